"""The fields of the entropy bonus: a fixed coefficient, or one that adapts to the entropy."""

from __future__ import annotations

from whet.config.algo.base import AlgorithmConfig
from whet.config.base import config
from whet.config.fields import Bool, Float
from whet.errors import ConfigError

__all__ = ["EntropyFields"]


@config
class EntropyFields(AlgorithmConfig):
    """The entropy bonus. It keeps the policy from becoming too certain."""

    entropy_coef: Float = 0.0
    """c, the weight of the entropy bonus of each token; 0.0 = no bonus."""
    use_adaptive_entropy: Bool = False
    """Adapt c after each update: entropy_coef_delta raises it if the mean entropy of the trained tokens was at most
    entropy_target, and lowers it otherwise. The bonus acts only if the entropy of the update before was at most the
    target."""
    entropy_coef_min: Float = 0.0
    """Smallest c of use_adaptive_entropy."""
    entropy_coef_max: Float = 1.0
    """Largest c of use_adaptive_entropy."""
    entropy_coef_delta: Float = 0.005
    """The change of c after each update with use_adaptive_entropy."""
    entropy_target: Float = 0.2
    """The entropy that use_adaptive_entropy aims at, in nats per token."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        super().__post_init__()
        for name in ("entropy_coef_min", "entropy_coef_max", "entropy_target"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)!r}")
        if self.entropy_coef_min > self.entropy_coef_max:
            raise ConfigError(
                f"entropy_coef_min={self.entropy_coef_min!r} must be at most entropy_coef_max={self.entropy_coef_max!r}"
            )
        if not self.entropy_coef_delta > 0:
            raise ConfigError(f"entropy_coef_delta must be positive, got {self.entropy_coef_delta!r}; 0.005 is usual")
        if self.use_adaptive_entropy and not self.entropy_coef_min <= self.entropy_coef <= self.entropy_coef_max:
            raise ConfigError(
                f"entropy_coef={self.entropy_coef!r}, where use_adaptive_entropy starts, must be between "
                f"entropy_coef_min={self.entropy_coef_min!r} and entropy_coef_max={self.entropy_coef_max!r}"
            )
