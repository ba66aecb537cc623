"""curves.png: reward and accuracy over the run."""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from whet.observe.files import finite, write_atomic

__all__ = ["plot_curves", "series"]

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
    "reward": ("reward", "rewards/score/mean"),
    "accuracy": ("accuracy", "eval_accuracy", "pass@1"),
    "completion tokens": ("completions/mean_length",),
}
"""Title -> the names that a metric may have, the first one found being drawn."""


def series(rows: Sequence[Mapping[str, Any]], names: Sequence[str], mode: str) -> tuple[list[int], list[float]]:
    """The steps and values of a metric.

    Args: rows: of metrics.jsonl. names: that it may have, in order of preference. mode: "train" or "eval".
    Returns: (steps, values) where there is a finite value; both empty where there is none.

    >>> series([{"step": 1, "mode": "eval", "accuracy": 0.5}, {"step": 2, "mode": "train"}], ["accuracy"], "eval")
    ([1], [0.5])
    """
    for name in names:
        pairs: list[tuple[Any, float | None]]
        pairs = [(r.get("step"), finite(r.get(name))) for r in rows if r.get("mode") == mode]
        found = [(step, value) for step, value in pairs if finite(step) is not None and value is not None]
        if found:
            return [s for s, _ in found], [v for _, v in found]
    return [], []


def plot_curves(
    rows: Sequence[Mapping[str, Any]], path: str | Path, panels: Mapping[str, Sequence[str]] | None = None
) -> Path | None:
    """Draws a panel per metric: training faint under its moving mean, evaluation with dots, named at the line's end.

    Args: rows: of metrics.jsonl. path: the PNG. panels: title -> the names that the metric may have; None = reward,
        accuracy and completion length. A panel without values is left out.
    Returns: the path; None, with the reason logged, where matplotlib is not installed or nothing can be drawn.
    Raises: CheckpointError: the file can't be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        log.info("no curves.png: matplotlib is not installed; pip install 'whet[plot]'")
        return None
    drawn = {
        title: {mode: found for mode in ("train", "eval") if (found := series(rows, names, mode))[0]}
        for title, names in (panels or _PANELS).items()
    }
    drawn = {title: curves for title, curves in drawn.items() if curves}
    if not drawn:
        log.info("no curves.png: no metric to draw in %d rows", len(rows))
        return None
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):  # pyright: ignore[reportArgumentType]
        figure = Figure(figsize=(max(5.2, 3.8 * len(drawn)), 2.6), layout="constrained")
        FigureCanvasAgg(figure)
        for axes, (title, curves) in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn.items()):
            _panel(axes, title, curves)
        path, drawing = Path(path), BytesIO()
        figure.savefig(drawing, format=path.suffix.removeprefix(".") or "png")
    write_atomic(path, drawing.getvalue())
    return path


def _panel(axes: Any, title: str, curves: Mapping[str, tuple[list[int], list[float]]]) -> None:
    ends = []
    for mode, (steps, values) in curves.items():
        color = _COLORS[mode]
        line = values
        if mode == "train" and len(values) > 8:
            axes.plot(steps, values, color=color, alpha=0.2, linewidth=0.8)
            line = _moving_mean(values)
        axes.plot(steps, line, color=color, linewidth=1.8, marker="o" if mode == "eval" else None, markersize=3)
        ends.append((line[-1], steps[-1], f"{mode} {line[-1]:.3g}", color))
    axes.set_title(title)
    axes.set_xlabel("step", color="#68707c")
    axes.margins(x=0.02)
    low, high = axes.get_ylim()
    gap, last = (high - low) * 0.09, -math.inf
    for value, step, text, color in sorted(ends):
        place = max(value, last + gap)
        last = place
        axes.annotate(
            text,
            (step, place),
            xytext=(5, 0),
            textcoords="offset points",
            color=color,
            va="center",
            fontsize=8,
            annotation_clip=False,
        )


def _moving_mean(values: Sequence[float], new: float = 0.15) -> list[float]:
    mean, out = values[0], []
    for value in values:
        mean = (1 - new) * mean + new * value
        out.append(mean)
    return out
