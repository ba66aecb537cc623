"""Columns: the tensors that a batch holds per token or per sequence, by name.

`TokenBatch.select` and `cat`, packing and `LossInputs` carry all columns without knowing their names. This file
declares the well-known columns, which are read as attributes. `TokenBatch.with_token_columns` and
`with_sequence_columns` set columns of a user's own, which are read in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

from torch import Tensor

from whet.errors import DataError, nearest

__all__ = ["Columns", "OptionalColumn", "RequiredColumn"]


class OptionalColumn:
    """A well-known column of the token axis; it reads as None if the batch does not have it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, holder: None, owner: type) -> OptionalColumn: ...

    @overload
    def __get__(self, holder: Columns, owner: type) -> Tensor | None: ...

    def __get__(self, holder: Columns | None, owner: type) -> OptionalColumn | Tensor | None:
        return self if holder is None else holder.token_columns.get(self.name)


class RequiredColumn:
    """A column of the token axis that every batch has."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, holder: None, owner: type) -> RequiredColumn: ...

    @overload
    def __get__(self, holder: Columns, owner: type) -> Tensor: ...

    def __get__(self, holder: Columns | None, owner: type) -> RequiredColumn | Tensor:
        return self if holder is None else holder.token_columns[self.name]


class Columns:
    """The columns of a batch, or of a micro-batch: `token_columns` [S ...] and `sequence_columns` [N ...], by name.

    >>> import torch
    >>> from whet.types import LossInputs
    >>> x = LossInputs(sequence=torch.tensor([0, 0, 1]), mask=torch.ones(3, dtype=torch.bool), logprobs=torch.zeros(3),
    ...                token_columns={"teacher_logprobs": -torch.ones(3)},
    ...                sequence_columns={"label": torch.tensor([1., 0.])})
    >>> x.need("teacher_logprobs"), x.need("label"), x.advantages
    (tensor([-1., -1., -1.]), tensor([1., 0.]), None)
    """

    token_columns: Mapping[str, Tensor]
    """[S ...] each: the columns per token, by name."""
    sequence_columns: Mapping[str, Tensor]
    """[N ...] each: the columns per sequence, by name."""

    tokens = OptionalColumn()
    """Long: the completion tokens."""
    sampler_logprobs = OptionalColumn()
    """Float: the log-probabilities that the engine reported."""
    versions = OptionalColumn()
    """Int: the policy version that sampled each token; -1 = the token was not sampled."""
    old_logprobs = OptionalColumn()
    """Float: the log-probabilities under the policy at rollout: by the trainer, or the engine's own (see
    `PolicyLearner.old_logprobs_from`). None if one update follows one rollout: the loss then takes logprobs.detach(),
    so that the ratio is exactly 1."""
    ref_logprobs = OptionalColumn()
    """Float: the log-probabilities under the reference."""
    values = OptionalColumn()
    """Float: the critic's values of the states before each token, at rollout."""
    token_rewards = OptionalColumn()
    """Float: the reward of each token, if rewards are not of whole trajectories."""
    episode_rewards = OptionalColumn()
    """Float64: the part of an episode's reward that its environment gave at each token."""
    returns = OptionalColumn()
    """Float: the targets of the critic's values."""
    advantages = OptionalColumn()
    """Float: the advantage of each token."""
    weights = OptionalColumn()
    """Float: loss_agg_mode as weights of tokens, computed once per optimizer step."""

    def column(self, name: str) -> Tensor | None:
        """Returns the column, or other input of a loss, of this name.

        Returns: [S ...] or [N ...]; None if the name is known and this batch does not have the column.
        Raises: DataError: the name is unknown; the message suggests the nearest known one.
        """
        for columns in (self.token_columns, self.sequence_columns):
            if name in columns:
                return columns[name]
        known = self._names()
        if name not in known:
            raise DataError(f"unknown column {name!r}{nearest(name, known) or '.'} Known: {', '.join(known)}")
        return getattr(self, name)

    def need(self, name: str) -> Tensor:
        """Returns the column of this name, which must be there.

        Raises: DataError: this batch does not have the column, or the name is unknown.
        """
        if name not in (known := self._names()):
            raise DataError(
                f"the loss needs {name}, which is not a column of this batch{nearest(name, known) or '.'} Set it with "
                "batch.with_token_columns or with_sequence_columns"
            )
        column = self.column(name)
        if column is None:
            raise DataError(f"the loss needs {name}, which this batch does not have; compute it before the update")
        return column

    @classmethod
    def well_known(cls) -> list[str]:
        """Returns the names of the columns of the token axis that are declared here, sorted."""
        declared = {n: c for base in reversed(cls.__mro__) for n, c in vars(base).items()}
        return sorted(name for name, c in declared.items() if isinstance(c, OptionalColumn | RequiredColumn))

    def _names(self) -> list[str]:
        """Returns the names that `column` knows."""
        return sorted({*self.well_known(), *self.token_columns, *self.sequence_columns})

    def __getattr__(self, name: str) -> Any:
        """Returns a column that is not well known. Python calls this only if nothing else has the name."""
        fields = vars(self)
        if not {"token_columns", "sequence_columns"} <= fields.keys():  # copy and pickle ask before any is set
            raise AttributeError(name)
        for columns in (fields["token_columns"], fields["sequence_columns"]):
            if name in columns:
                return columns[name]
        near = nearest(name, {*dir(type(self)), *fields, *self._names()})
        raise AttributeError(f"{type(self).__name__} has no column or attribute {name!r}{near}")
