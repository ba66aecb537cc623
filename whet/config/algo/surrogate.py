"""The choice of the surrogate, and of how the losses of tokens become one."""

from __future__ import annotations

from typing import Literal

from whet.config.algo.base import AlgorithmConfig
from whet.config.base import config
from whet.config.fields import Float, Fn, Name
from whet.errors import ConfigError

__all__ = ["SurrogateFields"]

_POSITIVE = (
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
)


@config
class SurrogateFields(AlgorithmConfig):
    """Parameters of the policy losses, by the names of their keywords, and the aggregation."""

    importance_sampling_level: Literal["token", "sequence", "sequence-token", "sequence-sum"] = "token"
    """What the importance ratio is of."""
    epsilon: Float = 0.2
    """The ratio is clipped below 1 - ε; with gmpo, its log below -ε."""
    epsilon_high: Float | None = None
    """The ratio is clipped above 1 + ε_high (with gmpo, its log above ε_high; with cispo-trl, at ε_high itself);
    None = epsilon."""
    epsilon_c: Float | None = None
    """Dual clip: with a negative advantage the loss stays below -ε_c·A; None = off, else greater than 1."""
    delta: Float | None = None
    """The largest ratio of the arm that is not clipped; None = off. From 1 + ε_high on the same as epsilon_c."""
    cispo_epsilon_low: Float | None = None
    """cispo: weights are at least 1 - ε_low; None = no lower bound."""
    sapo_temperature_pos: Float = 1.0
    """sapo: with a positive advantage, how soon the gradient fades."""
    sapo_temperature_neg: Float = 1.05
    """sapo: the same with an advantage that is not positive."""
    vespo_k_pos: Float = 2.0
    """vespo: k of w^k·exp(-λw), the weight of a sequence of ratio w, with an advantage that is not negative."""
    vespo_lambda_pos: Float = 3.0
    """vespo: λ of the same."""
    vespo_k_neg: Float = 3.0
    """vespo: k with a negative advantage."""
    vespo_lambda_neg: Float = 2.0
    """vespo: λ with a negative advantage."""
    teacher_coef: Float = 1.0
    """distillation: weight of log(teacher / policy), which the advantage of each token is raised by."""
    gkd_beta: Float = 0.5
    """gkd: 0.0 = the forward KL (cover all that the teacher does), 1.0 = the reverse (seek what it finds likely),
    between them the Jensen-Shannon divergence; TRL's beta."""
    loss_agg_mode: Name | Fn = "sequence-mean-token-mean"
    """How the losses of tokens become one: a name, or a function that gives every token its weight."""
    loss_agg_norm: Float | None = None
    """The constant of the modes that divide by one; None = their default."""
    loss_agg_units: Literal["trained", "all"] = "trained"
    """What a loss_agg_mode with a mean over sequences (prompts) divides by: those with a trained token, or all, as TRL
    does."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        super().__post_init__()
        for name in ("epsilon", "epsilon_high", "cispo_epsilon_low"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} must not be negative, got {value!r}")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value <= 0:
                raise ConfigError(f"{name} must be positive, got {value!r}")
        if not 0 <= self.gkd_beta <= 1:
            raise ConfigError(f"gkd_beta must be between 0 (forward KL) and 1 (reverse KL), got {self.gkd_beta!r}")
        if self.delta is not None and self.delta < 1:
            raise ConfigError(
                f"delta must be at least 1, got {self.delta!r}: below 1 no token with a positive advantage would have "
                "a gradient at the start; None = off"
            )
        if self.epsilon_c is not None and self.epsilon_c <= 1:
            raise ConfigError(f"epsilon_c must be greater than 1, got {self.epsilon_c!r}; None turns the dual clip off")
        if self.loss_agg_norm is not None and self.loss_agg_norm <= 0:
            raise ConfigError(f"loss_agg_norm: Invalid 'norm' value: must be positive, got {self.loss_agg_norm!r}")

    @property
    def clip_range(self) -> tuple[float, float]:
        """(ε, ε_high), ε_high with its default filled in."""
        return self.epsilon, self.epsilon if self.epsilon_high is None else self.epsilon_high
