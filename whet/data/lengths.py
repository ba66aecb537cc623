"""Sequences over the limit: refused, cut at one end or left out, and counted."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from whet.config.data import SupervisedDataConfig
from whet.errors import DataError
from whet.types import TrainSequence

__all__ = ["Lengths"]


class Lengths:
    """The lengths of rows, and what is done with those over max_length."""

    def __init__(self, data: SupervisedDataConfig) -> None:
        """Args: data: its max_length and on_long."""
        self.data = data
        self.seen = array("q")
        """Tokens of each row's longest sequence."""
        self.deferred = False
        """Whether an over-long row is an error only after the last row: `check_all`."""

    def fit(self, sequences: Sequence[TrainSequence], row: int) -> list[TrainSequence | None] | None:
        """The sequences under the policy.

        Args: sequences: of a row. row: its number.
        Returns: each as it is or cut, None for one of which nothing trained is left; None where the row is left out.
        Raises: DataError: the row is over the limit and on_long is "error", unless that is deferred.
        """
        longest, limit = max(map(_length, sequences)), self.data.max_length
        self.seen.append(longest)
        if limit is None or longest <= limit:
            return list(sequences)
        if self.data.on_long in ("truncate", "truncate_left"):
            cut = cut_at_end if self.data.on_long == "truncate" else cut_at_start
            return [cut(s, limit) for s in sequences]
        if self.data.on_long == "error" and not self.deferred:
            raise DataError(f"row {row} has {longest} tokens, over max_length {limit}; {self._way_on(longest)}")
        return None

    def check_all(self) -> None:
        """Raises DataError where rows were over the limit and on_long is "error": how many, and how long they are."""
        if self.data.on_long == "error" and (over := self.told()):
            raise DataError(f"{over}; {self._way_on(max(self.seen))}")

    def told(self) -> str:
        """How many rows were over the limit, the longest, and the 95th percentile of all; "" where none was."""
        limit = self.data.max_length
        if limit is None or not self.seen:
            return ""
        lengths = np.frombuffer(self.seen, dtype=np.int64)
        over = int((lengths > limit).sum())
        most = int(np.percentile(lengths, 95, method="higher"))
        if not over:
            return ""
        return (
            f"{over} of {len(lengths)} rows {'is' if over == 1 else 'are'} over max_length {limit}: the longest has "
            f"{lengths.max()} tokens, 95 % of all rows have {most} or fewer"
        )

    def _way_on(self, longest: int) -> str:
        return f"raise max_length to {longest}, or set on_long to truncate (cut the end off) or drop"


def cut_at_end(sequence: TrainSequence, limit: int) -> TrainSequence | None:
    """A sequence's first tokens.

    Args: sequence: any. limit: tokens that stay, prefix included.
    Returns: None where no trained token is among them.

    >>> s = TrainSequence(prefix=np.array([5, 6]), tokens=np.array([7, 2]), mask=np.array([True, True]))
    >>> cut_at_end(s, 3).tokens.tolist(), cut_at_end(s, 2)
    ([7], None)
    """
    if _length(sequence) <= limit:
        return sequence
    kept = max(0, limit - len(sequence.prefix))
    if not sequence.mask[:kept].any():
        return None
    return TrainSequence(prefix=sequence.prefix, tokens=sequence.tokens[:kept], mask=sequence.mask[:kept])


def cut_at_start(sequence: TrainSequence, limit: int) -> TrainSequence | None:
    """A sequence's last tokens; the first of them is given, whatever it was.

    Args: sequence: any. limit: tokens that stay, prefix included.
    Returns: None where no trained token is among those that follow the first.

    >>> s = TrainSequence(prefix=np.array([5, 6]), tokens=np.array([7, 8, 2]), mask=np.array([True, True, True]))
    >>> cut = cut_at_start(s, 2)
    >>> cut.prefix.tolist(), cut.tokens.tolist(), cut_at_start(s, 1)
    ([8], [2], None)
    """
    over = _length(sequence) - limit
    if over <= 0:
        return sequence
    given = np.concatenate([sequence.prefix, sequence.tokens])[over:]
    size = max(1, len(sequence.prefix) - over)  # of the prefix
    mask = sequence.mask[size + over - len(sequence.prefix) :]
    if not mask.any():
        return None
    return TrainSequence(prefix=given[:size], tokens=given[size:], mask=mask)


def _length(sequence: TrainSequence) -> int:
    return len(sequence.prefix) + len(sequence.tokens)
