"""Corrections for the gap between the sampler's logprobs and the trainer's of the same tokens: TIS, MIS and masks.

A sampler logprob of NaN means unknown. Its token has a weight of 1, as if the two agreed (as in TRL), and is left out
of mismatch_metrics and of the metrics of an update. Engines never report NaN; a user's own rollout may.
Dim legend: s tokens of a micro-batch, S of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from whet.errors import ConfigError, lookup_error
from whet.ops.kl import kl_divergence
from whet.ops.masked import masked_column, masked_mean, segment_mean, segment_sum
from whet.ops.policy_losses.ratios import get_old_logprobs
from whet.ops.shapes import check_shapes
from whet.types import LossInputs

__all__ = [
    "CORRECTIONS",
    "effective_sample_size",
    "mismatch_metrics",
    "sampler_importance",
    "sampler_log_ratio",
    "sampler_rejection",
    "sampling_metrics",
    "weight_metrics",
]

_LEVELS = ("token", "sequence", "geometric")
_MODES = ("truncate", "mask")


def sampler_log_ratio(x: LossInputs, level: str = "token", *, current: bool = False) -> Tensor:
    """Log of the trainer's rollout policy over the sampler, of each token or of its whole sequence.

    δ_t = log π_old − log π_sampler. token: δ_t. sequence: Σ δ_t over the trained tokens of the sequence, the log of the
    ratio of whole completions. geometric: their mean, the log of the geometric mean of the tokens' ratios.

    Args:
        x: needs sampler_logprobs; old_logprobs, or the current policy stands for them.
        level: token, sequence or geometric.
        current: the policy as it is now takes π_old's place.
    Returns: [s], without gradient, in ±20, 0 where masked out.
    Raises: ConfigError: another level. DataError: no sampler_logprobs.

    >>> x = LossInputs(sequence=torch.tensor([0, 0]), mask=torch.tensor([True, True]),
    ...                logprobs=torch.tensor([-1., -1.]), sampler_logprobs=torch.tensor([-2., -4.]))
    >>> [sampler_log_ratio(x, level).tolist() for level in ("token", "sequence", "geometric")]
    [[1.0, 3.0], [4.0, 4.0], [2.0, 2.0]]
    """
    if level not in _LEVELS:
        raise lookup_error("level of the sampler's correction", level, _LEVELS)
    sampler = x.need("sampler_logprobs")
    known = x.mask & ~sampler.isnan()
    policy = x.logprobs.detach() if current else get_old_logprobs(x)
    gap = masked_column(policy, known) - masked_column(sampler.detach(), known)
    if level != "token":
        by_sequence = (
            segment_sum(gap, x.sequence, x.num_sequences)
            if level == "sequence"
            else segment_mean(gap, x.mask, x.sequence, x.num_sequences)
        )
        gap = torch.where(x.mask, by_sequence.index_select(0, x.sequence), 0.0)
    return gap.clamp(-20.0, 20.0)


def sampler_importance(
    x: LossInputs,
    *,
    level: str = "token",
    sampler_is_mode: str = "truncate",
    sampler_is_threshold: float | None = 2.0,
    sampler_is_lower: float | None = None,
    sampler_is_normalize: bool = False,
    sampler_is_current: bool = False,
) -> Tensor:
    """Importance weights of the trainer's rollout policy against the sampler, bounded on both sides.

    w = exp(clip(δ, ±20)), δ of the token, its sequence's sum or its mean: see sampler_log_ratio. truncate: w is held
    in [lower, threshold]. mask: w is 0 outside [lower, threshold], so that such a token is not learned from.
    Normalised: w is then divided by its mean over the whole step: over trained tokens, or over sequences where w is one
    of sequences.

    Args:
        x: needs sampler_logprobs; old_logprobs, or the current policy stands for them.
        level: token, sequence or geometric.
        sampler_is_mode: truncate or mask.
        sampler_is_threshold: the largest weight; None = no bound above.
        sampler_is_lower: the least; None = no bound below.
        sampler_is_normalize: divide by the column sampler_is_mean, which a learner makes of a whole step.
        sampler_is_current: weigh by the policy as it is now, not as it was at the start of the step.
    Returns: [s], without gradient, 0 where masked out; divided by nothing.
    Raises: ConfigError: an unknown level or mode, bounds that are not positive or cross. DataError: a missing column.
    Source: token and truncate: truncated importance sampling, Yao et al. (2025), "Your efficient RL framework secretly
        brings you off-policy RL training"; agrees with Tunix's sampler_is="token". token and mask with 0.5 and 5.0:
        IcePop, arXiv:2510.18855. The names agree with TRL's vllm_importance_sampling_mode: token_truncate, token_mask,
        sequence_truncate, sequence_mask; its default is sequence_mask at 3.0. TRL does not hold δ in ±20, and weighs
        masked-out tokens too. geometric and the normalisation: verl's (rollout_is, rollout_is_batch_normalize). The
        current policy: RL2's tis_coef.

    >>> x = LossInputs(sequence=torch.tensor([0, 0]), mask=torch.tensor([True, True]),
    ...                logprobs=torch.tensor([-1., -1.]), sampler_logprobs=torch.tensor([-1., -3.]))
    >>> sampler_importance(x), sampler_importance(x, sampler_is_mode="mask")  # exp(2) is cut to 2, or to 0
    (tensor([1., 2.]), tensor([1., 0.]))
    """
    if sampler_is_mode not in _MODES:
        raise lookup_error("sampler_is_mode", sampler_is_mode, _MODES)
    _check_band("sampler_is", sampler_is_lower, sampler_is_threshold)
    weights = sampler_log_ratio(x, level, current=sampler_is_current).exp()
    if sampler_is_mode == "mask":
        weights = torch.where(_inside(weights, sampler_is_lower, sampler_is_threshold), weights, 0.0)
    elif sampler_is_lower is not None or sampler_is_threshold is not None:
        weights = weights.clamp(sampler_is_lower, sampler_is_threshold)
    if sampler_is_normalize:
        weights = weights / torch.where(x.mask, x.need("sampler_is_mean"), 1.0)
    return torch.where(x.mask, weights, 0.0)


def sampler_rejection(
    x: LossInputs,
    *,
    rejection_level: str = "geometric",
    rejection_lower: float | None = 0.999,
    rejection_threshold: float | None = 1.001,
) -> Tensor:
    """1 for sequences on which sampler and trainer agree, 0 for those with a ratio outside a band.

    m = 1 where lower ≤ exp(clip(δ, ±20)) ≤ threshold, δ the mean (geometric), the sum (sequence) or the token's own:
    see sampler_log_ratio.

    Args:
        x: needs sampler_logprobs; old_logprobs, or the current policy stands for them.
        rejection_level: geometric, sequence or token (which rejects tokens, not sequences).
        rejection_lower, rejection_threshold: the band; None = no bound on that side.
    Returns: [s], 0 or 1, without gradient, 0 where masked out; divided by nothing.
    Raises: ConfigError: an unknown level, bounds that are not positive or cross. DataError: no sampler_logprobs.
    Source: verl's rejection sampling of rollouts (rollout_rs="geometric", "sequence", "token"), by itself or together
        with weights of sampler_is; verl leaves rejected tokens out of the denominator too, here they stay in it.

    >>> x = LossInputs(sequence=torch.tensor([0, 1]), mask=torch.tensor([True, True]),
    ...                logprobs=torch.tensor([-1., -1.]), sampler_logprobs=torch.tensor([-1., -1.5]))
    >>> sampler_rejection(x)
    tensor([1., 0.])
    """
    _check_band("rejection", rejection_lower, rejection_threshold)
    ratio = sampler_log_ratio(x, rejection_level).exp()
    return (x.mask & _inside(ratio, rejection_lower, rejection_threshold)).to(ratio.dtype)


CORRECTIONS: dict[str, Callable[..., Tensor]] = {
    "geometric": partial(sampler_importance, level="geometric"),
    "sequence": partial(sampler_importance, level="sequence"),
    "token": sampler_importance,
}
"""fn(x, **kw) -> weight [s], by the names of sampler_is."""


def effective_sample_size(weights: Tensor, mask: Tensor) -> Tensor:
    """Returns the share of the tokens that importance weights leave in effect.

    ESS = (Σ w)² / (n Σ w²), over the n masked-in tokens: 1 where all weights are equal, 1/n where one has all weight.
    Args: weights [S], not negative. mask: Bool [S].
    Returns: 0-d, float64; 1 where no token is masked in or all weights are 0.
    Source: Kish (1965). Agrees with TorchRL's GRPOLoss, which gives NaN for an empty mask.

    >>> effective_sample_size(torch.tensor([1., 3., 7.]), torch.tensor([True, True, False]))  # 16 / (2 * 10)
    tensor(0.8000, dtype=torch.float64)
    """
    w = masked_column(weights.detach(), mask).double()
    spread = mask.sum() * w.square().sum()
    return torch.where(spread > 0, w.sum().square() / spread.clamp(min=1e-300), 1.0)


def mismatch_metrics(old_logprobs: Tensor, sampler_logprobs: Tensor, *, mask: Tensor) -> dict[str, float]:
    """Returns how far trainer and sampler are apart on the same tokens.

    Args: old_logprobs, sampler_logprobs [S], in nats. mask: Bool [S], True = sampled and trained.
    Returns: over the mask (0 where it is empty, but ess): sampler_trainer/logp_diff_mean, _max (of |log π_old − log
        π_sampler|), prob_diff_mean, _max, probs_pearson_corr, ess (of π_old/π_sampler).
    Source: the first five are Tunix's.

    >>> found = mismatch_metrics(torch.tensor([-1., -1.]), torch.tensor([-1., -3.]), mask=torch.tensor([True, True]))
    >>> found["sampler_trainer/logp_diff_max"], found["sampler_trainer/logp_diff_mean"]
    (2.0, 1.0)
    """
    check_shapes("[S]", old_logprobs=old_logprobs, sampler_logprobs=sampler_logprobs, mask=mask)
    mask = mask & ~sampler_logprobs.isnan()
    old, sampler = masked_column(old_logprobs.detach(), mask), masked_column(sampler_logprobs.detach(), mask)
    gap, p, q = (old - sampler).abs(), old.exp(), sampler.exp()
    metrics = {
        "sampler_trainer/ess": effective_sample_size((old - sampler).clamp(-20.0, 20.0).exp(), mask),
        "sampler_trainer/logp_diff_max": _max(gap),
        "sampler_trainer/logp_diff_mean": masked_mean(gap, mask),
        "sampler_trainer/prob_diff_max": _max((p - q).abs()),
        "sampler_trainer/prob_diff_mean": masked_mean((p - q).abs(), mask),
        "sampler_trainer/probs_pearson_corr": _pearson(p, q, mask),
    }
    return {name: float(value) for name, value in metrics.items()}


def sampling_metrics(x: LossInputs, *, recorded: bool = True) -> dict[str, Tensor]:
    """Returns how far the current policy is from the sampler at each token, for the metrics of an update.

    With δ = log π − log π_sampler: sampling/sampling_logp_difference |δ|; sampling/kl_approx −δ, whose mean estimates
    KL(π_sampler‖π); sampling/kl_to_inference exp(−δ) + δ − 1, k3 of KL(π‖π_sampler); sampling/weight exp(δ) and its
    square, which give the effective sample size.

    Args:
        x: needs sampler_logprobs; at one that is NaN there is no difference, which a mean over tokens should leave out.
        recorded: False = the engine reports no logprobs: the policy at the start of the step stands for the sampler,
            and the first metric, which would say nothing, is left out.
    Returns: [s] each, without gradient, 0 where masked out; exponents clamped to ±20.
    Source: the first is TRL's; the others are TorchRL's kl_approx, kl_to_inference and ESS over only the trained
        tokens: TorchRL divides the first two by all positions, prompt and padding included.

    >>> x = LossInputs(sequence=torch.tensor([0]), mask=torch.tensor([True]), logprobs=torch.tensor([-1.]),
    ...                sampler_logprobs=torch.tensor([-2.]))
    >>> found = sampling_metrics(x)
    >>> found["sampling/kl_approx"], found["sampling/kl_to_inference"]
    (tensor([-1.]), tensor([0.3679]))
    """
    sampler = x.need("sampler_logprobs").detach() if recorded else get_old_logprobs(x)
    known = x.mask & ~sampler.isnan()
    gap = masked_column(x.logprobs.detach(), known) - masked_column(sampler, known)
    weight = torch.where(x.mask, gap.clamp(-20.0, 20.0).exp(), 0.0)
    metrics = {
        "sampling/kl_approx": -gap,
        "sampling/kl_to_inference": kl_divergence(gap, torch.zeros_like(gap), mode="k3"),
        "sampling/weight": weight,
        "sampling/weight_squared": weight.square(),
    }
    return {**metrics, "sampling/sampling_logp_difference": gap.abs()} if recorded else metrics


def weight_metrics(
    weights: Tensor, log_ratio: Tensor, *, mask: Tensor, threshold: float | None, lower: float | None
) -> dict[str, float]:
    """Returns the metrics of a correction's weights.

    Args: weights [S]: of sampler_importance. log_ratio [S]: before its bounds. mask: Bool [S]. threshold, lower: the
        bounds, None = none.
    Returns: over the mask (0 where it is empty, but ess): sampler_is/weight_mean, weight_min, weight_max, ess,
        frac_clipped_at_threshold, frac_clipped_at_lower (a weight that equals a bound is not clipped).

    >>> ratio, mask = torch.tensor([0., 2.]), torch.tensor([True, True])
    >>> weight_metrics(ratio.exp().clamp(max=2), ratio, mask=mask, threshold=2.0,
    ...                lower=None)["sampler_is/frac_clipped_at_threshold"]
    0.5
    """
    check_shapes("[S]", weights=weights, log_ratio=log_ratio, mask=mask)
    ratio = log_ratio.exp()
    above = torch.zeros_like(ratio) if threshold is None else (ratio > threshold).float()
    below = torch.zeros_like(ratio) if lower is None else (ratio < lower).float()
    metrics = {
        "sampler_is/ess": effective_sample_size(weights, mask),
        "sampler_is/frac_clipped_at_lower": masked_mean(below, mask),
        "sampler_is/frac_clipped_at_threshold": masked_mean(above, mask),
        "sampler_is/weight_max": _max(weights),
        "sampler_is/weight_mean": masked_mean(weights, mask),
        "sampler_is/weight_min": -_max(-weights[mask]),
    }
    return {name: float(value) for name, value in metrics.items()}


def _check_band(what: str, lower: float | None, upper: float | None) -> None:
    """Raises ConfigError for bounds of a ratio that are not positive or cross."""
    if upper is not None and not upper > 0:
        raise ConfigError(f"{what}_threshold {upper!r} must be positive (2.0 is usual); None = no bound above")
    if lower is not None and not lower > 0:
        raise ConfigError(f"{what}_lower {lower!r} must be positive (0.5 is usual); None = no bound below")
    if lower is not None and upper is not None and not lower < upper:
        raise ConfigError(f"{what}_lower {lower!r} must be below {what}_threshold {upper!r}")


def _inside(ratio: Tensor, lower: float | None, upper: float | None) -> Tensor:
    """Bool: within the band, its bounds included."""
    inside = torch.ones_like(ratio, dtype=torch.bool)
    inside = inside if lower is None else inside & (ratio >= lower)
    return inside if upper is None else inside & (ratio <= upper)


def _max(x: Tensor) -> Tensor:
    """Returns the largest, of numbers that are 0 where masked out; 0 of none."""
    return x.amax() if len(x) else x.new_zeros(())


def _pearson(p: Tensor, q: Tensor, mask: Tensor) -> Tensor:
    """Pearson's correlation over the mask, in float64; 0 where one of the two does not vary."""
    p, q = p.double(), q.double()
    dp = torch.where(mask, p - masked_mean(p, mask), 0.0)
    dq = torch.where(mask, q - masked_mean(q, mask), 0.0)
    scale = (dp.square().sum() * dq.square().sum()).sqrt()
    return torch.where(scale > 0, (dp * dq).sum() / scale.clamp(min=1e-300), 0.0)
