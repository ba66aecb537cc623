"""Surrogates with the gradient of the ratio: a soft gate instead of the clip, and only a clip."""

from __future__ import annotations

import torch

from whet.ops.policy_losses.base import LossOutput, name_metrics_by_level, output, zero_without_advantage
from whet.ops.policy_losses.ratios import (
    check_positive,
    detached_advantages,
    log_ratios,
    ratio_metrics,
    resolve_epsilon_high,
    scalar_where,
)
from whet.types import LossInputs

__all__ = ["cispo_torchrl", "sapo"]


@zero_without_advantage()
def sapo(
    x: LossInputs,
    *,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    importance_sampling_level: str = "token",
) -> LossOutput:
    """SAPO: a sigmoid of the ratio. Its gradient fades as the policy moves away and never becomes 0.

    l = −A·σ(τ(r − 1))·4/τ, τ = τ_pos where A > 0, else τ_neg. At r = 1 its gradient is that of −A·r.

    Args:
        x: needs advantages; old_logprobs None = a ratio of exactly 1. Both are constants.
        sapo_temperature_pos, sapo_temperature_neg: τ; the larger, the sooner the gradient fades.
        importance_sampling_level: a name of IMPORTANCE_LEVELS.
    Returns: loss [s], 0 where masked out, divided by nothing; is_ratio, log_ratio_abs, ppo_kl.
    Raises: ConfigError: a temperature that is not positive, an unknown level. DataError: no advantages.
    Source: arXiv:2511.20347; agrees with TRL's loss_type="sapo".

    >>> x = LossInputs(sequence=torch.tensor([0]), mask=torch.tensor([True]), logprobs=torch.tensor([0.]),
    ...                old_logprobs=torch.tensor([0.]), advantages=torch.tensor([3.]))
    >>> sapo(x)[0]  # -3 * 0.5 * 4
    tensor([-6.])
    """
    check_positive(sapo_temperature_pos=sapo_temperature_pos, sapo_temperature_neg=sapo_temperature_neg)
    advantages = detached_advantages(x)
    log_ratio, used = log_ratios(x, importance_sampling_level)
    temperature = scalar_where(advantages > 0, sapo_temperature_pos, sapo_temperature_neg, like=used)
    gate = torch.sigmoid(temperature * (used.exp() - 1)) * 4 / temperature
    return output(-advantages * gate, ratio_metrics(log_ratio, used, x.mask))


@zero_without_advantage("clip_ratio/high", "clip_ratio/low", "clip_ratio/region")
def cispo_torchrl(
    x: LossInputs, *, epsilon: float = 0.2, epsilon_high: float | None = None, importance_sampling_level: str = "token"
) -> LossOutput:
    """Only the clipped ratio, which TorchRL calls CISPO: outside the range no token has a gradient, whatever A is.

    l = −A·clip(r, 1 − ε, 1 + ε_high), with the gradient of r. It is here so that such runs can be repeated; a token
    that has become unlikely can't be pushed back up (A > 0, r < 1 − ε), which cispo and clipped_surrogate do.
    Args: as clipped_surrogate; advantages and old_logprobs are constants.
    Returns: loss [s], 0 where masked out, divided by nothing; clip_ratio/low, /high, /region, where the gradient is
        lost; is_ratio, log_ratio_abs, ppo_kl.
    Raises: ConfigError: a negative bound, an unknown level. DataError: no advantages.
    Source: agrees with TorchRL's CISPOLoss.

    >>> x = LossInputs(sequence=torch.tensor([0]), mask=torch.tensor([True]), logprobs=torch.tensor([-1.]),
    ...                old_logprobs=torch.tensor([0.]), advantages=torch.tensor([2.]))
    >>> cispo_torchrl(x)[0]  # r = 1/e is held at 0.8
    tensor([-1.6000])
    """
    low, high = 1 - epsilon, 1 + resolve_epsilon_high(epsilon, epsilon_high)
    advantages = detached_advantages(x)
    log_ratio, used = log_ratios(x, importance_sampling_level)
    ratio, some = used.exp(), advantages != 0
    clips = {"clip_ratio/high": (ratio > high) & some, "clip_ratio/low": (ratio < low) & some}
    clips["clip_ratio/region"] = clips["clip_ratio/high"] | clips["clip_ratio/low"]
    metrics = {**name_metrics_by_level(clips, importance_sampling_level), **ratio_metrics(log_ratio, used, x.mask)}
    return output(-advantages * ratio.clamp(low, high), metrics)
