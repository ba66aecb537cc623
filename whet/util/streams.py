"""Output that never fails: no work ends because what is printed about it can't be written.

A reader that has gone, a terminal that was closed, a full disk under a log: what is written then is lost, nothing else
is. Left out on purpose: programs whose output is the result. For them a lost line is an error, or, where the reader of
a pipe has seen enough, the end.
"""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

__all__ = ["Stderr", "flush_or_discard", "has_no_reader", "ignore_write_errors", "open_descriptors"]


class _Unfailing(io.FileIO):
    """A descriptor whose writes succeed, wherever they end up."""

    def write(self, data: Any, /) -> int:
        """Writes what the system takes."""
        try:
            written = super().write(data)
        except BrokenPipeError:
            _to_nowhere(self.fileno())  # the programs that we start would be killed by it
            written = None
        except OSError:  # a full disk may have room again
            written = None
        return memoryview(data).nbytes if written is None else written


class _Open(io.TextIOWrapper):
    """A standard stream that is shared by all: who closes it (a reward function) has only written for the last time."""

    def close(self) -> None:
        """Passes on what was written."""
        with suppress(ValueError):  # its buffer was closed, or taken away
            self.flush()


@contextmanager
def ignore_write_errors(*names: str) -> Iterator[None]:
    """Inside, standard streams take all that is written to them, by whoever.

    Args: names: "stdout", "stderr". One that is not a file (a test's, a notebook's) stays as it is.
    """
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(_replaced(name))
        yield


@contextmanager
def _replaced(name: str) -> Iterator[None]:
    old = vars(sys)[name]
    try:
        raw = _Unfailing(old.fileno(), "w", closefd=False)
        plain = isinstance(old.buffer, io.RawIOBase)  # python -u
        options = {"line_buffering": old.line_buffering, "write_through": old.write_through}
        raw.name = f"<{name}>"
        buffer: Any = raw if plain else io.BufferedWriter(raw)
        new = _Open(buffer, old.encoding, "backslashreplace", **options)
    except (AttributeError, OSError, ValueError):  # ValueError: it was closed
        yield
        return
    with suppress(OSError):
        old.flush()
    setattr(sys, name, new)
    try:
        yield
    finally:
        new.close()
        if has_no_reader(new):
            _to_nowhere(raw.fileno())  # else Python, too, fails with it as it ends
        if vars(sys)[name] is new:
            setattr(sys, name, old)


class Stderr:
    """Standard error as it is at the moment of writing; what it does not take is lost, without an error.

    >>> Stderr().isatty() == sys.stderr.isatty()
    True
    """

    def write(self, text: str) -> int:
        """Writes what it takes."""
        with suppress(OSError, ValueError):  # ValueError: it was closed, or can't spell the text
            self._now().write(text)
        return len(text)

    def flush(self) -> None:
        """Passes on what was written."""
        with suppress(OSError, ValueError):
            self._now().flush()

    def isatty(self) -> bool:
        """Whether a person looks on."""
        with suppress(OSError, ValueError):
            return self._now().isatty()
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now(), name)

    @staticmethod
    def _now() -> Any:
        now = sys.stderr or io.StringIO()  # None: it was closed before Python began
        return getattr(now, "rich_proxied_file", now)  # the stream below a bar of rich's


def open_descriptors() -> None:
    """Gives standard streams that the caller has closed (`>&-`) a place to write to.

    Their numbers as well: a checkpoint opened under number 2 would be written to by whatever complains in C.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            _to_nowhere(number)
    for name in ("stdout", "stderr"):
        if vars(sys)[name] is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115  (for as long as the process lives)


def has_no_reader(stream: Any) -> bool:
    """Whether a stream is a pipe whose reader has gone."""
    try:
        number = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    poll = select.poll()
    poll.register(number, 0)
    return any(what & (select.POLLERR | select.POLLHUP) for _, what in poll.poll(0))


def flush_or_discard(stream: Any) -> None:
    """Flushes a stream; where that fails, what it holds is dropped, lest Python fails with it as it ends."""
    try:
        stream.flush()
    except (AttributeError, OSError, ValueError):  # ValueError: it was closed; AttributeError: it is None
        with suppress(OSError, ValueError, AttributeError):
            _to_nowhere(stream.fileno())


def _to_nowhere(number: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null == number:
        os.set_inheritable(number, True)
    else:
        os.dup2(null, number)
        os.close(null)
