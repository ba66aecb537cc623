"""How attention of packed prompts reads and writes the KV stores.

On a CPU and without a mask this is torch's operator. Where scores have caps or sinks they have to be held: on a GPU
piece by piece, since a prompt of 8,192 tokens has gigabytes of them.
Left out on purpose: one call for prompts of several lengths.
Dim legend: B rows, H query heads, K KV heads, T queries, S keys, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from whet.models.attention import Layout
from whet.models.sdpa import masked_attention
from whet.rollout.engine.kv_cache import KVStore
from whet.rollout.engine.layouts import attention_part, hiding

__all__ = ["PrefillLayout", "PrefillSpan"]

MAX_PIECE_SCORES = 1 << 24
"""Scores of a piece."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefillSpan:
    """Neighbours in a packed row that are attended to together: `count` prompts, tokens start..start+length of each."""

    count: int
    start: int
    length: int
    store: KVStore
    slot: int
    """The first prompt's row of the store; the others follow."""


class PrefillLayout(Layout):
    """Packed prompts, or chunks of them, that see themselves causally and leave their keys and values in the stores."""

    def __init__(self, runs: list[PrefillSpan], device: torch.device) -> None:
        self.runs = runs
        steps = [torch.arange(r.start, r.start + r.length).repeat(r.count) for r in runs]
        self.position_ids = torch.cat(steps).unsqueeze(0).to(device)
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
        outs, begin = [], 0
        for run in self.runs:
            count, length, end = run.count, run.length, run.start + run.length
            span = slice(begin, begin + count * length)
            qr, kr, vr = (x[0, :, span].unflatten(1, (count, length)).transpose(0, 1) for x in (q, k, v))
            keys, values = run.store.layer(layer, k, v)
            rows = slice(run.slot, run.slot + count)
            keys[rows, :, run.start : end] = kr
            values[rows, :, run.start : end] = vr
            if run.start:
                kr, vr = keys[rows, :, :end], values[rows, :, :end]
            o = self._causal(qr, kr, vr, run, scale=scale, window=window, softcap=softcap, sinks=sinks)
            outs.append(o.transpose(0, 1).flatten(1, 2))  # [H, count * length, D]
            begin = span.stop
        return (outs[0] if len(outs) == 1 else torch.cat(outs, 1)).unsqueeze(0)

    def _causal(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        run: PrefillSpan,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """One run: [count, H, length, D] queries at start.., keys from 0."""
        allowed = self._mask(run, window, q.device)
        if softcap is None and sinks is None:
            if allowed is not None:
                return masked_attention(q, k, v, allowed, scale=scale)
            grouped = q.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        if allowed is None:
            allowed = torch.ones(run.length, run.length, dtype=torch.bool, device=q.device).tril()
        if q.is_cuda:
            return _by_pieces(q, k, v, hiding(~allowed, q.dtype), scale=scale, softcap=softcap, sinks=sinks)
        (count, heads, length, _), kv = q.shape, k.shape[1]
        o, lse = attention_part(
            q.reshape(count, heads, length, -1),
            k.repeat_interleave(heads // kv, 1),
            v.repeat_interleave(heads // kv, 1),
            hiding(~allowed, q.dtype),
            scale=scale,
            softcap=softcap,
        )
        return _with_sinks(o, lse, sinks)

    def _mask(self, run: PrefillSpan, window: int | None, device: torch.device) -> Tensor | None:
        """Bool [length, start + length]: what each query sees; None = plainly causal."""
        end = run.start + run.length
        if window is not None and window >= end:
            window = None
        if window is None and run.start == 0:
            return None
        key = (run.start, run.length, window)
        if key not in self._masks:
            distance = torch.arange(run.start, end, device=device)[:, None] - torch.arange(end, device=device)
            self._masks[key] = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        return self._masks[key]


def _with_sinks(o: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """What the sinks leave of the output. Args: o [B, H, T, D]. lse [B, H, T]. sinks [H]; None = there are none."""
    if sinks is None:
        return o
    return o * torch.sigmoid(lse - sinks.float().view(1, -1, 1)).unsqueeze(-1).to(o.dtype)


def _by_pieces(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention whose scores have to be held: one head of each group at a time, and only so many queries.

    Args: q [B, H, T, D]. k, v: [B, K, S, D]. bias [T, S]. sinks [H]. Returns: [B, H, T, D].
    """
    (count, heads, _, _), kv = q.shape, k.shape[1]
    rows = max(1, MAX_PIECE_SCORES // (count * kv * k.shape[2]))
    outs = []
    for head in range(heads // kv):
        own = None if sinks is None else sinks.view(kv, -1)[:, head]
        pieces = []
        for part, hidden in zip(q.unflatten(1, (kv, -1))[:, :, head].split(rows, 2), bias.split(rows), strict=True):
            pieces.append(_with_sinks(*attention_part(part, k, v, hidden, scale=scale, softcap=softcap), own))
        outs.append(torch.cat(pieces, 2))
    return torch.stack(outs, 2).flatten(1, 2)
