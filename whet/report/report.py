"""Writes the report: a page, and beside it the data, which the page loads as scripts.

A page that is opened from disk may not fetch files, but it may load scripts: so each file of completions becomes an
index, loaded when its step is looked at, and parts, loaded when their completions are drawn or searched.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from whet.errors import CheckpointError, ConfigError
from whet.evaluation.estimators import estimate
from whet.report.completions import load_token_texts, prompt_means, step_scripts
from whet.report.run_data import CompletionFile, completion_files, run_data

__all__ = ["keep_within", "page_text", "script_text", "standard_error", "write_report"]

log = logging.getLogger("whet")

_PAGE = Path(__file__).with_name("page")
_GROWTH = 5
"""Bytes of a script for each byte of its compressed parquet file, measured on runs with short completions."""

Warnings = Callable[[dict[str, Any]], list[dict[str, Any]]]


def write_report(
    runs: Sequence[str | Path], out: str | Path, *, max_mb: float = 200.0, find_warnings: Warnings | None = None
) -> Path:
    """Writes out/index.html and its data.

    Args:
        runs: run folders, drawn over each other; the first one is in front.
        out: folder of the report. Files of an earlier report in it are replaced.
        max_mb: megabytes of completions, about. Beyond it, steps are left out evenly, and the page says so.
        find_warnings: a run's data (see `run_data`) -> its warnings: `step`, `metric`, `message`.
    Returns: the page.
    Raises: ConfigError: a folder is no run, two runs are the same, or `out` can't be written.
    """
    folders = [Path(run).resolve() for run in runs]
    if len(set(folders)) < len(folders):
        raise ConfigError(f"a run is named twice: {', '.join(map(str, runs))}; name each once")
    shown = [run_data(run) for run in runs]
    out = Path(out)
    try:
        (out / "data").mkdir(parents=True, exist_ok=True)
        for old in (out / "data").glob("[0-9]*-[te]*-[0-9]*.js"):
            old.unlink()
        for i, (run, data) in enumerate(zip(runs, shown, strict=True)):
            data["warnings"] = find_warnings(data) if find_warnings is not None else []
            files = completion_files(run)
            kept = keep_within(files, [f.path.stat().st_size for f in files], max_mb * 1e6 / _GROWTH / len(folders))
            data["left_out"] = len(files) - len(kept)
            data["completions"] = _write_chunks(out, i, run, data, kept)
        _write(out / "data" / "runs.js", script_text("runs", shown))
        _write(out / "index.html", page_text(" · ".join(data["name"] for data in shown)))
    except OSError as error:
        raise ConfigError(f"{out}: the report can't be written: {error.strerror or error}; set out=FOLDER") from error
    return out / "index.html"


def page_text(title: str, *, live: bool = False) -> str:
    """Returns the page with its style and its program inside, so that it is one file beside its data.

    Args: title: in the window's title. live: the page asks its server for new rows.
    """
    import html

    text = (_PAGE / "index.html").read_text(encoding="utf-8")
    for name in ("page.css", "page.js", "charts.js", "completions.js"):
        text = text.replace(f"/*{name}*/", (_PAGE / name).read_text(encoding="utf-8"))
    text = text.replace("whet.start(false)", f"whet.start({'true' if live else 'false'})")
    return text.replace("<title></title>", f"<title>{html.escape(title)} · whet</title>")


def keep_within(files: Sequence[CompletionFile], sizes: Sequence[int], limit: float) -> list[CompletionFile]:
    """Returns the files of completions that a report shows: all if they fit, else every k-th of each mode, with the
    last one.

    Args: files: by step. sizes: bytes of each. limit: bytes of those that are kept, about; evaluations, which are few,
        get up to half of it before training does.

    >>> files = [CompletionFile(Path(f"train-{i}.parquet"), "train", i) for i in range(1, 7)]
    >>> [f.step for f in keep_within(files, [10] * 6, 30)]
    [2, 4, 6]
    """
    kept: list[CompletionFile] = []
    left = limit / 2
    for mode in ("eval", "train"):
        own = [(f, size) for f, size in zip(files, sizes, strict=True) if f.mode == mode][::-1]
        every = max(1, math.ceil(sum(size for _, size in own) / max(1.0, left)))
        kept += [f for f, _ in own[::every]]
        left = limit - sum(size for _, size in own[::every])
    return sorted(kept, key=lambda f: (f.step, f.mode))


def standard_error(path: Path) -> float | None:
    """Returns the standard error of the mean reward of a file of completions, clustered by prompt; None below two
    prompts.

    Raises: CheckpointError: the file can't be read.
    """
    error = estimate(prompt_means(path)).se
    return None if error != error else float(f"{error:.4g}")


def _write_chunks(
    out: Path, i: int, run: str | Path, data: dict[str, Any], files: Sequence[CompletionFile]
) -> list[dict[str, Any]]:
    """Writes the completions of run i, and returns what the page lists: one entry a file."""
    from rich.console import Console
    from rich.progress import track

    token_texts = load_token_texts(run, data["config"].get("actor.model"))
    listed = []
    console = Console(stderr=True)
    for file in track(files, data["name"], console=console, transient=True, disable=not console.is_terminal):
        try:
            for suffix, text in step_scripts(file.path, token_texts):
                key = f"{i}-{file.key}{suffix}"
                _write(out / "data" / f"{key}.js", script_text(key, text))
            listed.append(file.entry(i, standard_error(file.path) if file.mode == "eval" else None))
        except CheckpointError as error:
            log.warning("%s; the report leaves it out", error)
    return listed


def script_text(key: str, value: Any) -> str:
    """Returns a script that hands a value to the page, as a text. Args: key: its name there. value: JSON-able, or a
    text.
    """
    if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    text = value.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"whet.receive({json.dumps(key)},'{text}')\n"


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", errors="replace")
