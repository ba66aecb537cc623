"""What a run watches of its own metrics: which checkpoint is the best, and when to stop."""

from __future__ import annotations

from typing import Literal

from whet.config.base import config
from whet.config.fields import Count, Float, Name
from whet.errors import ConfigError

__all__ = ["BEFORE_STOP", "BEST", "Band", "KeepBestOptions"]

BEST, BEFORE_STOP = "best", "before_stop"
"""Names of the checkpoints that are set aside."""


@config
class KeepBestOptions:
    """The checkpoint that is kept as the best.

    >>> KeepBestOptions(metric="accuracy").mode
    'max'
    """

    metric: Name
    """A metric of the evaluation rows: reward, accuracy, loss, ..."""
    mode: Literal["max", "min"] = "max"
    """Whether the greatest value is the best, or the least."""


@config
class Band:
    """The values that a metric may have, and for how long it may leave them.

    >>> Band(below=0.5, above=0.1)
    Traceback (most recent call last):
    whet.errors.ConfigError: below=0.5 must be less than above=0.1: the band lies between them
    """

    below: Float | None = None
    """Stop where the metric is less than this; None = no bound."""
    above: Float | None = None
    """Stop where the metric is greater than this; None = no bound."""
    steps: Count = 1
    """Only after so many rows in a row outside the band: steps, or evaluations where the metric is of those."""

    def __post_init__(self) -> None:
        """Checks that there is a band."""
        if self.below is None and self.above is None:
            raise ConfigError("a band needs below, above or both")
        if self.below is not None and self.above is not None and self.below >= self.above:
            raise ConfigError(
                f"below={self.below:g} must be less than above={self.above:g}: the band lies between them"
            )
