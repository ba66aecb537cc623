"""The run folder: complete without any logger, and readable after a kill at any moment.

    config.yaml  environment.json  metrics.jsonl  completions/{train,eval}-000012.parquet  summary.json  .lock

metrics.jsonl grows by a line per step and mode, {step, mode, version, name: value}; it is repaired when a run is
taken up again. Every other file is written whole or not at all. Checkpoints lie here too, but are not this module's.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from whet.config import diff, dump, dump_tree
from whet.errors import ConfigError, DataError
from whet.observe.files import to_json, unwritable, write_atomic

__all__ = ["RunFolder", "changed_settings", "holds_steps"]

log = logging.getLogger("whet")

_FREE = (
    "actor.gradient_checkpointing",
    "critic.gradient_checkpointing",
    "reference.gradient_checkpointing",
    "offload_to_cpu",
    "trainer.max_steps",
    "trainer.num_epochs",
    "trainer.resume",
    "trainer.allow_config_change",
    "trainer.run_dir",
    "trainer.loggers",
    "trainer.metrics_logging_options",
    "trainer.perf_metrics_options",
    "trainer.profile",
    "trainer.checkpointing_options",
    "trainer.pbar_description",
)
"""Keys that a resumed run may change: they don't change what a step computes. Of the run's length only a learning-rate
schedule knows, which is made anew over another one, with a warning: see Optim.plan."""


class RunFolder:
    """One run's folder, locked while it is open. Made on rank 0 alone.

    Args: path: made if absent. resume_step: None = a new run, which the folder must not hold one of; else what was
        written after this step is removed, and the run goes on there; from 0 or less, where no step is kept, what an
        older run wrote of its steps is moved aside instead. A function that says the step is called once the folder
        is locked, so that it may read and change what lies there.
    Raises: ConfigError: another process has the folder open, or a new run was asked for where one lies.

    Example: with RunFolder("runs/a") as folder: folder.log(step=1, mode="train", version=0, values={"reward": 0.5})
    """

    def __init__(self, path: str | Path, *, resume_step: int | Callable[[], int] | None = None) -> None:
        self.path = Path(path).absolute()  # a reward function may change the working folder
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "completions").mkdir(exist_ok=True)
            self._lock = _lock(self.path / ".lock")
        except OSError as error:
            raise ConfigError(
                f"{path} can't be written: {error}; set its rights, or another trainer.run_dir"
            ) from error
        try:
            if resume_step is None:
                self._refuse_old_run()
            else:
                self._rewind(resume_step() if callable(resume_step) else resume_step)
            self._metrics = (self.path / "metrics.jsonl").open("ab")
        except BaseException:
            os.close(self._lock)
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
            (self.path / ".lock").unlink(missing_ok=True)
            os.close(self._lock)

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return self.path / "checkpoints"

    def _refuse_old_run(self) -> None:
        rows = self.rows()
        if rows:
            raise ConfigError(
                f"{self.path} holds a run of {rows[-1].get('step')} steps; set trainer.resume=latest to go on with it, "
                "or another trainer.run_dir"
            )

    # ---- configuration and environment ---------------------------------------------------------------------------

    def write_config(self, config: Any) -> None:
        """Writes config.yaml, which --config reads. Args: config: a configuration, or its tree."""
        write_atomic(self.path / "config.yaml", dump(config).encode())

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Writes a JSON file: environment.json, summary.json. NaN becomes null."""
        write_atomic(self.path / name, (to_json(value, indent=2) + "\n").encode())

    # ---- metrics -------------------------------------------------------------------------------------------------

    def log(self, *, step: int, mode: str, version: int, values: Mapping[str, float]) -> None:
        """Appends one row to metrics.jsonl; it is on the disk when this returns.

        Args: step: the global step. mode: "train" or "eval". version: policy version. values: name -> number.
        """
        row = to_json({"step": step, "mode": mode, "version": version, **values})
        try:
            self._metrics.write(row.encode() + b"\n")
            self._metrics.flush()
            os.fsync(self._metrics.fileno())
        except OSError as error:
            raise unwritable(self.path / "metrics.jsonl", error) from error

    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl in order; a torn last line is left out."""
        return _rows(self.path / "metrics.jsonl")

    def _rewind(self, step: int) -> None:
        """Removes what was written after a step, and what a kill left half written."""
        if step <= 0 and holds_steps(self.path):
            self._set_aside()
        kept = [row for row in self.rows() if row["step"] <= step]
        lines = "".join(f"{to_json(row)}\n" for row in kept)
        write_atomic(self.path / "metrics.jsonl", lines.encode())
        for file in (self.path / "completions").iterdir():
            number = file.stem.rpartition("-")[2]
            late = file.suffix == ".parquet" and number.isdigit() and int(number) > step
            if file.is_file() and (file.name.startswith(".") or late):
                file.unlink()
        if _number(self.path / "final" / "run.json", "step") > step:
            shutil.rmtree(self.path / "final")
        if _number(self.path / "summary.json", "steps") > step:
            (self.path / "summary.json").unlink()

    def _set_aside(self) -> None:
        """Gives the rows and completions of a run that begins anew other names: they may be all that is left of it."""
        n = 1
        while any((self.path / name).exists() for name in (f"metrics.before-{n}.jsonl", f"completions.before-{n}")):
            n += 1
        (self.path / "completions").rename(self.path / f"completions.before-{n}")  # first: the rows tell of them
        (self.path / "completions").mkdir()
        for name in ("final", "summary.json", "metrics.jsonl"):
            old = self.path / name
            if old.exists():
                old.rename(self.path / f"{old.stem}.before-{n}{old.suffix}")
        log.warning(
            "%s holds steps but no checkpoint of them; beginning anew, the old rows and completions are kept as "
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

        Args: step: the global step. mode: "train" or "eval". columns: a sequence each: row, generation, prompt (text,
            or messages), completion (text), tokens (ids), logprobs, reward, advantage, finish_reason, version; all but
            `advantage` are required, and NaN or None becomes null. rewards: per function, "exact" -> "reward/exact".
        Returns: the file.
        Raises: DataError: a column is missing, unknown, or of another length.
        """
        import pyarrow.parquet as pq

        table = _table(step, columns, rewards)
        path = self.path / "completions" / f"{mode}-{step:06d}.parquet"
        options = {
            "compression": "zstd",
            "use_dictionary": ["tokens.list.element", "finish_reason", "prompt"],
            "column_encoding": {"logprobs.list.element": "BYTE_STREAM_SPLIT"},
        }
        write_atomic(path, lambda file: pq.write_table(table, file, **options))
        return path


def changed_settings(old: Any, new: Any) -> list[str]:
    """How a resumed run's configuration differs in what its steps compute.

    Args: old, new: configurations, or their trees.
    Returns: "key: old -> new" for each key that differs; left out are those that change no step, such as
        trainer.max_steps, and sections that one side lacks: an earlier version noted fewer, and of a model that is
        given as a module nothing is known.

    >>> changed_settings({"trainer": {"max_steps": 5, "seed": 0}}, {"trainer": {"max_steps": 9, "seed": 1}})
    ['trainer.seed: 0 -> 1']
    """
    old, new = dump_tree(old), dump_tree(new)
    shared = old.keys() & new.keys()
    old, new = ({k: v for k, v in side.items() if k in shared} for side in (old, new))
    return [change for change in diff(old, new) if not change.startswith(_FREE)]


def holds_steps(path: str | Path) -> bool:
    """Whether a run folder holds rows of training steps.

    >>> holds_steps("nowhere")
    False
    """
    return any(row.get("mode") == "train" for row in _rows(Path(path) / "metrics.jsonl"))


def _number(path: Path, name: str) -> int:
    """A whole number in a JSON file; -1 where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return -1
    value = found.get(name) if isinstance(found, dict) else None
    return value if isinstance(value, int) else -1


def _rows(path: Path) -> list[dict[str, Any]]:
    found = []
    if path.is_file():
        for line in path.read_bytes().split(b"\n")[:-1]:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                found.append(row)
    return found


def _table(step: int, columns: Mapping[str, Any], rewards: Mapping[str, Any]) -> Any:
    import pyarrow as pa

    types = {
        "row": pa.int64(),
        "generation": pa.int32(),
        "prompt": pa.string(),
        "completion": pa.string(),
        "tokens": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "reward": pa.float64(),
        "advantage": pa.float64(),
        "finish_reason": pa.string(),
        "version": pa.int32(),
    }
    if missing := [n for n in types if n not in columns and n != "advantage"]:
        raise DataError(f"completions lack the columns {', '.join(missing)}")
    if unknown := [n for n in columns if n not in types]:
        raise DataError(f"completions have unknown columns {', '.join(unknown)}; known: {', '.join(types)}")
    count = len(columns["tokens"])
    given = {n: columns.get(n, [None] * count) for n in types}
    for name, values in {**given, **{f"reward/{n}": v for n, v in rewards.items()}}.items():
        if len(values) != count:
            raise DataError(f"column {name} has {len(values)} values for {count} completions")
    arrays = {"step": pa.array([step] * count, pa.int32())}
    for name, kind in types.items():
        if name == "reward":
            for fn, values in rewards.items():
                arrays[f"reward/{fn}"] = pa.array(_numbers(values), pa.float64())
        values = _numbers(given[name]) if kind == pa.float64() else [_text(v) for v in given[name]]
        arrays[name] = pa.array(values, kind)
    return pa.table(arrays)


def _numbers(values: Sequence[Any]) -> list[float | None]:
    return [None if v is None or v != v else float(v) for v in values]


def _text(value: Any) -> Any:
    """Text that UTF-8 can hold; messages as JSON; anything else as it is."""
    if isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
        value = to_json(value)
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


# ---- the lock --------------------------------------------------------------------------------------------------------


def _lock(path: Path) -> int:
    """The descriptor that holds the lock of a folder until it is closed or the process dies.

    The system's lock ends with the process, but a forked child would keep it alive: where the process named in the
    file is gone, the file is replaced.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = _holder(os.pread(fd, 4096, 0))
            os.close(fd)
            if holder and holder.get("host") == socket.gethostname() and not _alive(holder):
                path.unlink(missing_ok=True)
                continue
            who = f"process {holder['pid']} on {holder['host']}" if holder else "another process"
            raise ConfigError(f"{path.parent} is in use by {who}; end it, or set another trainer.run_dir") from None
        if _same_file(fd, path):  # not one that was replaced meanwhile
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(_me()).encode(), 0)
            return fd
        os.close(fd)


def _same_file(fd: int, path: Path) -> bool:
    try:
        return os.fstat(fd).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def _me() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": _started(os.getpid())}


def _holder(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) and {"pid", "host"} <= found.keys() else None


def _started(pid: int) -> str | None:
    """When a process began, in the kernel's ticks; None where that can't be known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _alive(holder: Mapping[str, Any]) -> bool:
    """Whether the very process that took the lock still runs, not another with its number."""
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return holder.get("started") in (None, _started(holder["pid"]))
