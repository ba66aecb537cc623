"""The choice of corrections: for a sampler that differs from the trainer, and for tokens that are not trained on."""

from __future__ import annotations

from whet.config.algo.base import AlgorithmConfig
from whet.config.base import config
from whet.config.fields import Bool, Float, Fn, Name, Text
from whet.errors import ConfigError

__all__ = ["CorrectionFields"]


@config
class CorrectionFields(AlgorithmConfig):
    """Factors of the policy loss: weights and masks."""

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
    mask_truncated_completions: Bool = False
    """Mask out completions that were cut at the length limit."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        super().__post_init__()
        if isinstance(self.sampler_is, str) and self.sampler_is != "token" and ":" not in self.sampler_is:
            raise ConfigError(f"sampler_is should be None or 'token'. Received: {self.sampler_is!r}")
        if self.sampler_is_threshold <= 0:
            raise ConfigError(f"sampler_is_threshold must be positive, got {self.sampler_is_threshold!r}; 2.0 is usual")
        if self.off_policy_mask_threshold < 0:
            raise ConfigError(f"off_policy_mask_threshold must not be negative, got {self.off_policy_mask_threshold!r}")
