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
from typing import Any

from whet.util.streams import Stderr

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
        from rich.logging import RichHandler

        handler: logging.Handler = RichHandler(console=_console(), show_path=False, markup=False)
    else:
        handler = logging.StreamHandler(Stderr())
    others = logging.WARNING if first else logging.ERROR
    logging.basicConfig(level=others, handlers=[handler], format="%(message)s", force=True)
    logging.getLogger("whet").setLevel(level if first else logging.ERROR)


class Progress:
    """Shows how far a run is: step, a metric and its curve, tokens per second, time left.

    In a terminal a bar; elsewhere a line on stderr at most every 30 seconds, and always the last. Nothing on other
    ranks than 0. It runs a thread in a terminal; a process that is forked meanwhile prints as if there were no bar.

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
            fields = {"metric": self.metric, "value": "-", "curve": "", "speed": "-"}
            self._task = self._bar.add_task(self.description, total=self.total, completed=self.start, **fields)
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

    def update(self, step: int, *, value: float, tokens_per_s: float, shown: Mapping[str, float] | None = None) -> None:
        """Shows one more step.

        Args:
            step: steps done.
            value: the step's `metric`; NaN = none.
            tokens_per_s: that it was trained on.
            shown: further metrics, after it.
        """
        self._values.append(value)
        more = "".join(f"  {name} {number:.4g}" for name, number in (shown or {}).items())
        if self._bar is not None:
            fields = {
                "value": f"{value:.4g}",
                "curve": sparkline(self._values) + more,
                "speed": f"{tokens_per_s:,.0f}",
            }
            self._bar.update(self._task, completed=step, **fields)
        elif self._shown:
            self._line = self._text(step, value, tokens_per_s, more)
            if time.monotonic() - self._said >= self.every_s:
                self._say()

    def _text(self, step: int, value: float, tokens_per_s: float, more: str) -> str:
        of = "" if self.total is None else f"/{self.total}"
        line = f"{self.description}: step {step}{of}  {self.metric} {value:.4g}{more}  {tokens_per_s:,.0f} tokens/s"
        if self.total is None or step <= self.start:
            return line
        left = (time.monotonic() - self._begun) / (step - self.start) * (self.total - step)
        return f"{line}  {left:.0f} s left"

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
        from rich.logging import RichHandler

        for name in ("stdout", "stderr"):
            setattr(sys, name, getattr(vars(sys)[name], "rich_proxied_file", vars(sys)[name]))
        _console.cache_clear()
        for handler in logging.getLogger().handlers:
            if isinstance(handler, RichHandler):
                handler.console = _console()


def _bar() -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        MofNCompleteColumn(),
        BarColumn(24),
        TextColumn("{task.fields[metric]} {task.fields[value]} {task.fields[curve]}", markup=False),
        TextColumn("{task.fields[speed]} tokens/s", markup=False),
        TimeRemainingColumn(),
        console=_console(),
        refresh_per_second=4,
        speed_estimate_period=600,  # steps may be slower than its usual 30 seconds
        redirect_stdout=True,
        redirect_stderr=True,
    )
