"""A run as HTML for notebooks: a table of its last metrics, and its curves."""

from __future__ import annotations

import base64
import html
import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whet.observe.plots import plot_curves
from whet.storage.files import finite_or_none

__all__ = ["run_html", "table_html"]

SHOWN = (
    "reward",
    "accuracy",
    "loss",
    "rewards/accuracies",
    "completions/mean_length",
    "completions/clipped_ratio",
    "kl",
)
"""The metrics of the table, if the run has them."""

Row = Mapping[str, Any]


def run_html(title: str, train: Sequence[Row], evaluations: Sequence[Row]) -> str:
    """Returns a run as HTML.

    Args: title: above the table. train, evaluations: its rows.

    >>> "<td>0.5</td>" in run_html("1 step", [{"reward": 0.5}], [])
    True
    """
    columns = {"first step": train[:1], "last step": train[-1:]}
    columns |= {"first evaluation": evaluations[:1], "last evaluation": evaluations[-1:]}
    last_rows = {name: rows[0] for name, rows in columns.items() if rows}
    names = [name for name in SHOWN if any(finite_or_none(row.get(name)) is not None for row in last_rows.values())]
    cells = [[name, *(_number(row.get(name)) for row in last_rows.values())] for name in names]
    return table_html(title, [["", *last_rows], *cells]) + _curves([*train, *evaluations])


def table_html(title: str, cells: Sequence[Sequence[str]]) -> str:
    """Returns a table as HTML. Args: title: above the table. cells: the rows, with the column heads first."""
    head, *rows = [[html.escape(cell) for cell in row] for row in cells]
    rows_html = "<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"
    for first, *others in rows:
        rows_html += f"<tr><th>{first}</th>" + "".join(f"<td>{cell}</td>" for cell in others) + "</tr>"
    return f"<p><b>{html.escape(title)}</b></p><table>{rows_html}</table>"


def _number(value: Any) -> str:
    known = finite_or_none(value)
    return "" if known is None else f"{known:.4g}"


def _curves(rows: Sequence[Row]) -> str:
    """Returns the curves as an image; "" if matplotlib is not installed or there is nothing to draw."""
    if len(rows) < 2 or importlib.util.find_spec("matplotlib") is None:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        path = plot_curves(rows, Path(folder) / "curves.png")
        if path is None:
            return ""
        image = base64.b64encode(path.read_bytes()).decode()
        return f'<img style="max-width:100%" src="data:image/png;base64,{image}">'
