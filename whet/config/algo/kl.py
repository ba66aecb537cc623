"""The fields of the KL to the reference: its estimate, where it acts, its coefficient, and a moving reference."""

from __future__ import annotations

from typing import Literal

from whet.config.algo.base import AlgorithmConfig
from whet.config.base import config
from whet.config.fields import Bool, Count, Float, Fn, Name
from whet.errors import ConfigError

__all__ = ["KLFields"]

_CORRECTED = ("k1", "k3", "kl", "low_var_kl")
"""The estimates that use_bias_correction_kl gives the gradient of the KL."""


@config
class KLFields(AlgorithmConfig):
    """The penalty for moving away from the reference model."""

    beta: Float = 0.04
    """Weight of the KL to the reference. 0.0 = off, and no reference is loaded unless force_compute_kl is set."""
    kl_loss_mode: Name | Fn = "low_var_kl"
    """The KL estimate: a name, or a function of log(policy / reference). In the loss, the gradient of k1 does not
    depend on the reference."""
    kl_type: Literal["loss", "reward", "advantage"] = "loss"
    """Where the KL acts: "loss" = a term of the loss, "reward" = subtracted from each token's reward before the
    advantage estimator, "advantage" = subtracted from the advantage after it."""
    use_bias_correction_kl: Bool = False
    """Multiply the KL in the loss (k1 or k3) by the importance ratio policy / old policy, with its gradient."""
    target_kl: Float | None = None
    """Adapt beta after each step so that the KL of the sampled completions stays near this; None = beta is fixed."""
    kl_horizon: Float = 10_000.0
    """With target_kl: the number of completions over which beta changes by a fifth at most; a step never changes it by
    more."""
    force_compute_kl: Bool = False
    """Compute the KL to the reference as a metric also when beta is 0.0."""
    sync_ref_model: Bool = False
    """Move the reference towards the policy every ref_model_sync_steps steps."""
    ref_model_mixup_alpha: Float = 0.6
    """α of sync_ref_model: reference = α * policy + (1 - α) * reference; 1.0 = copy the policy."""
    ref_model_sync_steps: Count = 512
    """Steps (rollouts) between two moves of the reference with sync_ref_model."""

    def __post_init__(self) -> None:
        """Checks the ranges, and that the fields go together."""
        super().__post_init__()
        if self.beta < 0:
            raise ConfigError(f"beta must not be negative, got {self.beta!r}")
        if self.use_bias_correction_kl and self.kl_type != "loss":
            raise ConfigError(
                f"use_bias_correction_kl=True corrects the KL in the loss; kl_type={self.kl_type!r} measures "
                "the KL of the policy that sampled, which needs no correction; set use_bias_correction_kl=False"
            )
        mode = self.keywords["kl_loss_mode"]
        if self.use_bias_correction_kl and mode in self.CHOICES["kl_loss_mode"] and mode not in _CORRECTED:
            raise ConfigError(
                f"use_bias_correction_kl=True with kl_loss_mode={mode!r} has a wrong gradient: with the "
                "importance ratio, only k1 and k3 have the gradient of the KL; take kl_loss_mode='low_var_kl', or "
                "leave the correction off"
            )
        for name in ("target_kl", "kl_horizon"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be positive, got {value!r}")
        if self.target_kl is not None and self.beta == 0:
            raise ConfigError(
                f"target_kl={self.target_kl!r} adapts beta from where it starts, and beta=0.0 stays 0.0; set beta, or "
                "target_kl=None"
            )
        if self.sync_ref_model and not (self.beta or self.force_compute_kl):
            raise ConfigError(
                "sync_ref_model=True moves a reference that nothing reads; set beta above 0.0, or force_compute_kl=True"
            )
        if not 0 < self.ref_model_mixup_alpha <= 1:
            raise ConfigError(
                f"ref_model_mixup_alpha must be above 0 and at most 1, got {self.ref_model_mixup_alpha!r}; 1.0 = a copy"
            )
