"""Makes the inputs of a loss for a micro-batch, and checks the shapes that the loss returns."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from whet.errors import DataError
from whet.packing.micro_batch import MicroBatch
from whet.types import LossInputs, TokenBatch, TokenStats

__all__ = ["check_loss_shapes", "has_unit_weights", "make_loss_inputs"]


def has_unit_weights(batch: TokenBatch) -> bool:
    """Returns whether the batch has weights of units, not of tokens. Raises DataError if it has both or neither."""
    if (batch.weights is None) == (batch.unit_weights is None):
        raise DataError(
            "the batch has no loss weights; call RoleTrainer.add_loss_weights(batch) once per optimizer step"
            if batch.weights is None
            else "the batch has both weights and unit_weights; a loss is per token or per unit, so set one to None"
        )
    return batch.unit_weights is not None


def make_loss_inputs(
    token_columns: Mapping[str, Tensor],
    sequence_columns: Mapping[str, Tensor],
    micro: MicroBatch,
    stats: TokenStats,
) -> LossInputs:
    """Returns the columns of a micro-batch, with the model's statistics of its tokens.

    Numbers at masked-out tokens are 0, so a NaN there (from an environment) reaches neither the loss nor, through
    0 * NaN, its gradient.
    """
    columns = {name: c.index_select(0, micro.token_index) for name, c in token_columns.items()}
    mask = columns.pop("mask")

    def masked(x: Tensor) -> Tensor:  # whet.ops masks too; this is for losses of users
        if not x.is_floating_point():
            return x
        return torch.where(mask.view(-1, *[1] * (x.dim() - 1)), x, 0.0)

    return LossInputs(
        sequence=micro.sequence,
        mask=mask,
        logprobs=None if stats.logprobs is None else masked(stats.logprobs),  # pyright: ignore[reportArgumentType]
        entropy=None if stats.entropy is None else masked(stats.entropy),
        new_values=None if stats.values is None else masked(stats.values),
        divergence=None if stats.divergence is None else masked(stats.divergence),
        correct=None if stats.correct is None else stats.correct & mask,
        log_sum_sq_probs=None if stats.log_sum_sq_probs is None else masked(stats.log_sum_sq_probs),
        mean_logits=None if stats.mean_logits is None else masked(stats.mean_logits),
        scores=stats.scores,
        unit_of=micro.unit_of,
        num_sequences=len(micro.sequences),
        num_units=len(micro.units),
        token_columns={"tokens": micro.targets, **{name: masked(c) for name, c in columns.items()}},
        sequence_columns={name: c.index_select(0, micro.sequences) for name, c in sequence_columns.items()},
    )


def check_loss_shapes(loss: Tensor, metrics: Mapping[str, Tensor], weights: Tensor, per_unit: bool) -> None:
    """Raises DataError if a loss, or a metric, does not have one number for each weight."""
    for name, x in {"the loss": loss, **{f"its metric {n!r}": m for n, m in metrics.items()}}.items():
        if not isinstance(x, Tensor):
            raise DataError(f"{name} is a {type(x).__name__}; return a tensor with one number per token or unit")
        if x.shape != weights.shape:
            kind, letter, column = ("unit", "u", "unit_weights") if per_unit else ("token", "s", "weights")
            raise DataError(
                f"{name} has shape {list(x.shape)}, and the batch has {column}: return one number per {kind}, "
                f"[{letter}] = [{len(weights)}]; see whet docs extending"
            )
