"""Attention over a row of segments by torch's operator: one call per bucket of padded segments of similar shape.

It works on every device, in every dtype and with every kind of scores. It uses masks if a causal flag is not enough.
The keys of a child are those of its ancestors and its own. Dim legend: T tokens, H query heads, D head size,
m segments of a bucket, n their own tokens, A tokens of their ancestors, K = A + n keys.
Left out on purpose: merging two parts of the attention by log-sum-exp, for which torch's operators have no gradient.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from whet.models.sdpa import masked_attention
from whet.ops.masked import fp32_or_wider

__all__ = ["Bucket", "BucketRow", "segment_positions", "token_places"]

SLACK = 4096
"""Padding up to this many query-key pairs costs less than another call."""
MASKED_PAIRS = 1 << 20
"""A bucket of at most this many query-key pairs may have a mask per segment; a larger one shares one mask."""
BUCKET_PAIRS = 1 << 22
"""The most query-key pairs of a bucket of several segments; it bounds the memory of stored scores."""


def segment_positions(lengths: Sequence[int], parents: Sequence[int]) -> np.ndarray:
    """Returns the position of each token of a row: it starts at 0 in a root, and continues after the parent in a child.

    Args: lengths: tokens of each segment, in row order. parents: -1 = root, else an earlier segment.
    Returns: int64 [T].

    >>> segment_positions([2, 1, 2], [-1, 0, 0]).tolist()
    [0, 1, 2, 2, 3]
    """
    starts: list[int] = []
    for parent in parents:
        starts.append(starts[parent] + lengths[parent] if parent >= 0 else 0)
    return np.concatenate([start + np.arange(n) for start, n in zip(starts, lengths)])


class BucketRow:
    """The segments of a row as buckets. Args: lengths, parents, device, multiple: see SegmentLayout."""

    def __init__(
        self, lengths: Sequence[int], parents: Sequence[int], device: torch.device | str, multiple: int
    ) -> None:
        places, above = token_places(lengths, parents)
        self.buckets = [
            Bucket([places[i] for i in ids], [above[i] for i in ids], device, multiple)
            for ids in _plan_buckets(places, above, multiple)
        ]
        queries = np.concatenate([b.queries for b in self.buckets])
        keys = np.concatenate([b.keys for b in self.buckets])
        real = np.concatenate([b.real for b in self.buckets])
        tokens = sum(lengths)
        back = np.empty(tokens, dtype=np.int64)
        back[queries[real]] = np.flatnonzero(real)
        self._queries, self._keys = _index(queries, tokens, device), _index(keys, tokens, device)
        self._back = _index(back, len(queries), device)  # this drops all padding

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> BucketRow:
        """Returns the same with fn(x) for each index x. Args: fn: moves a tensor to a device."""
        mapped = copy.copy(self)
        mapped.buckets = [b.map_tensors(fn) for b in self.buckets]
        indices = (self._queries, self._keys, self._back)
        mapped._queries, mapped._keys, mapped._back = (None if x is None else fn(x) for x in indices)
        return mapped

    def needs_no_mask(self, window: int | None) -> bool:
        """Returns whether the causal flag is enough for all buckets."""
        return all(b.is_causal(window) for b in self.buckets)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention of one layer; see Layout.attend."""
        q, k, v = _gather(q, self._queries), _gather(k, self._keys), _gather(v, self._keys)  # [tokens heads D]
        queries = q.split([b.count * b.own for b in self.buckets])
        keys, values = (x.split([b.count * (b.above + b.own) for b in self.buckets]) for x in (k, v))
        out = []
        for bucket, *qkv in zip(self.buckets, queries, keys, values):
            qb, kb, vb = (x.unflatten(0, (bucket.count, -1)).transpose(1, 2) for x in qkv)  # [m heads n or K D]
            if softcap is not None or sinks is not None:
                o = _attend_with_scores(qb, kb, vb, bucket, scale, window, softcap, sinks)
            elif bucket.is_causal(window):
                several = qb.shape[1] != kb.shape[1]  # query heads per KV head
                o = F.scaled_dot_product_attention(
                    qb, kb, vb, is_causal=bucket.own > 1, scale=scale, enable_gqa=several
                )
            else:
                o = masked_attention(qb, kb, vb, bucket.mask(window, qb, qb.dtype), scale=scale)
            out.append(o.transpose(1, 2).flatten(0, 1))
        rows = out[0] if len(out) == 1 else torch.cat(out)
        rows = rows if self._back is None else rows.index_select(0, self._back)
        return rows.transpose(0, 1)[None]


class Bucket:
    """Segments of similar shape in one attention call: ancestors are padded on the left, own tokens on the right."""

    def __init__(
        self, places: list[np.ndarray], above: list[np.ndarray], device: torch.device | str, multiple: int
    ) -> None:
        self.count = len(places)
        self.own, self.above = (_round_up(max(map(len, x)), multiple) for x in (places, above))
        # padding repeats a real token: its values are finite, and they are masked or dropped
        own = np.stack([np.pad(p, (0, self.own - len(p)), mode="edge") for p in places])
        head = [np.concatenate([np.full(self.above - len(a), p[0]), a]) for p, a in zip(places, above)]
        self.queries = own.reshape(-1)
        self.keys = np.concatenate([np.stack(head), own], axis=1).reshape(-1)
        self.real = (np.arange(self.own) < np.array([[len(p)] for p in places])).reshape(-1)
        gaps = [self.above - len(a) for a in above]
        gaps = gaps[:1] if len(set(gaps)) == 1 else gaps  # one mask for all
        self.gaps = torch.tensor(gaps, device=device) if any(gaps) else None
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> Bucket:
        """Returns the same with fn(x) for its tensor x. Args: fn: moves a tensor to a device."""
        mapped = copy.copy(self)
        mapped.gaps = None if self.gaps is None else fn(self.gaps)
        mapped._masks = {}
        return mapped

    def window(self, window: int | None) -> int | None:
        """Returns the window; None = it hides no key."""
        return window if window is not None and window < self.above + self.own else None

    def is_causal(self, window: int | None) -> bool:
        """Returns whether the causal flag is enough, without a mask."""
        return self.gaps is None and self.window(window) is None and (self.above == 0 or self.own == 1)

    def mask(self, window: int | None, like: Tensor, dtype: torch.dtype) -> Tensor:
        """[1 or m, 1, n, K] of 0 or -inf. Own token i is key above + i in every segment, whatever its padding."""
        window = self.window(window)
        key = (window, dtype)
        if key not in self._masks:
            with torch.inference_mode(False):  # the mask outlives this pass, and the next pass may need a gradient
                i = torch.arange(self.own, device=like.device)[:, None] + self.above
                j = torch.arange(self.above + self.own, device=like.device)
                visible = j <= i
                if window is not None:
                    visible &= j > i - window
                visible = visible[None, None]
                if self.gaps is not None:
                    visible = visible & (j >= self.gaps[:, None, None, None])
                mask = torch.zeros(visible.shape, dtype=dtype, device=like.device)
                self._masks[key] = mask.masked_fill_(~visible, -torch.inf)
        return self._masks[key]


def token_places(lengths: Sequence[int], parents: Sequence[int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """For each segment, the indices of its own tokens in the row, and of its ancestors' tokens from the root on.

    >>> token_places([2, 1], [-1, 0])
    ([array([0, 1]), array([2])], [array([], dtype=int64), array([0, 1])])
    """
    starts = np.cumsum([0, *lengths])
    places = [np.arange(a, b) for a, b in itertools.pairwise(starts)]
    chains: dict[int, np.ndarray] = {-1: np.arange(0)}
    for p in parents:  # a parent comes before its children, so its chain is known
        if p not in chains:
            chains[p] = np.concatenate([chains[parents[p]], places[p]])
    return places, [chains[p] for p in parents]


def _round_up(n: int, multiple: int) -> int:
    """Returns the smallest multiple that is at least n."""
    return -(-n // multiple) * multiple


def _plan_buckets(places: list[np.ndarray], above: list[np.ndarray], multiple: int) -> list[list[int]]:
    """Puts segments into buckets, roots separately (they need no mask). Two sort orders are tried; the cheaper wins."""
    shapes = [(_round_up(len(a), multiple), _round_up(len(p), multiple)) for a, p in zip(above, places)]
    buckets: list[list[int]] = []
    for ids in ([i for i, s in enumerate(shapes) if not s[0]], [i for i, s in enumerate(shapes) if s[0]]):
        plans = [
            _fill_buckets(sorted(ids, key=order), shapes) for order in (lambda i: shapes[i], lambda i: shapes[i][::-1])
        ]
        buckets += min(plans, key=lambda plan: sum(_bucket_pairs(b, shapes) + SLACK for b in plan))
    return buckets


def _fill_buckets(ids: list[int], shapes: list[tuple[int, int]]) -> list[list[int]]:
    """Puts neighbours into one bucket as long as padding is under a quarter of the work, or costs less than a call."""
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


def _bucket_pairs(bucket: list[int], shapes: list[tuple[int, int]]) -> int:
    """Query-key pairs of a bucket, padding included."""
    own = max(shapes[i][1] for i in bucket)
    return len(bucket) * own * (max(shapes[i][0] for i in bucket) + own)


def _index(places: np.ndarray, tokens: int, device: torch.device | str) -> Tensor | None:
    """Returns the places as an index tensor; None = they are all tokens in order, so a gather is not needed."""
    if len(places) == tokens and (places == np.arange(tokens)).all():
        return None
    return torch.from_numpy(places).to(device)


def _gather(x: Tensor, index: Tensor | None) -> Tensor:
    """[1 H T D] -> [tokens H D]. index_select's backward is deterministic with several threads; x[index]'s isn't."""
    rows = x[0].transpose(0, 1)
    return rows if index is None else rows.index_select(0, index)


def _attend_with_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bucket: Bucket,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with stored scores in fp32 or wider, for soft-caps and sinks, which torch's operator does not have."""
    dtype = fp32_or_wider(q.dtype)
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
