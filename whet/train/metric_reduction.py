"""Reduces a loss's values per token to metrics: summed on the device, read once, merged by kind.

Dim letters: s tokens of a micro-batch.
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
    """The labels of a loss's metric in the log, each with its reduction; by default its mean under its own name."""
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
    labels, found = [], [mask.sum().double()]
    for name, value in values.items():
        value = value.detach().double()
        for label, how in metric_labels(name, reductions).items():
            labels.append((label, how))
            if how.startswith("sequence_"):
                found += _over_sequences(value, mask, sequence, num_sequences, how)
                labels += [(label, "count")] if how == "sequence_mean" else []
            elif how == "max":
                found.append(torch.where(mask, value, -torch.inf).max())
            elif how == "min":
                found.append(torch.where(mask, value, torch.inf).min())
            else:
                kept = torch.where(mask, value, 0.0)
                found.append((weights * kept if how == "weighted" else kept).sum())
    return labels, found


def _over_sequences(value: Tensor, mask: Tensor, sequence: Tensor, number: int, how: str) -> list[Tensor]:
    """The maximum, the minimum, or the sum and the count, of the means of sequences over their trained tokens."""
    means, there = segment_mean(value, mask, sequence, number), segment_count(mask, sequence, number) > 0
    if how == "sequence_max":
        return [torch.where(there, means, -torch.inf).max()]
    if how == "sequence_min":
        return [torch.where(there, means, torch.inf).min()]
    return [torch.where(there, means, 0.0).sum(), there.sum().double()]


def unpack_metrics(labels: Sequence[Sequence[tuple[str, str]]], read: Sequence[float]) -> Iterator[Metrics]:
    """The metrics of each micro-batch, from its labels and all numbers: loss, count, and one for each label."""
    at = 0
    for named in labels:
        loss, count, *numbers = read[at : at + 2 + len(named)]
        at += 2 + len(named)
        found: Metrics = {"loss": Sum(loss)}
        for (label, how), x in zip(named, numbers):
            if how in ("mean", "sequence_mean"):
                found[label] = Mean(x, count)
            elif how == "count":
                found[label] = Mean(found[label].sum, x)  # pyright: ignore[reportAttributeAccessIssue]
            elif how == "weighted":
                found[label] = Sum(x)
            elif count:
                found[label] = Max(x) if how.endswith("max") else Min(x)
        yield found
