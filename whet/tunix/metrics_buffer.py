"""The metrics of one step on their way to the log: values appended by name, reduced when the step ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["MetricsBuffer"]

Aggregate = Callable[[Any], Any]


@dataclass(kw_only=True)
class MetricsBuffer:
    """Values of one step and mode, as Tunix's external loggers receive them.

    Args: global_steps: the step. mode: "train" or "eval". metrics: name -> (values so far, how they become one).

    >>> b = MetricsBuffer(global_steps=3, mode="train")
    >>> b.add({"reward": (1.0, np.mean)}); b.add({"reward": (0.0, np.mean), "note": ("hi", None)})
    >>> b.reduced()
    {'reward': 0.5}
    """

    global_steps: int
    mode: str
    metrics: dict[str, tuple[list[Any], Aggregate | None]] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, tuple[Any, Aggregate | None]]) -> None:
        """Appends values; the aggregation given last holds."""
        for name, (value, how) in metrics.items():
            self.metrics[name] = ([*self.metrics.get(name, ([], None))[0], value], how)

    def reduced(self) -> dict[str, float]:
        """Name to number; what has no aggregation (text, lists) is left out."""
        found = {}
        for name, (values, how) in self.metrics.items():
            if how is not None:
                flat = [x for v in values for x in np.ravel(np.asarray(v, dtype=np.float64))]
                found[name] = float(how(flat))
        return found
