"""The fields of corrections: weights for a sampler that differs from the trainer, and masks of tokens."""

from __future__ import annotations

from typing import Literal

from whet.config.algo.base import AlgorithmConfig
from whet.config.base import config
from whet.config.fields import Bool, Float, Fn, Name, Text
from whet.errors import ConfigError, nearest

__all__ = ["CorrectionFields"]

_LEVELS = ("token", "sequence", "geometric")
_POSITIVE = (
    "dppo_threshold",
    "dppo_threshold_high",
    "kl_mask_threshold",
    "rejection_threshold",
    "sampler_is_threshold",
)


@config
class CorrectionFields(AlgorithmConfig):
    """Factors of the policy loss: weights and masks."""

    use_rollout_logps: Bool = True
    """Take the sampler's logprobs as the old logprobs; false = the trainer computes them from the weights at the start
    of the step."""
    sampler_is: Text | Fn | None = None
    """Correct for a sampler that differs from the trainer: weigh tokens by the ratio trainer / sampler, of each token
    or of whole sequences. A function of LossInputs or "package.module:function" computes the weights itself; None =
    off."""
    sampler_is_mode: Literal["truncate", "mask"] = "truncate"
    """Treatment of a weight outside its bounds: "truncate" = clip it to the bound, "mask" = do not train on the
    token."""
    sampler_is_threshold: Float | None = 2.0
    """Upper bound of the weight of sampler_is; None = no bound."""
    sampler_is_lower: Float | None = None
    """Lower bound of the weight of sampler_is; None = no bound. IcePop is sampler_is_mode=mask with 0.5 here and a
    sampler_is_threshold of 5.0."""
    sampler_is_normalize: Bool = False
    """Divide the weight of sampler_is by its mean over the trained tokens of the step."""
    sampler_is_current: Bool = False
    """Compute the weight from the current policy instead of the policy at the start of the step (RL2's TIS)."""
    sampler_is_kl: Bool = False
    """Multiply the KL in the loss by the weight of sampler_is too (RL2's TIS)."""
    loss_masks: tuple[Name | Fn, ...] = ()
    """Masks that multiply the policy loss by 0 or 1: names, functions of LossInputs, "package.module:function"."""
    off_policy_mask_threshold: Float = 0.5
    """Threshold of loss_masks=[off-policy], in nats per token: it masks out completions that have a negative advantage
    and a mean log(sampler / policy) above this."""
    top_entropy_quantile: Float = 1.0
    """Share of the tokens of an optimizer step, those with the highest entropy, that loss_masks=[top-entropy] keeps."""
    dppo_threshold: Float = 0.2
    """Threshold of loss_masks=[dppo-tv] (in probability) and [dppo-kl] (in nats): they mask out tokens that have moved
    further than this in the direction of their advantage."""
    dppo_threshold_high: Float | None = None
    """Threshold of dppo-tv and dppo-kl for tokens with a positive advantage; None = dppo_threshold."""
    kl_mask_threshold: Float | None = None
    """Threshold of loss_masks=[sampler-kl], in nats: it masks out tokens with a larger log(policy / sampler)² / 2."""
    rejection_level: Literal["geometric", "sequence", "token"] = "geometric"
    """Level of the ratio trainer / sampler that loss_masks=[sampler-rejection] compares with its bounds."""
    rejection_threshold: Float | None = 1.001
    """Upper bound of the ratio of sampler-rejection: it masks out what lies above; None = no bound."""
    rejection_lower: Float | None = 0.999
    """Lower bound of the ratio of sampler-rejection: it masks out what lies below; None = no bound."""
    mask_truncated_completions: Bool = False
    """Mask out completions that were truncated at the length limit."""

    def __post_init__(self) -> None:
        """Checks the ranges, and that each mask would leave something out."""
        super().__post_init__()
        if isinstance(self.sampler_is, str) and self.sampler_is not in _LEVELS and ":" not in self.sampler_is:
            near = nearest(self.sampler_is, _LEVELS)
            raise ConfigError(
                f"sampler_is should be None, 'token', 'sequence' or 'geometric'. Received: {self.sampler_is!r}{near}"
            )
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be positive, got {value!r}; leave it out for the default")
        for name in ("sampler_is", "rejection"):
            lower, upper = getattr(self, f"{name}_lower"), getattr(self, f"{name}_threshold")
            if lower is not None and (lower <= 0 or (upper is not None and lower >= upper)):
                raise ConfigError(
                    f"{name}_lower={lower!r} must be positive and below {name}_threshold={upper!r}; None = no bound"
                )
        lower, upper = self.sampler_is_lower, self.sampler_is_threshold
        if self.sampler_is in _LEVELS and self.sampler_is_mode == "mask" and not (lower or 0) <= 1 <= (upper or 1):
            raise ConfigError(
                f"sampler_is_mode='mask' with sampler_is_lower={lower!r} and sampler_is_threshold={upper!r} masks out "
                "tokens on which sampler and trainer agree (ratio 1): the bounds must include 1"
            )
        if self.off_policy_mask_threshold < 0:
            raise ConfigError(f"off_policy_mask_threshold must not be negative, got {self.off_policy_mask_threshold!r}")
        if not 0 < self.top_entropy_quantile <= 1:
            raise ConfigError(
                f"top_entropy_quantile must be above 0 and at most 1, got {self.top_entropy_quantile!r}; 1.0 keeps all"
            )
        if self.sampler_is_normalize and self.sampler_is_current:
            raise ConfigError(
                "sampler_is_normalize=True divides by a mean over the whole step, and sampler_is_current=True has no "
                "such mean: turn one of the two off"
            )
        if "top-entropy" in self.loss_masks and self.top_entropy_quantile == 1:
            raise ConfigError(
                "loss_masks=[top-entropy] keeps all tokens at top_entropy_quantile=1.0, and costs a pass; set it below "
                "1 (0.2 is usual), or leave the mask out"
            )
        if "sampler-rejection" in self.loss_masks and self.rejection_lower is None and self.rejection_threshold is None:
            raise ConfigError(
                "loss_masks=[sampler-rejection] needs rejection_lower or rejection_threshold, for example "
                "0.999 and 1.001"
            )
        if "sampler-kl" in self.loss_masks and self.kl_mask_threshold is None:
            raise ConfigError("loss_masks=[sampler-kl] needs kl_mask_threshold, in nats (0.02, for example)")
