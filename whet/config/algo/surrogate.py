"""The fields of the policy losses and of the loss aggregation."""

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
    """Parameters of the policy losses, named as their keyword arguments, and the aggregation."""

    importance_sampling_level: Literal["token", "sequence", "sequence-token", "sequence-sum"] = "token"
    """Level of the importance ratio: of each token, or of its sequence."""
    epsilon: Float = 0.2
    """ε: the ratio is clipped from below at 1 - ε; gmpo clips its log at -ε."""
    epsilon_high: Float | None = None
    """ε_high: the ratio is clipped from above at 1 + ε_high; gmpo clips its log at ε_high, cispo-trl the ratio at
    ε_high itself. None = epsilon."""
    epsilon_c: Float | None = None
    """ε_c of the dual clip: with a negative advantage A the loss is at most -ε_c·A. Greater than 1; None = off."""
    delta: Float | None = None
    """δ, the largest ratio in the unclipped term; None = off. From 1 + ε_high on it does the same as epsilon_c."""
    cispo_epsilon_low: Float | None = None
    """cispo: ε_low; weights are at least 1 - ε_low. None = no lower bound."""
    sapo_temperature_pos: Float = 1.0
    """sapo: τ for a positive advantage; the gradient fades sooner with a larger τ."""
    sapo_temperature_neg: Float = 1.05
    """sapo: τ for an advantage of 0 or below."""
    vespo_k_pos: Float = 2.0
    """vespo: k of w^k·exp(-λw), the weight of a sequence with the ratio w, for an advantage of 0 or above."""
    vespo_lambda_pos: Float = 3.0
    """vespo: λ for an advantage of 0 or above."""
    vespo_k_neg: Float = 3.0
    """vespo: k for a negative advantage."""
    vespo_lambda_neg: Float = 2.0
    """vespo: λ for a negative advantage."""
    teacher_coef: Float = 1.0
    """distillation: weight of log(teacher / policy), which is added to the advantage of each token."""
    gkd_beta: Float = 0.5
    """gkd: 0.0 = the forward KL (the policy covers all that the teacher does), 1.0 = the reverse KL (it seeks what the
    teacher finds likely), between them the Jensen-Shannon divergence. TRL calls it beta."""
    loss_agg_mode: Name | Fn = "sequence-mean-token-mean"
    """How the losses of tokens become one loss: a name, or a function that computes the weight of every token."""
    loss_agg_norm: Float | None = None
    """The constant of sequence-mean-token-scale and sequence-mean-token-sum-norm; None = their default."""
    loss_agg_units: Literal["trained", "all"] = "trained"
    """The sequences (or prompts) that a mean over them counts: "trained" = those with a trained token, "all" = every
    one, as TRL does."""

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
