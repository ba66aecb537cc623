"""KVPool: keys and values of prompts and rows in one memory a layer, read by torch's varlen_attn wherever they lie.

Each prompt and each row has a range of places (places.py). varlen_attn takes the first place and the
number of keys of each sequence from tables on the device, so a decode step has the same shapes for any lengths: that is
what a captured graph needs. In a decode step each row is two sequences of one query, its prompt and its drawn tokens,
whose results are merged by their log-sum-exp. Rows of one prompt read the same places.
Dim legend: P places, T tokens of a pass, R rows of a decode step, N sequences, H query heads, K KV heads, D head size.
Left out on purpose: soft-caps, sinks and fp32, which varlen_attn does not have: DecodeLayout runs those.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whet.errors import format_exception
from whet.models import varlen
from whet.models.attention import Layout
from whet.models.flex import TOLERANCE, run_in_thread
from whet.rollout.engine.growing_memory import GrowingMemory, make_memory

__all__ = ["KVPool", "PoolCase", "PoolLayout", "SequenceTables", "pool_unsupported_reason"]

log = logging.getLogger("whet")


class KVPool:
    """KV of prompts and rows: for each layer a tensor [P, 2 K, D], keys before values.

    Args: capacity: the most places in use; place 0 comes before them. device: of the memory. longest: the most keys of
        a sequence; None = capacity. make: makes a layer's memory, see make_memory.

    >>> pool = KVPool(100, torch.device("cpu"))
    >>> pool.reserve(40)
    >>> pool.layer(0, torch.ones(1, 4, 8), kv=1)[1:3, :2] = 7.0  # rows of 4 heads, of which 1 + 1 are keys and values
    >>> keys, values = pool.read(1, 2)[0]
    >>> keys.shape, pool.places
    (torch.Size([1, 2, 8]), 40)
    """

    def __init__(
        self,
        capacity: int,
        device: torch.device,
        *,
        longest: int | None = None,
        make: Callable[[int, torch.device], GrowingMemory] = make_memory,
    ) -> None:
        self.capacity, self.longest, self.device, self._make = capacity, longest or capacity, device, make
        self.places = 0
        """Places allocated, without place 0."""
        self._memory: dict[int, GrowingMemory] = {}
        self._layers: dict[int, Tensor] = {}
        self._sizes: dict[int, int] = {}
        """Bytes of a place, by layer."""

    @property
    def moves(self) -> int:
        """Changes when a tensor has moved."""
        return sum(memory.moves for memory in self._memory.values())

    @property
    def bytes(self) -> int:
        """Memory held."""
        return sum(memory.held for memory in self._memory.values())

    def reserve(self, places: int) -> None:
        """Allocates at least this many places; the content is kept."""
        if places > self.places:
            self._resize(places)

    def shrink(self, places: int) -> None:
        """Frees what lies above this many places; 0 = everything."""
        if places < self.places:
            self._resize(places)

    def close(self) -> None:
        """Frees everything, addresses too."""
        self._layers.clear()
        for memory in self._memory.values():
            memory.close()

    def _resize(self, places: int) -> None:
        for layer, memory in self._memory.items():
            self._hold(layer, memory, places)
        self.places = places

    def _hold(self, layer: int, memory: GrowingMemory, places: int) -> None:
        """Gives a layer's memory the size for some places; place 0 is zero."""
        moves, held = memory.moves, memory.held
        memory.resize((places + 1) * self._sizes[layer] if places else 0)
        if memory.moves != moves and layer in self._layers:
            self._layers[layer] = self._view(memory, self._layers[layer].dtype, self._layers[layer].shape[1:])
        if not held and places and layer in self._layers:
            self._layers[layer][0].zero_()

    def layer(self, layer: int, like: Tensor, *, kv: int) -> Tensor:
        """Returns the tensor [P, 2 K, D] of a layer. Args: like: [T, *, D], for its D and dtype. kv: K."""
        if layer not in self._layers:
            shape = (2 * kv, like.shape[-1])
            self._sizes[layer] = size = shape[0] * shape[1] * like.dtype.itemsize
            memory = self._memory[layer] = self._make((self.capacity + 1) * size, self.device)
            self._hold(layer, memory, self.places)
            self._layers[layer] = self._view(memory, like.dtype, shape)
            self._layers[layer][0].zero_()
        return self._layers[layer]

    def _view(self, memory: GrowingMemory, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Returns the memory as [P, *shape]."""
        size = shape[0] * shape[1] * dtype.itemsize
        places = len(memory.bytes) // size
        return memory.bytes[: places * size].view(dtype).view(places, *shape)

    def read(self, start: int, length: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Views [K length D] of the keys and values of a range, by layer."""
        parts = {i: x[start : start + length].transpose(0, 1) for i, x in self._layers.items()}
        return {i: (x[: len(x) // 2], x[len(x) // 2 :]) for i, x in parts.items()}

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copies places to others, in all layers; they may overlap. Args: source, target: Long [n], distinct each."""
        for layer in self._layers.values():
            layer.index_copy_(0, target, layer.index_select(0, source))

    def write(self, start: int, length: int, layers: dict[int, tuple[Tensor, Tensor]]) -> None:
        """Writes keys and values to a range. Args: layers: by layer, [K T D] with T >= length."""
        for layer, (k, v) in layers.items():
            self.layer(layer, k, kv=len(k))[start : start + length] = torch.cat([k, v])[:, :length].transpose(0, 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceTables:
    """Which keys each sequence of a pass reads; all on the device, int32."""

    ends: Tensor
    """[N + 1]: where the queries of each sequence end, after a 0."""
    starts: Tensor
    """[N + 1]: the first place of its keys; the last number is not read."""
    used: Tensor
    """[N]: the number of its keys; its last query is at the last of them."""
    longest: tuple[int, int]
    """The most queries and keys of a sequence."""

    @functools.cached_property
    def by_ends(self) -> tuple[Tensor, Tensor]:
        """[2 N] each: ends of queries and of keys where keys have no lengths (torch 2.11).

        After each sequence is one without queries, whose keys go from the last of a sequence to the first of the next
        one, forwards or backwards: the kernel leaves a sequence without queries before it reads keys.
        """
        starts = self.starts[:-1]
        return self.ends.repeat_interleave(2)[1:-1], torch.stack([starts, starts + self.used], 1).flatten()


class PoolLayout(Layout):
    """Attention of packed prompts, or of a decode step, whose keys and values are in a KVPool.

    Args: pool: of the keys. position_ids: Long [T]. write_at: Long [T], the place of each token.

    `PoolLayout.of_prompts` and `PoolLayout.of_step` make one.
    """

    def __init__(self, pool: KVPool, position_ids: Tensor, write_at: Tensor, tables: SequenceTables) -> None:
        self.pool, self.position_ids, self.write_at, self.tables = pool, position_ids, write_at, tables
        self._rows: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self._by_window: dict[int, tuple[SequenceTables, Tensor]] = {}

    @classmethod
    def of_step(
        cls, pool: KVPool, prompt_starts: Tensor, prompt_lengths: Tensor, starts: Tensor, drawn: Tensor, ends: Tensor
    ) -> PoolLayout:
        """Returns the layout of a decode step.

        Args:
            pool: of the keys.
            prompt_starts, prompt_lengths: Long [R], of each row's prompt.
            starts: Long [R], the first place of each row's drawn tokens.
            drawn: Long [R], the drawn tokens that are in the pool already.
            ends: int32 [2 R + 1]: 0, 1, 2, ...
        """
        rows = prompt_starts, prompt_lengths, starts, drawn
        tables = _step_tables(pool, prompt_starts, prompt_lengths, starts, drawn + 1, ends)
        layout = cls(pool, prompt_lengths + drawn, starts + drawn, tables)
        layout._rows = rows
        return layout

    def attend_joined(self, layer: int, qkv: Tensor, *, kv: int, scale: float, window: int | None) -> Tensor:
        """Writes the keys and values of a layer, and attends.

        Args: layer: its index. qkv: [T, H + 2 K, D], queries before keys before values. kv: K. scale, window: see
            Layout.attend.
        Returns: [T, H, D].
        """
        pool = self.pool.layer(layer, qkv, kv=kv)
        pool.index_copy_(0, self.write_at, qkv[:, -2 * kv :])
        q, keys, values = qkv[:, : -2 * kv], pool[:, :kv], pool[:, kv:]
        if window is not None and window >= self.tables.longest[1]:
            window = None
        if self._rows is None:
            back = -1 if window is None else window - 1
            return _varlen(q, keys, values, self.tables, scale=scale, window=(back, 0))[0]
        tables, visible = self.tables, None
        if window is not None:
            tables, visible = self._windowed(window)
        out, lse = _varlen(q.repeat(2, 1, 1), keys, values, tables, scale=scale, window=(-1, -1))
        (prompt, own), (prompt_lse, own_lse) = out.chunk(2), lse.chunk(2, 1)
        weight = torch.sigmoid(prompt_lse - own_lse).t().unsqueeze(-1)
        if visible is not None:
            weight = weight * visible
        return own.addcmul_(prompt.sub_(own), weight)

    def _windowed(self, window: int) -> tuple[SequenceTables, Tensor]:
        """Returns the tables with the keys that a window shows, and [R, 1, 1], 1 where some are of the prompt."""
        if window not in self._by_window:
            assert self._rows is not None
            prompt_starts, prompt_lengths, starts, drawn = self._rows
            hidden = (prompt_lengths + drawn + 1 - window).clamp_(min=0).minimum(prompt_lengths)
            hidden_own = (drawn + 1 - window).clamp_(min=0)
            tables = _step_tables(
                self.pool, prompt_starts + hidden, prompt_lengths - hidden, starts + hidden_own,
                drawn + 1 - hidden_own, self.tables.ends,
            )  # fmt: skip
            self._by_window[window] = tables, (hidden < prompt_lengths).float().view(-1, 1, 1)
        return self._by_window[window]


def _step_tables(
    pool: KVPool, prompt_starts: Tensor, prompt_lengths: Tensor, starts: Tensor, lengths: Tensor, ends: Tensor
) -> SequenceTables:
    """Returns the tables of a step, whose prompts are the first R sequences. Args: see of_step; lengths of own keys."""
    firsts = torch.cat([prompt_starts, starts, starts[:1]]).to(torch.int32)
    used = torch.cat([prompt_lengths, lengths]).to(torch.int32)
    return SequenceTables(ends=ends, starts=firsts, used=used, longest=(1, pool.longest))


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: SequenceTables,
    *,
    scale: float,
    window: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """varlen_attn of q [T H D] and k, v [P K D]: [T H D], and the log-sum-exp [H T] in fp32."""
    assert varlen.varlen_attn is not None and varlen.AuxRequest is not None
    options = {"scale": scale, "window_size": window, "return_aux": varlen.AuxRequest(lse=True)}
    options |= varlen.head_options(q, k)
    if varlen.takes("seqused_k"):
        ends, longest, options["seqused_k"] = (tables.ends, tables.starts), tables.longest, tables.used
    else:  # with one query each, grouped heads would be taken for queries, of which the added sequences have none
        ends, longest = tables.by_ends, (max(2, tables.longest[0]), tables.longest[1])
    out: Any = varlen.varlen_attn(q, k, v, *ends, *longest, **options)
    return out


@dataclass(frozen=True)
class PoolCase:
    """The properties of a layer's attention that decide whether varlen_attn runs it from a pool."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv: int
    size: int
    scale: float


@functools.cache
def pool_unsupported_reason(case: PoolCase) -> str | None:
    """Says why decode steps can't read a KVPool; None = they can. Each case is compared with plain attention once.

    >>> pool_unsupported_reason(PoolCase(torch.device("cpu"), torch.bfloat16, 4, 2, 16, 0.25))
    'varlen_attn runs on CUDA devices only, not on cpu'
    """
    if case.device.type != "cuda":
        return f"varlen_attn runs on CUDA devices only, not on {case.device.type}"
    if varlen.varlen_attn is None or varlen.AuxRequest is None:
        return f"torch {torch.__version__} has no varlen_attn with a log-sum-exp"
    if case.dtype.itemsize != 2:
        return f"varlen_attn has no {case.dtype}"
    try:
        reason = run_in_thread(case.device, lambda: _difference(case))
    except Exception as error:  # an older torch, and GPUs, head sizes and options that the kernel does not take
        reason = f"it fails: {format_exception(error, 200)}"
    if reason is not None:
        log.warning("decode steps: not on varlen_attn, and not captured, because %s", reason)
    return reason


def _difference(case: PoolCase) -> str | None:
    """Compares decode steps and prompts with attention written out. Returns: the first difference that is too large."""
    random, limit = torch.Generator().manual_seed(0), TOLERANCE[case.dtype]
    draw = lambda *shape: torch.randn(shape, generator=random).to(case.device, case.dtype)
    pool = KVPool(400, case.device, make=GrowingMemory)
    pool.reserve(400)
    whole = pool.layer(0, draw(1, 1, case.size), kv=case.kv)
    whole.copy_(draw(*whole.shape))
    table = lambda *numbers: torch.tensor(numbers, device=case.device)
    prompts, lengths, starts, drawn = [200, 200, 1, 90], [150, 150, 70, 1], [80, 360, 75, 92], [0, 30, 3, 100]
    for window in (None, 33):
        qkv, step = draw(4, case.heads + 2 * case.kv, case.size), table(prompts, lengths, starts, drawn)
        ends = torch.arange(9, dtype=torch.int32, device=case.device)
        layout = PoolLayout.of_step(pool, step[0], step[1], step[2], step[3], ends)
        got = layout.attend_joined(0, qkv, kv=case.kv, scale=case.scale, window=window)
        places = [[*range(p, p + n), *range(s, s + d + 1)] for p, n, s, d in zip(prompts, lengths, starts, drawn)]
        want = torch.stack([_plain(q, whole[p], case, window) for q, p in zip(qkv, places, strict=True)])
        error = float((got.float() - want).abs().max() / want.abs().max())
        if not error <= limit:
            return f"a decode step is {error:.1e} from the plain path's, over {limit:.0e} (window {window})"
        qkv, write_at = draw(50, case.heads + 2 * case.kv, case.size), table(*range(230, 260), *range(20, 40))
        of_prompts = SequenceTables(
            ends=table(0, 30, 50).int(), starts=table(200, 10, 0).int(), used=table(60, 30).int(), longest=(30, 60)
        )
        got = PoolLayout(pool, write_at, write_at, of_prompts).attend_joined(
            0, qkv, kv=case.kv, scale=case.scale, window=window
        )
        places = [list(range(200 if place >= 200 else 10, place + 1)) for place in write_at.tolist()]
        want = torch.stack([_plain(q, whole[p], case, window) for q, p in zip(qkv, places, strict=True)])
        error = float((got.float() - want).abs().max() / want.abs().max())
        if not error <= limit:
            return f"its output is {error:.1e} from the plain path's, over {limit:.0e} (window {window})"
    return None


def _plain(qkv: Tensor, keys: Tensor, case: PoolCase, window: int | None) -> Tensor:
    """Attention of one token [H + 2 K, D] over keys and values [S, 2 K, D], the last of which is its own, in fp32."""
    q, keys = qkv[: case.heads].float(), (keys if window is None else keys[-window:]).float().transpose(0, 1)
    k, v = (x.repeat_interleave(case.heads // case.kv, 0) for x in keys.split(case.kv))
    return ((k @ q.unsqueeze(-1)).squeeze(-1) * case.scale).softmax(-1).unsqueeze(1).bmm(v).squeeze(1)
