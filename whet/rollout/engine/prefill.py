"""PrefillLayout: attention of packed prompts, which writes and reads the KV stores.

On a GPU in half precision torch's varlen_attn runs all prompts in one call (models/varlen.py). Otherwise it is torch's
operator where no mask is needed. With caps or sinks the scores are held in memory: on a GPU block by block, since a
prompt of 8,192 tokens has gigabytes of them.
Dim legend: B rows, H query heads, K KV heads, T queries, S keys, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from whet.models.attention import Layout
from whet.models.flex import FlexCase
from whet.models.sdpa import masked_attention
from whet.models.varlen import attend_sequences, varlen_unsupported_reason
from whet.rollout.engine.kv_cache import KVStore
from whet.rollout.engine.layouts import mask_bias, partial_attention

__all__ = ["PrefillLayout", "PrefillSpan", "sequence_ends"]

MAX_BLOCK_SCORES = 1 << 24
"""The most scores of a block."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefillSpan:
    """Neighbours in a packed row whose attention is one call: `count` prompts, tokens start..start+length of each."""

    count: int
    start: int
    length: int
    store: KVStore
    slot: int
    """The first prompt's row of the store; the others follow."""

    @property
    def positions(self) -> Tensor:
        """Long [count * length], on the host: the position of each token in its prompt."""
        return torch.arange(self.start, self.start + self.length).repeat(self.count)


def sequence_ends(spans: list[PrefillSpan]) -> tuple[Tensor, Tensor]:
    """Returns where the queries, and the keys, of each prompt end in a row of them, after a 0: int32, on the host."""
    lengths = [s.length for s in spans for _ in range(s.count)]
    keys = [s.start + s.length for s in spans for _ in range(s.count)]
    queries, keys = (torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (lengths, keys))
    return queries, keys


class PrefillLayout(Layout):
    """Packed prompts, or chunks of them: causal attention, whose keys and values are written to the stores.

    Args: spans: in the order of the row. position_ids: Long [1 T], their `positions` on the device; None = on the host.
        ends: their sequence_ends on the device; None = never take varlen_attn.
    """

    def __init__(
        self,
        spans: list[PrefillSpan],
        position_ids: Tensor | None = None,
        ends: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.spans, self._ends = spans, ends
        self.position_ids = torch.cat([s.positions for s in spans])[None] if position_ids is None else position_ids
        self._masks: dict[tuple[int, int, int | None], Tensor | None] = {}

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Writes k and v, and attends: [1, H, T, D] -> [1, H, T, D]."""
        pieces: list[tuple[Tensor, Tensor, Tensor]] = []
        begin = 0
        for span in self.spans:
            count, length, end = span.count, span.length, span.start + span.length
            columns = slice(begin, begin + count * length)
            qr, kr, vr = (x[0, :, columns].unflatten(1, (count, length)).transpose(0, 1) for x in (q, k, v))
            keys, values = span.store.layer(layer, k, v)
            rows = slice(span.slot, span.slot + count)
            keys[rows, :, span.start : end] = kr
            values[rows, :, span.start : end] = vr
            if span.start:
                kr, vr = keys[rows, :, :end], values[rows, :, :end]
            pieces.append((qr, kr, vr))
            begin = columns.stop
        if self._ends is not None and self._runs_varlen(q, k, v, scale, softcap, sinks):
            if any(span.start for span in self.spans):
                tokens_first = lambda x: x.transpose(1, 2).flatten(0, 1)  # [count * keys, K, D]
                keys = torch.cat([tokens_first(x) for _, x, _ in pieces])
                values = torch.cat([tokens_first(x) for _, _, x in pieces])
            else:
                keys, values = k[0].transpose(0, 1), v[0].transpose(0, 1)  # [T K D]
            longest = max(s.length for s in self.spans), max(s.start + s.length for s in self.spans)
            return attend_sequences(q[0].transpose(0, 1), keys, values, self._ends, longest, scale=scale, window=window)
        outs = []
        for span, piece in zip(self.spans, pieces, strict=True):
            o = self._causal(
                piece[0], piece[1], piece[2], span, scale=scale, window=window, softcap=softcap, sinks=sinks
            )
            outs.append(o.transpose(0, 1).flatten(1, 2))  # [H, count * length, D]
        return (outs[0] if len(outs) == 1 else torch.cat(outs, 1)).unsqueeze(0)

    def _runs_varlen(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> bool:
        """Returns whether varlen_attn runs this call."""
        if not q.is_cuda or softcap is not None or sinks is not None:
            return False
        return varlen_unsupported_reason(FlexCase.from_call(q, k, v, scale=scale, softcap=None, sinks=None)) is None

    def _causal(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        span: PrefillSpan,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention of one span: [count, H, length, D] queries at start.., keys from 0."""
        allowed = self._mask(span, window, q.device)
        if softcap is None and sinks is None:
            if allowed is not None:
                return masked_attention(q, k, v, allowed, scale=scale)
            grouped = q.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        if allowed is None:
            allowed = torch.ones(span.length, span.length, dtype=torch.bool, device=q.device).tril()
        if q.is_cuda:
            return _in_blocks(q, k, v, mask_bias(~allowed, q.dtype), scale=scale, softcap=softcap, sinks=sinks)
        (count, heads, length, _), kv = q.shape, k.shape[1]
        o, lse = partial_attention(
            q.reshape(count, heads, length, -1),
            k.repeat_interleave(heads // kv, 1),
            v.repeat_interleave(heads // kv, 1),
            mask_bias(~allowed, q.dtype),
            scale=scale,
            softcap=softcap,
        )
        return _with_sinks(o, lse, sinks)

    def _mask(self, span: PrefillSpan, window: int | None, device: torch.device) -> Tensor | None:
        """Bool [length, start + length]: the keys that each query sees; None = plainly causal."""
        end = span.start + span.length
        if window is not None and window >= end:
            window = None
        if window is None and span.start == 0:
            return None
        key = (span.start, span.length, window)
        if key not in self._masks:
            distance = torch.arange(span.start, end, device=device)[:, None] - torch.arange(end, device=device)
            self._masks[key] = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        return self._masks[key]


def _with_sinks(o: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Returns the output with the sinks' share taken off. Args: o [B, H, T, D]. lse [B, H, T]. sinks [H]; None = no
    sinks.
    """
    if sinks is None:
        return o
    return o * torch.sigmoid(lse - sinks.float().view(1, -1, 1)).unsqueeze(-1).to(o.dtype)


def _in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention that holds its scores: one head of each group at a time, and a block of queries.

    Args: q [B, H, T, D]. k, v: [B, K, S, D]. bias [T, S]. sinks [H]. Returns: [B, H, T, D].
    """
    (count, heads, _, _), kv = q.shape, k.shape[1]
    rows = max(1, MAX_BLOCK_SCORES // (count * kv * k.shape[2]))
    outs = []
    for head in range(heads // kv):
        head_sinks = None if sinks is None else sinks.view(kv, -1)[:, head]
        blocks = []
        for block, hidden in zip(q.unflatten(1, (kv, -1))[:, :, head].split(rows, 2), bias.split(rows), strict=True):
            blocks.append(
                _with_sinks(*partial_attention(block, k, v, hidden, scale=scale, softcap=softcap), head_sinks)
            )
        outs.append(torch.cat(blocks, 2))
    return torch.stack(outs, 2).flatten(1, 2)
