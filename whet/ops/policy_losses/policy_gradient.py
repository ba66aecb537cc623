"""Policy gradients with a constant weight, −w·A·log π. Where the weight is clipped, the token keeps a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from whet.ops.masked import masked_column, segment_sum
from whet.ops.policy_losses.base import LossOutput, name_metrics_by_level, output, zero_without_advantage
from whet.ops.policy_losses.ratios import (
    check_at_least_0,
    check_positive,
    detached_advantages,
    log_ratios,
    ratio_metrics,
    resolve_epsilon_high,
    scalar_where,
)
from whet.types import LossInputs

__all__ = ["cispo", "cispo_trl", "nll", "reinforce", "vespo"]

_SMALLEST = math.log(1e-8)


def nll(x: LossInputs) -> LossOutput:
    """Negative log-likelihood, the loss of supervised training.

    l = −log π(a).
    Args: x: needs logprobs and mask.
    Returns: loss [s], 0 where masked out, divided by nothing, and the metric nll.

    >>> nll(LossInputs(sequence=torch.tensor([0]), mask=torch.tensor([True]), logprobs=torch.tensor([-1.5])))[0]
    tensor([1.5000])
    """
    loss = -masked_column(x.logprobs, x.mask)
    return loss, {"nll": loss.detach()}


@zero_without_advantage()
def reinforce(x: LossInputs) -> LossOutput:
    """The plain policy gradient: no ratio, no clip.

    l = −A·log π(a). Off policy (several updates of a rollout, stale tokens) only the factors correct it.
    Args: x: needs advantages, which are constants.
    Returns: loss [s], 0 where masked out, divided by nothing.
    Raises: DataError: no advantages.
    Source: Williams (1992); RLOO's argument for it in post-training arXiv:2402.14740.

    >>> x = LossInputs(sequence=torch.tensor([0]), mask=torch.tensor([True]), logprobs=torch.tensor([-1.5]),
    ...                advantages=torch.tensor([2.]))
    >>> reinforce(x)[0]
    tensor([3.])
    """
    return output(-detached_advantages(x) * masked_column(x.logprobs, x.mask), {})


@zero_without_advantage("cispo_clip_ratio")
def cispo(
    x: LossInputs,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    cispo_epsilon_low: float | None = None,
    importance_sampling_level: str = "token",
) -> LossOutput:
    """CISPO: the weight of the policy gradient is the importance ratio, clipped and without gradient.

    l = −sg(clip(r, 1 − ε_low, 1 + ε_high))·A·log π, r at a level of IMPORTANCE_LEVELS, sg without gradient.

    Args:
        x: needs advantages; old_logprobs None = a ratio of exactly 1. Both are constants.
        epsilon, epsilon_high: the cap is 1 + ε_high; epsilon_high None = epsilon.
        cispo_epsilon_low: ε_low; None = no lower bound, as in the paper's own runs.
        importance_sampling_level: a name of IMPORTANCE_LEVELS.
    Returns: loss [s], 0 where masked out, divided by nothing; cispo_clip_ratio (r above the cap and A > 0, as TRL;
        sequence_cispo_clip_ratio where r is a sequence's); is_ratio (before the cap), log_ratio_abs, ppo_kl.
    Raises: ConfigError: a negative bound, an unknown level. DataError: no advantages.
    Source: MiniMax-M1, arXiv:2506.13585, equations 4 and 5. TRL's cispo has its cap at ε_high itself: cispo_trl.
        TorchRL's CISPOLoss is another loss, with a gradient through the clipped ratio: clipped_ratio.

    >>> x = LossInputs(sequence=torch.tensor([0]), mask=torch.tensor([True]), logprobs=torch.tensor([-1.]),
    ...                old_logprobs=torch.tensor([-2.]), advantages=torch.tensor([2.]))
    >>> cispo(x)[0]  # r = e is cut to 1.2: -1.2 * 2 * -1
    tensor([2.4000])
    """
    cap = 1 + resolve_epsilon_high(epsilon, epsilon_high)
    least = None if cispo_epsilon_low is None else 1 - cispo_epsilon_low
    check_at_least_0(cispo_epsilon_low=cispo_epsilon_low)
    return _capped(x, least, cap, importance_sampling_level)


@zero_without_advantage("cispo_clip_ratio")
def cispo_trl(
    x: LossInputs, *, epsilon: float = 0.2, epsilon_high: float | None = None, importance_sampling_level: str = "token"
) -> LossOutput:
    """CISPO as TRL computes it: the cap on the ratio is ε_high itself and not 1 + ε_high.

    l = −sg(min(r, ε_high))·A·log π. With the ε of a clip, 0.2, every weight near the old policy is 0.2, and so the step
    is a fifth of what it would be: take cispo, or an ε_high above 1 (5.0 is TRL's example).
    Args: as cispo, advantages and old_logprobs constants; epsilon_high None = epsilon, which has no other use.
    Returns: as cispo: loss [s], 0 where masked out, divided by nothing.
    Raises: as cispo.
    Source: agrees with TRL's loss_type="cispo"; cispo with epsilon_high one less is the same.

    >>> x = LossInputs(sequence=torch.tensor([0]), mask=torch.tensor([True]), logprobs=torch.tensor([-1.]),
    ...                old_logprobs=torch.tensor([-1.]), advantages=torch.tensor([2.]))
    >>> cispo_trl(x)[0]  # r = 1 is cut to 0.2
    tensor([0.4000])
    """
    return _capped(x, None, resolve_epsilon_high(epsilon, epsilon_high), importance_sampling_level)


def _capped(x: LossInputs, least: float | None, cap: float, level: str) -> LossOutput:
    """−sg(clip(r, least, cap))·A·log π, and CISPO's metrics."""
    advantages = detached_advantages(x)
    log_ratio, used = log_ratios(x, level)
    ratio = used.exp().detach()
    clips = name_metrics_by_level({"cispo_clip_ratio": (ratio > cap) & (advantages > 0)}, level)
    loss = -ratio.clamp(least, cap) * advantages * masked_column(x.logprobs, x.mask)
    return output(loss, {**clips, **ratio_metrics(log_ratio, used, x.mask)})


@zero_without_advantage()
def vespo(
    x: LossInputs,
    *,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    correction: Callable[[LossInputs], Tensor] | None = None,
) -> LossOutput:
    """VESPO: a smooth weight of the whole sequence's ratio, a gamma density with φ(1) = 1, in place of a clip.

    l = −sg(φ(w))·A·log π, φ(w) = e^λ·w^k·e^(−λw), w = Π_t r_t·ρ_t over the trained tokens of the sequence, ρ the
    correction for the sampler, which is in the weight and not a factor beside it; k and λ by the sign of A. In log
    space: each log r in ±20, each log ρ in [ln 1e-8, 20], log w in [ln 1e-8, 20].

    Args:
        x: needs advantages; old_logprobs None = r of exactly 1. Both are constants.
        vespo_k_pos, vespo_lambda_pos: k and λ where A ≥ 0.
        vespo_k_neg, vespo_lambda_neg: k and λ where A < 0.
        correction: gives ρ [s], of tokens; None = 1. The configuration's sampler_is is given here, "token" or your own.
    Returns: loss [s], 0 where masked out, divided by nothing; vespo/phi_seq_mean, φ, whose mean over sequences TRL
        reports; is_ratio (Π r) and log_ratio_abs of the sequence, ppo_kl.
    Raises: ConfigError: a k or λ that is not positive. DataError: no advantages.
    Source: arXiv:2602.10693; agrees with TRL's loss_type="vespo", which bounds λ below by 1e-4.

    >>> x = LossInputs(sequence=torch.tensor([0, 0]), mask=torch.tensor([True, True]), advantages=torch.ones(2),
    ...                logprobs=torch.tensor([-1., -1.]), old_logprobs=torch.tensor([-1.5, -1.]))
    >>> vespo(x)[1]["vespo/phi_seq_mean"]  # w = e^0.5: exp(3 + 2 * 0.5 - 3 * 1.6487)
    tensor([0.3882, 0.3882])
    """
    check_positive(
        vespo_k_pos=vespo_k_pos,
        vespo_lambda_pos=vespo_lambda_pos,
        vespo_k_neg=vespo_k_neg,
        vespo_lambda_neg=vespo_lambda_neg,
    )
    advantages = detached_advantages(x)
    log_ratio, clamped = log_ratios(x, "token")
    of_tokens = clamped.detach() if correction is None else clamped.detach() + _log_weight(correction(x), x.mask)
    log_w = segment_sum(of_tokens, x.sequence, x.num_sequences).clamp(_SMALLEST, 20.0).index_select(0, x.sequence)
    k = scalar_where(advantages >= 0, vespo_k_pos, vespo_k_neg, like=log_w)
    rate = scalar_where(advantages >= 0, vespo_lambda_pos, vespo_lambda_neg, like=log_w)
    phi = torch.where(x.mask, (rate + k * log_w - rate * log_w.exp()).exp(), 0.0)
    used = log_ratios(x, "sequence-sum")[1]
    metrics = {"vespo/phi_seq_mean": phi, **ratio_metrics(log_ratio, used, x.mask)}
    return output(-phi * advantages * masked_column(x.logprobs, x.mask), metrics)


def _log_weight(weight: Tensor, mask: Tensor) -> Tensor:
    """The log of a correction, clamped to [ln 1e-8, 20], 0 where masked out: [s], without gradient."""
    return torch.where(mask, weight.detach().log().clamp(_SMALLEST, 20.0), 0.0)
