"""MicroBatch: the input of one forward pass. packing/micro_batch_planner.py makes it, models/forward.py runs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from whet.models.attention import SegmentLayout
from whet.types import TokenBatch
from whet.util.transfer import to_device

__all__ = ["MicroBatch", "RankShare"]


@dataclass(frozen=True, eq=False)
class RankShare:
    """The part of a pass that one of several processes runs; see parallel/context.py."""

    whole: MicroBatch
    """The pass."""
    tokens: slice
    """Its places of the row."""
    targets: Tensor
    """Long: its targets, of those of the pass."""
    sequences: Tensor
    """Long: the sequences of the pass whose last token it runs, where scores are asked for."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """The input of one forward pass and the place of each target. Integers only; places index the flattened input_ids.

    Dim legend: B rows, T tokens of a row, s completion tokens, n sequences, u units.
    Example: prompt [5, 6], completions [7, 2] and [8, 2], packed: input_ids [[5, 6, 7, 8]], hidden_index [1, 2, 1, 3],
    targets [7, 2, 8, 2], token_index [0, 1, 2, 3], sequence [0, 0, 1, 1], position [0, 1, 0, 1], sequences [0, 1],
    units [0, 1], unit_of [0, 1]. With at_end: input_ids [[5, 6, 7, 2, 8, 2]], hidden_index [1, 2, 1, 4],
    last_index [3, 5].
    """

    input_ids: Tensor
    """Long [B T]."""
    layout: SegmentLayout | None
    """Which token attends to which, for a model that takes layouts (B = 1)."""
    attention_mask: Tensor | None
    """Long [B T], 1 = token, for a model with its own attention."""
    hidden_index: Tensor
    """Long [s]: the place of the hidden state that predicts each target; repeated where sequences share it."""
    targets: Tensor
    """Long [s]: token ids."""
    token_index: Tensor
    """Long [s]: place on the token axis of the TokenBatch."""
    sequence: Tensor
    """Long [s]: 0, 1, ... in order, the sequence of each target in this micro-batch."""
    position: Tensor
    """Long [s]: completion tokens before the target."""
    sequences: Tensor
    """Long [n]: the indices of these sequences in the TokenBatch."""
    units: Tensor
    """Long [u]: the indices of these units in the TokenBatch, in order of their first sequences."""
    unit_of: Tensor
    """Long [n]: 0, 1, ... as `units`, the unit of each sequence in this micro-batch."""
    last_index: Tensor | None = None
    """Long [n]: the place of the hidden state at each sequence's last token, where that token is run."""
    batch: TokenBatch
    """The batch that `token_index`, `sequences` and `units` index; on the CPU."""
    share: RankShare | None = None
    """Of one of several processes that run a pass together; None = it is whole."""
    host: MicroBatch | None = None
    """The CPU copy of a micro-batch that was moved to a device."""

    @property
    def num_tokens(self) -> int:
        """Places of input_ids, padding included."""
        return self.input_ids.numel()

    @property
    def on_host(self) -> MicroBatch:
        """The same on the CPU, where integers are read without waiting for a device."""
        return self.host or self

    def to(self, device: torch.device | str) -> MicroBatch:
        """Returns the same on a device, by one copy for which the host does not wait."""
        if torch.device(device).type == "cpu":
            return self
        tensors: list[Tensor] = []
        self._map_tensors(lambda x: (tensors.append(x), x)[1])
        moved = iter(to_device(tensors, device))
        return dataclasses.replace(self._map_tensors(lambda x: next(moved)), host=self.on_host)

    def _map_tensors(self, fn: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Returns the same with fn(x) for each tensor x of its columns and of its layout, in one order."""
        columns = {f.name: vars(self)[f.name] for f in dataclasses.fields(self)}
        mapped = {name: fn(x) for name, x in columns.items() if isinstance(x, Tensor)}
        return dataclasses.replace(self, layout=self.layout and self.layout.map_tensors(fn), **mapped)
