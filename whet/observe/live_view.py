"""A run as it goes on, updated in place: step, phase, time left, and metrics with their curves.

LiveView is a few lines in a terminal, NotebookView a table below a notebook's cell.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

from whet.errors import ConfigError
from whet.observe.notebook import table_html
from whet.observe.progress import Progress, force_terminal, format_short, sparkline, terminal_console

__all__ = ["LiveView", "NotebookView", "View", "make_progress"]

View = Literal["auto", "rich", "notebook", "lines"]
CELLS = (
    ("KL", ("kl",)),
    ("KL sampler", ("sampling/kl_to_inference",)),
    ("entropy", ("entropy/token_mean", "entropy")),
    ("grad norm", ("grad_norm",)),
    ("length", ("completions/mean_length",)),
    ("truncated", ("completions/clipped_ratio",)),
    ("accuracy", ("rewards/accuracies", "accuracy", "mean_token_accuracy")),
    ("tokens/s", ("perf/tokens_per_second",)),
    ("memory", ("memory/peak_allocated", "perf/peak_memory")),
)
"""The metrics beside the main one: the name that is shown, and metrics of a run; the first that it has is taken."""
_NAME, _VALUE, _GAP = 10, 8, 2
_REDRAW_S = 0.5
"""Seconds between two drawings of a NotebookView."""


def make_progress(view: View, total: int | None, **options: Any) -> Progress:
    """Returns the display of a run: a LiveView, a NotebookView, or plain lines.

    Args:
        view: "rich" = a LiveView in any case; "notebook" = a NotebookView; "lines" = lines; "auto" = a LiveView if
            stderr is a terminal, a NotebookView in a Jupyter kernel, else lines.
        total, options: as of Progress.
    Raises: ConfigError: view="notebook" where there is no notebook.
    """
    if view == "notebook" and not _in_notebook():
        raise ConfigError("trainer.view=notebook needs a Jupyter kernel; set trainer.view=auto")
    if view == "notebook" or (view == "auto" and _in_notebook()):
        return NotebookView(total, **options)
    if view == "rich":
        force_terminal()
    if view == "lines" or not terminal_console().is_terminal:
        return Progress(total, bar=False, **options)
    return LiveView(total, **options)


class LiveView(Progress):
    """Shows a run in a terminal.

    Args: total, options: as of Progress.
    """

    def __init__(self, total: int | None, **options: Any) -> None:
        super().__init__(total, **options)
        self._series: dict[str, list[float]] = {}
        self._drawn: tuple[int, int, list[str]] = (-1, 0, [])
        """The step and the width of the last drawing of the metrics, and its lines."""

    def update(
        self,
        step: int,
        *,
        value: float,
        tokens_per_s: float,
        fields: Mapping[str, str] | None = None,
        row: Mapping[str, float] | None = None,
    ) -> None:
        """Shows one more step. Args: as of Progress.update; the metrics come from `row`."""
        known, shown_metrics = row or {}, [(self.metric, value)]
        for name, metrics in CELLS:
            shown_metrics += [(name, known[m]) for m in metrics if m in known][:1]
        for name, number in shown_metrics:
            self._series.setdefault(name, []).append(number)
        self._step = step

    def _make_bar(self) -> Any:
        from rich.live import Live

        return Live(get_renderable=self._render, console=terminal_console(), refresh_per_second=4)

    def _render(self) -> Any:
        from rich.text import Text

        width = terminal_console().width
        if self._drawn[:2] != (self._step, width):
            self._drawn = (self._step, width, self._cells(width))
        return Text("\n".join([self._head(width), *self._drawn[2]]), no_wrap=True, overflow="crop")

    def _head(self, width: int) -> str:
        """Step, phase and time."""
        now = time.monotonic()
        title = self._title()
        spent = timedelta(seconds=round(now - self._begun))
        texts = [self._describe_phase(), f"{spent} spent", *self._time_left(self._step)]
        if len("  ".join([title, *texts])) > width:
            del texts[1]
        tail = "  ".join(texts)
        room = width - len(title) - len(tail) - 2 * _GAP
        if self.total is None or room < 8:
            return f"{title}  {tail}"
        done = round(min(1.0, self._step / max(1, self.total)) * room)
        return f"{title}  {'━' * done}{'─' * (room - done)}  {tail}"

    def _cells(self, width: int) -> list[str]:
        """Returns the metrics, in two columns where the terminal is wide enough."""
        columns = 2 if width >= 70 else 1
        size = (width - _GAP * (columns - 1)) // columns
        curve = max(0, size - _NAME - _VALUE - 2)
        cells = [
            f"{name:<{_NAME}.{_NAME}} {_number(name, values[-1]):>{_VALUE}} {sparkline(values, curve) if curve else ''}"
            for name, values in list(self._series.items())
        ]
        rows = (cells[i : i + columns] for i in range(0, len(cells), columns))
        return [(" " * _GAP).join(f"{cell:<{size}.{size}}" for cell in row).rstrip() for row in rows]


class NotebookView(LiveView):
    """Shows a run below a notebook's cell: a table of metrics with their curves.

    Args: total, phase, options: as of LiveView.
    """

    def __enter__(self) -> NotebookView:
        from IPython.display import HTML, display  # pyright: ignore[reportMissingImports]

        self._begun = time.monotonic()
        self._drawn_at = self._begun
        self._handle = display(HTML(self._table()), display_id=True) if self._enabled else None
        return self

    def __exit__(self, *exc: object) -> None:
        self._redraw(ended=True)

    def update(self, step: int, **shown: Any) -> None:
        """Shows one more step. Args: as of Progress.update."""
        super().update(step, **shown)
        if time.monotonic() - self._drawn_at >= _REDRAW_S:
            self._redraw()

    def _redraw(self, *, ended: bool = False) -> None:
        from IPython.display import HTML  # pyright: ignore[reportMissingImports]

        self._drawn_at = time.monotonic()
        if self._handle is not None:
            self._handle.update(HTML(self._table(ended=ended)))

    def _table(self, *, ended: bool = False) -> str:
        title = self._title()
        texts = [title, f"{timedelta(seconds=round(time.monotonic() - self._begun))} spent"]
        rows = [[name, _number(name, values[-1]), sparkline(values, 30)] for name, values in self._series.items()]
        return table_html("  ".join(texts if ended else [*texts, *self._time_left(self._step)]), [["", "", ""], *rows])


def _in_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook. It imports nothing: a kernel has IPython loaded."""
    python = sys.modules.get("IPython")
    return python is not None and getattr(python.get_ipython(), "kernel", None) is not None


def _number(name: str, value: float) -> str:
    """Formats a metric.

    >>> _number("memory", 2.5e9), _number("truncated", 0.25), _number("KL", 0.0123)
    ('2.5 GB', '25%', '0.0123')
    """
    if name == "memory":
        return f"{value / 1e9:.1f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"
    if name == "truncated":
        return f"{value:.0%}"
    return format_short(value) if name in ("tokens/s", "length") else f"{value:.3g}"
