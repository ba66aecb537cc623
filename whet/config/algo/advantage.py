"""The choice of the advantage: what the estimators take, and which of them compare a completion with its group."""

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
)
"""The estimators that give a group of one nothing, since it is compared with itself."""


@config
class AdvantageFields(AlgorithmConfig):
    """Parameters of the advantage estimators, by the names of their keywords."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """grpo, grpo_passk: divide by the standard deviation of the rewards of the group, of the batch, or by nothing."""
    advantage_eps: Float = 1e-6
    """Added to a deviation (or mean) that is divided by: 1e-6 as Tunix and verl, 1e-4 as TRL."""
    advantage_ddof: Literal[0, 1] = 1
    """1: standard deviations of a sample (n - 1); 0: of a population (n)."""
    normalize_advantages: Bool = False
    """rloo: less the mean of all advantages of the batch, divided by their standard deviation."""
    gamma: Float = 1.0
    """γ: what a reward is worth one token earlier. For estimators per token: reinforce_plus_plus."""
    global_norm: Bool = False
    """reinforce: mean and deviation of the whole batch, not of each group."""
    norm_var: Bool = False
    """reinforce: divide by the standard deviation."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        super().__post_init__()
        if self.advantage_eps < 0:
            raise ConfigError(f"advantage_eps must not be negative, got {self.advantage_eps!r}")
        if not 0 <= self.gamma <= 1:
            raise ConfigError(f"gamma must be between 0 and 1, got {self.gamma!r}; 1.0 does not discount")
