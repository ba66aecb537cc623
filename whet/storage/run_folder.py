"""The run folder: complete without any logger, and readable after a kill at any moment.

    config.yaml  config_full.yaml  environment.json  metrics.jsonl  summary.json  .lock
    completions/{train,eval}-000012.parquet

metrics.jsonl grows by a line per step and mode, {step, mode, version, name: value}; it is repaired when a run is
resumed, and kept as it was where lines of it were damaged. Every other file is written whole or not at all.
What lies here may have been written by anybody: it is checked, and no link of a fixed name is followed. Checkpoints
lie here too, but are not this module's.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.config import dump
from whet.config.minimal_config import minimal_config
from whet.config.resume import FULL_CONFIG_FILE
from whet.errors import CheckpointError, ConfigError
from whet.storage.completions import write_completions
from whet.storage.files import (
    create_file,
    is_temporary,
    open_for_append,
    read_json,
    remove_path,
    to_json,
    unused_path,
    write_atomic,
    write_error,
)
from whet.storage.folder_lock import FolderLock

__all__ = ["RunFolder", "check_no_run", "has_steps", "read_metrics"]

log = logging.getLogger("whet")

_COMPLETIONS = re.compile(r"(?:train|eval)-([0-9]+)\.parquet", re.ASCII)


class RunFolder:
    """One run's folder, locked while it is open. Made on rank 0 alone.

    Args:
        path: made if absent.
        resume_step: None = a new run, which the folder must not hold one of; else what was written after this step is
            removed, and the run continues there; from 0 or less, where no step is kept, what an older run wrote of its
            steps is moved aside instead. A function that says the step is called once the folder is locked, so that it
            may read and change what lies there.
    Raises: ConfigError: the path is empty or can't be written, another process has the folder open, or a new run was
        asked for where one lies. CheckpointError: what lies there can't be read or repaired.

    Example: with RunFolder("runs/a") as folder: folder.log(step=1, mode="train", version=0, values={"reward": 0.5})
    """

    def __init__(self, path: str | Path, *, resume_step: int | Callable[[], int] | None = None) -> None:
        if not str(path).strip():
            raise ConfigError(f"the run folder's name is empty, {str(path)!r}; give trainer.run_dir=runs/a or the like")
        self.path = Path(path).absolute()  # a reward function may change the working folder
        parts = (self.path, self.path / "completions", self.path / "metrics.jsonl")
        self._made = [part for part in parts if not os.path.lexists(part)]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "completions").mkdir(exist_ok=True)
            self._lock = FolderLock(self.path, "trainer.run_dir")
        except OSError as error:
            raise ConfigError(
                f"{path} can't be written: {error}; fix its permissions, or set another trainer.run_dir"
            ) from error
        try:
            if resume_step is None:
                self._refuse_old_run()
                step = None
            else:
                step = resume_step() if callable(resume_step) else resume_step
            try:
                self._tidy()
                if step is not None:
                    self._rewind(step)
                self._metrics = open_for_append(self.path / "metrics.jsonl")
            except OSError as error:
                raise write_error(self.path, error) from error
        except BaseException:
            self._let_go()
            raise

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends writing and lets others open the folder."""
        if not self._metrics.closed:
            with suppress(OSError):  # what a full disk did not take was said when it was written
                self._metrics.close()
            self._let_go()

    def _let_go(self) -> None:
        """Lets others open the folder; what a run that never began has made there is taken away."""
        rows, completions = self.path / "metrics.jsonl", self.path / "completions"
        with suppress(OSError):  # what holds something stays
            others = {p.name for p in self.path.iterdir()} - {".lock", rows.name, completions.name}
            if not others and not (rows.exists() and rows.stat().st_size):
                if completions in self._made:
                    completions.rmdir()
                if rows in self._made:
                    rows.unlink(missing_ok=True)
        self._lock.release()
        if self.path in self._made:
            with suppress(OSError):
                self.path.rmdir()

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return self.path / "checkpoints"

    def _refuse_old_run(self) -> None:
        """Raises ConfigError where a run lies here, in rows that can be read or not."""
        check_no_run(self.path)
        if _read(self.path / "metrics.jsonl").torn:  # all that a killed run has left: the first row begins there
            write_atomic(self.path / "metrics.jsonl", b"")

    def _tidy(self) -> None:
        """Removes what killed processes left half written; the last model comes back that was about to be replaced."""
        for folder in (self.path, self.path / "completions"):
            for file in list(folder.iterdir()):
                if is_temporary(file.name):
                    if file.name.endswith("-final.old") and not os.path.lexists(self.path / "final"):
                        file.rename(self.path / "final")
                    else:
                        remove_path(file)

    # ---- configuration and environment ---------------------------------------------------------------------------

    def write_config(self, config: Any) -> None:
        """Writes config.yaml, which --config reads, without what was not set and has no effect, and config_full.yaml.

        Args: config: a configuration, its sections by their names, or its tree.
        """
        write_atomic(self.path / FULL_CONFIG_FILE, dump(config).encode())
        write_atomic(self.path / "config.yaml", dump(minimal_config(config)).encode())

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Writes a JSON file: environment.json, summary.json. NaN becomes null."""
        write_atomic(self.path / name, (to_json(value, indent=2) + "\n").encode("utf-8", "replace"))

    # ---- metrics -------------------------------------------------------------------------------------------------

    def log(self, *, step: int, mode: str, version: int, values: Mapping[str, float]) -> None:
        """Appends one row to metrics.jsonl; it is on the disk when this returns.

        Args:
            step: the global step.
            mode: "train" or "eval".
            version: policy version.
            values: name -> number.
        """
        row = to_json({"step": step, "mode": mode, "version": version, **values})
        try:
            self._metrics.write(row.encode("utf-8", "replace") + b"\n")
            self._metrics.flush()
            os.fsync(self._metrics.fileno())
        except OSError as error:
            raise write_error(self.path / "metrics.jsonl", error) from error

    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl in order; a torn last line is left out, and so are damaged ones."""
        return _read(self.path / "metrics.jsonl").rows

    def _rewind(self, step: int) -> None:
        """Removes what was written after a step, and what a kill left half written."""
        if step <= 0 and has_steps(self.path):
            self._set_aside()
        found = _read(self.path / "metrics.jsonl")
        if found.damaged:
            self._keep_damaged(found)
        kept = [line for line, row in zip(found.lines, found.rows) if row["step"] <= step]
        write_atomic(self.path / "metrics.jsonl", b"".join(line + b"\n" for line in kept))
        for file in (self.path / "completions").iterdir():
            number = _COMPLETIONS.fullmatch(file.name)
            if number is not None and int(number[1]) > step and (file.is_file() or file.is_symlink()):
                file.unlink()
        if _number(self.path / "final" / "run.json", "step") > step:
            remove_path(self.path / "final", strict=True)
        if _number(self.path / "summary.json", "steps") > step:
            (self.path / "summary.json").unlink()
        (self.path / "model_card.md").unlink(missing_ok=True)  # written anew at the end

    def _keep_damaged(self, found: _Rows) -> None:
        """Keeps metrics.jsonl as it was, next to the one written without its damaged lines."""
        kept = unused_path(self.path / "metrics.jsonl", "damaged")
        with create_file(kept) as file:
            file.write(found.content)
            file.flush()
            os.fsync(file.fileno())
        log.warning(
            "%s: %d of its lines are not rows and are left out from now on; the file as it was is kept as %s",
            self.path / "metrics.jsonl",
            found.damaged,
            kept.name,
        )

    def _set_aside(self) -> None:
        """Renames the rows and completions of a run that starts over: they may be all that is left of it."""
        n = 1
        names = (
            "completions",
            "final",
            "summary.json",
            "wandb-id.txt",
            "metrics.jsonl",
        )  # last the rows: they tell all
        renamed = lambda name: self.path / f"{Path(name).stem}.before-{n}{Path(name).suffix}"
        while any(os.path.lexists(renamed(name)) for name in names):
            n += 1
        for name in names:
            if os.path.lexists(self.path / name):
                (self.path / name).rename(renamed(name))
        (self.path / "completions").mkdir()
        log.warning(
            "%s holds steps but no checkpoint of them; starting over, the old rows and completions are kept as "
            "metrics.before-%d.jsonl and completions.before-%d/",
            self.path,
            n,
            n,
        )

    # ---- completions ---------------------------------------------------------------------------------------------

    def write_completions(
        self, *, step: int, mode: str, columns: Mapping[str, Any], rewards: Mapping[str, Any]
    ) -> Path:
        """Writes completions/<mode>-<step>.parquet, one row per completion, always with the same columns.

        Args:
            step: the global step.
            mode: "train" or "eval".
            columns: a sequence each: row, generation, prompt (text, or messages), prompt_text and prompt_tokens (as
                the model was given it, and its ids), completion (text), tokens (ids), logprobs, reward, advantage,
                finish_reason, version, info (a mapping, written as JSON; empty ones become null); all but
                `prompt_text`, `prompt_tokens`, `advantage` and `info` are required, and NaN or None becomes null.
            rewards: per function, "exact" -> "reward/exact".
        Returns: the file.
        Raises: DataError: a column is missing, unknown, or of another length.
        """
        path = self.path / "completions" / f"{mode}-{step:06d}.parquet"
        write_completions(path, step=step, columns=columns, rewards=rewards)
        return path


def check_no_run(path: str | Path) -> None:
    """Raises ConfigError where a run lies in a folder, in rows that can be read or not."""
    path = Path(path).absolute()
    found = _read(path / "metrics.jsonl")
    if found.rows or found.damaged:
        steps = f"a run of {found.rows[-1]['step']} steps" if found.rows else "a metrics.jsonl that can't be read"
        raise ConfigError(f"{path} holds {steps}; set trainer.resume=latest to resume it, or another trainer.run_dir")


def has_steps(path: str | Path) -> bool:
    """Whether a run folder holds rows of training steps.

    >>> has_steps("nowhere")
    False
    """
    return any(row["mode"] == "train" for row in _read(Path(path) / "metrics.jsonl").rows)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a run folder that may be open elsewhere; [] where there are none.

    >>> read_metrics("nowhere")
    []
    """
    return _read(Path(path) / "metrics.jsonl").rows


def _number(path: Path, name: str) -> int:
    """A whole number in a JSON file; -1 where there is none."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return -1
    value = found.get(name) if isinstance(found, dict) else None
    return value if type(value) is int else -1


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """What metrics.jsonl holds."""

    content: bytes
    rows: list[dict[str, Any]]
    lines: list[bytes]
    """The line of each row."""
    damaged: int
    """Lines that are not rows."""
    torn: bool
    """Whether a kill has cut the last line short."""


def _read(path: Path) -> _Rows:
    """Reads metrics.jsonl. Raises CheckpointError where that is not possible."""
    try:
        if path.is_symlink():
            raise OSError("it is a symbolic link, and rows are written to no other file than this one")
        content = path.read_bytes() if path.is_file() else b""
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}; remove it or fix its permissions") from error
    *lines, last = content.split(b"\n")
    lines = [line for line in lines if line.strip()]
    found = [(line, row) for line in lines if (row := _row(line)) is not None]
    return _Rows(
        content=content,
        rows=[row for _, row in found],
        lines=[line for line, _ in found],
        damaged=len(lines) - len(found),
        torn=bool(last),
    )


def _row(line: bytes) -> dict[str, Any] | None:
    """The row that a line holds; None where it holds none."""
    try:
        row = read_json(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("mode"), str):
        return None
    return row if type(row.get("step")) is int and 0 <= row["step"] < 2**63 else None
