"""Rows from data files, at once or as they are asked for; an error names the file and, where it is known, the line.

Both ways read alike, through pyarrow and Python's own json: what is an error in one is one in the other, and rows are
equal. Only a type that a CSV file changes after its first megabyte is seen in a stream too late to be settled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.data.reading import reading, said
from whet.errors import DataError, WhetError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["FORMATS", "read_files", "sound", "stream_files"]

FORMATS = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
"""Suffixes of data files."""
JSON = (".json", ".jsonl")
TEXT = (*JSON, ".csv")
REPAIR = "repair the file, or write it again"
UTF8 = "convert it to UTF-8, e.g. with iconv"
BATCH = 1000
"""Rows of a table that a stream holds at a time."""


def read_files(paths: Sequence[Path]) -> Any:
    """The rows of data files of one format, one after the other.

    Args: paths: at least one.
    Returns: a list of dicts (JSON), or a datasets.Dataset (tables).
    Raises: DataError: a file that can't be read, or whose columns have other types than those of the first.
    """
    import datasets

    if paths[0].suffix in JSON:
        return [row for path in paths for row in _json_rows(path)]
    tables: list[Any] = []
    for path in paths:
        with _readable(path):
            tables.append(datasets.Dataset(_checked(_table(path), path)))
    if len(tables) == 1:
        return tables[0]
    _check_types({path: _types(table.data.schema) for path, table in zip(paths, tables, strict=True)})
    with reading(" and ".join(map(str, paths[:4])), "write the files with the same columns"):
        return datasets.concatenate_datasets(tables)


def stream_files(paths: Sequence[Path]) -> Any:
    """The rows of data files of one format as a datasets.IterableDataset, read when they are asked for.

    Args: paths: at least one.
    Raises: DataError: tables whose columns have other types than those of the first; and, once they are read, all that
        `read_files` raises, and no rows at all.
    """
    import datasets

    if paths[0].suffix not in JSON:
        schemas = {}
        for path in paths:
            with _readable(path):
                schemas[path] = _types(_parts(path)[0])
        _check_types(schemas)
    return datasets.IterableDataset.from_generator(_stream, gen_kwargs={"paths": [str(path) for path in paths]})


def _stream(paths: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of files, one by one."""
    empty = True
    for path in map(Path, paths):
        for row in _json_rows(path) if path.suffix in JSON else _table_rows(path):
            empty = False
            yield row
    if empty:
        raise DataError(f"{', '.join(paths[:4])} has no rows; a data set needs at least one")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns what reading a file raises into a DataError that names it, and of a text the line that is not UTF-8."""
    try:
        if path.suffix in TEXT:
            _refuse_utf16(path)
        yield
    except (WhetError, MemoryError):
        raise
    except Exception as error:
        if path.suffix in TEXT and not isinstance(error, OSError):
            for _ in _text_lines(path):
                pass
        raise DataError(f"{path} can't be read as {path.suffix[1:]}: {said(error)}; {REPAIR}") from error


def _refuse_utf16(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(4000)
    if start.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in start:
        raise DataError(f"{path} is not UTF-8: it looks like UTF-16, or is not text; {UTF8}")


def _text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, text) of every line. Raises DataError where one is not UTF-8."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                what = f"line {number} is not UTF-8: byte {line[error.start]:#x} at column {error.start + 1}"
                raise DataError(f"{path} can't be read as {path.suffix[1:]}: {what}; {UTF8}") from error
            yield number, text.removesuffix("\n")


# ---- JSON ------------------------------------------------------------------------------------------------------------


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl file, or of the list in a .json file (or under its only key that holds a list).

    Many write one object per line under .json too.
    """
    with _readable(path):
        yield from _lines(path) if path.suffix == ".jsonl" or _has_lines(path) else _whole(path)


def _whole(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file that is one value."""
    whole = _parsed("\n".join(line for _, line in _text_lines(path)), str(path), lines=True)
    if isinstance(whole, dict):
        lists = [value for value in whole.values() if isinstance(value, list)]
        if len(lists) != 1:
            raise DataError(f"{path} holds one object with keys {', '.join(whole)}; expected a list of objects")
        whole = lists[0]
    for place, row in enumerate(whole):
        if not isinstance(row, dict):
            raise DataError(f"{path}, element {place}: {type(row).__name__}; a row is an object of columns")
        yield row


def _has_lines(path: Path) -> bool:
    """Whether a .json file holds an object per line: its first line is one, or no JSON's beginning, and more follow."""
    first = ""
    for _, line in _text_lines(path):
        if first and line.strip():
            return True
        if line.strip():
            first = line.strip()
            if first[0] != "{":
                return first[0] != "["
            try:
                json.loads(first)
            except (ValueError, RecursionError):
                return False
    return not first


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file that has one on each line."""
    for number, line in _text_lines(path):
        if not line.strip():
            continue
        row = _parsed(line, f"{path}, line {number}")
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: {type(row).__name__}; a row is an object of columns")
        yield row


def _parsed(text: str, where: str, lines: bool = False) -> Any:
    """The value of a text of JSON; `lines` says that it has several, so that the place names one."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"{where}, line {error.lineno}" if lines else where
        near = "" if lines else f" at column {error.colno}: {text[:60]!r}"
        raise DataError(f"{place}: not JSON: {error.msg}{near}") from error
    except RecursionError as error:
        raise DataError(f"{where}: nested too deeply to be read; flatten it") from error
    except ValueError as error:  # an integer of more digits than Python reads
        raise DataError(f"{where}: {error}; write the number as a text") from error


# ---- tables ----------------------------------------------------------------------------------------------------------


def _table(path: Path) -> pa.Table:
    """The whole table of a csv, parquet or arrow file."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    if path.suffix == ".csv":
        return csv.read_csv(path, **_csv_options())
    if path.suffix == ".parquet":
        return parquet.ParquetFile(path).read()
    with pa.memory_map(str(path)) as file:
        try:
            return pa.ipc.open_stream(file).read_all()  # as datasets writes it
        except pa.ArrowInvalid:
            file.seek(0)
            return pa.ipc.open_file(file).read_all()  # as Feather writes it


def _parts(path: Path) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """The columns of a csv, parquet or arrow file, and its rows in parts."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    if path.suffix == ".csv":
        reader = csv.open_csv(path, **_csv_options())
        return reader.schema, iter(reader)
    if path.suffix == ".parquet":
        file = parquet.ParquetFile(path)
        return file.schema_arrow, file.iter_batches(BATCH)
    mapped = pa.memory_map(str(path))
    try:
        reader = pa.ipc.open_stream(mapped)
        return reader.schema, iter(reader)
    except pa.ArrowInvalid:
        mapped.seek(0)
        whole = pa.ipc.open_file(mapped)
        return whole.schema, map(whole.get_batch, range(whole.num_record_batches))


def _csv_options() -> dict[str, Any]:
    from pyarrow import csv

    return {
        "read_options": csv.ReadOptions(use_threads=False),  # then a bad row is named by its number
        "parse_options": csv.ParseOptions(newlines_in_values=True),
    }


def _table_rows(path: Path) -> Iterator[Any]:
    """The rows of a csv, parquet or arrow file, read a part at a time, with the features that datasets noted there."""
    import datasets
    import pyarrow as pa

    before = 0
    with _readable(path):
        for part in _parts(path)[1]:
            for start in range(0, len(part), BATCH):
                table = pa.Table.from_batches([part.slice(start, BATCH)])
                yield from datasets.Dataset(_checked(table, path, before))
                before += len(table)


def _checked(table: pa.Table, path: Path, before: int = 0) -> pa.Table:
    """The table, if it is sound, and each column can be told from the others; `before`: rows of the file before it."""
    import pyarrow as pa

    twice = [name for name in table.column_names if table.column_names.count(name) > 1]
    if twice:
        raise DataError(f"{path} has {table.column_names.count(twice[0])} columns {twice[0]!r}; rename all but one")
    for field in table.schema if path.suffix == ".csv" else ():
        if pa.types.is_binary(field.type):  # what pyarrow calls text that is not UTF-8
            raise ValueError(f"column {field.name!r} is not UTF-8")
        if pa.types.is_floating(field.type) and len(beyond := np.flatnonzero(np.isinf(table[field.name].to_numpy()))):
            raise DataError(
                f"{path}, row {before + beyond[0]}: column {field.name!r} holds a number beyond floating point; write "
                "it as a text in a .jsonl file"
            )
    return sound(table)


def sound(table: pa.Table) -> pa.Table:
    """The table, every byte of it looked at. Raises pyarrow's error where its buffers or texts are broken."""
    table.validate(full=True)
    return table


def _types(schema: pa.Schema) -> dict[str, pa.DataType]:
    """Column -> its type, of the columns that have one: what is None throughout goes with any."""
    import pyarrow as pa

    return {field.name: field.type for field in schema if not pa.types.is_null(field.type)}


def _check_types(columns: dict[Path, dict[str, pa.DataType]]) -> None:
    """Raises DataError where a column has one type in one file and another in the next."""
    first: dict[str, tuple[Path, pa.DataType]] = {}
    for path, types in columns.items():
        for name, kind in types.items():
            there, known = first.setdefault(name, (path, kind))
            if known != kind:
                raise DataError(
                    f"column {name!r} is {known} in {there} and {kind} in {path}; write the files with one type, or "
                    "name a single file"
                )
