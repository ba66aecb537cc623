"""Rules on a run's own metrics: which checkpoint is the best, and when to stop."""

from __future__ import annotations

from typing import Literal

from whet.config.base import config
from whet.config.fields import Count, Float, Name
from whet.errors import ConfigError

__all__ = ["BEFORE_STOP", "BEST", "Band", "KeepBestOptions"]

BEST, BEFORE_STOP = "best", "before_stop"
"""Names of the checkpoints that are kept apart."""


@config
class KeepBestOptions:
    """The rule for the best checkpoint.

    >>> KeepBestOptions(metric="accuracy").mode
    'max'
    """

    metric: Name
    """A metric of the evaluation rows: reward, accuracy, loss, ..."""
    mode: Literal["max", "min"] = "max"
    """"max" = the largest value is the best, "min" = the smallest."""


@config
class Band:
    """The values that a metric may have, and how long it may be outside of them.

    >>> Band(below=0.5, above=0.1)
    Traceback (most recent call last):
    whet.errors.ConfigError: below=0.5 must be less than above=0.1: the band lies between them
    """

    below: Float | None = None
    """Lower end: the metric is outside if it is less than this; None = no bound."""
    above: Float | None = None
    """Upper end: the metric is outside if it is greater than this; None = no bound."""
    steps: Count = 1
    """Consecutive steps outside the band before the rule acts; for a metric of evaluations, consecutive evaluations."""

    def __post_init__(self) -> None:
        """Checks that there is a band."""
        if self.below is None and self.above is None:
            raise ConfigError("a band needs below, above or both")
        if self.below is not None and self.above is not None and self.below >= self.above:
            raise ConfigError(
                f"below={self.below:g} must be less than above={self.above:g}: the band lies between them"
            )
