"""Attention over a row of segments by torch's operator: segments of similar shape are padded and run in one call.

It runs on every device, in every dtype and with every kind of scores. It uses masks where a causal flag is not enough.
A child's keys are its ancestors' and its own, concatenated. Dim letters: T tokens, H query heads, D head size,
m segments of a bucket, n their own tokens, A their ancestors' tokens, K = A + n keys.
Left out on purpose: merging two parts of attention by their log-sum-exp, because torch's operators have no gradient
for the log-sum-exp.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from whet.models.sdpa import masked_attention
from whet.ops.masked import fp32_or_wider

__all__ = ["Bucket", "BucketRow", "segment_positions"]

SLACK = 4096
"""Query-key pairs of padding that cost less than one more call."""
MASKED_PAIRS = 1 << 20
"""A bucket may have a mask per segment up to this many entries; a larger bucket shares one mask."""
BUCKET_PAIRS = 1 << 22
"""Largest bucket of more than one segment, in query-key pairs: this bounds the scores where they are stored."""


def segment_positions(lengths: Sequence[int], parents: Sequence[int]) -> np.ndarray:
    """The position of each token of a row of segments: from 0 in a root, after its parent's last in a child.

    Args: lengths: tokens of each segment, in row order. parents: -1 = root, else an earlier segment.
    Returns: int64 [T].

    >>> segment_positions([2, 1, 2], [-1, 0, 0]).tolist()
    [0, 1, 2, 2, 3]
    """
    above: list[int] = []
    for parent in parents:
        above.append(above[parent] + lengths[parent] if parent >= 0 else 0)
    return np.concatenate([a + np.arange(n) for a, n in zip(above, lengths)])


class BucketRow:
    """Segments of a row as buckets. Args: lengths, parents, device, multiple: as SegmentLayout has them."""

    def __init__(
        self, lengths: Sequence[int], parents: Sequence[int], device: torch.device | str, multiple: int
    ) -> None:
        places, above = _token_places(lengths, parents)
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
        self._back = _index(back, len(queries), device)  # padding at the very end is left behind too

    def needs_no_mask(self, window: int | None) -> bool:
        """Whether the causal flag is enough for all buckets."""
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
            if softcap is None and sinks is None:
                o = _attend_by_operator(qb, kb, vb, bucket, scale, window)
            else:
                o = _attend_with_scores(qb, kb, vb, bucket, scale, window, softcap, sinks)
            out.append(o.transpose(1, 2).flatten(0, 1))
        rows = out[0] if len(out) == 1 else torch.cat(out)
        rows = rows if self._back is None else rows.index_select(0, self._back)
        return rows.transpose(0, 1)[None]


class Bucket:
    """Segments of similar shape that run in one attention call, padded: ancestors left, own tokens right."""

    def __init__(
        self, places: list[np.ndarray], above: list[np.ndarray], device: torch.device | str, multiple: int
    ) -> None:
        self.count = len(places)
        self.own, self.above = (_round_up(max(map(len, x)), multiple) for x in (places, above))
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
        """The window; None where it hides nothing."""
        return window if window is not None and window < self.above + self.own else None

    def is_causal(self, window: int | None) -> bool:
        """Whether the causal flag is enough, without a mask."""
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


def _token_places(lengths: Sequence[int], parents: Sequence[int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The places in the row of each segment's own tokens, and of its ancestors' in order from the root."""
    starts = np.cumsum([0, *lengths])
    places = [np.arange(a, b) for a, b in itertools.pairwise(starts)]
    chains: dict[int, np.ndarray] = {-1: np.arange(0)}
    for p in parents:  # a parent comes before its children, so its own chain is known
        if p not in chains:
            chains[p] = np.concatenate([chains[parents[p]], places[p]])
    return places, [chains[p] for p in parents]


def _round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is at least n."""
    return -(-n // multiple) * multiple


def _plan_buckets(places: list[np.ndarray], above: list[np.ndarray], multiple: int) -> list[list[int]]:
    """Puts segments into buckets: roots apart (they need no mask); each part is sorted both ways, the cheaper wins."""
    shapes = [(_round_up(len(a), multiple), _round_up(len(p), multiple)) for a, p in zip(above, places)]
    buckets: list[list[int]] = []
    for ids in ([i for i, s in enumerate(shapes) if not s[0]], [i for i, s in enumerate(shapes) if s[0]]):
        ways = [
            _fill_buckets(sorted(ids, key=order), shapes) for order in (lambda i: shapes[i], lambda i: shapes[i][::-1])
        ]
        buckets += min(ways, key=lambda way: sum(_bucket_pairs(b, shapes) + SLACK for b in way))
    return buckets


def _fill_buckets(ids: list[int], shapes: list[tuple[int, int]]) -> list[list[int]]:
    """Puts neighbours into one bucket while padding is under a quarter of the work, or costs less than a call."""
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
    """Places as an index tensor; None where they are all tokens in order, so that nothing has to be gathered."""
    if len(places) == tokens and (places == np.arange(tokens)).all():
        return None
    return torch.from_numpy(places).to(device)


def _gather(x: Tensor, index: Tensor | None) -> Tensor:
    """[1 H T D] -> [tokens H D]. index_select, whose backward is repeatable on two threads; x[index] is not."""
    rows = x[0].transpose(0, 1)
    return rows if index is None else rows.index_select(0, index)


def _attend_by_operator(q: Tensor, k: Tensor, v: Tensor, bucket: Bucket, scale: float, window: int | None) -> Tensor:
    """Attention by torch's operator on one bucket, without a mask where the causal flag is enough."""
    if bucket.is_causal(window):
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=bucket.own > 1, scale=scale, enable_gqa=grouped)
    return masked_attention(q, k, v, bucket.mask(window, q, q.dtype), scale=scale)


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
    """Attention with stored scores in fp32 or better, for soft-caps and sinks, which torch's operator lacks."""
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
