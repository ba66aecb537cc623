"""Metrics that merge exactly across micro-batches and ranks.

A mean carries its sum and its count, so that the mean of two halves is the mean of the whole however unequal the
halves are. Every kind is frozen; `merge` makes a new one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from whet.errors import DataError

__all__ = ["Last", "Max", "Mean", "Metric", "Min", "Sum", "flat", "merge"]


@dataclass(frozen=True)
class Mean:
    """Σx / n, kept as the sum and the count.

    Args: sum: Σx. count: n, a number of tokens, sequences or whatever is averaged; 1.0 for a lone value.

    >>> Mean(3.0, 3).merge(Mean(5.0, 1)).value        # 8/4, not the mean of the means 1 and 5
    2.0
    >>> Mean(0.0, 0).value                            # nothing was counted
    nan
    """

    sum: float
    count: float = 1.0

    @property
    def value(self) -> float:
        """The mean; NaN when nothing was counted."""
        return float(self.sum) / float(self.count) if self.count else math.nan

    def merge(self, other: Mean) -> Mean:
        """Returns the mean over both."""
        return Mean(self.sum + other.sum, self.count + other.count)


@dataclass(frozen=True)
class Sum:
    """Σx: tokens generated, updates skipped.

    >>> Sum(2.0).merge(Sum(3.0)).value
    5.0
    """

    value: float

    def merge(self, other: Sum) -> Sum:
        """Returns the sum of both."""
        return Sum(self.value + other.value)


@dataclass(frozen=True)
class Max:
    """The greatest; NaN if any is NaN, so that one bad value stays visible.

    >>> Max(2.0).merge(Max(3.0)).value
    3.0
    """

    value: float

    def merge(self, other: Max) -> Max:
        """Returns the greater of both."""
        return other if math.isnan(other.value) or other.value > self.value else self


@dataclass(frozen=True)
class Min:
    """The least; NaN if any is NaN, so that one bad value stays visible.

    >>> Min(2.0).merge(Min(3.0)).value
    2.0
    """

    value: float

    def merge(self, other: Min) -> Min:
        """Returns the lesser of both."""
        return other if math.isnan(other.value) or other.value < self.value else self


@dataclass(frozen=True)
class Last:
    """The value seen last: a learning rate, a version.

    >>> Last(2.0).merge(Last(1.0)).value
    1.0
    """

    value: float

    def merge(self, other: Last) -> Last:
        """Returns the other: it came later."""
        return other


Metric = Mean | Sum | Max | Min | Last
"""Any of the kinds: frozen, with `.merge(other)` and `.value`."""


def merge(first: Mapping[str, Metric], *others: Mapping[str, Metric]) -> dict[str, Metric]:
    """Returns the metrics of several micro-batches or ranks as one.

    Args: first, others: metrics by name, in the order they were computed, which matters only to Last.
    Returns: a new dict with every name of any of them.
    Raises: DataError: one name carries two kinds.

    >>> merge({"kl": Mean(1.0, 2)}, {"kl": Mean(3.0, 2), "updates": Sum(1.0)})
    {'kl': Mean(sum=4.0, count=4), 'updates': Sum(value=1.0)}
    """
    merged = dict(first)
    for metrics in others:
        for name, metric in metrics.items():
            had = merged.get(name)
            if had is not None and type(had) is not type(metric):
                kinds = f"{type(had).__name__} and {type(metric).__name__}"
                raise DataError(f"metric {name!r} is both {kinds}; one name has one kind")
            merged[name] = metric if had is None else had.merge(metric)  # pyright: ignore[reportArgumentType]
    return merged


def flat(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Returns names and plain numbers, for a row of metrics.jsonl.

    Args: metrics: by name.
    Returns: name -> value, NaN where a mean counted nothing.

    >>> flat({"kl": Mean(1.0, 2), "learning_rate": Last(1e-6)})
    {'kl': 0.5, 'learning_rate': 1e-06}
    """
    return {name: float(metric.value) for name, metric in metrics.items()}
