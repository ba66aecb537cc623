"""The fields of the advantage estimators, and the list of those that compare a completion with its group."""

from __future__ import annotations

from typing import Literal

from whet.config.algo.base import AlgorithmConfig
from whet.config.base import config
from whet.config.fields import Bool, Float
from whet.errors import ConfigError

__all__ = ["NEED_GROUPS", "AdvantageFields"]

NEED_GROUPS = (
    "drgrpo",
    "gdpo",
    "grpo",
    "grpo_passk",
    "maxrl",
    "opo",
    "reinforce_plus_plus_baseline",
    "rloo",
    "scalerl",
    "turn_rloo",
)
"""The estimators that need groups of two or more: they would compare a single completion with itself."""


@config
class AdvantageFields(AlgorithmConfig):
    """Parameters of the advantage estimators, named as their keyword arguments."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """grpo, grpo_passk: divide by the standard deviation of the rewards of the group, of the batch, or by nothing."""
    advantage_eps: Float = 1e-6
    """ε, added to the standard deviation (or mean) in the denominator. Tunix and verl have 1e-6, TRL has 1e-4."""
    advantage_ddof: Literal[0, 1] = 1
    """1 = the standard deviation divides by n - 1; 0 = it divides by n."""
    normalize_advantages: Bool = False
    """rloo: subtract the mean of all advantages of the batch, then divide by their standard deviation."""
    gamma: Float = 1.0
    """γ, the discount of a reward: per token in gae and reinforce_plus_plus, per turn in turn_rloo; 1.0 = none."""
    global_norm: Bool = False
    """reinforce: take mean and standard deviation over the whole batch instead of each group."""
    norm_var: Bool = False
    """reinforce: divide by the standard deviation."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        super().__post_init__()
        if self.advantage_eps < 0:
            raise ConfigError(f"advantage_eps must not be negative, got {self.advantage_eps!r}")
        if not 0 <= self.gamma <= 1:
            raise ConfigError(f"gamma must be between 0 and 1, got {self.gamma!r}; 1.0 does not discount")
