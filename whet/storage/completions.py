"""Files of completions: parquet, one row per completion, the same columns in every file, written atomically.

docs/run-folder.md describes the columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from whet.errors import CheckpointError, DataError
from whet.storage.files import to_json, write_atomic

__all__ = ["REWARD", "iter_completions", "read_completions", "write_completions"]

REWARD = "reward/"
"""The prefix of the column of a reward function."""
OPTIONAL = (
    "prompt_text",
    "prompt_tokens",
    "trainer_logprobs",
    "entropy",
    "advantages",
    "versions",
    "turn_starts",
    "turn_ends",
    "advantage",
    "info",
    "seconds",
)
"""Columns that are null if they are not given."""
_FLOATS = ("logprobs", "trainer_logprobs", "entropy", "advantages")
_REPEATED = ("tokens", "prompt_tokens", "versions", "turn_starts", "turn_ends")


def write_completions(path: Path, *, step: int, columns: Mapping[str, Any], rewards: Mapping[str, Any]) -> None:
    """Writes a file of completions.

    Args: path: the file. step, columns, rewards: as in `RunFolder.write_completions`.
    Raises: DataError: a column is missing, unknown, or has another length. CheckpointError: the file can't be
        written.
    """
    import pyarrow.parquet as pq

    table = _table(step, columns, rewards)
    options = {
        "compression": "zstd",
        "use_dictionary": ["finish_reason", "prompt", "prompt_text", *(f"{name}.list.element" for name in _REPEATED)],
        "column_encoding": {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in _FLOATS},
    }
    write_atomic(path, lambda file: pq.write_table(table, file, **options))


def read_completions(path: Path) -> tuple[dict[str, list[Any]], dict[str, list[float]]]:
    """Reads a file that `write_completions` wrote.

    Returns: the columns, and the rewards by function; null rewards are NaN.
    Raises: CheckpointError: the file can't be read, or a column is missing.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        present = [n for n in _types() if n != "reward" and (n in table.column_names or n not in OPTIONAL)]
        columns = {name: table.column(name).to_pylist() for name in present}
        columns["reward"] = table.column("reward").to_pylist()
    except (OSError, KeyError, pa.ArrowException) as error:
        raise CheckpointError(f"{path} is not a file of completions: {error}; remove it") from error
    named = [n for n in table.column_names if n.startswith(REWARD)]
    known = lambda values: [math.nan if v is None else float(v) for v in values]
    return columns, {n.removeprefix(REWARD): known(table.column(n).to_pylist()) for n in named}


def iter_completions(path: Path, names: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Reads a file that `write_completions` wrote, a row at a time: a file can be larger than the memory for lists.

    Args: names: the columns; None = all.
    Yields: column -> its value; lists are numpy arrays.
    Raises: CheckpointError: the file can't be read, or a column is missing.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    array = lambda cell: cell.values.to_numpy(zero_copy_only=False) if cell.is_valid else None
    wanted = names or [name for name in _types() if name not in OPTIONAL]
    try:
        with pq.ParquetFile(path) as file:
            if missing := [name for name in wanted if name not in file.schema_arrow.names]:
                raise CheckpointError(f"{path} is not a file of completions: it lacks {', '.join(missing)}; remove it")
            for batch in file.iter_batches(batch_size=256, columns=names):
                of = {
                    name: [array(cell) for cell in column] if pa.types.is_list(column.type) else column.to_pylist()
                    for name, column in zip(batch.schema.names, batch.columns, strict=True)
                }
                for values in zip(*of.values(), strict=True):
                    yield dict(zip(of, values, strict=True))
    except (OSError, pa.ArrowException) as error:
        raise CheckpointError(f"{path} is not a file of completions: {error}; remove it") from error


def _types() -> dict[str, Any]:
    """Returns the columns and their types."""
    import pyarrow as pa

    return {
        "row": pa.int64(),
        "generation": pa.int32(),
        "prompt": pa.string(),
        "prompt_text": pa.string(),
        "prompt_tokens": pa.list_(pa.int32()),
        "completion": pa.string(),
        "tokens": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "trainer_logprobs": pa.list_(pa.float32()),
        "entropy": pa.list_(pa.float32()),
        "advantages": pa.list_(pa.float32()),
        "versions": pa.list_(pa.int32()),
        "turn_starts": pa.list_(pa.int32()),
        "turn_ends": pa.list_(pa.int32()),
        "reward": pa.float64(),
        "advantage": pa.float64(),
        "finish_reason": pa.string(),
        "version": pa.int32(),
        "info": pa.string(),
        "seconds": pa.string(),
    }


def _table(step: int, columns: Mapping[str, Any], rewards: Mapping[str, Any]) -> Any:
    import pyarrow as pa

    types = _types()
    if missing := [n for n in types if n not in columns and n not in OPTIONAL]:
        raise DataError(f"completions lack the columns {', '.join(missing)}")
    if unknown := [n for n in columns if n not in types]:
        raise DataError(f"completions have unknown columns {', '.join(unknown)}; known: {', '.join(types)}")
    count = len(columns["tokens"])
    all_columns = {n: columns.get(n, [None] * count) for n in types}
    for name, values in {**all_columns, **{f"{REWARD}{n}": v for n, v in rewards.items()}}.items():
        if len(values) != count:
            raise DataError(f"column {name} has {len(values)} values for {count} completions")
    arrays = {"step": pa.array([step] * count, pa.int32())}
    for name, kind in types.items():
        if name == "reward":
            for fn, values in rewards.items():
                arrays[f"{REWARD}{fn}"] = pa.array(_numbers(values), pa.float64())
        if name in ("info", "seconds"):
            all_columns[name] = [to_json(value) if value else None for value in all_columns[name]]
        values = _numbers(all_columns[name]) if kind == pa.float64() else [_text(v) for v in all_columns[name]]
        arrays[name] = pa.array(values, kind)
    return pa.table(arrays)


def _numbers(values: Sequence[Any]) -> list[float | None]:
    return [None if v is None or v != v else float(v) for v in values]


def _text(value: Any) -> Any:
    """Makes text valid UTF-8 and messages JSON; returns any other value unchanged."""
    if isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
        value = to_json(value)
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
