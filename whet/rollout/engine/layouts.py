"""DecodeLayout: attention of a decode step, which writes and reads the KV stores; prefill.py has that of prompts.

A decode step attends to the prompt (once per group: the rows of a group are the queries of one block) and to the row's
drawn tokens, and merges both parts by their log-sum-exp. That is exact, but has no gradient: inference only.
Dim legend: n live rows, m prompts of a bucket, G the most rows of one of its prompts, H query heads, K KV heads,
g = H / K, S places read, D head size, T packed tokens.
Left out on purpose: steps of fixed shape, and a fused kernel for CUDA: a KVPool has both (kv_pool.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from whet.models.attention import Layout
from whet.ops.masked import to_fp32
from whet.rollout.engine.kv_cache import KVStore
from whet.util.transfer import to_device

__all__ = ["DecodeLayout", "mask_bias", "partial_attention"]

MASK_VALUE = -1e30
"""Added to the score of a masked key: finite, so that a part without any visible key gets no weight, and no NaN."""

FLASH = "_scaled_dot_product_flash_attention_for_cpu"
"""torch's fused operator, which is private: without it, scores of any size are held at once."""
MAX_SCORES = 1 << 24
"""The most scores held at once; above it torch's fused operator computes them block by block."""


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention over some of the keys, and the log-sum-exp that merges it with the rest.

    o = Σⱼ exp(sⱼ − lse) vⱼ, lse = log Σⱼ exp(sⱼ), s = cap(q·k·scale) + bias, cap(x) = c·tanh(x / c).
    Args: q [B, K, T, D]. k, v: [B, K, S, D], whose dims B and K have one stride, so that they are not copied.
        bias: broadcastable to [B, K, T, S], 0 or MASK_VALUE; None = all visible.
    Returns: ([B, K, T, D], lse [B, K, T] in fp32). Without gradient.

    >>> one = torch.ones(1, 1, 1, 8)
    >>> partial_attention(one, one, one, None, scale=1.0, softcap=None)[1]
    tensor([[[8.]]])
    """
    # Plain products, where they fit: faster for few queries, and a row's result does not depend on the number of rows.
    # The fused operator's does in half precision. (The price: scores are rounded to that precision.)
    if (
        q.shape[:3].numel() * k.shape[2] > MAX_SCORES
        and q.device.type == "cpu"
        and softcap is None
        and k.shape[-1] == v.shape[-1]
        and (flash := getattr(torch.ops.aten, FLASH, None)) is not None
    ):
        return flash(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
    s, p = _scores_and_softmax(q, k, bias, scale=scale, softcap=softcap)
    v = v.flatten(0, 1)
    # the largest score and its softmax: two maxima are cheaper than another sum of exponentials
    return torch.bmm(p.to(v.dtype), v).view(*q.shape[:3], -1), (s.amax(-1) - p.amax(-1).log()).view(q.shape[:3])


def _scores_and_softmax(
    q: Tensor, k: Tensor, bias: Tensor | None, *, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Scores and their softmax [B * K, T, S], in fp32 or wider, of q [B, K, T, D] and k [B, K, S, D]."""
    s = to_fp32(torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT))
    if scale != 1.0:
        s.mul_(scale)
    if softcap is not None:
        s.div_(softcap).tanh_().mul_(softcap)
    if bias is not None:
        s.view(*q.shape[:3], -1).add_(bias)
    return s, s.softmax(-1)


def mask_bias(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the bias of scores: 0 where a key is visible, MASK_VALUE (or the dtype's minimum) where it is hidden."""
    value = max(MASK_VALUE, torch.finfo(dtype).min)
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, value)


@dataclass(frozen=True, kw_only=True, eq=False)
class _PromptBucket:
    """The prompts of one store, and the rows that read them."""

    store: KVStore
    prompts: int
    """m."""
    max_rows: int
    """G."""
    length: int
    """S: the longest prompt."""
    rows: np.ndarray
    """[m, G]: the row of each query; unused places repeat row 0."""
    lengths: Tensor
    """Long [m]."""
    row_index: Tensor
    """Long [m * G]."""
    hidden: Tensor | None
    """Bool [m, S]: places after a prompt's end; None = there are none."""


class DecodeLayout(Layout):
    """One new token for each live row.

    An example: rows 0, 1 and 2 are live. Rows 0 and 2 have the same prompt of 5 tokens, in slot 0 of the store of
    bucket 32; row 1 has one of 40, in slot 0 of bucket 64. They have drawn 3, 1 and 3 tokens:

    >>> completion_store, stores = KVStore(rows=3, length=32), {n: KVStore(rows=1, length=n) for n in (32, 64)}
    >>> layout = DecodeLayout(completion_store, torch.device("cpu"))
    >>> layout.regroup(stores, np.array([32, 64, 32]), np.array([0, 0, 0]), np.array([5, 40, 5]))
    >>> [(b.prompts, b.max_rows, b.rows.tolist(), b.length) for b in layout._buckets]
    [(1, 2, [[0, 2]], 5), (1, 1, [[1]], 40)]

    So there are three products with keys in a step: the queries of rows 0 and 2 as one block with the 5 keys of their
    prompt, those of row 1 with 40, and each row's with its drawn tokens:

    >>> drawn, position = torch.tensor([3, 1, 3]), torch.tensor([8, 41, 8])
    >>> layout.begin(position, drawn, longest=3, furthest=41, equal=False)
    >>> q, kv = torch.zeros(3, 2, 1, 4), torch.ones(3, 1, 1, 4)  # 2 query heads over 1 KV head
    >>> layout.attend(0, q, kv, kv, scale=1.0, window=None, softcap=None, sinks=None).shape
    torch.Size([3, 2, 1, 4])

    The new keys are written after those of each row's drawn tokens, at its places 3, 1 and 3:

    >>> [row.nonzero().flatten().tolist() for row in completion_store.layer(0, kv, kv)[0][:, 0, :, 0]]
    [[3], [1], [3]]

    Args: completion_store: KV of the rows' drawn tokens. device: of the stores.
    """

    def __init__(self, completion_store: KVStore, device: torch.device) -> None:
        self.completion_store = completion_store
        self.device = device
        self.rows = 0
        self._buckets: list[_PromptBucket] = []
        self._place = np.zeros((0, 3), np.int64)
        self._head_tables: dict[tuple[int, int], tuple[list[Tensor], Tensor]] = {}
        self._range = torch.arange(0, device=device)
        self._clear_step()

    def _clear_step(self) -> None:
        """Drops the tables of the last step."""
        self._drawn_bias: dict[int | None, Tensor | None] = {}
        self._prompt_bias: dict[tuple[int, int | None, int], Tensor] = {}
        self._write_at: dict[int, Tensor] = {}

    def regroup(
        self,
        stores: dict[int, KVStore],
        buckets: np.ndarray,
        slots: np.ndarray,
        lengths: np.ndarray,
    ) -> None:
        """Records which row reads which prompt. Call it whenever rows or prompts have moved.

        Args: stores: by bucket. buckets, slots, lengths: int [n], of each row's prompt: its bucket, its row there, its
            tokens.
        """
        self.rows = len(buckets)
        self._head_tables.clear()
        self._buckets = []
        found: list[tuple[int, np.ndarray, np.ndarray]] = []
        self._place = np.zeros((self.rows, 3), np.int64)  # bucket number, prompt slot, rank among its rows
        for number, bucket in enumerate(np.unique(buckets)):
            readers = np.flatnonzero(buckets == bucket)
            readers = readers[np.argsort(slots[readers], kind="stable")]
            slot = slots[readers]
            counts = np.bincount(slot)
            rank = np.arange(len(readers)) - (counts.cumsum() - counts)[slot]
            m, max_rows = len(counts), int(counts.max())
            rows_of, plens = np.zeros((m, max_rows), np.int64), np.ones(m, np.int64)
            rows_of[slot, rank] = readers
            plens[slot] = lengths[readers]
            self._place[readers] = np.stack([np.full(len(readers), number), slot, rank], 1)
            found.append((int(bucket), rows_of, plens))
        moved = to_device([torch.from_numpy(x.reshape(-1)) for _, *tables in found for x in tables], self.device)
        for number, (bucket, rows_of, plens) in enumerate(found):
            row_index, lengths_of = moved[2 * number], moved[2 * number + 1]
            longest = int(plens.max())
            hidden = torch.arange(longest, device=self.device) >= lengths_of[:, None]
            self._buckets.append(
                _PromptBucket(
                    store=stores[bucket],
                    prompts=len(rows_of),
                    max_rows=rows_of.shape[1],
                    length=longest,
                    rows=rows_of,
                    lengths=lengths_of,
                    row_index=row_index,
                    hidden=None if (plens == longest).all() else hidden,
                )
            )

    def begin(self, position: Tensor, drawn: Tensor, *, longest: int, furthest: int, equal: bool) -> None:
        """Sets one step.

        Args:
            position: Long [n], of the new tokens.
            drawn: Long [n], drawn tokens before them.
            longest: the maximum of `drawn`.
            furthest: the maximum of `position`.
            equal: all of `drawn` are the same.
        """
        self.position_ids = position.unsqueeze(1)
        self._drawn = drawn
        self._longest, self._furthest, self._equal = longest + 1, furthest, equal
        self._clear_step()
        if len(self._range) < self.completion_store.length:
            self._range = torch.arange(2 * self.completion_store.length, device=self.device)

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
        """Writes k and v after each row's drawn tokens, and attends: [n, H, 1, D] -> [n, H, 1, D]."""
        n, heads, _, size = q.shape
        kv = k.shape[1]
        if window is not None and window > self._furthest:
            window = None
        keys, values = self._write(layer, k, v)
        s = self._longest
        drawn_out, drawn_lse = partial_attention(
            q.reshape(n, kv, heads // kv, size), keys[:n, :, :s], values[:n, :, :s], self._drawn_mask(window, q.dtype),
            scale=scale, softcap=softcap,
        )  # fmt: skip
        q, lse = q.reshape(n * heads, size), drawn_lse.reshape(-1)
        prompt, prompt_lse = self._prompt_part(layer, q, k, v, window, scale=scale, softcap=softcap)
        weight = torch.sigmoid(prompt_lse - lse).unsqueeze(1)
        out = torch.lerp(drawn_out.view(n * heads, -1).to(weight.dtype), prompt.to(weight.dtype), weight)
        if sinks is not None:
            lse = torch.logaddexp(prompt_lse, lse)
            out = out * torch.sigmoid(lse.view(n, heads) - sinks.float()).view(-1, 1)
        return out.to(q.dtype).view(n, heads, 1, -1)

    def _prompt_part(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        *,
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Attention to prompts: [n * H, D] of q [n * H, D], and the lse [n * H]. Args: k, v: read for their shapes."""
        (heads, kv), outs, lses = (len(q) // self.rows, k.shape[1]), [], []
        tables, back = self._heads(heads, kv)
        for number, (bucket, table) in enumerate(zip(self._buckets, tables, strict=True)):
            pk, pv = bucket.store.layer(layer, k, v)
            m, p = bucket.prompts, bucket.length
            queries = q.index_select(0, table).view(m, kv, -1, q.shape[1])
            bias = self._prompt_mask(number, window, heads // kv, q.dtype)
            o, lse = partial_attention(queries, pk[:m, :, :p], pv[:m, :, :p], bias, scale=scale, softcap=softcap)
            outs.append(o.reshape(-1, o.shape[-1]))
            lses.append(lse.reshape(-1))
        out = (outs[0] if len(outs) == 1 else torch.cat(outs)).index_select(0, back)
        lse = (lses[0] if len(lses) == 1 else torch.cat(lses)).index_select(0, back)
        return out, lse

    def _write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the new keys and values after each row's drawn tokens. Returns: the layer's whole buffers."""
        keys, values = self.completion_store.layer(layer, k, v)
        if self._equal:
            keys[: self.rows, :, self._longest - 1] = k[:, :, 0]
            values[: self.rows, :, self._longest - 1] = v[:, :, 0]
            return keys, values
        kv = k.shape[1]
        if kv not in self._write_at:
            row = torch.arange(self.rows * kv, device=self.device).view(self.rows, kv) * self.completion_store.length
            self._write_at[kv] = (row + self._drawn.unsqueeze(1)).view(-1)
        for buffer, x in ((keys, k), (values, v)):
            flat = buffer.view(-1, x.shape[-1])
            flat.index_copy_(0, self._write_at[kv], x.reshape(self.rows * kv, -1))
        return keys, values

    def _drawn_mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """[n, 1, 1, s] of 0 and MASK_VALUE over the drawn tokens; None = all are visible."""
        if window is not None and window >= self._longest:
            window = None
        if window is None and self._equal:
            return None
        if window not in self._drawn_bias:
            distance = self._drawn.unsqueeze(1) - self._range[: self._longest]
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            self._drawn_bias[window] = mask_bias(hidden, dtype)[:, None, None]
        return self._drawn_bias[window]

    def _prompt_mask(self, number: int, window: int | None, g: int, dtype: torch.dtype) -> Tensor | None:
        """[m, 1, 1 or G * g, S] of 0 and MASK_VALUE over a bucket's prompts; None = all are visible."""
        bucket = self._buckets[number]
        key = (number, window, g)
        if window is None:
            if bucket.hidden is None:
                return None
            if key not in self._prompt_bias:
                self._prompt_bias[key] = mask_bias(bucket.hidden, dtype)[:, None, None]
        elif key not in self._prompt_bias:
            position = self.position_ids.view(-1).index_select(0, bucket.row_index).view(bucket.prompts, -1, 1)
            place = torch.arange(bucket.length, device=self.device)
            hidden = (place >= bucket.lengths.view(-1, 1, 1)) | (position - place >= window)
            self._prompt_bias[key] = mask_bias(hidden, dtype).repeat_interleave(g, 1).unsqueeze(1)
        return self._prompt_bias[key]

    def _heads(self, heads: int, kv: int) -> tuple[list[Tensor], Tensor]:
        """Index tables for a head count: of the queries of each bucket, and back to the rows' order."""
        if (heads, kv) not in self._head_tables:
            g, found, bases, base = heads // kv, [], [], 0
            head = np.arange(heads).reshape(kv, 1, g)
            for b in self._buckets:
                index = b.rows[:, None, :, None] * heads + head  # [m K G g]
                found.append(torch.from_numpy(index.reshape(-1)))
                bases.append(base)
                base += index.size
            number, slot, rank = self._place.T[:, :, None, None]
            max_rows = np.array([b.max_rows for b in self._buckets])[number]
            k, j = np.arange(kv)[:, None], np.arange(g)
            back = np.array(bases)[number] + ((slot * kv + k) * max_rows + rank) * g + j  # [n K g]
            *moved, last = to_device([*found, torch.from_numpy(back.reshape(-1))], self.device)
            self._head_tables[heads, kv] = moved, last
        return self._head_tables[heads, kv]
