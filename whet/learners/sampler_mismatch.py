"""The difference between the logprobs of sampler and trainer: its metrics, and the mean weight of a correction."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from whet.config import PolicyConfig
from whet.learners.from_config import bind_fields
from whet.metrics import Max, Mean, Metric
from whet.ops import (
    CORRECTIONS,
    masked_mean,
    mismatch_metrics,
    sampler_log_ratio,
    segment_count,
    segment_mean,
    weight_metrics,
)
from whet.train.metric_reduction import Metrics
from whet.types import LossInputs, TokenBatch

__all__ = ["add_ess", "compare_sampler"]


def compare_sampler(batch: TokenBatch, config: PolicyConfig) -> tuple[TokenBatch, dict[str, Metric]]:
    """Compares the trainer's old logprobs with the sampler's, over the trained tokens of a whole step.

    Args: batch: with the trainer's old_logprobs.
    Returns: the batch, with the column sampler_is_mean if sampler_is_normalize is set; and metrics: sampler_trainer/*,
        and sampler_is/* if sampler_is is a correction of whet's. Means are over sequences if weights are.
    """
    old, sampler = batch.need("old_logprobs"), batch.sampler_logprobs
    metrics = mismatch_metrics(old, sampler, mask=batch.mask)
    if isinstance(config.sampler_is, str) and config.sampler_is in CORRECTIONS:
        x = LossInputs(
            sequence=batch.sequence,
            mask=batch.mask,
            logprobs=old,
            sampler_logprobs=sampler,
            num_sequences=batch.num_sequences,
        )
        weigh = partial(CORRECTIONS[config.sampler_is], sampler_is_normalize=False)
        weights = bind_fields(weigh, config)(x)
        bounds = {"threshold": config.sampler_is_threshold, "lower": config.sampler_is_lower}
        ratio = sampler_log_ratio(x, config.sampler_is)
        mean = _mean_weight(weights, batch, config.sampler_is)
        metrics |= weight_metrics(weights, ratio, mask=batch.mask, **bounds) | {"sampler_is/weight_mean": float(mean)}
        if config.sampler_is_normalize:
            batch = batch.with_token_columns(sampler_is_mean=mean.clamp(min=1e-8).expand(batch.num_tokens))
    return batch, {n: Max(v) if n.endswith("_max") else Mean(v) for n, v in metrics.items()}


def _mean_weight(weights: Tensor, batch: TokenBatch, level: str) -> Tensor:
    """Returns the mean weight over trained tokens, or over sequences with a trained token at other levels; as
    in verl.
    """
    if level == "token":
        return masked_mean(weights, batch.mask)
    each = segment_mean(weights, batch.mask, batch.sequence, batch.num_sequences)
    count = segment_count(batch.mask, batch.sequence, batch.num_sequences)
    return each.sum() / (count > 0).sum().clamp(min=1)


def add_ess(metrics: Metrics) -> Metrics:
    """Returns an update's metrics with sampling/ess, computed from the means of its weights and of their squares.

    >>> add_ess({"sampling/weight": Mean(4.0, 2), "sampling/weight_squared": Mean(10.0, 2)})  # 2² / 5
    {'sampling/ess': Mean(sum=0.8, count=1.0)}
    """
    weight, squared = metrics.get("sampling/weight"), metrics.get("sampling/weight_squared")
    if weight is None or squared is None:
        return metrics
    rest = {n: m for n, m in metrics.items() if n not in ("sampling/weight", "sampling/weight_squared")}
    ess = weight.value**2 / squared.value if squared.value > 0 else 1.0
    return {**rest, "sampling/ess": Mean(ess)}
