"""MicroBatch: one forward pass, as packing/planner.py plans it and the model call runs it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from whet.models.attention import SegmentLayout
from whet.types import TokenBatch

__all__ = ["MicroBatch"]


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """One forward pass: what goes in, and where each target is. Integers only; places count over input_ids flattened.

    Dim legend: B rows, T tokens of a row, s completion tokens, n sequences, u units.
    Example: prompt [5, 6], completions [7, 2] and [8, 2], packed: input_ids [[5, 6, 7, 8]], hidden_index [1, 2, 1, 3],
    targets [7, 2, 8, 2], token_index [0, 1, 2, 3], sequence [0, 0, 1, 1], position [0, 1, 0, 1], sequences [0, 1],
    units [0, 1], unit_of [0, 1]. With the state at the end: input_ids [[5, 6, 7, 2, 8, 2]], hidden_index [1, 2, 1, 4],
    last_index [3, 5].
    """

    input_ids: Tensor
    """Long [B T]."""
    layout: SegmentLayout | None
    """Who sees whom, where the model takes it (then B = 1)."""
    attention_mask: Tensor | None
    """Long [B T], 1 = token, for a model with its own attention."""
    hidden_index: Tensor
    """Long [s]: the place of the hidden state that predicts each target; one that sequences share once for each."""
    targets: Tensor
    """Long [s]."""
    token_index: Tensor
    """Long [s]: place on the token axis of the TokenBatch."""
    sequence: Tensor
    """Long [s]: 0, 1, ... in order, the sequence of each target in this micro-batch."""
    position: Tensor
    """Long [s]: completion tokens before the target."""
    sequences: Tensor
    """Long [n]: which sequences of the TokenBatch these are."""
    units: Tensor
    """Long [u]: which units of the TokenBatch these are, in the order in which their first sequences come."""
    unit_of: Tensor
    """Long [n]: 0, 1, ... as `units`, the unit of each sequence in this micro-batch."""
    last_index: Tensor | None = None
    """Long [n]: the place of the hidden state at each sequence's last token, where that token is run."""
    batch: TokenBatch
    """What `token_index`, `sequences` and `units` count in; on the CPU."""
    host: MicroBatch | None = None
    """Of one that was moved to a device: as it was on the CPU."""

    @property
    def num_tokens(self) -> int:
        """Places of input_ids, padding included: what the forward pass costs."""
        return self.input_ids.numel()

    @property
    def on_host(self) -> MicroBatch:
        """The same on the CPU: reading integers there waits for no device."""
        return self.host or self

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same on a device."""
        if torch.device(device).type == "cpu":
            return self
        columns = {f.name: vars(self)[f.name] for f in dataclasses.fields(self)}
        moved = {name: x.to(device) for name, x in columns.items() if isinstance(x, Tensor)}
        return dataclasses.replace(self, layout=self.layout and self.layout.to(device), host=self.on_host, **moved)
