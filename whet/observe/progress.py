"""Progress: a bar in a terminal, plain lines elsewhere, on rank 0 only. live_view.py has the display of a run."""

from __future__ import annotations

import functools
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from whet.util.log_lines import LevelFormatter
from whet.util.streams import Stderr
from whet.util.text_lines import join_fields, wrap_text

__all__ = ["Progress", "force_terminal", "format_short", "setup_logging", "sparkline", "terminal_console"]

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Returns a curve in one line of text.

    Args: values: in order; NaN is left out. width: of the text at most; a longer series is averaged in parts.
    Returns: one block character per part; the lowest block is the series' minimum, the highest its maximum.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▄█'
    """
    known = [v for v in values if math.isfinite(v)]
    if not known:
        return ""
    size = math.ceil(len(known) / width)
    means = [sum(part) / len(part) for part in (known[i : i + size] for i in range(0, len(known), size))]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(_BARS[min(7, int((v - low) / span * 7.999))] for v in means)


@functools.cache
def terminal_console() -> Any:
    """Returns the console that log handler and bar share, so that they don't break each other's lines."""
    from typing import cast

    from rich.console import Console

    return Console(file=cast(Any, Stderr()))


def _first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def setup_logging(level: int = logging.INFO) -> None:
    """Sends log lines to stderr, above the bar if there is one; ranks other than 0 log errors only.

    For programs, not for libraries: it replaces the root logger's handlers.

    Args: level: of whet's own lines on rank 0; other libraries log warnings.
    """
    first = _first_rank()
    if first and terminal_console().is_terminal:
        handler: logging.Handler = _AboveBarHandler()
    else:
        handler = logging.StreamHandler(Stderr())
    handler.setFormatter(LevelFormatter("%(message)s" if first else f"[rank {os.environ['RANK']}] %(message)s"))
    others = logging.WARNING if first else logging.ERROR
    logging.basicConfig(level=others, handlers=[handler], force=True)
    logging.getLogger("whet").setLevel(level if first else logging.ERROR)


def force_terminal() -> None:
    """Treats stderr as a terminal from here on: log lines go above the bar."""
    os.environ["TTY_COMPATIBLE"] = "1"  # which rich reads
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(getattr(h, "stream", None), Stderr)]:
        new = _AboveBarHandler()
        new.setFormatter(old.formatter)
        root.removeHandler(old)
        root.addHandler(new)


class _AboveBarHandler(logging.Handler):
    """Prints log lines in a terminal above the bar, wrapped at words to the terminal's width."""

    def __init__(self) -> None:
        super().__init__()
        self.console = terminal_console()

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a record."""
        from rich.text import Text

        try:
            style = "yellow" if record.levelno >= logging.WARNING else ""
            self.console.print(Text(wrap_text(self.format(record), self.console.width), style=style), soft_wrap=True)
        except Exception:  # as in every handler: a failed log line must not end the program
            self.handleError(record)


class Progress:
    """Shows the progress of a run: step, a metric with its curve, other metrics, tokens per second, time left.

    In a terminal it updates one line, with a bar and a curve if there is room. Elsewhere it prints a line to stderr at
    most every 30 seconds, always the last one, and the first one unless it came within a second; while a step takes
    longer, the line says what the run does. It prints nothing on ranks other than 0. It runs a thread; a process that
    is forked meanwhile prints as if there were no bar.

    Args:
        total: the number of steps of the run; None = unknown.
        start: the number of steps done before, in a resumed run.
        description: the words before the bar; None = show nothing.
        every_s: seconds between two lines.
        metric: the metric that is shown first.
        bar: show a bar in a terminal; False = lines there too.
        phase: returns what the run does now, "" = nothing of its own; None = not known.
    """

    def __init__(
        self,
        total: int | None,
        *,
        start: int = 0,
        description: str | None = "Training",
        every_s: float = 30.0,
        metric: str = "reward",
        bar: bool = True,
        phase: Callable[[], str] | None = None,
    ) -> None:
        self.total, self.start, self.description, self.every_s = total, start, description, every_s
        self.metric = metric
        self._enabled, self._has_bar = _first_rank() and description is not None, bar
        self._values: list[float] = []
        self._line = ""
        self._begun = self._printed = time.monotonic()
        self._bar: Any = None
        self._task: Any = None
        self._phase, self._step = phase, start
        self._shown_phase, self._phase_since = "", self._begun
        self._ended, self._writing = threading.Event(), threading.Lock()
        self._watcher: threading.Thread | None = None
        self._has_told_phase = False  # of this step: its metrics then come at once

    def start_clock(self) -> None:
        """Measures the time left from now on."""
        self._begun = self._printed = time.monotonic()

    def __enter__(self) -> Progress:
        self.start_clock()
        if self._enabled and self._has_bar and terminal_console().is_terminal:
            self._bar = self._make_bar()
            self._bar.start()
            method = weakref.WeakMethod(self._after_fork)
            os.register_at_fork(after_in_child=lambda: (after_fork := method()) and after_fork())
        elif self._enabled and self._phase is not None:
            self._watcher = threading.Thread(target=self._watch, name="whet-progress", daemon=True)
            self._watcher.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._watcher is not None:
            self._ended.set()
            self._watcher.join()
            self._watcher = None
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        elif self._line:
            self._print_line()

    def update(
        self,
        step: int,
        *,
        value: float,
        tokens_per_s: float,
        fields: Mapping[str, str] | None = None,
        row: Mapping[str, float] | None = None,
    ) -> None:
        """Shows one more step.

        Args:
            step: the number of finished steps.
            value: the step's `metric`; NaN = it has none.
            tokens_per_s: the tokens trained per second.
            fields: shown after the metric: name -> formatted number.
            row: all metrics of the step, for a LiveView.
        """
        self._values.append(value)
        self._step = step
        texts = [f"{self.metric} {value:.3g}", *(f"{name} {number}" for name, number in (fields or {}).items())]
        texts.append(f"{format_short(tokens_per_s)} tok/s")
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=self._with_curve(texts))
        elif self._enabled:
            self._line = join_fields([self._title(), *texts, *self._time_left(step)])
            wait = min(self.every_s, _FIRST_LINE_S) if self._printed == self._begun else self.every_s
            if self._has_told_phase or time.monotonic() - self._printed >= wait:
                self._print_line()
                self._has_told_phase = False

    def _make_bar(self) -> Any:
        bar = _make_bar()
        self._task = bar.add_task(str(self.description), total=self.total, completed=self.start, text="")
        return bar

    def _time_left(self, step: int) -> list[str]:
        """Returns the time left; [] if the number of steps is unknown."""
        if self.total is None or step <= self.start:
            return []
        seconds = round((time.monotonic() - self._begun) / (step - self.start) * (self.total - step))
        return [f"{timedelta(seconds=seconds)} left"]

    def _with_curve(self, texts: list[str]) -> str:
        """Returns the text after the bar, with a curve after the first metric if the terminal is wide enough."""
        room = terminal_console().width - _OTHER_COLUMNS - len(str(self.description)) - len("  ".join(texts))
        room -= _BAR_COLUMNS if terminal_console().width >= _MIN_WIDTH_FOR_BAR else 0
        curve = f" {sparkline(self._values, min(24, room))}" if room >= 6 else ""
        return "  ".join([texts[0] + curve, *texts[1:]])

    def _title(self) -> str:
        return f"{self.description} {self._step}" + ("" if self.total is None else f"/{self.total}")

    def _watch(self) -> None:
        """Prints a line where a step takes long."""
        while not self._ended.wait(self.every_s / 10):
            phase = self._describe_phase()
            if time.monotonic() - self._printed >= self.every_s:
                if not self._line:
                    self._line, self._has_told_phase = join_fields([self._title(), f"next step: {phase}"]), True
                self._print_line()

    def _describe_phase(self) -> str:
        """Returns what the run does, and for how long."""
        status, now = (self._phase() if self._phase else "") or "between steps", time.monotonic()
        phase, comma, counted = status.partition(",")
        if phase != self._shown_phase:
            self._shown_phase, self._phase_since = phase, now
        return f"{phase} {now - self._phase_since:.0f} s{comma}{counted}"

    def _print_line(self) -> None:
        with self._writing:
            line, self._line, self._printed = self._line, "", time.monotonic()
            if line:
                stderr = Stderr()
                stderr.write(line + "\n")
                stderr.flush()

    def _after_fork(self) -> None:
        """Detaches the bar from a forked child's streams: a thread that the child lacks may hold a lock of the bar."""
        if self._bar is None:
            return
        self._bar, self._enabled = None, False
        for name in ("stdout", "stderr"):
            setattr(sys, name, getattr(vars(sys)[name], "rich_proxied_file", vars(sys)[name]))
        terminal_console.cache_clear()
        for handler in logging.getLogger().handlers:
            if isinstance(handler, _AboveBarHandler):
                handler.console = terminal_console()


_FIRST_LINE_S = 1.0
"""The first step that took this long is shown at once: whoever started the run waits for it."""
_MIN_WIDTH_FOR_BAR, _BAR_COLUMNS, _OTHER_COLUMNS = 110, 20, 24
"""The width of a terminal with room for a bar, the width of the bar, and that of the rest besides words and bar."""


def format_short(number: float) -> str:
    """Formats a number in at most five characters.

    >>> format_short(872.3), format_short(5234.0), format_short(1.5e6)
    ('872', '5.2k', '1.5M')
    """
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}" if number >= 10 * size else f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


def _make_bar() -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        MofNCompleteColumn(),
        *([BarColumn(_BAR_COLUMNS - 1)] if terminal_console().width >= _MIN_WIDTH_FOR_BAR else []),
        TextColumn("{task.fields[text]}", markup=False),
        TimeRemainingColumn(),
        console=terminal_console(),
        refresh_per_second=4,
        speed_estimate_period=600,  # steps may be slower than the default of 30 seconds
        redirect_stdout=True,
        redirect_stderr=True,
    )
