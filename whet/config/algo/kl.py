"""The choice of the KL to the reference."""

from __future__ import annotations

from whet.config.algo.base import AlgorithmConfig
from whet.config.base import config
from whet.config.fields import Bool, Float, Name
from whet.errors import ConfigError

__all__ = ["KLFields"]


@config
class KLFields(AlgorithmConfig):
    """How far the policy may move from the reference, and what that costs."""

    beta: Float = 0.04
    """Weight of the KL to the reference, which pulls towards it under low_var_kl and mse_kl. 0.0 = off; no reference is
    loaded then unless force_compute_kl is set."""
    kl_loss_mode: Name = "kl"
    """KL estimate: low_var_kl (k3), mse_kl (k2), kl (k1). The gradient of k1 does not depend on the reference."""
    force_compute_kl: Bool = False
    """Compute the KL to the reference as a metric also when beta is 0.0."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        super().__post_init__()
        if self.beta < 0:
            raise ConfigError(f"beta must not be negative, got {self.beta!r}")
