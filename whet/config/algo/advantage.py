"""The choice of the advantage: what the estimators take."""

from __future__ import annotations

from whet.config.algo.base import AlgorithmConfig
from whet.config.base import config

__all__ = ["AdvantageFields"]


@config
class AdvantageFields(AlgorithmConfig):
    """Parameters of the advantage estimators, by the names of their keywords."""
