"""The choice of the surrogate, and of how the losses of tokens become one."""

from __future__ import annotations

from typing import Literal

from whet.config.algo.base import AlgorithmConfig
from whet.config.base import config
from whet.config.fields import Float, Fn, Name
from whet.errors import ConfigError

__all__ = ["SurrogateFields"]


@config
class SurrogateFields(AlgorithmConfig):
    """Parameters of the policy losses, by the names of their keywords, and the aggregation."""

    epsilon: Float = 0.2
    """The ratio is clipped below 1 - ε."""
    epsilon_high: Float | None = None
    """The ratio is clipped above 1 + ε_high; None = epsilon."""
    epsilon_c: Float | None = None
    """Dual clip: with a negative advantage the loss stays below -ε_c·A; None = off, else greater than 1."""
    loss_agg_mode: Name | Fn = "sequence-mean-token-mean"
    """How the losses of tokens become one: token-mean, sequence-mean-token-mean, sequence-mean-token-scale,
    seq-mean-token-sum, sequence-mean-token-sum-norm, or a function that gives every token its weight."""
    loss_agg_norm: Float | None = None
    """The constant of the modes that divide by one; None = their default."""
    loss_agg_units: Literal["trained", "all"] = "trained"
    """What a loss_agg_mode with a mean over sequences divides by: those with a trained token, or all, as TRL does."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        super().__post_init__()
        for name in ("epsilon", "epsilon_high"):
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
