"""Corrections for the gap between the sampler's logprobs and the trainer's of the same tokens. Dim legend: S tokens.

Left out on purpose, so far: masked and sequence-level importance sampling.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whet.errors import ConfigError
from whet.ops.masked import masked_column, masked_mean

__all__ = ["mismatch_metrics", "truncated_weights"]


def truncated_weights(old_logprobs: Tensor, sampler_logprobs: Tensor, *, mask: Tensor, threshold: float) -> Tensor:
    """Truncated importance weights of the trainer's policy against the sampler's.

    w = min(exp(clip(log π_old − log π_sampler, ±20)), threshold), π_old the rollout policy in the trainer's numerics.
    Args: old_logprobs, sampler_logprobs [S], in nats. mask: Bool [S], True = sampled and trained. threshold: the
        largest weight, positive.
    Returns: [S], detached, fp32 or wider, 0 where masked out.
    Raises: ConfigError: threshold not positive.
    Source: truncated importance sampling, Yao et al. (2025), "Your efficient RL framework secretly brings you
        off-policy RL training"; agrees with Tunix's sampler_is="token".

    >>> truncated_weights(torch.tensor([-1., -1.]), torch.tensor([-1., -3.]),
    ...                   mask=torch.tensor([True, True]), threshold=2.0)  # exp(2) is cut to 2
    tensor([1., 2.])
    """
    if not threshold > 0:
        raise ConfigError(f"sampler_is_threshold {threshold!r} must be positive (2.0 is usual)")
    gap = masked_column(old_logprobs.detach(), mask) - masked_column(sampler_logprobs.detach(), mask)
    return torch.where(mask, gap.clamp(-20.0, 20.0).exp().clamp(max=threshold), 0.0)


def mismatch_metrics(
    old_logprobs: Tensor, sampler_logprobs: Tensor, *, mask: Tensor, threshold: float
) -> dict[str, float]:
    """How far trainer and sampler are apart on the same tokens, and what the truncated weights make of it.

    Args: as in `truncated_weights`.
    Returns: over the mask (0 where it is empty): sampler_trainer/logp_diff_mean, _max (of |log π_old − log π_sampler|),
        prob_diff_mean, _max, probs_pearson_corr, sampler_is/weight_mean, weight_min, weight_max,
        frac_clipped_at_threshold.

    >>> found = mismatch_metrics(torch.tensor([-1., -1.]), torch.tensor([-1., -3.]),
    ...                          mask=torch.tensor([True, True]), threshold=2.0)
    >>> found["sampler_is/frac_clipped_at_threshold"], found["sampler_trainer/logp_diff_max"]
    (0.5, 2.0)
    """
    weights = truncated_weights(old_logprobs, sampler_logprobs, mask=mask, threshold=threshold)
    old, sampler = masked_column(old_logprobs.detach(), mask), masked_column(sampler_logprobs.detach(), mask)
    gap, p, q = (old - sampler).abs(), old.exp(), sampler.exp()
    clipped = (old - sampler).clamp(-20.0, 20.0).exp() > threshold
    metrics = {
        "sampler_is/frac_clipped_at_threshold": masked_mean(clipped.float(), mask),
        "sampler_is/weight_max": _max(weights),
        "sampler_is/weight_mean": masked_mean(weights, mask),
        "sampler_is/weight_min": -_max(-weights[mask]),
        "sampler_trainer/logp_diff_max": _max(gap),
        "sampler_trainer/logp_diff_mean": masked_mean(gap, mask),
        "sampler_trainer/prob_diff_max": _max((p - q).abs()),
        "sampler_trainer/prob_diff_mean": masked_mean((p - q).abs(), mask),
        "sampler_trainer/probs_pearson_corr": _pearson(p, q, mask),
    }
    return {name: float(value) for name, value in metrics.items()}


def _max(x: Tensor) -> Tensor:
    """The largest, of numbers that are 0 where masked out; 0 of none."""
    return x.amax() if len(x) else x.new_zeros(())


def _pearson(p: Tensor, q: Tensor, mask: Tensor) -> Tensor:
    """Pearson's correlation over the mask, in float64; 0 where one of the two does not vary."""
    p, q = p.double(), q.double()
    dp = torch.where(mask, p - masked_mean(p, mask), 0.0)
    dq = torch.where(mask, q - masked_mean(q, mask), 0.0)
    scale = (dp.square().sum() * dq.square().sum()).sqrt()
    return torch.where(scale > 0, (dp * dq).sum() / scale.clamp(min=1e-300), 0.0)
