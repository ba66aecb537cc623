"""Attention over packed rows that share prefixes, under the name "whet" in transformers' registry.

A layout says who sees whom; it goes down the model as the keyword `whet_layout=` and arrives, once per layer, at
`whet_attn`. Importing this module registers the name. Where a GPU would need masks and FlexAttention passes its probe,
that kernel serves (flex.py); else, and on a CPU, the plain path below does. Dim letters: B rows, T tokens, H query
heads, D head size, N segments, m segments of a bucket, n their own tokens, A their ancestors' tokens, K = A + n keys.

Left out on purpose: any way to merge two attention parts by their log-sum-exp, since the operators of the plain path
give it no gradient. A child's keys are its ancestors' and its own, concatenated.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from whet.errors import ConfigError, DataError, lookup_error
from whet.models.flex import FlexCase, FlexRow, flex_refusal

__all__ = ["ATTENTION", "KERNELS", "Layout", "SegmentLayout", "whet_attn"]

ATTENTION = "whet"
"""The name under which transformers finds `whet_attn`."""
KERNELS = ("auto", "flex", "plain")
"""What serves a layout: flex where it pays and agrees, always flex, or torch's operator segment by segment."""
HARMLESS = frozenset({"cache_position", "output_attentions", "output_router_logits", "position_ids", "use_cache"})
"""Keywords that models pass along and that say nothing about who sees whom."""
SLACK = 4096
"""Query-key pairs of padding that cost less than one more call."""
MASKED_PAIRS = 1 << 20
"""A mask per segment is built up to this many entries; beyond it a bucket shares one mask."""
BUCKET_PAIRS = 1 << 22
"""Largest bucket of more than one segment, in query-key pairs: bounds the scores where they are held."""


class Layout:
    """Who sees whom in one forward pass; a plain class, since FSDP2 rebuilds dataclasses and casts their tensors.

    Example: `model(input_ids, position_ids=layout.position_ids, whet_layout=layout, use_cache=False)`.
    """

    position_ids: Tensor
    """Long [B T]."""

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
        """Attention of one layer.

        Args: layer: its place in the model. q: [B H T D]. k, v: [B KV T D] (the head size of v may differ).
            scale: factor of the scores. window: a token sees keys less than this many positions back; None = all.
            softcap: scores become softcap * tanh(scores / softcap). sinks: [H], a score per head without a value.
        Returns: [B H T D of v].
        """
        raise NotImplementedError


class SegmentLayout(Layout):
    """Segments end to end in one row: each sees its ancestors whole, and itself causally. Immutable.

    Packing is all roots; a group is one root and a child per completion; forks go deeper. Positions start at 0 in a
    root and go on after the parent in a child, so a child's tokens see what they would see alone.

    Args: lengths: tokens of each segment, in row order. parents: -1 = root, else an earlier segment.
        device: where the index tensors live. attention: one of KERNELS; "auto" takes flex on a GPU where masks would be
        needed and the probe agrees. multiple: a bucket's own tokens and its ancestors' are padded to multiples of this,
        so that fewer shapes of calls occur.
    Raises: DataError: an empty segment, or a parent that is not an earlier segment.

    >>> SegmentLayout([2, 1, 2], [-1, 0, 0]).position_ids      # a prompt of 2 and two completions
    tensor([[0, 1, 2, 2, 3]])
    """

    def __init__(
        self,
        lengths: Sequence[int],
        parents: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        attention: str = "auto",
        multiple: int = 1,
    ) -> None:
        if attention not in KERNELS:
            raise lookup_error("attention", attention, KERNELS)
        self.attention = attention
        self.lengths = tuple(int(n) for n in lengths)
        self.parents = tuple(int(p) for p in parents)
        if len(self.lengths) != len(self.parents) or not self.lengths:
            raise DataError(
                f"{len(self.lengths)} lengths and {len(self.parents)} parents; give one of each per segment"
            )
        for i, (n, p) in enumerate(zip(self.lengths, self.parents)):
            if n < 1 or not -1 <= p < i:
                raise DataError(
                    f"segment {i} has {n} tokens and parent {p}; it needs a token and an earlier parent, or -1"
                )
        places, above = _places(self.lengths, self.parents)
        position_ids = np.concatenate([len(a) + np.arange(len(p)) for p, a in zip(places, above)])
        self.position_ids = torch.from_numpy(position_ids)[None].to(device)
        self._buckets = [
            _Bucket([places[i] for i in ids], [above[i] for i in ids], device, multiple)
            for ids in _plan(places, above, multiple)
        ]
        queries = np.concatenate([b.queries for b in self._buckets])
        keys = np.concatenate([b.keys for b in self._buckets])
        real = np.concatenate([b.real for b in self._buckets])
        back = np.empty(len(position_ids), dtype=np.int64)
        back[queries[real]] = np.flatnonzero(real)
        tokens = len(position_ids)
        self._queries, self._keys = _index(queries, tokens, device), _index(keys, tokens, device)
        self._back = _index(back, len(queries), device)  # padding at the very end is left behind too
        self._row: FlexRow | None = None

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
        """Attention of one layer; see Layout.attend.

        Raises: DataError: more than one row, or not as many tokens as the layout has. ConfigError: flex is asked for
            and can't serve.
        """
        if q.shape[0] != 1 or q.shape[2] != self.position_ids.shape[1]:
            raise DataError(
                f"a layout of 1 row of {self.position_ids.shape[1]} tokens was given {q.shape[0]} of {q.shape[2]}"
            )
        if self._by_flex(q, k, v, window, softcap, sinks):
            if self._row is None:
                self._row = FlexRow(self.lengths, self.parents, self.position_ids)
            return self._row.attend(q, k, v, scale=scale, window=window, softcap=softcap, sinks=sinks)
        q, k, v = _take(q, self._queries), _take(k, self._keys), _take(v, self._keys)  # [tokens heads D]
        queries = q.split([b.count * b.own for b in self._buckets])
        keys, values = (x.split([b.count * (b.above + b.own) for b in self._buckets]) for x in (k, v))
        out = []
        for bucket, *qkv in zip(self._buckets, queries, keys, values):
            qb, kb, vb = (x.unflatten(0, (bucket.count, -1)).transpose(1, 2) for x in qkv)  # [m heads n or K D]
            if softcap is None and sinks is None:
                o = _fused(qb, kb, vb, bucket, scale, window)
            else:
                o = _explicit(qb, kb, vb, bucket, scale, window, softcap, sinks)
            out.append(o.transpose(1, 2).flatten(0, 1))
        rows = out[0] if len(out) == 1 else torch.cat(out)
        rows = rows if self._back is None else rows.index_select(0, self._back)
        return rows.transpose(0, 1)[None]

    def _by_flex(
        self, q: Tensor, k: Tensor, v: Tensor, window: int | None, softcap: float | None, sinks: Tensor | None
    ) -> bool:
        """Whether flex serves this call. Rows without masks are faster in torch's operator."""
        if self.attention == "plain" or (self.attention == "auto" and not q.is_cuda):
            return False
        plain = softcap is None and sinks is None and all(b.plain(window) for b in self._buckets)
        if self.attention == "auto" and plain:
            return False
        case = FlexCase(
            q.device, q.dtype, q.shape[1], k.shape[1], q.shape[3], v.shape[3], softcap is not None, sinks is not None
        )
        reason = flex_refusal(case)
        if reason is not None and self.attention == "flex":
            raise ConfigError(f'attention "flex" can\'t serve this model: {reason}; set it to auto or plain')
        return reason is None


class _Bucket:
    """Segments of like shape that one attention call serves, padded: ancestors on the left, own tokens on the right."""

    def __init__(
        self, places: list[np.ndarray], above: list[np.ndarray], device: torch.device | str, multiple: int
    ) -> None:
        self.count = len(places)
        self.own, self.above = (_up(max(map(len, x)), multiple) for x in (places, above))
        # a padded place reads a real token: it is finite, and masked or never read back
        own = np.stack([np.pad(p, (0, self.own - len(p)), mode="edge") for p in places])
        head = [np.concatenate([np.full(self.above - len(a), p[0]), a]) for p, a in zip(places, above)]
        self.queries = own.reshape(-1)
        self.keys = np.concatenate([np.stack(head), own], axis=1).reshape(-1)
        self.real = (np.arange(self.own) < np.array([[len(p)] for p in places])).reshape(-1)
        gaps = [self.above - len(a) for a in above]
        gaps = gaps[:1] if len(set(gaps)) == 1 else gaps  # one mask for all
        self.gaps = torch.tensor(gaps, device=device) if any(gaps) else None
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def window(self, window: int | None) -> int | None:
        """The window, where it hides anything at all."""
        return window if window is not None and window < self.above + self.own else None

    def plain(self, window: int | None) -> bool:
        """Whether causality says it all, without a mask."""
        return self.gaps is None and self.window(window) is None and (self.above == 0 or self.own == 1)

    def mask(self, window: int | None, like: Tensor, dtype: torch.dtype) -> Tensor:
        """[1 or m, 1, n, K], 0 or -inf. Own place i is at chain place above + i, so gaps on the left shift nothing."""
        key = (self.window(window), dtype)
        if key not in self._masks:
            with torch.inference_mode(False):  # it outlives this pass, and the next one may need a gradient
                self._masks[key] = self._mask(key[0], like.device, dtype)
        return self._masks[key]

    def _mask(self, window: int | None, device: torch.device, dtype: torch.dtype) -> Tensor:
        i = torch.arange(self.own, device=device)[:, None] + self.above
        j = torch.arange(self.above + self.own, device=device)
        seen = j <= i
        if window is not None:
            seen &= j > i - window
        seen = seen[None, None]
        if self.gaps is not None:
            seen = seen & (j >= self.gaps[:, None, None, None])
        return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)


def whet_attn(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    whet_layout: Layout | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in each layer; hands over to the layout.

    Args: module: the attention module, with its layer_idx. query: [B H T D]. key, value: [B KV T D].
        attention_mask: must be None. s_aux: [H] sink scores. whet_layout: who sees whom. The others as transformers.
    Returns: ([B T H D], None).
    Raises: ConfigError: no layout, a mask, dropout, or a keyword that this function does not know: it may change
        what a token sees.

    Example: `model.set_attn_implementation("whet")`, after which the model's forward takes `whet_layout=`.
    """
    if whet_layout is None:
        raise ConfigError(
            f'attention "{ATTENTION}" was called without whet_layout=; pass a layout, or set another attention'
        )
    if attention_mask is not None:
        raise ConfigError("an attention mask was given beside whet_layout; the layout alone says who sees whom")
    if dropout:
        raise ConfigError(f'attention "{ATTENTION}" has no dropout, got {dropout}; set the dropout of the config to 0')
    if unknown := set(extra) - HARMLESS:
        raise ConfigError(
            f'attention "{ATTENTION}" does not know {", ".join(sorted(unknown))}; train this model padded'
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    out = whet_layout.attend(layer, query, key, value, scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux)
    return out.transpose(1, 2).contiguous(), None


def _places(lengths: Sequence[int], parents: Sequence[int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The places in the row of each segment's own tokens, and of its ancestors' in order from the root."""
    starts = np.cumsum([0, *lengths])
    places = [np.arange(a, b) for a, b in itertools.pairwise(starts)]
    chains: dict[int, np.ndarray] = {-1: np.arange(0)}
    for p in parents:  # a parent comes before its children, so its own chain is known
        if p not in chains:
            chains[p] = np.concatenate([chains[parents[p]], places[p]])
    return places, [chains[p] for p in parents]


def _up(n: int, multiple: int) -> int:
    """The next multiple of a number that holds n."""
    return -(-n // multiple) * multiple


def _plan(places: list[np.ndarray], above: list[np.ndarray], multiple: int) -> list[list[int]]:
    """Segments into buckets: roots apart (they need no mask), each sorted both ways, the cheaper taken."""
    shapes = [(_up(len(a), multiple), _up(len(p), multiple)) for a, p in zip(above, places)]
    buckets: list[list[int]] = []
    for ids in ([i for i, s in enumerate(shapes) if not s[0]], [i for i, s in enumerate(shapes) if s[0]]):
        ways = [_fill(sorted(ids, key=order), shapes) for order in (lambda i: shapes[i], lambda i: shapes[i][::-1])]
        buckets += min(ways, key=lambda way: sum(_pairs(b, shapes) + SLACK for b in way))
    return buckets


def _fill(ids: list[int], shapes: list[tuple[int, int]]) -> list[list[int]]:
    """Neighbours into one bucket while padding stays under a quarter of the work, or under the price of a call."""
    buckets: list[list[int]] = []
    above = own = real = 0
    for i in ids:
        a, n = shapes[i]
        above, own, real = max(above, a), max(own, n), real + n * (a + n)
        if buckets:
            padded = (len(buckets[-1]) + 1) * own * (above + own)
            limit = BUCKET_PAIRS if all(shapes[j][0] == a for j in buckets[-1]) else MASKED_PAIRS
            if padded <= limit and padded - real <= max(real // 4, SLACK):
                buckets[-1].append(i)
                continue
        buckets.append([i])
        above, own, real = a, n, n * (a + n)
    return buckets


def _pairs(bucket: list[int], shapes: list[tuple[int, int]]) -> int:
    """Query-key pairs of a bucket, padding included."""
    own = max(shapes[i][1] for i in bucket)
    return len(bucket) * own * (max(shapes[i][0] for i in bucket) + own)


def _index(places: np.ndarray, tokens: int, device: torch.device | str) -> Tensor | None:
    """Places as an index tensor; None where they are all tokens in order, so that nothing need move."""
    if len(places) == tokens and (places == np.arange(tokens)).all():
        return None
    return torch.from_numpy(places).to(device)


def _take(x: Tensor, index: Tensor | None) -> Tensor:
    """[1 H T D] -> [tokens H D]. index_select, whose backward is repeatable on two threads; x[index] is not."""
    rows = x[0].transpose(0, 1)
    return rows if index is None else rows.index_select(0, index)


def _fused(q: Tensor, k: Tensor, v: Tensor, bucket: _Bucket, scale: float, window: int | None) -> Tensor:
    """Attention by torch's operator on one bucket, without a mask where causality says it all."""
    grouped = q.shape[1] != k.shape[1]
    if bucket.plain(window):
        return F.scaled_dot_product_attention(q, k, v, is_causal=bucket.own > 1, scale=scale, enable_gqa=grouped)
    mask = bucket.mask(window, q, q.dtype)
    if grouped and q.is_cuda:  # the CUDA kernels that take a mask don't take grouped heads
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bucket: _Bucket,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with its scores held, in fp32 or better: what torch's operator does not know."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    groups = k.shape[1]
    heads = q.to(dtype).unflatten(1, (groups, -1))  # [m KV H/KV n D]
    scores = heads @ (k.to(dtype) * scale)[:, :, None].transpose(-1, -2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + bucket.mask(window, q, dtype)[:, :, None]
    if sinks is not None:
        sink = sinks.to(dtype).view(1, groups, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights @ v.to(dtype)[:, :, None]).flatten(1, 2).to(q.dtype)


# On import, and again without harm: a model can be told to use the name as soon as this module is there. No mask
# function stands beside it: without one transformers makes no mask and, before that, asks no position ids whether they
# are packed, for which it would wait for the device in every pass.
ALL_ATTENTION_FUNCTIONS.register(ATTENTION, whet_attn)
