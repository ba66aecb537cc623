"""The run folder: complete without any logger, and readable after a kill at any moment.

    config.yaml  config_full.yaml  environment.json  metrics.jsonl  summary.json  .lock
    completions/{train,eval}-000012.parquet

metrics.jsonl gets one line per step and mode, {step, mode, version, name: value}. Resuming a run repairs the file. If
it has damaged lines, a copy of the old file is kept. Every other file is written atomically: a reader sees the whole
file or none. The files may have been written by anybody, so they are checked before use, and symbolic links are not
followed. Checkpoints are in the same folder, but storage/checkpoint.py writes them.
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
    """One run's folder. It is locked while it is open. Only rank 0 creates it.

    Args:
        path: the folder; it is created if it doesn't exist.
        resume_step: None = a new run; the folder must not hold a run yet. A number removes everything that was written
            after this step, and the run continues from there. A number of 0 or less keeps no step: the older run's
            files are renamed instead of removed. A function that returns the number is called after the folder is
            locked, so it may read and change the folder.
    Raises: ConfigError: the path is empty or can't be written, another process has the folder open, or a new run finds
        an older run there. CheckpointError: the files there can't be read or repaired.

    Example: with RunFolder("runs/a") as folder: folder.log(step=1, mode="train", version=0, values={"reward": 0.5})
    """

    def __init__(self, path: str | Path, *, resume_step: int | Callable[[], int] | None = None) -> None:
        if not str(path).strip():
            raise ConfigError(f"the run folder's name is empty, {str(path)!r}; give trainer.run_dir=runs/a or the like")
        self.path = Path(path).absolute()  # a reward function may change the working folder
        parts = (self.path, self.path / "completions", self.path / "metrics.jsonl")
        self._created = [part for part in parts if not os.path.lexists(part)]
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
                check_no_run(self.path)  # even one with an unreadable metrics.jsonl
                if _read(self.path / "metrics.jsonl").torn:  # a run was killed while it wrote its first row
                    write_atomic(self.path / "metrics.jsonl", b"")
                step = None
            else:
                step = resume_step() if callable(resume_step) else resume_step
            try:
                self._remove_temporary_files()
                if step is not None:
                    self._rewind(step)
                self._metrics = open_for_append(self.path / "metrics.jsonl")
            except OSError as error:
                raise write_error(self.path, error) from error
        except BaseException:
            self._release()
            raise

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files and releases the lock."""
        if not self._metrics.closed:
            with suppress(OSError):  # a full disk has raised its error at the write already
                self._metrics.close()
            self._release()

    def _release(self) -> None:
        """Releases the lock. If the run has written nothing, removes the files and folders that it created."""
        rows, completions = self.path / "metrics.jsonl", self.path / "completions"
        with suppress(OSError):  # a folder that isn't empty stays
            others = {p.name for p in self.path.iterdir()} - {".lock", rows.name, completions.name}
            if not others and not (rows.exists() and rows.stat().st_size):
                if completions in self._created:
                    completions.rmdir()
                if rows in self._created:
                    rows.unlink(missing_ok=True)
        self._lock.release()
        if self.path in self._created:
            with suppress(OSError):
                self.path.rmdir()

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    def _remove_temporary_files(self) -> None:
        """Removes half-written files of killed processes; restores final/ if its replacement was interrupted."""
        for folder in (self.path, self.path / "completions"):
            for file in list(folder.iterdir()):
                if is_temporary(file.name):
                    if file.name.endswith("-final.old") and not os.path.lexists(self.path / "final"):
                        file.rename(self.path / "final")
                    else:
                        remove_path(file)

    # ---- configuration and environment ---------------------------------------------------------------------------

    def write_config(self, config: Any) -> None:
        """Writes config.yaml with the keys that were set or have an effect, and config_full.yaml with every key.

        --config reads either file.

        Args: config: a configuration, a mapping of its sections by name, or its tree.
        """
        write_atomic(self.path / FULL_CONFIG_FILE, dump(config).encode())
        write_atomic(self.path / "config.yaml", dump(minimal_config(config)).encode())

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Writes a JSON file: environment.json, summary.json. NaN becomes null."""
        write_atomic(self.path / name, (to_json(value, indent=2) + "\n").encode("utf-8", "replace"))

    # ---- metrics -------------------------------------------------------------------------------------------------

    def log(self, *, step: int, mode: str, version: int, values: Mapping[str, float]) -> None:
        """Appends one row to metrics.jsonl and waits until it is on the disk.

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
        """Returns the rows of metrics.jsonl in order, without damaged lines and without a last line that a kill cut
        short.
        """
        return _read(self.path / "metrics.jsonl").rows

    def _rewind(self, step: int) -> None:
        """Removes everything that was written after a step, and a last line that a kill cut short."""
        if step <= 0 and has_steps(self.path):
            self._rename_old_run()
        metrics = _read(self.path / "metrics.jsonl")
        if metrics.damaged:
            self._keep_damaged(metrics)
        kept = [line for line, row in zip(metrics.lines, metrics.rows) if row["step"] <= step]
        write_atomic(self.path / "metrics.jsonl", b"".join(line + b"\n" for line in kept))
        for file in (self.path / "completions").iterdir():
            number = _COMPLETIONS.fullmatch(file.name)
            if number is not None and int(number[1]) > step and (file.is_file() or file.is_symlink()):
                file.unlink()
        if _number(self.path / "final" / "run.json", "step") > step:
            remove_path(self.path / "final", strict=True)
        if _number(self.path / "summary.json", "steps") > step:
            (self.path / "summary.json").unlink()
        (self.path / "model_card.md").unlink(missing_ok=True)  # the end of the run writes it again

    def _keep_damaged(self, table: _Rows) -> None:
        """Copies metrics.jsonl, damaged lines included, to metrics.damaged-N.jsonl."""
        kept = unused_path(self.path / "metrics.jsonl", "damaged")
        with create_file(kept) as file:
            file.write(table.content)
            file.flush()
            os.fsync(file.fileno())
        log.warning(
            "%s: %d lines are damaged and were removed; the original file is kept as %s",
            self.path / "metrics.jsonl",
            table.damaged,
            kept.name,
        )

    def _rename_old_run(self) -> None:
        """Renames the older run's files when a run starts over; there may be no other copy of them."""
        n = 1
        names = ("completions", "final", "summary.json", "wandb-id.txt", "metrics.jsonl")  # rows last: they mark a run
        renamed = lambda name: self.path / f"{Path(name).stem}.before-{n}{Path(name).suffix}"
        while any(os.path.lexists(renamed(name)) for name in names):
            n += 1
        for name in names:
            if os.path.lexists(self.path / name):
                (self.path / name).rename(renamed(name))
        (self.path / "completions").mkdir()
        log.warning(
            "%s has steps but no checkpoint, so the run starts over; the old rows and completions are kept as "
            "metrics.before-%d.jsonl and completions.before-%d/",
            self.path,
            n,
            n,
        )

    # ---- completions ---------------------------------------------------------------------------------------------

    def write_completions(
        self, *, step: int, mode: str, columns: Mapping[str, Any], rewards: Mapping[str, Any]
    ) -> Path:
        """Writes completions/<mode>-<step>.parquet: one row per completion, with the same columns every time.

        Args:
            step: the global step.
            mode: "train" or "eval".
            columns: name -> sequence: row, generation, prompt (text or messages), prompt_text (the text that the model
                read), prompt_tokens (its ids), completion (text), reward, advantage, finish_reason, version, info and
                seconds (mappings, written as JSON; an empty one becomes null); a value for each token: tokens (ids),
                logprobs, trainer_logprobs, entropy, advantages, versions; turn_starts and turn_ends. Those of
                `completions.OPTIONAL` may be missing. NaN and None become null, except in values for each token.
            rewards: function -> its rewards; "exact" becomes the column "reward/exact".
        Returns: the file's path.
        Raises: DataError: a column is missing, unknown, or has another length.
        """
        path = self.path / "completions" / f"{mode}-{step:06d}.parquet"
        write_completions(path, step=step, columns=columns, rewards=rewards)
        return path


def check_no_run(path: str | Path) -> None:
    """Raises ConfigError if a folder holds a run, even one with an unreadable metrics.jsonl."""
    path = Path(path).absolute()
    metrics = _read(path / "metrics.jsonl")
    if metrics.rows or metrics.damaged:
        steps = f"a run of {metrics.rows[-1]['step']} steps" if metrics.rows else "a metrics.jsonl that can't be read"
        raise ConfigError(f"{path} holds {steps}; set trainer.resume=latest to resume it, or another trainer.run_dir")


def has_steps(path: str | Path) -> bool:
    """Returns whether a run folder holds rows of training steps.

    >>> has_steps("nowhere")
    False
    """
    return any(row["mode"] == "train" for row in _read(Path(path) / "metrics.jsonl").rows)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Returns the rows of a run folder, which another process may have open; [] if there are none.

    >>> read_metrics("nowhere")
    []
    """
    return _read(Path(path) / "metrics.jsonl").rows


def _number(path: Path, name: str) -> int:
    """Returns an integer in a JSON file; -1 if there is none."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return -1
    value = content.get(name) if isinstance(content, dict) else None
    return value if type(value) is int else -1


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """The parsed metrics.jsonl."""

    content: bytes
    rows: list[dict[str, Any]]
    lines: list[bytes]
    """The line of each row."""
    damaged: int
    """The number of lines that are not rows."""
    torn: bool
    """Whether a kill cut the last line short."""


def _read(path: Path) -> _Rows:
    """Reads metrics.jsonl. Raises CheckpointError if the file can't be read."""
    try:
        if path.is_symlink():
            raise OSError("it is a symbolic link, and whet does not follow links in a run folder")
        content = path.read_bytes() if path.is_file() else b""
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}; remove it or fix its permissions") from error
    *lines, last = content.split(b"\n")
    lines = [line for line in lines if line.strip()]
    pairs = [(line, row) for line in lines if (row := _row(line)) is not None]
    return _Rows(
        content=content,
        rows=[row for _, row in pairs],
        lines=[line for line, _ in pairs],
        damaged=len(lines) - len(pairs),
        torn=bool(last),
    )


def _row(line: bytes) -> dict[str, Any] | None:
    """Parses a line; None if it is not a row."""
    try:
        row = read_json(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("mode"), str):
        return None
    return row if type(row.get("step")) is int and 0 <= row["step"] < 2**63 else None
