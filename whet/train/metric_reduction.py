"""Reduces a loss's values per token to metrics. Sums are made on the device, and the host reads them once.

Dim legend: s tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from whet.metrics import Max, Mean, Metric, Min, Sum
from whet.ops import segment_count, segment_mean

__all__ = ["REDUCTIONS", "Metrics", "Reductions", "metric_labels", "reduce_metrics", "unpack_metrics"]

Metrics = dict[str, Metric]
Reductions = Mapping[str, Mapping[str, str]]
REDUCTIONS = ("mean", "max", "min", "weighted", "sequence_mean", "sequence_max", "sequence_min")
"""Reductions of a metric per token: over the tokens of the mask; weighted: the sum with the token weights, as of the
loss; sequence_*: the mean, maximum and minimum of the means of sequences."""


def metric_labels(name: str, reductions: Reductions) -> Mapping[str, str]:
    """Returns the labels of a loss's metric in the log, each with its reduction. Default: its mean, under its
    own name.
    """
    return reductions.get(name, {name: "mean"})


def reduce_metrics(
    values: Mapping[str, Tensor],
    mask: Tensor,
    weights: Tensor,
    reductions: Reductions,
    sequence: Tensor,
    num_sequences: int,
) -> tuple[list[tuple[str, str]], list[Tensor]]:
    """Reduces per-token metrics over the mask to numbers on the device.

    Returns: (label, reduction) of each number; the count of the mask, then these numbers, as float64 scalars.
    """
    labels, numbers = [], [mask.sum().double()]
    for name, value in values.items():
        value = value.detach().double()
        for label, how in metric_labels(name, reductions).items():
            labels.append((label, how))
            if how.startswith("sequence_"):
                means = segment_mean(value, mask, sequence, num_sequences)
                trained = segment_count(mask, sequence, num_sequences) > 0
                if how == "sequence_max":
                    numbers.append(torch.where(trained, means, -torch.inf).max())
                elif how == "sequence_min":
                    numbers.append(torch.where(trained, means, torch.inf).min())
                else:
                    numbers += [torch.where(trained, means, 0.0).sum(), trained.sum().double()]
                labels += [(label, "count")] if how == "sequence_mean" else []
            elif how == "max":
                numbers.append(torch.where(mask, value, -torch.inf).max())
            elif how == "min":
                numbers.append(torch.where(mask, value, torch.inf).min())
            else:
                masked = torch.where(mask, value, 0.0)
                numbers.append((weights * masked if how == "weighted" else masked).sum())
    return labels, numbers


def unpack_metrics(labels: Sequence[Sequence[tuple[str, str]]], numbers: Sequence[float]) -> Iterator[Metrics]:
    """Yields the metrics of each micro-batch.

    Args: labels: (label, reduction) of each micro-batch, from reduce_metrics. numbers: of all micro-batches end to end:
        the loss, the count of the mask, and one for each label.
    """
    start = 0
    for pairs in labels:
        end = start + 2 + len(pairs)
        loss, count, *values = numbers[start:end]
        start = end
        metrics: Metrics = {"loss": Sum(loss)}
        for (label, how), x in zip(pairs, values):
            if how in ("mean", "sequence_mean"):
                metrics[label] = Mean(x, count)
            elif how == "count":
                metrics[label] = Mean(metrics[label].sum, x)  # pyright: ignore[reportAttributeAccessIssue]
            elif how == "weighted":
                metrics[label] = Sum(x)
            elif count:
                metrics[label] = Max(x) if how.endswith("max") else Min(x)
        yield metrics
