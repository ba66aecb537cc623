"""Columns: what a batch holds per token or per sequence, each under its name.

`TokenBatch.select` and `cat`, packing and `LossInputs` carry all columns without knowing their names. The well-known
ones are declared once, here, and are read as attributes; a user's own is set by `TokenBatch.with_token_columns` or
`with_sequence_columns` and is read the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

from torch import Tensor

from whet.errors import DataError, nearest

__all__ = ["Columns", "OptionalColumn", "RequiredColumn"]


class OptionalColumn:
    """A well-known column of the token axis that reads as None where a batch has none."""

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
    """[S ...] each: whatever is per token, by name."""
    sequence_columns: Mapping[str, Tensor]
    """[N ...] each: whatever is per sequence, by name."""

    tokens = OptionalColumn()
    """Long: the completion tokens."""
    sampler_logprobs = OptionalColumn()
    """Float: what the engine reported."""
    versions = OptionalColumn()
    """Int: policy version of each token, -1 = not sampled."""
    old_logprobs = OptionalColumn()
    """Float: the policy at rollout, in the trainer's numerics; None where one update follows one rollout: the loss
    takes logprobs.detach(), a ratio of exactly 1."""
    ref_logprobs = OptionalColumn()
    """Float: the reference's."""
    values = OptionalColumn()
    """Float: of the state before each token, at rollout."""
    token_rewards = OptionalColumn()
    """Float: what a token earned, where rewards are not of whole trajectories."""
    returns = OptionalColumn()
    """Float: what a critic's values should be."""
    advantages = OptionalColumn()
    """Float."""
    weights = OptionalColumn()
    """Float: loss_agg_mode as token weights, made once per optimizer step."""

    def column(self, name: str) -> Tensor | None:
        """A column, or what a loss is given besides, by name.

        Returns: [S ...] or [N ...]; None where it is a known one that this batch does not have.
        Raises: DataError: nothing has this name here; with the nearest that has.
        """
        for columns in (self.token_columns, self.sequence_columns):
            if name in columns:
                return columns[name]
        known = self._names()
        if name not in known:
            raise DataError(f"unknown column {name!r}{nearest(name, known) or '.'} Known: {', '.join(known)}")
        return getattr(self, name)

    def need(self, name: str) -> Tensor:
        """A column that can't be done without.

        Raises: DataError: the column is missing, with its name; or nothing has this name.
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
        """The names of the columns of the token axis that are declared here, sorted."""
        declared = {n: c for base in reversed(cls.__mro__) for n, c in vars(base).items()}
        return sorted(name for name, c in declared.items() if isinstance(c, OptionalColumn | RequiredColumn))

    def _names(self) -> list[str]:
        """What `column` knows."""
        return sorted({*self.well_known(), *self.token_columns, *self.sequence_columns})

    def __getattr__(self, name: str) -> Any:
        """A column that is not well known. Asked for only where nothing else has the name."""
        held = vars(self)
        if not {"token_columns", "sequence_columns"} <= held.keys():  # still empty: copy and pickle look names up
            raise AttributeError(name)
        for columns in (held["token_columns"], held["sequence_columns"]):
            if name in columns:
                return columns[name]
        near = nearest(name, {*dir(type(self)), *held, *self._names()})
        raise AttributeError(f"{type(self).__name__} has no column or attribute {name!r}{near}")
