"""The metrics of one step on their way to the log: values appended by name, reduced when the step ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whet.config import Mode

__all__ = ["MetricsBuffer", "MetricsBuffers"]

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


class MetricsBuffers:
    """The buffers of all steps that have not been logged, and who else is told of them."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, str], MetricsBuffer] = {}
        self.external_logger: Callable[[MetricsBuffer], None] | None = None
        """Given each buffer when it is taken."""

    def add(self, metrics: Mapping[str, tuple[Any, Aggregate | None]], mode: Mode, step: int) -> None:
        """Adds metrics, name -> (value, aggregation), to a step."""
        key = (step, Mode(mode).value)
        self._buffers.setdefault(key, MetricsBuffer(global_steps=step, mode=key[1])).add(metrics)

    def take(self, step: int, mode: Mode) -> dict[str, float]:
        """What was buffered for a step and all before it, as numbers."""
        found: dict[str, float] = {}
        for key in sorted(k for k in self._buffers if k[0] <= step and k[1] == mode.value):
            buffer = self._buffers.pop(key)
            found |= buffer.reduced()
            if self.external_logger is not None:
                self.external_logger(buffer)
        return found
