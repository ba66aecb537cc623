"""The metrics of a step before they are logged: values are appended by name, and reduced when the step ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whet.config import Mode
from whet.rewards.metric_fns import aggregate_metrics

__all__ = ["MetricsBuffer", "MetricsBuffers"]

Aggregate = Callable[[Any], Any]


@dataclass(kw_only=True)
class MetricsBuffer:
    """The values of one step and mode, as an external logger receives them.

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
        """Returns the values as numbers, by name; those without an aggregation (text, lists) are left out."""
        joined = {
            name: ([x for value in values for x in np.ravel(value)] if how is not None else values, how)
            for name, (values, how) in self.metrics.items()
        }
        return aggregate_metrics(joined)


class MetricsBuffers:
    """The buffers of all steps that have not been logged, and the external logger that receives them."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, str], MetricsBuffer] = {}
        self.external_logger: Callable[[MetricsBuffer], None] | None = None
        """It is called with each buffer that is taken."""

    def add(self, metrics: Mapping[str, tuple[Any, Aggregate | None]], mode: Mode, step: int) -> None:
        """Adds metrics, name -> (value, aggregation), to a step."""
        key = (step, Mode(mode).value)
        self._buffers.setdefault(key, MetricsBuffer(global_steps=step, mode=key[1])).add(metrics)

    def take(self, step: int, mode: Mode) -> dict[str, float]:
        """Takes what was buffered for a step and all before it, as numbers."""
        reduced: dict[str, float] = {}
        for key in sorted(k for k in self._buffers if k[0] <= step and k[1] == mode.value):
            buffer = self._buffers.pop(key)
            reduced |= buffer.reduced()
            if self.external_logger is not None:
                self.external_logger(buffer)
        return reduced
