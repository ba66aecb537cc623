"""Errors raised while rows are read, as a DataError that names the place.

Rows come from files of any make, from libraries that read them, and from functions of the user's own: each raises its
own errors. Errors of whet and a lack of memory pass as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from whet.errors import DataError, WhetError, format_exception

__all__ = ["convert_read_errors", "iterate_rows"]


@contextmanager
def convert_read_errors(what: str, fix: str) -> Iterator[None]:
    """Turns what is raised inside into a DataError.

    Args: what: is read, for the message. fix: what to do about it.

    >>> with convert_read_errors("a.csv", "write it again"):
    ...     raise KeyError("x")
    Traceback (most recent call last):
    whet.errors.DataError: a.csv can't be read: KeyError: 'x'; write it again
    """
    try:
        yield
    except (Exception, SystemExit) as error:  # a user's function that calls sys.exit would end the run without a word
        if isinstance(error, WhetError | MemoryError):
            raise
        raise DataError(f"{what} can't be read: {format_exception(error)}; {fix}") from error


def iterate_rows(rows: Iterable[Any], what: str, fix: str = "fix what makes the rows") -> Iterator[Any]:
    """The rows, one by one; what reading one raises is a DataError with the row's number.

    Args: rows: any iterable. what: holds them, for the message. fix: what to do about it.

    >>> list(iterate_rows(iter([1, 2]), "the data"))
    [1, 2]
    """
    place = 0
    try:
        for row in rows:
            yield row
            place += 1
    except (Exception, SystemExit) as error:
        if isinstance(error, WhetError | MemoryError):  # asked here: what closes it as Python ends finds no such name
            raise
        raise DataError(f"{what} can't be read from row {place} on: {format_exception(error)}; {fix}") from error
