"""Standard streams whose write errors are ignored, so that a run never ends because a message can't be printed.

If the reader of a pipe has exited, the terminal was closed, or the disk is full, only the output is lost.
Left out on purpose: programs whose output is the result. For them a lost line is an error, or the end if the reader of
a pipe has exited.
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


class _IgnoringFile(io.FileIO):
    """A file whose write errors are ignored."""

    def write(self, data: Any, /) -> int:
        """Writes as much as the system accepts."""
        try:
            written = super().write(data)
        except BrokenPipeError:
            _redirect_to_null(self.fileno())  # a broken pipe would kill child processes
            written = None
        except OSError:  # a full disk may have room again
            written = None
        return memoryview(data).nbytes if written is None else written


class _SharedStream(io.TextIOWrapper):
    """A standard stream that stays open if a user (a reward function) closes it."""

    def close(self) -> None:
        """Flushes the stream."""
        with suppress(ValueError):  # its buffer was closed or detached
            self.flush()


@contextmanager
def ignore_write_errors(*names: str) -> Iterator[None]:
    """Returns a context in which write errors of standard streams are ignored.

    Args: names: "stdout", "stderr". A stream that is not a file (in a test, in a notebook) is not changed.
    """
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(_replaced(name))
        yield


@contextmanager
def _replaced(name: str) -> Iterator[None]:
    """Replaces one standard stream."""
    old = vars(sys)[name]
    try:
        raw = _IgnoringFile(old.fileno(), "w", closefd=False)
        is_unbuffered = isinstance(old.buffer, io.RawIOBase)  # python -u
        options = {"line_buffering": old.line_buffering, "write_through": old.write_through}
        raw.name = f"<{name}>"
        buffer: Any = raw if is_unbuffered else io.BufferedWriter(raw)
        new = _SharedStream(buffer, old.encoding, "backslashreplace", **options)
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
            _redirect_to_null(raw.fileno())  # else Python's flush at exit fails
        if vars(sys)[name] is new:
            setattr(sys, name, old)


class Stderr:
    """Standard error as it is at the time of each write; write errors are ignored.

    >>> Stderr().isatty() == sys.stderr.isatty()
    True
    """

    def write(self, text: str) -> int:
        """Writes the text; errors are ignored."""
        with suppress(OSError, ValueError):  # ValueError: it was closed, or can't encode the text
            self._current().write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream."""
        with suppress(OSError, ValueError):
            self._current().flush()

    def isatty(self) -> bool:
        """Returns whether it is a terminal."""
        with suppress(OSError, ValueError):
            return self._current().isatty()
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._current(), name)

    @staticmethod
    def _current() -> Any:
        stream = sys.stderr or io.StringIO()  # None: it was closed before Python started
        return getattr(stream, "rich_proxied_file", stream)  # the stream below a progress bar of rich


def open_descriptors() -> None:
    """Opens standard streams that the caller has closed (`>&-`) on /dev/null, and their descriptors too.

    Otherwise a checkpoint could be opened as descriptor 2, and C code would write its error messages into it.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            _redirect_to_null(number)
    for name in ("stdout", "stderr"):
        if vars(sys)[name] is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115  (for as long as the process lives)


def has_no_reader(stream: Any) -> bool:
    """Returns whether a stream is a pipe without a reader."""
    try:
        number = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    poll = select.poll()
    poll.register(number, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def flush_or_discard(stream: Any) -> None:
    """Flushes a stream, or discards its buffer if that fails, so that Python's flush at exit does not fail."""
    try:
        stream.flush()
    except (AttributeError, OSError, ValueError):  # ValueError: it was closed; AttributeError: it is None
        with suppress(OSError, ValueError, AttributeError):
            _redirect_to_null(stream.fileno())


def _redirect_to_null(number: int) -> None:
    """Redirects a file descriptor to /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    if null == number:
        os.set_inheritable(number, True)
    else:
        os.dup2(null, number)
        os.close(null)
