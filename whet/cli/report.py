"""`whet report`, `whet watch` and `whet compare`: runs as a page, as a live page, and as a table."""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from whet.cli.output import print_text
from whet.config.base import partial_config_from_dict
from whet.config.monitoring import Band
from whet.config.report import CompareConfig, ReportConfig, WatchConfig
from whet.learners.symptoms import Symptom, find_no_signal, symptoms
from whet.report.compare import Comparison, compare_runs, write_comparison
from whet.report.report import write_report
from whet.report.server import LOOPBACK, LiveRuns, make_server

__all__ = ["compare", "find_warnings", "report", "watch"]


_WARN_WHEN = "trainer.warn_when."
_DEMO = Path("runs", "watch-demo")
_DEMO_SETTINGS = ("trainer.max_steps=40", "trainer.token_stats_every_n_steps=10", "algo.force_compute_kl=true")


def report(config: ReportConfig) -> Path:
    """Writes the report of runs, and prints where it is.

    Args: config: the whole configuration.
    Returns: the page.
    Raises: ConfigError: see report.report.write_report.
    """
    out = config.out or (Path(config.runs[0], "report") if len(config.runs) == 1 else "report")
    page = write_report(config.runs, out, max_mb=config.max_mb, find_warnings=find_warnings)
    print_text(f"{page}\n  open it in a browser: {page.resolve().as_uri()}")
    return page


def watch(config: WatchConfig) -> None:
    """Serves the page of runs until Ctrl-C, and prints its address.

    Args: config: the whole configuration.
    Raises: ConfigError: a folder is no run, or the address can't be bound.
    """
    runs = (_demo_run(),) if config.demo else config.runs
    token = None if config.host in LOOPBACK else secrets.token_urlsafe(24)
    with make_server(LiveRuns(runs, find_warnings), config.host, config.port, token) as server:
        name = f"[{config.host}]" if ":" in config.host else config.host
        query = f"?token={token}" if token else ""
        print_text(f"http://{name}:{server.server_address[1]}/{query}\n  Ctrl-C ends it; the runs go on")
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def _demo_run() -> Path:
    """Returns the folder of a finished small run, which is trained first if it is not there."""
    if not (_DEMO / "summary.json").is_file():
        from whet.cli.commands import grpo
        from whet.config import load_run
        from whet.util.package_files import recipe_path

        print_text(f"whet trains a small model in {_DEMO} first (half a minute)")
        resume = ["trainer.resume=latest"] if _DEMO.is_dir() else []
        grpo(load_run(["--config", str(recipe_path("demo")), f"trainer.run_dir={_DEMO}", *_DEMO_SETTINGS, *resume]))
    return _DEMO


def compare(config: CompareConfig) -> Comparison:
    """Prints runs beside each other: what differs in their settings and environments, and their metrics.

    Args: config: the whole configuration.
    Raises: ConfigError: see report.compare.compare_runs.
    """
    comparison = compare_runs(config.runs, metrics=config.metrics, last=config.last)
    parts = {
        "settings that differ": comparison.settings,
        "environment": comparison.environment,
        f"metrics, over the last {config.last} steps": {
            name: ["-" if cell is None else str(cell) for cell in cells] for name, cells in comparison.metrics.items()
        },
    }
    tables = {
        title: [[title, *comparison.heads], *([name, *values] for name, values in cells.items())] if cells else []
        for title, cells in parts.items()
    }
    lines = [*comparison.notes, ""] if comparison.notes else []
    for title, rows in tables.items():
        lines += [*_table(rows), ""] if rows else [f"{title}: none", ""]
    print_text("\n".join([*lines, f"curves: whet report {' '.join(config.runs)}"]))
    if config.html:
        page = write_comparison(comparison, tables, config.out)
        print_text(f"{page}\n  open it in a browser: {page.resolve().as_uri()}")
    return comparison


def _table(rows: list[list[str]]) -> list[str]:
    """Returns rows of cells as lines, with columns as wide as their widest cell, up to 40 characters."""
    cut = [[cell if len(cell) <= 40 else f"{cell[:37]}..." for cell in row] for row in rows]
    widths = [max(len(row[k]) for row in cut) for k in range(len(cut[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cut]


def find_warnings(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the symptoms of a run that its rows of metrics show, each once, at the step where it began.

    Args: data: of `report.run_data.run_data`. The bounds are those of the run's trainer.warn_when.
    Returns: `step`, `metric` (the symptom's name), `message`.
    """
    steps, columns = data["metrics"]["train"]["steps"], data["metrics"]["train"]["columns"]
    bands: dict[str, dict[str, Any]] = {}
    for key, value in data["config"].items():
        if key.startswith(_WARN_WHEN) and "." in key.removeprefix(_WARN_WHEN):
            metric, _, side = key.removeprefix(_WARN_WHEN).rpartition(".")
            bands.setdefault(metric, {})[side] = value
    known = {metric: partial_config_from_dict(Band, sides)[0] for metric, sides in bands.items()}
    rules = symptoms({metric: band for metric, band in known.items() if band is not None})
    warnings = []
    for name, symptom in {"no_signal": Symptom(find_no_signal, steps=3), **rules}.items():
        in_a_row = 0
        for i, step in enumerate(steps):
            row = {metric: values[i] for metric, values in columns.items() if values[i] is not None}
            finding = symptom.find(row)
            in_a_row = in_a_row + 1 if finding else 0
            if finding and in_a_row == symptom.steps:
                warnings.append({"step": step, "metric": name, "message": finding.message})
                break
    return sorted(warnings, key=lambda warning: warning["step"])
