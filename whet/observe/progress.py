"""Progress: a bar in a terminal, plain lines elsewhere, on rank 0 alone."""

from __future__ import annotations

import functools
import logging
import math
import os
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from whet.util.streams import Stderr
from whet.util.text_lines import join_fields, wrap_text

__all__ = ["Progress", "setup_logging", "sparkline"]

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """A curve in one line of text.

    Args: values: in order; NaN is left out. width: characters at most; longer series are averaged in pieces.
    Returns: one block character per piece, lowest to highest over the series' own range.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▄█'
    """
    known = [v for v in values if math.isfinite(v)]
    if not known:
        return ""
    size = math.ceil(len(known) / width)
    means = [sum(piece) / len(piece) for piece in (known[i : i + size] for i in range(0, len(known), size))]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(_BARS[min(7, int((v - low) / span * 7.999))] for v in means)


@functools.cache
def _console() -> Any:
    """The one console: a log handler and a bar that share it don't tear each other's lines."""
    from typing import cast

    from rich.console import Console

    return Console(file=cast(Any, Stderr()))


def _first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def setup_logging(level: int = logging.INFO) -> None:
    """Sends log lines to stderr, above the bar where there is one; ranks other than 0 log errors only.

    Args: level: of whet's own lines on rank 0; other libraries log warnings. For programs, not for libraries: it
        replaces the root logger's handlers.
    """
    first = _first_rank()
    if first and _console().is_terminal:
        handler: logging.Handler = _AboveTheBar()
    else:
        handler = logging.StreamHandler(Stderr())
    handler.setFormatter(_Named())
    others = logging.WARNING if first else logging.ERROR
    logging.basicConfig(level=others, handlers=[handler], force=True)
    logging.getLogger("whet").setLevel(level if first else logging.ERROR)


class _Named(logging.Formatter):
    """The message alone; of a warning and an error the word first."""

    def format(self, record: logging.LogRecord) -> str:
        """The text of a record."""
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


class _AboveTheBar(logging.Handler):
    """Log lines in a terminal, above the bar where there is one, broken at words to its width."""

    def __init__(self) -> None:
        super().__init__()
        self.console = _console()

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a record."""
        from rich.text import Text

        try:
            style = "yellow" if record.levelno >= logging.WARNING else ""
            self.console.print(Text(wrap_text(self.format(record), self.console.width), style=style), soft_wrap=True)
        except Exception:  # as every handler: what can't be logged ends nothing
            self.handleError(record)


class Progress:
    """Shows how far a run is: step, a metric and its curve, others, tokens per second, time left.

    In a terminal a line that stays, with a bar and a curve where there is room; elsewhere one on stderr at most every
    30 seconds, and always the last. Nothing on other ranks than 0. It runs a thread in a terminal; a process that is
    forked meanwhile prints as if there were no bar.

    Args:
        total: steps of the run, None where the data decides.
        start: steps done before (a resumed run).
        description: words before the bar; None = show nothing.
        every_s: seconds between two lines.
        metric: what is shown first.
    """

    def __init__(
        self,
        total: int | None,
        *,
        start: int = 0,
        description: str | None = "Training",
        every_s: float = 30.0,
        metric: str = "reward",
    ) -> None:
        self.total, self.start, self.description, self.every_s = total, start, description, every_s
        self.metric = metric
        self._shown = _first_rank() and description is not None
        self._values: list[float] = []
        self._line = ""
        self._begun = self._said = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        self._begun = self._said = time.monotonic()
        if self._shown and _console().is_terminal:
            self._bar = _bar()
            options = {"total": self.total, "completed": self.start, "text": ""}
            self._task = self._bar.add_task(self.description, **options)
            self._bar.start()
            child = weakref.WeakMethod(self._leave_streams)
            os.register_at_fork(after_in_child=lambda: (leave := child()) and leave())
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        elif self._line:
            self._say()

    def update(self, step: int, *, value: float, tokens_per_s: float, shown: Mapping[str, str] | None = None) -> None:
        """Shows one more step.

        Args:
            step: steps done.
            value: the step's `metric`; NaN = none.
            tokens_per_s: that it was trained on.
            shown: what else, after it: name -> number, as it is to be read.
        """
        self._values.append(value)
        fields = [f"{self.metric} {value:.3g}", *(f"{name} {number}" for name, number in (shown or {}).items())]
        fields.append(f"{_short(tokens_per_s)} tok/s")
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=self._beside(fields))
        elif self._shown:
            self._line = join_fields([self._head(step), *fields, *self._left(step)])
            if time.monotonic() - self._said >= self.every_s:
                self._say()

    def _head(self, step: int) -> str:
        return f"{self.description} {step}" + ("" if self.total is None else f"/{self.total}")

    def _left(self, step: int) -> list[str]:
        """The time left, where the end is known."""
        if self.total is None or step <= self.start:
            return []
        seconds = round((time.monotonic() - self._begun) / (step - self.start) * (self.total - step))
        return [f"{timedelta(seconds=seconds)} left"]

    def _beside(self, fields: list[str]) -> str:
        """What stands beside the bar: the curve of the first of the fields, if the terminal is wide enough for it."""
        room = _console().width - _WITHOUT - len(str(self.description)) - len("  ".join(fields))
        room -= _BAR if _console().width >= _WIDE else 0
        curve = f" {sparkline(self._values, min(24, room))}" if room >= 6 else ""
        return "  ".join([fields[0] + curve, *fields[1:]])

    def _say(self) -> None:
        self._said = time.monotonic()
        stderr = Stderr()
        stderr.write(self._line + "\n")
        stderr.flush()
        self._line = ""

    def _leave_streams(self) -> None:
        """Takes the bar off a forked child's streams: a lock of it may be held by a thread that the child lacks."""
        if self._bar is None:
            return
        self._bar, self._shown = None, False
        for name in ("stdout", "stderr"):
            setattr(sys, name, getattr(vars(sys)[name], "rich_proxied_file", vars(sys)[name]))
        _console.cache_clear()
        for handler in logging.getLogger().handlers:
            if isinstance(handler, _AboveTheBar):
                handler.console = _console()


_WIDE, _BAR, _WITHOUT = 110, 20, 24
"""Columns of a terminal that has room for a bar, of the bar, and of what stands on the line besides words and bar."""


def _short(number: float) -> str:
    """A number in at most five characters.

    >>> _short(872.3), _short(5234.0), _short(1.5e6)
    ('872', '5.2k', '1.5M')
    """
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}" if number >= 10 * size else f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


def _bar() -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        MofNCompleteColumn(),
        *([BarColumn(_BAR - 1)] if _console().width >= _WIDE else []),
        TextColumn("{task.fields[text]}", markup=False),
        TimeRemainingColumn(),
        console=_console(),
        refresh_per_second=4,
        speed_estimate_period=600,  # steps may be slower than its usual 30 seconds
        redirect_stdout=True,
        redirect_stderr=True,
    )
