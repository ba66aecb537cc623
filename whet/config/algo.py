"""The algorithm: the section algo. Names and defaults are Tunix's where Tunix has the field."""

from __future__ import annotations

from typing import Literal

from whet.config.base import config
from whet.config.fields import Bool, Count, Float, Fn, Name, Size, Text
from whet.errors import ConfigError

__all__ = ["AlgorithmConfig", "GRPOConfig", "GrpoConfig"]


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
        """Checks the ranges."""
        if self.kl_clamp_value is not None and self.kl_clamp_value <= 0:
            raise ConfigError(f"kl_clamp_value must be positive, got {self.kl_clamp_value!r}; None turns it off")


@config
class GRPOConfig(AlgorithmConfig):
    """Group-relative policy optimisation (arXiv:2402.03300) and its relatives.

    >>> GRPOConfig(num_generations=1)
    Traceback (most recent call last):
    whet.errors.ConfigError: num_generations must be greater than 1, got 1: a completion is compared with its group
    >>> GRPOConfig(epsilon=0.2, epsilon_high=0.28).clip_range
    (0.2, 0.28)
    """

    num_generations: Size = 2
    """G: completions of each prompt."""
    beta: Float = 0.04
    """Weight of the KL to the reference, which pulls towards it under low_var_kl and mse_kl. 0.0 = off; no reference is
    loaded then unless force_compute_kl is set."""
    kl_loss_mode: Name = "kl"
    """KL estimate: low_var_kl (k3), mse_kl (k2), kl (k1). The gradient of k1 does not depend on the reference."""
    epsilon: Float = 0.2
    """The ratio is clipped below 1 - ε."""
    epsilon_high: Float | None = None
    """The ratio is clipped above 1 + ε_high; None = epsilon."""
    epsilon_c: Float | None = None
    """Dual clip: with a negative advantage the loss stays below -ε_c·A; None = off, else greater than 1."""
    loss_algo: Literal["grpo", "gspo-token"] | Text = "grpo"
    """Ratio of each token (grpo) or of the whole sequence (gspo-token)."""
    loss_agg_mode: Name | Fn = "sequence-mean-token-mean"
    """How the losses of tokens become one: token-mean, sequence-mean-token-mean, sequence-mean-token-scale,
    seq-mean-token-sum, sequence-mean-token-sum-norm, or a function that gives every token its weight."""
    loss_agg_norm: Float | None = None
    """The constant of the modes that divide by one; None = their default."""
    use_rollout_logps: Bool = True
    """Old logprobs are the sampler's; off, the trainer computes them from the weights at the start of the step."""
    sampler_is: Text | Fn | None = None
    """Correction for a sampler that differs from the trainer: "token" weighs each token by trainer / sampler
    probability, truncated; a function or "package.module:function" of LossInputs gives each its weight; None = off."""
    sampler_is_threshold: Float = 2.0
    """Upper bound of that weight."""
    loss_masks: tuple[Name | Fn, ...] = ()
    """Multiply the policy loss by 0 or 1: off-policy, functions of LossInputs, "package.module:function"."""
    off_policy_mask_threshold: Float = 0.5
    """Threshold of loss_masks=[off-policy]: completions with a negative advantage whose mean log(sampler / policy) is
    above it are masked out."""
    entropy_coef: Float = 0.0
    """c: weight of the entropy bonus at each token; 0.0 = none."""
    loss_agg_units: Literal["trained", "all"] = "trained"
    """What a loss_agg_mode with a mean over sequences divides by: those with a trained token, or all, as TRL does."""
    force_compute_kl: Bool = False
    """Compute the KL to the reference as a metric also when beta is 0.0."""
    mask_truncated_completions: Bool = False
    """Mask out completions that were cut at the length limit."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        super().__post_init__()
        if self.loss_algo not in ("grpo", "gspo-token"):
            raise ConfigError(f"loss_algo should be either grpo or gspo-token. Received: {self.loss_algo}")
        if self.num_generations <= 1:
            raise ConfigError(
                f"num_generations must be greater than 1, got {self.num_generations}: "
                "a completion is compared with its group"
            )
        if isinstance(self.sampler_is, str) and self.sampler_is != "token" and ":" not in self.sampler_is:
            raise ConfigError(f"sampler_is should be None or 'token'. Received: {self.sampler_is!r}")
        if self.sampler_is_threshold <= 0:
            raise ConfigError(f"sampler_is_threshold must be positive, got {self.sampler_is_threshold!r}; 2.0 is usual")
        for name in ("beta", "epsilon", "epsilon_high", "off_policy_mask_threshold"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} must not be negative, got {value!r}")
        if self.epsilon_c is not None and self.epsilon_c <= 1:
            raise ConfigError(f"epsilon_c must be greater than 1, got {self.epsilon_c!r}; None turns the dual clip off")
        if self.loss_agg_norm is not None and self.loss_agg_norm <= 0:
            raise ConfigError(f"loss_agg_norm: Invalid 'norm' value: must be positive, got {self.loss_agg_norm!r}")

    @property
    def clip_range(self) -> tuple[float, float]:
        """(ε, ε_high), ε_high with its default filled in."""
        return self.epsilon, self.epsilon if self.epsilon_high is None else self.epsilon_high


GrpoConfig = GRPOConfig
"""Tunix's other spelling."""
