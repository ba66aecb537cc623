"""The importance ratio π/π_old of a token or of its sequence, which most policy losses use.

Dim legend: s tokens of a micro-batch, whole sequences laid end to end.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from whet.errors import ConfigError, lookup_error
from whet.ops.masked import masked_column, segment_mean, segment_sum, to_fp32
from whet.ops.shapes import check_shapes
from whet.types import LossInputs

__all__ = ["IMPORTANCE_LEVELS"]

_BOUND = 20.0
"""Log-ratios are clamped to ±20: exp(88.8) is infinite in fp32. Beyond it a ratio is constant, its gradient 0."""


def _token(log_ratio: Tensor, x: LossInputs) -> Tensor:
    """exp(ρ_t), ρ_t = log π − log π_old of the token, clamped to ±20."""
    return log_ratio.clamp(-_BOUND, _BOUND)


def _sequence(log_ratio: Tensor, x: LossInputs) -> Tensor:
    """exp(mean_t ρ_t) over the trained tokens of the sequence, with its gradient through the mean."""
    means = segment_mean(_token(log_ratio, x), x.mask, x.sequence, x.num_sequences)
    return means.index_select(0, x.sequence)


def _sequence_token(log_ratio: Tensor, x: LossInputs) -> Tensor:
    """exp(mean_t ρ_t) in value, at most e¹⁰; the gradient is that of ρ_t, also where the log-ratio is clamped."""
    finite = log_ratio.clamp(-1e30, 1e30)  # so that the difference below is 0 and not NaN
    return (finite - finite.detach() + _sequence(log_ratio, x).detach()).clamp(max=10.0)


def _sequence_sum(log_ratio: Tensor, x: LossInputs) -> Tensor:
    """exp(Σ_t ρ_t) over the trained tokens of the sequence, the sum clamped to ±20."""
    sums = segment_sum(_token(log_ratio, x), x.sequence, x.num_sequences)
    return sums.clamp(-_BOUND, _BOUND).index_select(0, x.sequence)


IMPORTANCE_LEVELS: dict[str, Callable[[Tensor, LossInputs], Tensor]] = {
    "sequence": _sequence,
    "sequence-sum": _sequence_sum,
    "sequence-token": _sequence_token,
    "token": _token,
}
"""fn(log π − log π_old [s], 0 where masked out, x) -> the log of the importance ratio [s].

By the names of importance_sampling_level.

With d_t = log π(a_t) − log π_old(a_t) clamped to ±20, n the trained tokens of the sequence:

    token            d_t                                     PPO, GRPO
    sequence         (1/n) Σ d_t                             GSPO arXiv:2507.18071 as TRL has it: its gradient is shared
                                                             by the tokens of the sequence
    sequence-token   the same value, at most 10; its         GSPO-token, same paper; Tunix's gspo-token
                     gradient is that of log π(a_t)
    sequence-sum     Σ d_t, clamped to ±20                      the sequence's own probability: RLOO arXiv:2402.14740

Where a sequence has one advantage, its tokens one weight, and no factor (correction, mask) differs within it, sequence
and sequence-token have the same gradient. Tunix holds d_t and sequence-token as here; TRL holds nothing.
"""


def get_old_logprobs(x: LossInputs) -> Tensor:
    """Log π_old, a constant, [s]; that of the current policy where it is NaN or missing; 0 where masked out."""
    current = masked_column(x.logprobs, x.mask).detach()
    if x.old_logprobs is None:
        return current
    check_shapes("[s]", logprobs=x.logprobs, old_logprobs=x.old_logprobs)
    return torch.where(x.mask & ~x.old_logprobs.isnan(), to_fp32(x.old_logprobs.detach()), current)


def log_ratios(x: LossInputs, level: str) -> tuple[Tensor, Tensor]:
    """Log π − log π_old before any clamp, and the log of the importance ratio: [s] and [s], 0 where masked out.

    Args: x: old_logprobs None, or NaN at a token = logprobs.detach(), a ratio of exactly 1. level: a name of
            IMPORTANCE_LEVELS.
    Raises: ConfigError: an unknown level.
    """
    if level not in IMPORTANCE_LEVELS:
        raise lookup_error("importance level", level, IMPORTANCE_LEVELS)
    log_ratio = masked_column(x.logprobs, x.mask) - get_old_logprobs(x)
    return log_ratio, torch.where(x.mask, IMPORTANCE_LEVELS[level](log_ratio, x), 0.0)


def ratio_metrics(log_ratio: Tensor, used: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Tunix's metrics of the ratio: ppo_kl (−log_ratio, before any clamp), is_ratio and log_ratio_abs as used."""
    return {"is_ratio": torch.where(mask, used.exp(), 0.0), "log_ratio_abs": used.abs(), "ppo_kl": -log_ratio}


def detached_advantages(x: LossInputs) -> Tensor:
    """The advantages, a constant, 0 where masked out: [s]. Raises DataError: the batch has none."""
    return masked_column(x.need("advantages"), x.mask).detach()


def scalar_where(first: Tensor, pos: float, neg: float, *, like: Tensor) -> Tensor:
    """The number `pos` where `first` is True, else `neg`: [s], in the dtype of `like`."""
    return torch.where(first, torch.full_like(like, pos), torch.full_like(like, neg))


def resolve_epsilon_high(epsilon: float, epsilon_high: float | None) -> float:
    """ε_high, which is ε where it is not set. Raises ConfigError: one of them is negative."""
    check_at_least_0(epsilon=epsilon, epsilon_high=epsilon_high)
    return epsilon if epsilon_high is None else epsilon_high


def check_at_least_0(**values: float | None) -> None:
    """Raises ConfigError for a number below 0; None is allowed."""
    for name, value in values.items():
        if value is not None and not value >= 0:
            raise ConfigError(f"{name} {value!r} must be at least 0")


def check_positive(**values: float | None) -> None:
    """Raises ConfigError for a number that is not above 0; None is allowed."""
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{name} {value!r} must be positive")
