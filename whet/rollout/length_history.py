"""LengthHistory: remembers the length of each prompt's completions, so that long ones can start first the next time.

Left out on purpose: estimates for new prompts; these count with the maximum length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from whet.types import Group, Prompt

__all__ = ["LengthHistory"]

MAX_ROWS = 1_000_000
"""Rows remembered of each kind; the oldest are dropped."""


class LengthHistory:
    """The values of Request.expected, by kind of rollout and row of the data.

    A prompt's longest completion counts: its group is finished when that one is.

    >>> import numpy as np
    >>> lengths = LengthHistory()
    >>> lengths.expected("train", [Prompt(tokens=np.array([1]), source="a", row=7)])
    [None]
    """

    def __init__(self) -> None:
        self._lengths: dict[str, dict[int, int]] = {}

    def expected(self, kind: str, prompts: Sequence[Prompt]) -> list[int | None]:
        """Returns tokens of each prompt's longest completion the last time; None = it had none yet."""
        lengths = self._lengths.get(kind, {})
        return [lengths.get(p.row) for p in prompts]

    def record(self, kind: str, groups: Sequence[Group]) -> None:
        """Records lengths. Calls of kind "generate" are ignored: their rows are not those of the data."""
        if kind == "generate":
            return
        lengths = self._lengths.setdefault(kind, {})
        for g in groups:
            lengths.pop(g.prompt.row, None)  # the newest come last
            lengths[g.prompt.row] = max(len(c.tokens) for c in g.completions)
        while len(lengths) > MAX_ROWS:
            del lengths[next(iter(lengths))]

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint: by kind, Long [2, prompts], rows and lengths."""
        return {k: torch.tensor([list(x), list(x.values())], dtype=torch.long) for k, x in self._lengths.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restores `state`."""
        self._lengths = {k: dict(zip(*x.tolist(), strict=True)) for k, x in state.items()}
