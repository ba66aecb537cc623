"""LengthHistory: the length of each prompt's completions the last time, so that long ones start first the next time.

Left out on purpose: guesses for new prompts; for these the maximum length counts.
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
    >>> lengths.of("train", [Prompt(tokens=np.array([1]), source="a", row=7)])
    [None]
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[int, int]] = {}

    def of(self, kind: str, prompts: Sequence[Prompt]) -> list[int | None]:
        """Tokens of each prompt's longest completion the last time; None = it had none yet."""
        known = self._known.get(kind, {})
        return [known.get(p.row) for p in prompts]

    def record(self, kind: str, groups: Sequence[Group]) -> None:
        """Records lengths. Calls of kind "generate" are ignored: their rows are not those of the data."""
        if kind == "generate":
            return
        known = self._known.setdefault(kind, {})
        for g in groups:
            known.pop(g.prompt.row, None)  # the newest come last
            known[g.prompt.row] = max(len(c.tokens) for c in g.completions)
        while len(known) > MAX_ROWS:
            del known[next(iter(known))]

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint: by kind, Long [2, prompts], rows and lengths."""
        return {k: torch.tensor([list(x), list(x.values())], dtype=torch.long) for k, x in self._known.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restores `state`."""
        self._known = {k: dict(zip(*x.tolist(), strict=True)) for k, x in state.items()}
