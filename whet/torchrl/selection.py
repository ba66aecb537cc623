"""Chooses the trajectories of an oversampled group to train on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from whet.errors import ConfigError, DataError, lookup_error

__all__ = ["MCAdvantageSelector", "mean_is_within"]

_STRATEGIES = ("balanced", "first", "uniform")


def mean_is_within(values: Sequence[float], bounds: tuple[float, float] | None) -> bool:
    """Returns whether the mean of some returns lies strictly between the bounds; None = no bounds.

    >>> mean_is_within([0., 1.], (0.1, 0.9)), mean_is_within([1., 1.], (0.1, 0.9))
    (True, False)
    """
    return bounds is None or bounds[0] < sum(values) / len(values) < bounds[1]


class MCAdvantageSelector:
    """Chooses the trajectories of an oversampled group.

    first: the first to arrive. uniform: spread evenly over the sorted returns. balanced: of all subsets with a mean
    return inside the bounds, the one nearest to their middle, and of equals the one with the widest range; uniform if
    there are no bounds.

    Args:
        strategy: balanced, first or uniform.
        max_combinations: the most subsets that balanced tries. If there are more, uniform's choice is moved into the
            bounds, one trajectory at a time.
        in_keys: the keys of each candidate that `select` receives: "return" and, for your own selector,
            "trajectories".
    Raises: ConfigError: an unknown strategy, no combinations, no keys.
    Source: agrees with TorchRL's MCAdvantageSelector.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> returns = TensorDict({"return": torch.tensor([0., 0., 0., 1.])}, [4])
    >>> MCAdvantageSelector().select(returns, group_size=2, keep_return_bounds=(0.1, 0.9))
    [0, 3]
    """

    def __init__(
        self, strategy: str = "balanced", *, max_combinations: int = 100_000, in_keys: Sequence[Any] | None = None
    ) -> None:
        if strategy not in _STRATEGIES:
            raise lookup_error("selection strategy", strategy, _STRATEGIES)
        if max_combinations < 1:
            raise ConfigError(f"max_combinations {max_combinations!r} must be at least 1")
        if in_keys is not None and not in_keys:
            raise ConfigError('in_keys is empty; name the keys that select() reads, ["return"] by default')
        self.strategy = strategy
        self.max_combinations = max_combinations
        self.in_keys = ["return"] if in_keys is None else list(in_keys)

    def select(
        self, candidates: Any, *, group_size: int, keep_return_bounds: tuple[float, float] | None = None
    ) -> list[int] | None:
        """Returns the places of the trajectories chosen; None = no choice has a mean inside the bounds.

        Args: candidates: a TensorDict [n] with the keys `in_keys`, the first of them a number each. group_size: how
                many are chosen. keep_return_bounds: of their mean, exclusive; None = any.
        Raises: DataError: fewer candidates than group_size, or not a single number each.
        """
        values = self._values(candidates)
        if len(values) < group_size:
            raise DataError(f"{len(values)} candidates for a group of {group_size}; wait until there are as many")
        if len(values) == group_size or self.strategy == "first":
            chosen: list[int] | None = list(range(group_size))
        elif self.strategy == "uniform" or keep_return_bounds is None:
            chosen = _choose_uniform(values, group_size)
        elif math.comb(len(values), group_size) <= self.max_combinations:
            chosen = _choose_nearest(values, group_size, keep_return_bounds)
        else:
            chosen = _move_into_bounds(values, group_size, keep_return_bounds)
        if chosen is None or not mean_is_within([values[i] for i in chosen], keep_return_bounds):
            return None
        return chosen

    def _values(self, candidates: Any) -> list[float]:
        """Returns the first key of each candidate, as a number."""
        values = candidates.get(self.in_keys[0])
        if values.numel() != candidates.numel():
            raise DataError(
                f"{self.in_keys[0]!r} has the shape {list(values.shape)} for {candidates.numel()} candidates; "
                "whet's strategies take one number each: override select() for others"
            )
        return [float(v) for v in values.detach().reshape(-1).cpu()]


def _choose_uniform(values: list[float], size: int) -> list[int]:
    """Places spread evenly over the sorted values."""
    ordered = sorted(range(len(values)), key=values.__getitem__)
    if size == 1:
        return [ordered[len(ordered) // 2]]
    return [ordered[round(i * (len(ordered) - 1) / (size - 1))] for i in range(size)]


def _choose_nearest(values: list[float], size: int, bounds: tuple[float, float]) -> list[int] | None:
    """Returns the subset with its mean nearest to the middle of the bounds, then the widest range, then the
    first one.
    """
    middle = 0.5 * (bounds[0] + bounds[1])

    def distance(subset: tuple[int, ...]) -> tuple[float, float]:
        returns = [values[i] for i in subset]
        return abs(sum(returns) / size - middle), min(returns) - max(returns)

    subsets = (s for s in combinations(range(len(values)), size) if mean_is_within([values[i] for i in s], bounds))
    best = min(subsets, key=distance, default=None)
    return None if best is None else list(best)


def _move_into_bounds(values: list[float], size: int, bounds: tuple[float, float]) -> list[int] | None:
    """Replaces trajectories of uniform's choice one at a time, until the mean is inside the bounds; None = never."""
    chosen = _choose_uniform(values, size)
    low = sum(values[i] for i in chosen) / size <= bounds[0]
    ordered = sorted(range(len(values)), key=values.__getitem__)
    towards = reversed(ordered) if low else ordered
    leaving = sorted(chosen, key=values.__getitem__, reverse=not low)
    for new in towards:
        if mean_is_within([values[i] for i in chosen], bounds):
            return chosen
        if new in chosen:
            continue
        if not leaving:
            return None
        chosen[chosen.index(leaving.pop(0))] = new
    return chosen
