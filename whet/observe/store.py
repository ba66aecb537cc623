"""The run folder: complete without any logger, and readable after a kill at any moment.

    config.yaml  environment.json  metrics.jsonl  completions/{train,eval}-000012.parquet  summary.json  .lock

metrics.jsonl grows by a line per step and mode, {step, mode, version, name: value}; it is repaired when a run is
taken up again. Every other file is written whole or not at all. Checkpoints lie here too, but are not this module's.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.config import diff, dump
from whet.errors import ConfigError, DataError
from whet.observe.files import to_json, write_atomic

__all__ = ["RunFolder", "changed_settings"]


class RunFolder:
    """One run's folder, locked while it is open. Made on rank 0 alone.

    Args: path: made if absent. after_step: what was written after this step is removed; the run goes on there.
        fresh: a new run, which the folder must not hold one of.
    Raises: ConfigError: another process has the folder open, or a fresh run was asked for where one lies.

    Example: with RunFolder("runs/a") as folder: folder.write_metrics({"step": 1, "mode": "train", "reward": 0.5})
    """

    def __init__(self, path: str | Path, *, after_step: int = 0, fresh: bool = False) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.path / ".lock")
        try:
            (self.path / "completions").mkdir(exist_ok=True)
            if fresh:
                self._refuse_old_run()
            else:
                self._rewind(after_step)
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
            self._metrics.close()
            (self.path / ".lock").unlink(missing_ok=True)
            os.close(self._lock)

    def _refuse_old_run(self) -> None:
        rows = self.rows()
        if rows:
            raise ConfigError(
                f"{self.path} holds a run of {rows[-1].get('step')} steps; set trainer.resume=latest to go on with it, "
                "or another trainer.run_dir"
            )

    # ---- small files ---------------------------------------------------------------------------------------------

    def write_config(self, config: Any) -> None:
        """Writes config.yaml, which --config reads. Args: config: a configuration, or its tree."""
        write_atomic(self.path / "config.yaml", dump(config).encode())

    def write_environment(self, more: Mapping[str, Any] | None = None) -> None:
        """Writes environment.json: see `environment`. Args: more: what a start-up probe chose, beside it."""
        self.write_json("environment.json", {**environment(), **(more or {})})

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Writes a JSON file: summary.json. NaN becomes null."""
        write_atomic(self.path / name, (to_json(value, indent=2) + "\n").encode())

    def read_json(self, name: str) -> dict[str, Any] | None:
        """What `write_json` wrote; None where there is none."""
        path = self.path / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    # ---- metrics -------------------------------------------------------------------------------------------------

    def write_metrics(self, row: Mapping[str, Any]) -> None:
        """Appends a row to metrics.jsonl; it is on the disk when this returns.

        Args: row: step (an int), mode ("train" or "eval"), version, and name -> number; NaN becomes null.
        """
        self._metrics.write(to_json(row).encode() + b"\n")
        self._metrics.flush()
        os.fsync(self._metrics.fileno())

    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl in order; a torn last line is left out."""
        return read_rows(self.path)

    def _rewind(self, step: int) -> None:
        """Removes what was written after a step, and what a kill left half written."""
        kept = [row for row in self.rows() if row["step"] <= step]
        lines = "".join(f"{to_json(row)}\n" for row in kept)
        write_atomic(self.path / "metrics.jsonl", lines.encode())
        for file in (self.path / "completions").iterdir():
            number = file.stem.rpartition("-")[2]
            if file.name.startswith(".") or (file.suffix == ".parquet" and number.isdigit() and int(number) > step):
                file.unlink()

    # ---- completions ---------------------------------------------------------------------------------------------

    def write_completions(self, mode: str, step: int, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Writes completions/<mode>-<step>.parquet, one row per completion.

        Args: mode: "train" or "eval". step: the global step. rows: see `completion_rows`; every key is required.
        Returns: the file. Its columns have the same names and types at every step: step, row, generation, prompt,
            completion, tokens, logprobs, reward/<function> ..., reward, advantage, finish_reason, version.
        Raises: DataError: a row lacks a key or has an unknown one.
        """
        import pyarrow.parquet as pq

        table = _table(rows)
        path = self.path / "completions" / f"{mode}-{step:06d}.parquet"
        options = {
            "compression": "zstd",
            "use_dictionary": ["tokens.list.element", "finish_reason", "prompt"],
            "column_encoding": {"logprobs.list.element": "BYTE_STREAM_SPLIT"},
        }
        write_atomic(path, lambda file: pq.write_table(table, file, **options))
        return path


def completion_rows(step: int, rewarded: Any, batch: TokenBatch, decode: Callable[[Any], str]) -> list[dict[str, Any]]:
    """The rows of a step's completions, for `write_completions`.

    Args: step: the global step. rewarded: has `groups`, with their rewards. batch: those groups as a TokenBatch, with
        advantages where they are known. decode: token ids -> text.
    Returns: a dict per completion. Its advantage is the mean over its trained tokens; NaN rewards become None.
    """
    advantages = _advantages(batch)
    totals = batch.rewards.tolist()
    rows = []
    for group in rewarded.groups:
        order = {g: i for i, g in enumerate(dict.fromkeys(c.generation for c in group.completions))}
        for c in group.completions:
            i = len(rows)
            rows.append(
                {
                    "step": step,
                    "row": group.prompt.row,
                    "generation": c.generation,
                    "prompt": group.prompt.source,
                    "completion": decode(c.tokens),
                    "tokens": c.tokens,
                    "logprobs": c.logprobs,
                    "rewards": {name: values[order[c.generation]] for name, values in group.rewards.items()},
                    "reward": totals[int(batch.trajectory_of[i])],
                    "advantage": advantages[i],
                    "finish_reason": c.finish_reason,
                    "version": int(c.versions.max(initial=-1)),
                }
            )
    return rows


def _advantages(batch: TokenBatch) -> list[float | None]:
    if batch.advantages is None:
        return [None] * batch.num_sequences
    parts = (batch.advantages.double() * batch.mask).split(batch.lengths.tolist())
    counts = [int(m.sum()) for m in batch.mask.split(batch.lengths.tolist())]
    return [float(part.sum()) / n if n else None for part, n in zip(parts, counts)]


def read_rows(folder: str | Path) -> list[dict[str, Any]]:
    """The rows of a run folder's metrics.jsonl in order.

    Args: folder: of the run; it may be running. A torn last line is left out.
    """
    path, found = Path(folder) / "metrics.jsonl", []
    if path.is_file():
        for line in path.read_bytes().split(b"\n")[:-1]:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                found.append(row)
    return found


def _table(rows: Sequence[Mapping[str, Any]]) -> Any:
    import pyarrow as pa

    names = sorted({name for row in rows for name in row["rewards"]})
    types = {
        "step": pa.int32(),
        "row": pa.int64(),
        "generation": pa.int32(),
        "prompt": pa.string(),
        "completion": pa.string(),
        "tokens": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        **{f"reward/{name}": pa.float64() for name in names},
        "reward": pa.float64(),
        "advantage": pa.float64(),
        "finish_reason": pa.string(),
        "version": pa.int32(),
    }
    flat = [{**row, **{f"reward/{n}": row["rewards"].get(n) for n in names}} for row in rows]
    for row in flat:
        del row["rewards"]
        if row.keys() != types.keys():
            odd = ", ".join(sorted(row.keys() ^ types.keys()))
            raise DataError(f"a completion's row lacks or has too much: {odd}; its keys are {', '.join(types)}")
    plain = {pa.float64(): _number, pa.string(): _text}
    return pa.table(
        {name: pa.array([plain.get(kind, _same)(row[name]) for row in flat], kind) for name, kind in types.items()}
    )


def _number(value: Any) -> float | None:
    return None if value is None or value != value else float(value)


def _same(value: Any) -> Any:
    return value


def _text(value: Any) -> str:
    """Text that UTF-8 can hold; messages as JSON."""
    text = value if isinstance(value, str) else to_json(value)
    return text.encode("utf-8", "replace").decode()


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
        if path.exists() and os.fstat(fd).st_ino == path.stat().st_ino:
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(_me()).encode(), 0)
            return fd
        os.close(fd)


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
