"""PoolRunner: the Runner whose KV is in a KVPool, and whose decode steps are captured as CUDA graphs.

A graph has a step from the last tokens to the hidden states, for 1, 2, 4, ... rows. It reads the state, the weights and
the pool at their addresses, and nothing that depends on lengths, prompts or sampling: so it serves every rollout.
Dim legend: n live rows, R rows of a captured step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from whet.models.attention import Layout
from whet.models.config_sizes import kv_bytes_per_token
from whet.models.loaded_model import LoadedModel
from whet.models.modes import max_positions
from whet.rollout.engine.cuda_graph import MAX_ROWS, StepGraphs, padded_rows
from whet.rollout.engine.growing_memory import GrowingMemory, make_memory
from whet.rollout.engine.kv_pool import KVPool, PoolLayout, SequenceTables
from whet.rollout.engine.model_forward import FusedForward
from whet.rollout.engine.places import Places
from whet.rollout.engine.runner import NUM_STORED, TOKEN, Runner
from whet.rollout.engine.scheduler import Prefix
from whet.rollout.in_flight import InFlightRequest
from whet.util.device import available_memory, on_device
from whet.util.transfer import to_device

__all__ = ["PoolRunner"]

START, PROMPT_START, PROMPT_LENGTH = range(6, 9)
"""Further rows of the state: the first place of its drawn tokens, that of its prompt, and the prompt's tokens."""
KV_SHARE = 0.9
"""The most of the free memory that keys and values may take, if nothing bounds them."""
MOVED_TOKENS = 1 << 14
"""Tokens whose KV is moved at once, through a copy of that of a layer."""
MAX_LENGTH = 1 << 17
"""Tokens of the longest sequence of a model that names no limit."""


class PoolRunner(Runner):
    """Runs what the engine has scheduled, on a KVPool.

    Args: loaded, forward, max_batch, prefill_tokens: see Runner. kv_cache_tokens: of the pool; None = as many as
        max_batch of the longest sequences have, or as there is memory for now. make: makes a layer's memory.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        forward: FusedForward,
        *,
        max_batch: int,
        prefill_tokens: int,
        kv_cache_tokens: int | None = None,
        make: Callable[[int, torch.device], GrowingMemory] = make_memory,
    ) -> None:
        super().__init__(loaded, forward, max_batch=max_batch, prefill_tokens=prefill_tokens)
        longest = max_positions(loaded.module) or MAX_LENGTH
        capacity = kv_cache_tokens or max_batch * longest
        free = None if kv_cache_tokens else available_memory(self.device)
        if free is not None:
            config, itemsize = loaded.module.config.get_text_config(), next(loaded.module.parameters()).dtype.itemsize
            capacity = max(1, min(capacity, int(free * KV_SHARE) // kv_bytes_per_token(config, itemsize)))
        self.places = Places(capacity)
        self.pool = KVPool(capacity, self.device, longest=min(longest, capacity), make=make)
        self.graphs = StepGraphs(self.device)
        rows = padded_rows(max_batch)
        self.state = torch.zeros(9, rows, dtype=torch.long, device=self.device)
        self._ends = torch.arange(2 * rows + 1, dtype=torch.int32, device=self.device)
        is_one = not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1
        if is_one:  # FSDP makes and frees the memory of parameters
            forward.join_products()
        forward.ensure_positions(min(longest, capacity))

    @property
    def steps(self) -> str:
        """How decode steps run, for `backends`."""
        return self.graphs.path

    def _reserve_prompts(self, prefixes: Sequence[Prefix], slots_in_use: dict[int, int]) -> None:
        self.pool.reserve(self.places.end - 1)

    def _read_prompt(self, prefix: Prefix, count: int) -> dict[int, tuple[Tensor, Tensor]]:
        return self.pool.read(prefix.place, count)

    def _write_prompt(self, prefix: Prefix, layers: dict[int, tuple[Tensor, Tensor]]) -> None:
        self.pool.write(prefix.place, prefix.num_computed_tokens, layers)

    def _read_drawn(self, row: int, flight: InFlightRequest, count: int) -> dict[int, tuple[Tensor, Tensor]]:
        return self.pool.read(flight.place, count)

    def _prefill_layout(
        self, chunk: list[tuple[Prefix, int, int]], tokens: Tensor, ends: Tensor
    ) -> tuple[Layout, Tensor, Tensor]:
        counts = [end - start for _, start, end in chunk]
        positions = np.concatenate([np.arange(start, end) for _, start, end in chunk])
        firsts = np.array([p.place for p, _, _ in chunk])
        lists = (np.cumsum([0, *counts]), [*firsts, 0], [end for *_, end in chunk])
        host = [tokens, ends, torch.from_numpy(positions), torch.from_numpy(positions + np.repeat(firsts, counts))]
        host += [torch.from_numpy(np.array(x, np.int32)) for x in lists]
        tokens, last, position_ids, write_at, ends, starts, used = to_device(host, self.device)
        longest = max(counts), max(end for *_, end in chunk)
        tables = SequenceTables(ends=ends, starts=starts, used=used, longest=longest)
        return PoolLayout(self.pool, position_ids, write_at, tables), tokens, last

    def reserve_rows(self, live: int, count: int) -> None:
        """Allocates memory for new rows, whose places are taken. Args: see Runner."""
        if not live:
            self.seen = None
        self.pool.reserve(self.places.end - 1)

    def _fill_places(self, state: np.ndarray, admitted: Sequence[tuple[InFlightRequest, Prefix]]) -> None:
        state[START] = [flight.place for flight, _ in admitted]
        state[PROMPT_START] = [prefix.place for _, prefix in admitted]
        state[PROMPT_LENGTH] = [len(prefix.tokens) for _, prefix in admitted]

    def _regroup(self, rows: Sequence[tuple[InFlightRequest, Prefix]]) -> None:
        self.state[:, len(rows) :] = 0  # padding rows read no prompt, and write to place 0

    def reserve_drawn(self, rows: int, length: int, longest: int) -> None:
        """Nothing to do: `move_places` has reserved the memory. Args: see Runner."""

    def _features(self, n: int, *, longest: int, furthest: int, equal: bool) -> Tensor:
        rows = padded_rows(n)
        body = lambda: (self._step(rows),)
        if rows > MAX_ROWS:
            return body()[0][:n]
        return self.graphs.step(rows, (self.pool.moves, self.forward.epoch), body)[0][:n]

    def _step(self, rows: int) -> Tensor:
        """Returns the hidden states [R, d] of the last tokens, padding included: the same work for any lengths."""
        state = self.state[:, :rows]
        layout = PoolLayout.of_step(
            self.pool, state[PROMPT_START], state[PROMPT_LENGTH], state[START], state[NUM_STORED],
            self._ends[: 2 * rows + 1],
        )  # fmt: skip
        return self.forward.features(state[TOKEN].unsqueeze(1), layout)

    def _move_drawn(self, source: Tensor, target: Tensor, length: int) -> None:
        """Nothing to do: places do not move with rows."""

    def move_places(self, moves: Sequence[tuple[int, int, int, int]]) -> None:
        """Allocates memory for rows that have grown, and moves the KV of those that have another range now.

        Args: moves: (row, its first place before, now, tokens stored), in the order in which the ranges were taken: one
            may begin where an earlier one has been.
        """
        self.pool.reserve(self.places.end - 1)
        if not moves:
            return
        places = [np.concatenate([np.arange(move[i], move[i] + move[3]) for move in moves]) for i in (1, 2)]
        numbers = [np.array([move[i] for move in moves], np.int64) for i in (0, 2)]
        host = [torch.from_numpy(x) for x in (*places, *numbers)]
        source, target, rows, starts = to_device(host, self.device)
        for part in zip(source.split(MOVED_TOKENS), target.split(MOVED_TOKENS), strict=True):
            self.pool.move(*part)
        self.state[START].index_copy_(0, rows, starts)

    def shrink(self, rows: int, length: int, slots_in_use: dict[int, int]) -> None:
        """Frees memory above the places in use."""
        self.pool.shrink(self.places.end - 1)

    @property
    def kv_tokens(self) -> int:
        """Places allocated."""
        return self.pool.places

    @property
    def kv_bytes(self) -> int:
        """Memory of the pool."""
        return self.pool.bytes

    def drop(self) -> None:
        """Drops all KV. The memory stays until `release`."""
        self.places.clear()
        self.seen = None

    def release(self) -> None:
        """See Runner; graphs stay valid where the memory comes back at its address."""
        super().release()
        with on_device(self.device):
            self.pool.shrink(0)

    def close(self) -> None:
        """Frees everything, graphs and addresses too."""
        self.release()
        self.graphs.clear()
        with on_device(self.device):
            self.pool.close()
