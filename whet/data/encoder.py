"""Encoder: turns the rows of a data set into what a run trains on, and counts how each row was treated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, TypeVar

__all__ = ["Encoder", "FunctionEncoder"]

T = TypeVar("T")


class Encoder(ABC, Generic[T]):
    """Encodes rows, each once: the base of PromptEncoder and RowEncoder."""

    unit: ClassVar[str] = "rows"
    """What messages call the encoded rows."""
    takes_batches: ClassVar[bool] = False
    """Whether an item of the data may be a ready-made batch of rows."""

    @abstractmethod
    def encode_batch(self, rows: Sequence[Any], first: int = 0) -> list[T | None]:
        """Encodes several rows; the results are those of one row after the other. None = the row is left out.

        Args: rows: of the data set. first: the index of the first of them in it.
        """

    def __call__(self, row: Any, number: int = 0) -> T | None:
        """Encodes one row. Args: row: of the data set. number: its index. Returns: None = it is left out."""
        return self.encode_batch([row], number)[0]

    @contextmanager
    def all_rows(self) -> Iterator[None]:
        """Context for encoding all rows of a data set: the counts start at 0, and a finding about many rows is one
        message after the last row.
        """
        self.reset_counts()
        yield

    def reset_counts(self) -> None:
        """Sets all counts to 0 for another data set."""

    def describe_counts(self) -> str:
        """Describes the rows that were changed or left out; "" where there are none."""
        return ""


class FunctionEncoder(Encoder[Any]):
    """Applies a function to each row. Args: fn: (row, its index) -> the encoded row; None = rows stay as they are.

    >>> FunctionEncoder(lambda row, number: row if number else None).encode_batch(["a", "b"])
    [None, 'b']
    """

    unit, takes_batches = "prompts", True

    def __init__(self, fn: Callable[[Any, int], Any] | None = None) -> None:
        self._fn = fn

    def encode_batch(self, rows: Sequence[Any], first: int = 0) -> list[Any]:
        """Applies the function to each row. Args, Returns: see Encoder."""
        return list(rows) if self._fn is None else [self._fn(row, number) for number, row in enumerate(rows, first)]
