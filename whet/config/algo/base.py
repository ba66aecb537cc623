"""What every algorithm has, and the check that each choice adds to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from whet.config.base import config
from whet.config.fields import Count, Float, Fn, Name
from whet.errors import ConfigError

__all__ = ["AlgorithmConfig"]


@config
class AlgorithmConfig:
    """What every algorithm is made of: functions by name, as objects, or as "package.module:function"."""

    algo_variant: Name = "grpo"
    """Tunix's name of the algorithm. No effect: the fields below define the algorithm."""
    advantage_estimator: Name | Fn = "grpo"
    """Rewards -> advantages: grpo, drgrpo, rloo, a function or "package.module:function"."""
    policy_loss_fn: Name | Fn = "grpo"
    """Logprobs and advantages -> a loss per token: grpo (the clipped surrogate; "ppo" is another name of it),
    gspo-token, a function or "package.module:function"."""
    reward_manager: Name | Fn = "sequence-level"
    """How the rewards of several functions become one."""
    reward_weights: tuple[Float, ...] | None = None
    """Weight of each reward function, in their order; None = 1.0 each."""
    num_iterations: Count = 1
    """μ: passes over each rollout."""
    kl_clamp_value: Float | None = None
    """Bound of the KL estimate at each token, both ways; None = off."""

    def __post_init__(self) -> None:
        """Checks the ranges; each choice adds its own check, and calls this one first."""
        if self.kl_clamp_value is not None and self.kl_clamp_value <= 0:
            raise ConfigError(f"kl_clamp_value must be positive, got {self.kl_clamp_value!r}; None turns it off")

    @property
    def keywords(self) -> Mapping[str, Any]:
        """What the functions of an algorithm are given where they ask for it by name: the fields."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
