"""curves.png: the metrics of a run over its steps."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from whet.storage.files import finite_or_none, write_atomic
from whet.util.install import install_hint

__all__ = ["metric_series", "plot_curves"]

log = logging.getLogger(__name__)

_STYLE = {
    "figure.dpi": 160,
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#c9ced6",
    "axes.grid": True,
    "grid.color": "#eceff3",
    "axes.axisbelow": True,
    "xtick.color": "#68707c",
    "ytick.color": "#68707c",
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 10,
    "savefig.bbox": "tight",
}
_COLORS = {"train": "#2f6fde", "eval": "#e0603c"}
_PANELS: dict[str, tuple[str, ...]] = {
    "reward": ("reward",),
    "accuracy": ("accuracy", "eval_accuracy", "pass@1"),
    "completion tokens": ("completions/mean_length",),
    "share truncated at the limit": ("completions/clipped_ratio",),
    "KL to the reference": ("kl",),
    "entropy": ("entropy",),
    "gradient norm": ("grad_norm",),
}
"""Title -> the names that a metric may have; the first one found is drawn."""
_SUPERVISED: dict[str, tuple[str, ...]] = {
    "loss": ("loss",),
    "accuracy": ("rewards/accuracies", "accuracy", "mean_token_accuracy"),
    "margin": ("rewards/margins", "margin"),
    "entropy": ("entropy",),
    "gradient norm": ("grad_norm",),
}
"""The panels of a run without rewards."""
_SHARES = ("share truncated at the limit",)
"""Panels with an axis from 0 to 1."""
_FROM_0 = ("accuracy",)
"""Panels with an axis from 0, so that noise does not look like progress."""
_COLUMNS = 4
"""Panels in a row."""


def metric_series(rows: Sequence[Mapping[str, Any]], names: Sequence[str], mode: str) -> tuple[list[int], list[float]]:
    """Returns the steps and values of a metric.

    Args: rows: of metrics.jsonl. names: of the metric, in order of preference. mode: "train" or "eval".
    Returns: (steps, values) of the finite values; both empty if there are none.

    >>> metric_series([{"step": 1, "mode": "eval", "accuracy": 0.5}], ["accuracy"], "eval")
    ([1], [0.5])
    """
    for name in names:
        pairs: list[tuple[Any, float | None]]
        pairs = [(r.get("step"), finite_or_none(r.get(name))) for r in rows if r.get("mode") == mode]
        points = [(step, value) for step, value in pairs if finite_or_none(step) is not None and value is not None]
        if points:
            return [s for s, _ in points], [v for _, v in points]
    return [], []


def plot_curves(
    rows: Sequence[Mapping[str, Any]], path: str | Path, panels: Mapping[str, Sequence[str]] | None = None
) -> Path | None:
    """Draws a panel for each metric: training values faint under their moving mean, evaluations with dots.

    Args: rows: of metrics.jsonl. path: the PNG. panels: title -> the names that the metric may have; None = the usual
        panels of a run with rewards, or of one without. A panel without values is left out.
    Returns: the path; None, with the reason logged, if matplotlib is not installed or there is nothing to draw.
    Raises: CheckpointError: the file can't be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        log.info("no curves.png: matplotlib is not installed; %s", install_hint("plot"))
        return None
    if panels is None:
        panels = _PANELS if any("reward" in row for row in rows) else _SUPERVISED
    drawn = {
        title: {mode: found for mode in ("train", "eval") if (found := metric_series(rows, names, mode))[0]}
        for title, names in panels.items()
    }
    drawn = {title: curves for title, curves in drawn.items() if curves}
    if not drawn:
        log.info("no curves.png: no metric to draw in %d rows", len(rows))
        return None
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):  # pyright: ignore[reportArgumentType]
        across, down = min(_COLUMNS, len(drawn)), -(-len(drawn) // _COLUMNS)
        figure = Figure(figsize=(max(5.2, 3.8 * across), 2.6 * down), layout="constrained")
        FigureCanvasAgg(figure)
        places = [axes for row in figure.subplots(down, across, squeeze=False) for axes in row]
        for axes, (title, curves) in zip(places, drawn.items()):
            _panel(axes, title, curves)
        for axes in places[len(drawn) :]:
            axes.set_visible(False)
        path, drawing = Path(path), BytesIO()
        figure.savefig(drawing, format=path.suffix.removeprefix(".") or "png")
    write_atomic(path, drawing.getvalue())
    return path


def _panel(axes: Any, title: str, curves: Mapping[str, tuple[list[int], list[float]]]) -> None:
    for mode, (steps, values) in curves.items():
        color = _COLORS[mode]
        line = values
        if mode == "train" and len(values) > 8:
            axes.plot(steps, values, color=color, alpha=0.2, linewidth=0.8)
            line = _moving_mean(values)
        label = f"{mode} {line[-1]:.3g}"
        marker = "o" if mode == "eval" or len(values) == 1 else None
        axes.plot(steps, line, color=color, linewidth=1.8, marker=marker, markersize=3, label=label)
    if title in _SHARES:
        axes.set_ylim(-0.03, 1.03)
    elif title in _FROM_0:
        axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.set_xlabel("step", color="#68707c")
    axes.margins(x=0.02)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.legend(loc="best", frameon=False, labelcolor="linecolor", handlelength=0, fontsize=8)


def _moving_mean(values: Sequence[float]) -> list[float]:
    """Returns an exponential moving mean over about a tenth of the values, so that it follows a short run
    closely too.
    """
    new = min(0.6, 2 / (1 + len(values) / 10))
    mean, out = values[0], []
    for value in values:
        mean = (1 - new) * mean + new * value
        out.append(mean)
    return out
