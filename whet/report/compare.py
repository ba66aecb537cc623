"""Compares runs: the settings and versions in which they differ, and their metrics, with the spread over seeds.

Runs whose settings differ in nothing but the seed and the paths of the run are one group, a column of the tables.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.errors import ConfigError
from whet.report.run_data import run_data

__all__ = ["Comparison", "Spread", "compare_runs", "write_comparison"]

_OF_ONE_RUN = ("trainer.seed", "trainer.run_dir", "trainer.pbar_description", "rollout.seed")
"""Settings that runs of one group may have each for itself."""
_OF_ONE_START = ("run", "name", "threads", "devices")
"""Keys of environment.json, and beginnings of such, that tell nothing about a result."""
METRICS = (
    "eval reward",
    "eval accuracy",
    "eval loss",
    "reward",
    "loss",
    "completions/mean_length",
    "completions/clipped_ratio",
    "turns/mean",
    "turns/forks",
    "turns/failed",
    "kl",
    "entropy",
    "grad_norm",
    "perf/tokens_per_second",
    "time/step",
)
"""The metrics that are compared if none are named; "eval" before a name = of the last evaluation."""


@dataclass(frozen=True)
class Spread:
    """A metric of a group of runs.

    >>> str(Spread.from_values([0.5, 0.7])), str(Spread.from_values([0.5]))
    ('0.6 ± 0.141 (2)', '0.5')
    """

    mean: float
    deviation: float
    """The sample's standard deviation over the runs; NaN for a single one."""
    runs: int

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Spread:
        """Returns the spread of values, one for each run."""
        mean = math.fsum(values) / len(values)
        if len(values) == 1:
            return cls(mean, math.nan, 1)
        squares = math.fsum((value - mean) ** 2 for value in values)
        return cls(mean, math.sqrt(squares / (len(values) - 1)), len(values))

    def __str__(self) -> str:
        text = f"{self.mean:.4g}"
        return text if self.runs == 1 else f"{text} ± {self.deviation:.3g} ({self.runs})"


@dataclass(frozen=True)
class Comparison:
    """Runs beside each other; each list of cells has one for each group."""

    groups: tuple[tuple[str, ...], ...]
    """The names of the runs of each group."""
    settings: dict[str, list[str]]
    """Setting that differs -> its values; "-" where a group has none."""
    environment: dict[str, list[str]]
    """The same of environment.json."""
    metrics: dict[str, list[Spread | None]]
    """Metric -> its mean over the last steps, and its spread over the runs; None where a group has none."""

    @property
    def heads(self) -> list[str]:
        """The heads of the columns: the names of a group's runs, but of four or more the first alone.

        >>> Comparison((("a", "b"), ("c", "d", "e", "f")), {}, {}, {}).heads
        ['a, b', 'c and 3 more']
        """
        return [", ".join(g) if len(g) < 4 else f"{g[0]} and {len(g) - 1} more" for g in self.groups]

    @property
    def notes(self) -> list[str]:
        """What the columns of several runs show, a sentence each."""
        several = [", ".join(group) for group in self.groups if len(group) > 1]
        return [f"{names} differ only in the seed: mean ± standard deviation (runs)" for names in several]


def compare_runs(runs: Sequence[str | Path], *, metrics: Sequence[str] = (), last: int = 10) -> Comparison:
    """Compares run folders.

    Args:
        runs: two folders or more.
        metrics: names of metrics.jsonl, those of evaluations after "eval "; empty = METRICS.
        last: steps over which a metric of training is averaged. One of evaluation is of the last evaluation.
    Raises: ConfigError: a folder that is no run, or a metric that no run has.
    """
    shown = [run_data(run) for run in runs]
    for data in shown:
        data["config"] = _without_run_dir(data["config"])
    groups: dict[str, list[dict[str, Any]]] = {}
    for data in shown:
        same = {key: value for key, value in data["config"].items() if key not in _OF_ONE_RUN}
        groups.setdefault(repr(sorted(same.items(), key=lambda pair: pair[0])), []).append(data)
    columns = list(groups.values())
    table = {name: [_spread(group, name, last) for group in columns] for name in metrics or METRICS}
    if missing := [name for name in metrics if not any(table[name])]:
        known = sorted({name for data in shown for name in data["metrics"]["train"]["columns"]})
        raise ConfigError(f"no run has the metric {missing[0]!r}; training has {', '.join(known)}")
    return Comparison(
        groups=tuple(tuple(data["name"] for data in group) for group in columns),
        settings=_differences([group[0]["config"] for group in columns], _OF_ONE_RUN),
        environment=_differences([group[0]["environment"] for group in columns], _OF_ONE_START),
        metrics={name: cells for name, cells in table.items() if any(cells)},
    )


def _without_run_dir(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings; a path in the run's own folder, such as the demo's starting model, is written as
    RUN_DIR/...
    """
    folder = str(config.get("trainer.run_dir") or "").strip("/")
    of_value = lambda value: f"/{value}".partition(f"/{folder}/")[2] if folder and isinstance(value, str) else ""
    return {key: f"RUN_DIR/{rest}" if (rest := of_value(value)) else value for key, value in config.items()}


def write_comparison(comparison: Comparison, tables: Mapping[str, Sequence[Sequence[str]]], out: str) -> Path:
    """Writes tables of a comparison as a page that opens from the disk.

    Args: comparison: has the heads and the notes. tables: title -> rows, with the heads first; no rows = no difference.
        out: the file.
    Returns: the page.
    Raises: ConfigError: the file can't be written.
    """
    cells_of = lambda kind, shape, cells: "".join(f"<{kind}{shape}>{html.escape(c)}</{kind}>" for c in cells)
    row = lambda kind, shape, cells: f"<tr><th>{html.escape(cells[0])}</th>{cells_of(kind, shape, cells[1:])}</tr>"
    names = html.escape(" · ".join(comparison.heads))
    parts = [f"<p>{html.escape(note)}</p>" for note in comparison.notes]
    for title, rows in tables.items():
        parts.append(f"<h2>{html.escape(title)}</h2>")
        shape = ' class="n"' if title.startswith("metrics") else ""  # numbers, below each other
        lines = [row("td" if i else "th", shape, cells if i else ["", *cells[1:]]) for i, cells in enumerate(rows)]
        parts.append(f'<div class="scroll"><table>{"".join(lines)}</table></div>' if lines else "<p>no difference</p>")
    style = (Path(__file__).with_name("page") / "page.css").read_text(encoding="utf-8")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{names}</title>'
    body = f'<header class="top"><h1>{names}</h1></header><main>{"".join(parts)}</main>'
    text = f'<!doctype html>\n<html lang="en">{head}<style>{style}</style>{body}</html>\n'
    try:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{out}: the page can't be written: {error.strerror or error}; set out=FILE") from error
    return Path(out)


def _spread(group: Sequence[dict[str, Any]], name: str, last: int) -> Spread | None:
    mode, count = ("eval", 1) if name.startswith("eval ") else ("train", last)
    values = []
    for data in group:
        column = data["metrics"][mode]["columns"].get(name.removeprefix("eval "), [])
        if known := [value for value in column[-count:] if value is not None]:
            values.append(math.fsum(known) / len(known))
    return Spread.from_values(values) if values else None


def _differences(trees: Sequence[dict[str, Any]], ignored: Sequence[str]) -> dict[str, list[str]]:
    names = dict.fromkeys(name for tree in trees for name in tree if name.partition(".")[0] not in ignored)
    text = lambda value: value if isinstance(value, str) else repr(value)
    rows = {name: [text(tree.get(name, "-")) for tree in trees] for name in names if name not in ignored}
    return {name: cells for name, cells in rows.items() if len(set(cells)) > 1}
