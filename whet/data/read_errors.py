"""Converts errors of reading rows into a DataError that names the place.

Rows come from files, from libraries that read files, and from the user's functions, with many exception classes. Errors
of whet and MemoryError are not converted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from whet.errors import DataError, WhetError, format_exception

__all__ = ["convert_read_errors", "iterate_rows"]


@contextmanager
def convert_read_errors(what: str, fix: str) -> Iterator[None]:
    """Converts an exception inside the context into a DataError.

    Args: what: names the data, for the message. fix: the advice of the message.

    >>> with convert_read_errors("a.csv", "write it again"):
    ...     raise KeyError("x")
    Traceback (most recent call last):
    whet.errors.DataError: a.csv can't be read: KeyError: 'x'; write it again
    """
    try:
        yield
    except (Exception, SystemExit) as error:  # sys.exit in a user's function would end the run silently
        if isinstance(error, WhetError | MemoryError):
            raise
        raise DataError(f"{what} can't be read: {format_exception(error)}; {fix}") from error


def iterate_rows(rows: Iterable[Any], what: str, fix: str = "fix the source of the rows") -> Iterator[Any]:
    """Yields the rows, one by one; an error becomes a DataError with the row's number.

    Args: rows: any iterable. what: names the data, for the message. fix: the advice of the message.

    >>> list(iterate_rows(iter([1, 2]), "the data"))
    [1, 2]
    """
    place = 0
    try:
        for row in rows:
            yield row
            place += 1
    except (Exception, SystemExit) as error:
        if isinstance(error, WhetError | MemoryError):  # not an except clause: its names are gone when Python exits
            raise
        raise DataError(f"{what} can't be read from row {place} on: {format_exception(error)}; {fix}") from error
