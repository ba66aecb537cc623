"""Masks: factors of the policy loss that are 0 or 1, so that some tokens or sequences are not trained on.

A mask multiplies only the policy's loss and has no gradient. The KL, the entropy bonus and the weights of the other
tokens do not change: a token that is masked here still counts in the denominator of the aggregation.
If the ratio is of a whole sequence (levels sequence and sequence-sum, gmpo), each token's loss has the gradient of all
tokens. A mask of single tokens then only scales the gradient of its sequence; with sequence-token it masks the token.
Dim legend: s tokens of a micro-batch, S of a batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from whet.errors import ConfigError
from whet.ops.corrections import sampler_rejection
from whet.ops.masked import masked_column, segment_mean, to_fp32
from whet.ops.policy_losses.ratios import get_old_logprobs
from whet.ops.shapes import check_shapes
from whet.types import LossInputs

__all__ = [
    "TOKEN_MASKS",
    "binary_kl_mask",
    "entropy_rank",
    "high_entropy_mask",
    "off_policy_mask",
    "sampler_kl_mask",
    "total_variation_mask",
]


def off_policy_mask(x: LossInputs, *, off_policy_mask_threshold: float = 0.5) -> Tensor:
    """1 for sequences to train on, 0 for those with a negative advantage that the policy has moved away from.

    m = 1 where A ≥ 0 or mean_t (log π_sampler − log π) ≤ δ, the mean over the trained tokens of the sequence.
    Args: x: needs advantages and sampler_logprobs; one that is NaN counts as no difference.
        off_policy_mask_threshold: δ, in nats per token.
    Returns: [s], 0 or 1, without gradient; divided by nothing.
    Raises: ConfigError: a negative threshold. DataError: a missing column.
    Source: DeepSeek-V3.2, arXiv:2512.02556, equation 9; agrees with TRL's get_off_policy_mask.

    >>> x = LossInputs(sequence=torch.tensor([0, 1]), mask=torch.tensor([True, True]),
    ...                logprobs=torch.tensor([-3., -3.]), sampler_logprobs=torch.tensor([-1., -1.]),
    ...                advantages=torch.tensor([1., -1.]))
    >>> off_policy_mask(x, off_policy_mask_threshold=0.5)
    tensor([1., 0.])
    """
    if not off_policy_mask_threshold >= 0:
        raise ConfigError(f"off_policy_mask_threshold {off_policy_mask_threshold!r} must be at least 0")
    gap = -_log_ratio(x, x.need("sampler_logprobs"))
    drift = segment_mean(gap, x.mask, x.sequence, x.num_sequences).index_select(0, x.sequence)
    return ((x.need("advantages") >= 0) | (drift <= off_policy_mask_threshold)).to(gap.dtype)


def sampler_kl_mask(x: LossInputs, *, kl_mask_threshold: float | None = None) -> Tensor:
    """1 for tokens on which the policy is still near the sampler, 0 for the others.

    m = 1 where ½(log π − log π_sampler)² ≤ δ.
    Args: x: needs sampler_logprobs; one that is NaN counts as no difference.
        kl_mask_threshold: δ; None = all tokens are kept.
    Returns: [s], 0 or 1, without gradient; divided by nothing.
    Raises: ConfigError: a threshold that is not positive. DataError: no sampler_logprobs.
    Source: TorchRL's GRPOLoss(kl_mask_threshold=...), which leaves such tokens out of the denominator, the entropy
        bonus and the KL as well.

    >>> x = LossInputs(sequence=torch.tensor([0, 0]), mask=torch.tensor([True, True]),
    ...                logprobs=torch.tensor([-1., -3.]), sampler_logprobs=torch.tensor([-1., -1.]))
    >>> sampler_kl_mask(x, kl_mask_threshold=1.0)  # half of 2 squared is over 1
    tensor([1., 0.])
    """
    gap = _log_ratio(x, x.need("sampler_logprobs"))
    if kl_mask_threshold is None:
        return torch.ones_like(gap)
    if not kl_mask_threshold > 0:
        raise ConfigError(f"kl_mask_threshold {kl_mask_threshold!r} must be positive; None keeps all tokens")
    return (0.5 * gap.square() <= kl_mask_threshold).to(gap.dtype)


def total_variation_mask(
    x: LossInputs, *, dppo_threshold: float = 0.2, dppo_threshold_high: float | None = None
) -> Tensor:
    """0 for tokens with a probability that has moved too far in the direction of the advantage, else 1.

    With p = π(a), q = π_old(a): m = 0 where A > 0 and p − q > δ_high, or A ≤ 0 and q − p > δ; |p − q| is the total
    variation of the policies as they tell a from all other tokens.
    Args: x: needs advantages; old_logprobs None = nothing has moved.
        dppo_threshold, dppo_threshold_high: δ and δ_high, in probability; None = δ.
    Returns: [s], 0 or 1, without gradient; divided by nothing.
    Raises: ConfigError: a threshold that is not positive. DataError: no advantages.
    Source: DPPO (Binary-TV), arXiv:2602.04879; the mask of verl's dppo_tv with clip_ratio_low and _high as thresholds.
        There the ratio is held below 20 and is a constant that weighs log π, and π_old is the policy at the start of
        the step: policy_loss_fn=cispo with epsilon_high=19 and this mask is that loss.

    >>> x = LossInputs(sequence=torch.tensor([0, 0]), mask=torch.tensor([True, True]),
    ...                advantages=torch.tensor([1., -1.]), logprobs=torch.tensor([.9, .9]).log(),
    ...                old_logprobs=torch.tensor([.5, .5]).log())
    >>> total_variation_mask(x, dppo_threshold=0.2)  # up by .4: too far for the good one, fine for the bad one
    tensor([0., 1.])
    """
    old, new = _old_and_new(x)
    p, q = new.exp(), old.exp()
    return _pushed_too_far(x, (p - q).abs(), p - q, dppo_threshold, dppo_threshold_high)


def binary_kl_mask(x: LossInputs, *, dppo_threshold: float = 0.2, dppo_threshold_high: float | None = None) -> Tensor:
    """0 for tokens that the policy has moved too far in the direction of the advantage, by a KL, else 1.

    With p = π(a), q = π_old(a): D = q log(q/p) + (1 − q) log((1 − q)/(1 − p)), the KL(π_old‖π) of the policies as they
    tell a from all other tokens. m = 0 where A > 0, p > q and D > δ_high, or A ≤ 0, p < q and D > δ.
    Args: as total_variation_mask, the thresholds in nats.
    Returns: [s], 0 or 1, without gradient; divided by nothing.
    Raises: ConfigError: a threshold that is not positive. DataError: no advantages.
    Source: DPPO (Binary-KL), arXiv:2602.04879; the mask of verl's dppo_kl, which adds 1e-8 to 1 − p and 1 − q; here
        they are held at least 1e-8.

    >>> x = LossInputs(sequence=torch.tensor([0, 0]), mask=torch.tensor([True, True]),
    ...                advantages=torch.tensor([1., -1.]), logprobs=torch.tensor([.9, .9]).log(),
    ...                old_logprobs=torch.tensor([.5, .5]).log())
    >>> binary_kl_mask(x, dppo_threshold=0.2)  # .5 log(.5 / .9) + .5 log(.5 / .1) = .51
    tensor([0., 1.])
    """
    old, new = _old_and_new(x)
    p, q = new.exp(), old.exp()
    rest_p, rest_q = (1 - p).clamp(min=1e-8), (1 - q).clamp(min=1e-8)
    divergence = q * (old - new) + (1 - q) * (rest_q / rest_p).log()
    return _pushed_too_far(x, divergence, p - q, dppo_threshold, dppo_threshold_high)


def entropy_rank(entropy: Tensor, mask: Tensor) -> Tensor:
    """The rank of each token's entropy within a whole optimizer step: 0 = the lowest, 1 = the highest.

    ρ_t = (#{u : H_u ≤ H_t} − 1) / (n − 1), over the n masked-in tokens.
    Args: entropy [S], in nats. mask: Bool [S].
    Returns: float64 [S], 0 where masked out; 1 where n is 1.

    >>> entropy_rank(torch.tensor([3., 1., 2., 9.]), torch.tensor([True, True, True, False]))
    tensor([1.0000, 0.0000, 0.5000, 0.0000], dtype=torch.float64)
    """
    check_shapes("[S]", entropy=entropy, mask=mask)
    kept = entropy[mask]
    ranks = torch.zeros(len(entropy), dtype=torch.float64, device=entropy.device)
    if len(kept) == 1:
        ranks[mask] = 1.0
    elif len(kept):
        order = kept.sort().values
        ranks[mask] = (torch.searchsorted(order, kept, right=True) - 1).double() / (len(kept) - 1)
    return ranks


def high_entropy_mask(x: LossInputs, *, top_entropy_quantile: float = 1.0) -> Tensor:
    """1 for the share of the trained tokens with the highest entropy, 0 for the others.

    m = 1 where ρ_t ≥ 1 − τ, ρ the entropy_rank: where H is at least the (1 − τ) quantile of all entropies.
    Args: x: needs the column entropy_rank, which a learner makes of all tokens of an optimizer step by a pass of the
        policy before it. top_entropy_quantile: τ, the share kept; 1.0 = all.
    Returns: [s], 0 or 1, without gradient; divided by nothing.
    Raises: ConfigError: a share outside 0 to 1. DataError: no entropy_rank.
    Source: "Beyond the 80/20 rule", arXiv:2506.01939 (τ = 0.2). TRL's top_entropy_quantile takes the quantile of each
        micro-batch: without accumulation the two are equal. TRL narrows the entropy bonus to those tokens too.

    >>> x = LossInputs(sequence=torch.tensor([0, 0]), mask=torch.tensor([True, True]), logprobs=torch.zeros(2),
    ...                token_columns={"entropy_rank": torch.tensor([0., 1.])})
    >>> high_entropy_mask(x, top_entropy_quantile=0.2)
    tensor([0., 1.])
    """
    if not 0 <= top_entropy_quantile <= 1:
        raise ConfigError(f"top_entropy_quantile {top_entropy_quantile!r} must be between 0 and 1; 1.0 keeps all")
    rank = x.need("entropy_rank")
    return (x.mask & (rank >= 1 - top_entropy_quantile - 1e-6)).to(to_fp32(x.logprobs).dtype)


TOKEN_MASKS: dict[str, Callable[..., Tensor]] = {
    "dppo-kl": binary_kl_mask,
    "dppo-tv": total_variation_mask,
    "off-policy": off_policy_mask,
    "sampler-kl": sampler_kl_mask,
    "sampler-rejection": sampler_rejection,
    "top-entropy": high_entropy_mask,
}
"""fn(x, **kw) -> 0 or 1 [s], by the names of loss_masks."""


def _log_ratio(x: LossInputs, other: Tensor) -> Tensor:
    """Log π − log of another policy, without gradient; 0 where masked out or not known."""
    known = x.mask & ~other.isnan()
    return masked_column(x.logprobs.detach(), known) - masked_column(other.detach(), known)


def _old_and_new(x: LossInputs) -> tuple[Tensor, Tensor]:
    """Log π_old(a) and log π(a), without gradient; the same where π_old is not known."""
    return get_old_logprobs(x), masked_column(x.logprobs.detach(), x.mask)


def _pushed_too_far(x: LossInputs, divergence: Tensor, change: Tensor, low: float, high: float | None) -> Tensor:
    """0 where a divergence is over its threshold and the change is the one that the advantage pushes for, else 1."""
    high = low if high is None else high
    for name, value in (("dppo_threshold", low), ("dppo_threshold_high", high)):
        if not value > 0:
            raise ConfigError(f"{name} {value!r} must be positive (0.2 is usual)")
    up = x.need("advantages") > 0
    too_far = torch.where(up, (change > 0) & (divergence > high), (change < 0) & (divergence > low))
    return (x.mask & ~too_far).to(divergence.dtype)
