"""Reads what the report shows of a run folder: metrics, configuration, versions and a list of completions.

It takes nothing but files, so a run can be shown while it goes on, on another machine, and without its model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.config.loader import flatten
from whet.errors import ConfigError
from whet.storage.files import finite_or_none
from whet.storage.run_folder import read_metrics

__all__ = ["CompletionFile", "completion_files", "metric_columns", "run_data"]

_COMPLETIONS = re.compile(r"(train|eval)-([0-9]+)\.parquet", re.ASCII)
_ROW_KEYS = ("step", "mode", "version")
"""Keys of a row of metrics.jsonl that are no metrics."""


@dataclass(frozen=True)
class CompletionFile:
    """A file of completions in a run folder."""

    path: Path
    mode: str
    """"train" or "eval"."""
    step: int

    @property
    def key(self) -> str:
        """The name of the file without its ending: train-000012."""
        return self.path.stem

    def entry(self, run: int, se: float | None) -> dict[str, Any]:
        """Returns what the page lists. Args: run: the number of the run there. se: standard error of an evaluation's
        reward.
        """
        import pyarrow.parquet as pq

        count = pq.read_metadata(self.path).num_rows
        return {"mode": self.mode, "step": self.step, "key": f"{run}-{self.key}", "n": count, "se": se}


def run_data(folder: str | Path) -> dict[str, Any]:
    """Returns what the report's page needs of a run, as JSON-able values; completions come apart, a file a step.

    Args: folder: a run folder, of a finished run or of one that goes on.
    Returns: name, path, config (dotted key -> value), environment (dotted key -> value), metrics (mode -> `steps` and
        `columns`, see `metric_columns`).
    Raises: ConfigError: the folder is not there, or holds no metrics.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give the folder of a run, such as runs/a")
    rows = read_metrics(folder)
    if not rows:
        raise ConfigError(f"{folder} has no metrics.jsonl with rows; name a folder that a run has written")
    return {
        "name": folder.resolve().name,
        "path": str(folder),
        "config": _settings(folder / "config.yaml"),
        "environment": _settings(folder / "environment.json"),
        "metrics": {mode: metric_columns([r for r in rows if r["mode"] == mode]) for mode in ("train", "eval")},
    }


def metric_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns rows of metrics as columns of numbers with six digits; null where a row lacks a metric or it is not
    finite.

    >>> metric_columns([{"step": 1, "mode": "train", "reward": 0.123456789}, {"step": 2, "mode": "train"}])
    {'steps': [1, 2], 'columns': {'reward': [0.123457, None]}}
    """
    names = dict.fromkeys(name for row in rows for name in row if name not in _ROW_KEYS)
    columns = {name: [_rounded(row.get(name)) for row in rows] for name in names}
    return {
        "steps": [int(row["step"]) for row in rows],
        "columns": {name: values for name, values in columns.items() if any(v is not None for v in values)},
    }


def completion_files(folder: str | Path) -> list[CompletionFile]:
    """Returns the files of completions of a run folder, by step.

    >>> completion_files("nowhere")
    []
    """
    files = [
        CompletionFile(path, match[1], int(match[2]))
        for path in Path(folder, "completions").glob("*.parquet")
        if (match := _COMPLETIONS.fullmatch(path.name))
    ]
    return sorted(files, key=lambda f: (f.step, f.mode))


def _settings(path: Path) -> dict[str, Any]:
    """Returns the values of a YAML or JSON file by their dotted keys; empty mappings are left out."""
    return {key: value for key, value in flatten(_read(path)).items() if value != {}}


def _read(path: Path) -> Any:
    """Returns a YAML or JSON file; {} if it is missing or damaged, since a report shows what there is."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError):
        return {}


def _rounded(value: Any) -> float | int | None:
    number = finite_or_none(value)
    if number is None or number == 0:
        return number
    digits = 5 - math.floor(math.log10(abs(number)))
    number = round(number, digits)
    return int(number) if number == int(number) and abs(number) < 2**53 else number
