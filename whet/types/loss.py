"""The inputs of a loss, and the outputs of a model.

Dim legend: s tokens of a micro-batch, n its sequences (whole), u its units (whole).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from whet.errors import DataError, nearest
from whet.types.columns import Columns

__all__ = ["CONSTANTS", "LossInputs", "TokenStats"]

_PER_TOKEN = (
    "correct",
    "divergence",
    "entropy",
    "log_sum_sq_probs",
    "logprobs",
    "mean_logits",
    "new_values",
    "sequence",
)
CONSTANTS = ("correct", "log_sum_sq_probs", "mean_logits")
"""Further outputs of a model for each token, computed on request and without a gradient."""


@dataclass(frozen=True, kw_only=True, eq=False, init=False)
class LossInputs(Columns):
    """The inputs of a loss: whole sequences of one micro-batch, on the model's device, in fp32 or better.

    They have all columns of the batch for these sequences: `x.advantages`, `x.need("teacher_logprobs")`. Numbers per
    token are 0 where the mask is False.
    Example: two sequences of 2 and 1 tokens: sequence = [0, 0, 1]; a column per token has length 3, a column per
    sequence has length 2. If the two are one unit, a pair: unit_of = [0, 0], unit = [0, 0, 0], num_units = 1.
    """

    sequence: Tensor
    """Long [s]: the sequence of each token, counted 0, 1, ... within this micro-batch."""
    mask: Tensor
    """Bool [s]: True = trained."""
    logprobs: Tensor
    """[s], with gradient: the log-probabilities under the current policy."""
    entropy: Tensor | None
    """[s]: the entropy of the current policy, with gradient if the loss requires it."""
    new_values: Tensor | None
    """[s], with gradient: the values of the current critic."""
    divergence: Tensor | None
    """[s], with gradient: the divergence between policy and teacher, if the loss requires it."""
    correct: Tensor | None
    """Bool [s]: whether the token is the most likely one, if the loss requires it."""
    log_sum_sq_probs: Tensor | None
    """[s], without gradient: log Σ p² of the policy's distribution, if the loss requires it."""
    mean_logits: Tensor | None
    """[s], without gradient: the mean logit over the vocabulary, if the loss requires it."""
    scores: Tensor | None
    """[n], with gradient: the output of the value head at each sequence's last token, if the loss requires it."""
    unit_of: Tensor
    """Long [n]: the unit of each sequence, counted within this micro-batch."""
    num_sequences: int
    """The number of sequences, n."""
    num_units: int
    """The number of units, u."""
    token_columns: Mapping[str, Tensor]
    sequence_columns: Mapping[str, Tensor]

    def __init__(
        self,
        *,
        sequence: Tensor,
        mask: Tensor,
        logprobs: Tensor,
        entropy: Tensor | None = None,
        new_values: Tensor | None = None,
        divergence: Tensor | None = None,
        correct: Tensor | None = None,
        log_sum_sq_probs: Tensor | None = None,
        mean_logits: Tensor | None = None,
        scores: Tensor | None = None,
        unit_of: Tensor | None = None,
        num_sequences: int | None = None,
        num_units: int | None = None,
        token_columns: Mapping[str, Tensor] | None = None,
        sequence_columns: Mapping[str, Tensor] | None = None,
        **columns: Tensor | None,
    ) -> None:
        """Takes well-known columns (advantages, ...) as arguments, others in `token_columns` or `sequence_columns`.

        Raises: DataError: a name in `columns` is not well known, or a column has not the length of its axis.
        """
        known = self.well_known()
        if wrong := [name for name in columns if name not in known]:
            raise DataError(
                f"unknown column {wrong[0]!r}{nearest(wrong[0], known) or '.'} Pass a column of your own in "
                "token_columns= or sequence_columns="
            )
        if num_sequences is None:
            num_sequences = int(sequence.max()) + 1 if len(sequence) else 0
        if unit_of is None:
            unit_of = torch.arange(num_sequences, device=sequence.device)
        if num_units is None:
            num_units = int(unit_of.max()) + 1 if len(unit_of) else 0
        all_token_columns = {**(token_columns or {}), **columns}
        values = {
            "sequence": sequence,
            "mask": mask,
            "logprobs": logprobs,
            "entropy": entropy,
            "new_values": new_values,
            "divergence": divergence,
            "correct": correct,
            "log_sum_sq_probs": log_sum_sq_probs,
            "mean_logits": mean_logits,
            "scores": scores,
            "unit_of": unit_of,
            "num_sequences": num_sequences,
            "num_units": num_units,
            "token_columns": {name: c for name, c in all_token_columns.items() if c is not None},
            "sequence_columns": dict(sequence_columns or {}),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check_lengths()

    def _check_lengths(self) -> None:
        """Raises DataError unless every column has one row for each token, or one for each sequence."""
        per_token = {**{name: getattr(self, name) for name in _PER_TOKEN}, **self.token_columns}
        per_sequence = {"unit_of": self.unit_of, "scores": self.scores, **self.sequence_columns}
        kinds = ((per_token, len(self.mask), "tokens"), (per_sequence, self.num_sequences, "sequences"))
        for columns, size, kind in kinds:
            for name, column in columns.items():
                if column is not None and column.shape[:1] != (size,):
                    raise DataError(f"{name} has the shape {list(column.shape)}, and there are {size} {kind}")

    @property
    def unit(self) -> Tensor:
        """Long [s]: the unit of each token in this micro-batch."""
        return self.unit_of.index_select(0, self.sequence)

    def _names(self) -> list[str]:
        others = {"token_columns", "sequence_columns", "num_sequences", "num_units"}
        besides = {f.name for f in dataclasses.fields(self)} - others
        return sorted({*super()._names(), *besides, "unit"})


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenStats:
    """A model's outputs for each token: [s] of a micro-batch, or [S] of a whole batch; scores are [n] or [N]."""

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    scores: Tensor | None = None
    divergence: Tensor | None = None
    correct: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
