"""Log lines: warnings and errors begin with their level."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress

__all__ = ["DefaultHandler", "LevelFormatter"]


class LevelFormatter(logging.Formatter):
    """Formats a record as its message; warnings and errors begin with their level.

    >>> LevelFormatter().format(logging.makeLogRecord({"msg": "low", "levelno": 30, "levelname": "WARNING"}))
    'warning: low'
    """

    def format(self, record: logging.LogRecord) -> str:
        """Returns the text of a record."""
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


class DefaultHandler(logging.Handler):
    """Prints whet's warnings in a notebook or a script without a logging setup; Python would print no level.

    It prints nothing if the program has added a handler to the root logger or to the logger `whet`. It looks up
    sys.stderr at each record, so that lines appear above a progress bar.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(LevelFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a record; a line that standard error does not take is lost."""
        handlers = [*logging.getLogger().handlers, *logging.getLogger("whet").handlers]
        if handlers == [self] and sys.stderr is not None:
            with suppress(OSError, ValueError):  # ValueError: it was closed, or can't encode the text
                sys.stderr.write(self.format(record) + "\n")
                sys.stderr.flush()
