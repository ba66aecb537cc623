"""The choice of the entropy bonus."""

from __future__ import annotations

from whet.config.algo.base import AlgorithmConfig
from whet.config.base import config
from whet.config.fields import Float

__all__ = ["EntropyFields"]


@config
class EntropyFields(AlgorithmConfig):
    """What keeps the policy from becoming too certain."""

    entropy_coef: Float = 0.0
    """c: weight of the entropy bonus at each token; 0.0 = none."""
