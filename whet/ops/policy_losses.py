"""Policy losses: per token, never a mean; the weights of whet.ops.weighting turn them into one number.

Dim legend: s tokens of a micro-batch, whole sequences laid end to end. Every loss is fn(x: LossInputs, **kw) ->
(loss [s], {metric: [s]}); metrics are detached, per token, and the caller takes their mean over the mask. Masked-out
tokens have loss 0 and metrics 0 whatever their logprobs are.
Corrections, masks, the KL and the entropy bonus are pieces of their own: see objective.py.
Left out on purpose, so far: CISPO, SAPO; each new loss is one function, here or anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from whet.errors import ConfigError, lookup_error
from whet.ops.masked import masked_column, segment_mean
from whet.types import LossInputs

__all__ = ["POLICY_LOSSES", "clipped_surrogate", "metrics_without_advantage", "nll", "zero_without_advantage"]

LossOutput = tuple[Tensor, dict[str, Tensor]]
"""(loss [s], {metric: [s]})."""
LossFn = TypeVar("LossFn", bound=Callable[..., Any])


def zero_without_advantage(*metrics: str) -> Callable[[LossFn], LossFn]:
    """Declares of a policy loss that where the advantage is 0 it has no gradient, and that these metrics are 0 there.

    A learner need not run sequences without an advantage then: it counts their tokens in the means of these metrics.
    Args: metrics: names, as the loss returns them.
    Returns: what marks the loss and gives it back.

    >>> @zero_without_advantage("far")
    ... def reinforce(x):
    ...     return -x.need("advantages") * x.logprobs, {"far": (x.logprobs < -5) & (x.advantages > 0)}
    >>> metrics_without_advantage(reinforce), metrics_without_advantage(nll)
    (('far',), None)
    """

    def declare(loss: LossFn) -> LossFn:
        loss.zero_without_advantage = metrics  # pyright: ignore[reportFunctionMemberAccess]
        return loss

    return declare


def metrics_without_advantage(loss: Callable[..., Any]) -> tuple[str, ...] | None:
    """What a loss has declared by zero_without_advantage; None = nothing, so it may have a gradient anywhere.

    >>> metrics_without_advantage(clipped_surrogate)[:2], metrics_without_advantage(nll)
    (('clip_ratio/high', 'clip_ratio/low'), None)
    """
    return getattr(loss, "zero_without_advantage", None)


@zero_without_advantage("clip_ratio/high", "clip_ratio/low", "clip_ratio/region", "pg_clipfrac", "pg_clipfrac_lower")
def clipped_surrogate(
    x: LossInputs,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    epsilon_c: float | None = None,
    level: str = "token",
) -> LossOutput:
    """The clipped surrogate of PPO and GRPO, with dual clip and sequence-level ratio.

    l = max(−A·r, −A·clip(r, 1 − ε, 1 + ε_high)), r = exp(clip(log π − log π_old, ±20)), A the advantage. Dual clip:
    where A < 0, max(...) is at most −ε_c·A. level="sequence" (GSPO-token): r has the value of exp(mean of the
    sequence's log-ratios), at most e¹⁰, and the gradient of each token's own logprob.

    Args:
        x: needs logprobs, mask, sequence and advantages; old_logprobs None = logprobs.detach(), a ratio of exactly 1.
        epsilon, epsilon_high: clip range, epsilon_high None = epsilon.
        epsilon_c: dual clip, above 1; None = off.
        level: token or sequence.
    Returns: loss [s], and per token: pg_loss, pg_loss/unclipped and /clipped (both arms), pg_clipfrac, ppo_kl
        (−log π + log π_old, before any clip), is_ratio, log_ratio_abs (both as used), clip_ratio/low, /high and
        /region (sequence_clip_ratio/* at the level of sequences); pg_clipfrac_lower with epsilon_c.
    Raises: ConfigError: epsilon_c not above 1, negative epsilon, unknown level. DataError: a missing column.
    Source: PPO arXiv:1707.06347; GRPO arXiv:2402.03300; dual clip arXiv:1912.09729; clip-higher, DAPO arXiv:2503.14476;
        GSPO-token arXiv:2507.18071. Agrees with Tunix's grpo_loss_fn; clip_ratio/* are TRL's.

    >>> x = LossInputs(sequence=torch.tensor([0]), mask=torch.tensor([True]), logprobs=torch.tensor([0.]),
    ...                old_logprobs=torch.tensor([-1.]), advantages=torch.tensor([2.]))
    >>> clipped_surrogate(x)[0]  # r = e is clipped to 1.2: -2 * 1.2
    tensor([-2.4000])
    """
    _check(epsilon, epsilon_high, epsilon_c, level)
    advantages = masked_column(x.need("advantages"), x.mask).detach()
    log_ratio, used = _log_ratios(x, level)
    ratio = used.exp()
    low, high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)
    free, clipped = -advantages * ratio, -advantages * ratio.clamp(low, high)
    loss = torch.maximum(free, clipped)
    metrics = {
        **_clip_metrics(ratio, advantages, low, high, level),
        "is_ratio": torch.where(x.mask, ratio, 0.0),
        "log_ratio_abs": used.abs(),
        "pg_clipfrac": clipped > free,
        "pg_loss/clipped": clipped,
        "pg_loss/unclipped": free,
        "ppo_kl": -log_ratio,
    }
    if epsilon_c is not None:
        loss, metrics["pg_clipfrac_lower"] = _dual_clipped(loss, advantages, epsilon_c)
    metrics["pg_loss"] = loss
    return loss, {name: value.detach().to(loss.dtype) for name, value in metrics.items()}


def _clip_metrics(ratio: Tensor, advantages: Tensor, low: float, high: float, level: str) -> dict[str, Tensor]:
    """Where the clip takes the gradient away, Bool [s]: clip_ratio/*, or of sequences where the ratio is theirs."""
    too_low, too_high = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
    name = "clip_ratio" if level == "token" else "sequence_clip_ratio"
    return {f"{name}/high": too_high, f"{name}/low": too_low, f"{name}/region": too_low | too_high}


def nll(x: LossInputs) -> LossOutput:
    """Negative log-likelihood, the loss of supervised training.

    l = −log π(a).
    Args: x: needs logprobs and mask.
    Returns: loss [s], 0 where masked out, and the metric nll.

    >>> nll(LossInputs(sequence=torch.tensor([0]), mask=torch.tensor([True]), logprobs=torch.tensor([-1.5])))[0]
    tensor([1.5000])
    """
    loss = -masked_column(x.logprobs, x.mask)
    return loss, {"nll": loss.detach()}


POLICY_LOSSES: dict[str, Callable[..., LossOutput]] = {
    "grpo": clipped_surrogate,
    "gspo-token": zero_without_advantage(
        *("sequence_clip_ratio/high", "sequence_clip_ratio/low", "sequence_clip_ratio/region"),
        *("pg_clipfrac", "pg_clipfrac_lower"),
    )(partial(clipped_surrogate, level="sequence")),
    "ppo": clipped_surrogate,
}
"""fn(x: LossInputs, **kw) -> (loss [s], metrics), by name."""


def _log_ratios(x: LossInputs, level: str) -> tuple[Tensor, Tensor]:
    """Log π − log π_old before any clip, and the log of the importance ratio; [s] and [s]; 0 where masked out."""
    logprobs = masked_column(x.logprobs, x.mask)
    old = logprobs.detach() if x.old_logprobs is None else masked_column(x.old_logprobs, x.mask).detach()
    log_ratio = logprobs - old
    clipped = log_ratio.clamp(-20.0, 20.0)
    if level == "token":
        return log_ratio, clipped
    means = segment_mean(clipped.detach(), x.mask, x.sequence, x.num_sequences).index_select(0, x.sequence)
    return log_ratio, (logprobs - logprobs.detach() + torch.where(x.mask, means, 0.0)).clamp(max=10.0)


def _dual_clipped(loss: Tensor, advantages: Tensor, epsilon_c: float) -> tuple[Tensor, Tensor]:
    """The loss, at most −ε_c·A where A < 0, and where that bound held."""
    ceiling, bad = -epsilon_c * advantages, advantages < 0
    return torch.where(bad, torch.minimum(ceiling, loss), loss), bad & (loss > ceiling)


def _check(epsilon: float, epsilon_high: float | None, epsilon_c: float | None, level: str) -> None:
    """Raises ConfigError for what clipped_surrogate can't carry out."""
    for name, value in (("epsilon", epsilon), ("epsilon_high", epsilon_high)):
        if value is not None and not value >= 0:
            raise ConfigError(f"{name} {value!r} must be at least 0")
    if epsilon_c is not None and not epsilon_c > 1:
        raise ConfigError(f"epsilon_c {epsilon_c!r} must be above 1 (3.0 is usual); None = no dual clip")
    if level not in ("token", "sequence"):
        raise lookup_error("importance level", level, ("token", "sequence"))
