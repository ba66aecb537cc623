"""PPOConfig: proximal policy optimisation with a critic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from whet.config.algo.policy import PolicyConfig
from whet.config.base import config
from whet.config.fields import Bool, Count, Float, Fn, Name, Number
from whet.errors import ConfigError

__all__ = ["PPOConfig"]


def _or_zero(value: Any) -> Any:
    """0.0 for None."""
    return 0.0 if value is None else value


@config
class PPOConfig(PolicyConfig):
    """Proximal policy optimisation (arXiv:1707.06347): generalised advantages from a critic, and a clipped surrogate.

    >>> PPOConfig(epsilon_low=0.0).clip_range, PPOConfig(epsilon=0.1, epsilon_high=0.3).clip_range
    ((0.0, 0.2), (0.1, 0.3))
    """

    advantage_estimator: Name | Fn = "gae"
    """How rewards and values become advantages: a name, a function or "package.module:function". The critic is trained
    with every choice."""
    policy_loss_fn: Name | Fn = "ppo"
    """The loss of each token, from logprobs and advantages: a name, a function or "package.module:function"."""
    value_loss_fn: Name | Fn = "ppo"
    """The critic's loss of each token, from values and returns: a name, a function or "package.module:function"."""
    gae_lambda: Float = 0.95
    """λ of the generalised advantages and of the critic's returns: 1 = rewards only, 0 = the critic only."""
    whiten_advantages: Bool = True
    """Normalise the advantages of a step to mean 0 and variance 1 over its trained tokens."""
    kl_type: Literal["loss", "reward", "advantage"] = "reward"
    """Where the KL acts: "reward" = subtracted from each token's reward before the advantage estimator, "loss" = a term
    of the loss, "advantage" = subtracted from the advantage after the estimator."""
    epsilon_low: Float | None = None
    """The ratio is clipped below 1 - ε_low; None = epsilon."""
    entropy_coef: Annotated[Float, BeforeValidator(_or_zero)] = 0.0
    """c, the weight of the entropy bonus of each token; 0.0 or null = no bonus."""
    clip_range_value: Float = 0.2
    """The range around the value at rollout to which the value loss clips the new value."""
    loss_agg_mode: Name | Fn = "token-mean"
    """How the losses of tokens become one loss: a name, or a function that computes the weight of every token."""
    value_loss_agg_mode: Name | Fn = "token-mean"
    """How the critic's losses of tokens become one loss: as loss_agg_mode."""
    critic_updates: Count = 1
    """Updates of the critic per update of the actor: the mini-batch is split into this many parts."""
    vf_coef: Float = 0.5
    """Weight of the value loss in the sum with the policy loss, for a critic that shares the actor's backbone
    (critic.model=actor). No effect on a critic with a model of its own, which has its own optimizer."""
    critic_warmup_steps: Number = 0
    """Steps at the start that train only the critic and leave the policy unchanged (RL2's freeze_steps)."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        super().__post_init__()
        self.check_groups()
        if not 0 <= self.gae_lambda <= 1:
            raise ConfigError(f"gae_lambda must be between 0 and 1, got {self.gae_lambda!r}")
        if self.vf_coef <= 0:
            raise ConfigError(f"vf_coef must be positive, got {self.vf_coef!r}")
        if self.clip_range_value <= 0:
            raise ConfigError(f"clip_range_value must be positive, got {self.clip_range_value!r}")
        if self.epsilon_low is not None and self.epsilon_low < 0:
            raise ConfigError(f"epsilon_low must not be negative, got {self.epsilon_low!r}")

    @property
    def clip_range(self) -> tuple[float, float]:
        """(ε_low, ε_high), epsilon where they are None."""
        low, high = self.epsilon_low, self.epsilon_high
        return self.epsilon if low is None else low, self.epsilon if high is None else high

    @property
    def keywords(self) -> Mapping[str, Any]:
        """The fields by name; epsilon_low replaces epsilon."""
        low, high = self.clip_range
        return {**super().keywords, "epsilon": low, "epsilon_high": high}
