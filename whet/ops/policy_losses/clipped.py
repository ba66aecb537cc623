"""Surrogates that clip the importance ratio, so that the gradient ends where the policy has moved far enough."""

from __future__ import annotations

import torch
from torch import Tensor

from whet.errors import ConfigError
from whet.ops.masked import segment_mean
from whet.ops.policy_losses.base import LossOutput, name_metrics_by_level, output, zero_without_advantage
from whet.ops.policy_losses.ratios import detached_advantages, log_ratios, ratio_metrics, resolve_epsilon_high
from whet.types import LossInputs

__all__ = ["clipped_surrogate", "gmpo"]

CLIP_METRICS = ("clip_ratio/high", "clip_ratio/low", "clip_ratio/region")


@zero_without_advantage(*CLIP_METRICS, "pg_clipfrac", "pg_clipfrac_lower")
def clipped_surrogate(
    x: LossInputs,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    epsilon_c: float | None = None,
    delta: float | None = None,
    importance_sampling_level: str = "token",
) -> LossOutput:
    """The clipped surrogate of PPO and GRPO, with dual clip, two-sided clip and a ratio of sequences.

    l = max(−A·min(r, δ), −A·clip(r, 1 − ε, 1 + ε_high)), A the advantage, r the importance ratio at a level of
    IMPORTANCE_LEVELS, which also says where log-ratios are clamped. Dual clip: where A < 0, max(...) is at most −ε_c·A.
    With δ at least 1 + ε_high it is the same as ε_c = δ. Clipping log r to [log1p(−ε), log1p(ε_high)] is the same too.

    Args:
        x: needs logprobs, mask, sequence and advantages; old_logprobs None = logprobs.detach(), a ratio of exactly 1.
            Advantages and old_logprobs are constants.
        epsilon, epsilon_high: clip range, epsilon_high None = epsilon.
        epsilon_c: dual clip, above 1; None = off.
        delta: δ, the largest ratio of the arm that is not clipped, at least 1; None = off.
        importance_sampling_level: a name of IMPORTANCE_LEVELS.
    Returns: loss [s], 0 where masked out, divided by nothing; and per token: pg_loss, pg_loss/unclipped and /clipped
        (both arms), pg_clipfrac, ppo_kl (−log π + log π_old, before any clip), is_ratio, log_ratio_abs (both as used),
        clip_ratio/low, /high and /region (sequence_clip_ratio/* where r is a sequence's); pg_clipfrac_lower with
        epsilon_c.
    Raises: ConfigError: epsilon_c not above 1, delta below 1, negative epsilon, unknown level. DataError: a missing
        column.
    Source: PPO arXiv:1707.06347; GRPO arXiv:2402.03300; dual clip arXiv:1912.09729; clip-higher, DAPO arXiv:2503.14476;
        two-sided clip arXiv:2505.07291. Agrees with Tunix's grpo_loss_fn, TRL's grpo, bnpo, dr_grpo, dapo and luspo,
        which differ only in aggregation, and TorchRL's GRPOLoss, which clips log r; clip_ratio/* are TRL's.

    >>> x = LossInputs(sequence=torch.tensor([0]), mask=torch.tensor([True]), logprobs=torch.tensor([0.]),
    ...                old_logprobs=torch.tensor([-1.]), advantages=torch.tensor([2.]))
    >>> clipped_surrogate(x)[0]  # r = e is clipped to 1.2: -2 * 1.2
    tensor([-2.4000])
    """
    low, high = 1 - epsilon, 1 + resolve_epsilon_high(epsilon, epsilon_high)
    if delta is not None and not delta >= 1:
        raise ConfigError(f"delta {delta!r} must be at least 1: below, a ratio of 1 has no gradient where A > 0")
    if epsilon_c is not None and not epsilon_c > 1:
        raise ConfigError(f"epsilon_c {epsilon_c!r} must be above 1 (3.0 is usual); None = no dual clip")
    advantages = detached_advantages(x)
    log_ratio, used = log_ratios(x, importance_sampling_level)
    ratio = used.exp()
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    unclipped, clipped = -advantages * bounded, -advantages * ratio.clamp(low, high)
    loss = torch.maximum(unclipped, clipped)
    metrics = {
        **name_metrics_by_level(_clip_metrics(bounded, advantages, low, high), importance_sampling_level),
        **ratio_metrics(log_ratio, used, x.mask),
        "pg_clipfrac": clipped > unclipped,
        "pg_loss/clipped": clipped,
        "pg_loss/unclipped": unclipped,
    }
    if epsilon_c is not None:
        ceiling, bad = -epsilon_c * advantages, advantages < 0
        metrics["pg_clipfrac_lower"] = bad & (loss > ceiling)
        loss = torch.where(bad, torch.minimum(ceiling, loss), loss)
    return output(loss, metrics)


@zero_without_advantage(*CLIP_METRICS)
def gmpo(x: LossInputs, *, epsilon: float = 0.2, epsilon_high: float | None = None) -> LossOutput:
    """GMPO: the geometric mean of a sequence's token ratios, each clipped in log space on the side that A points to.

    l = −A·exp((1/n) Σ_t c_t), c_t = min(d_t, ε_high) where A > 0, else max(d_t, −ε); d_t = log π − log π_old clamped to
    ±20, n the trained tokens of the sequence. All tokens of the sequence have this loss; d_t has its gradient through
    the mean, none where clipped. The aggregation that the paper means is a mean over sequences of means over tokens.

    Args: x: needs advantages; they and old_logprobs are constants. epsilon, epsilon_high: the range, in log space: the
            paper's is 0.4, e^±0.4.
    Returns: loss [s], 0 where masked out, divided by nothing; clip_ratio/low, /high, /region of tokens; ppo_kl;
        is_ratio and log_ratio_abs of the sequence.
    Raises: ConfigError: negative epsilon. DataError: no advantages.
    Source: arXiv:2507.20673; agrees with TRL's experimental GMPOTrainer, whose default is ε = 0.4.

    >>> x = LossInputs(sequence=torch.tensor([0, 0]), mask=torch.tensor([True, True]), advantages=torch.ones(2),
    ...                logprobs=torch.tensor([.9, -.4]), old_logprobs=torch.zeros(2))
    >>> gmpo(x, epsilon=0.4)[0]  # -exp((0.4 - 0.4) / 2)
    tensor([-1., -1.])
    """
    high = resolve_epsilon_high(epsilon, epsilon_high)
    advantages = detached_advantages(x)
    log_ratio, clamped = log_ratios(x, "token")
    clipped = torch.where(advantages > 0, clamped.clamp(max=high), clamped.clamp(min=-epsilon))
    used = segment_mean(clipped, x.mask, x.sequence, x.num_sequences).index_select(0, x.sequence)
    clips = _clip_metrics(clamped, advantages, -epsilon, high)
    used = torch.where(x.mask, used, 0.0)
    return output(-advantages * used.exp(), {**clips, **ratio_metrics(log_ratio, used, x.mask)})


def _clip_metrics(ratio: Tensor, advantages: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """Where the clip takes the gradient away, Bool [s]: clip_ratio/*."""
    too_low, too_high = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
    return {"clip_ratio/high": too_high, "clip_ratio/low": too_low, "clip_ratio/region": too_low | too_high}
