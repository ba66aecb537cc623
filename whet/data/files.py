"""Reads rows from data files, all at once or as a stream; errors name the file and, if it is known, the line.

Both ways use pyarrow and Python's json, give equal rows and raise the same errors, with one exception: a stream can't
adapt to a column of a CSV file that changes its type after the first megabyte.
JSON and CSV files may be compressed (.gz, .bz2, .zst, .lz4); pyarrow decompresses them while it reads.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.data.read_errors import convert_read_errors
from whet.errors import DataError, WhetError, format_exception

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["FORMATS", "StreamedFiles", "file_format", "read_files", "stream_files", "validate_table"]

FORMATS = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
"""Suffixes of data files."""
JSON = (".json", ".jsonl")
TEXT = (*JSON, ".csv")
COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")
"""Suffixes of compression, after that of the format."""
REPAIR = "repair the file, or write it again"
UTF8 = "convert it to UTF-8, e.g. with iconv"
BATCH = 1000
"""The most rows of a table that a stream keeps in memory."""


def file_format(path: Path) -> str:
    """Returns the suffix of a file's format: the last one, or for a compressed file the one before.

    >>> file_format(Path("a/train.jsonl")), file_format(Path("train.csv.gz"))
    ('.jsonl', '.csv')
    """
    inner = Path(path.stem).suffix
    return inner if path.suffix in COMPRESSED and inner in TEXT else path.suffix


def read_files(paths: Sequence[Path]) -> Any:
    """Returns the rows of data files of one format, one after the other.

    Args: paths: at least one.
    Returns: a list of dicts (JSON), or a datasets.Dataset (tables).
    Raises: DataError: a file can't be read, or its columns have other types than those of the first file.
    """
    import datasets

    if file_format(paths[0]) in JSON:
        return [row for path in paths for row in _json_rows(path)]
    tables: list[Any] = []
    for path in paths:
        with _convert_file_errors(path):
            tables.append(datasets.Dataset(_check_table(_read_table(path), path)))
    if len(tables) == 1:
        return tables[0]
    _check_types({path: _column_types(table.data.schema) for path, table in zip(paths, tables, strict=True)})
    with convert_read_errors(" and ".join(map(str, paths[:4])), "write the files with the same columns"):
        return datasets.concatenate_datasets(tables)


def stream_files(paths: Sequence[Path]) -> StreamedFiles:
    """Returns the rows of data files of one format, as a stream.

    Args: paths: at least one.
    Raises: DataError: the columns of a table have other types than those of the first. While it is read, the stream
        raises the errors of `read_files`, and one if there are no rows.
    """
    if file_format(paths[0]) not in JSON:
        schemas = {}
        for path in paths:
            with _convert_file_errors(path):
                schemas[path] = _column_types(_open_batches(path)[0])
        _check_types(schemas)
    return StreamedFiles(paths)


class StreamedFiles:
    """A stream of the rows of data files, which can be read repeatedly and resumed.

    As in datasets.IterableDataset, `state_dict` is the position of the newest iterator, and after `load_state_dict` the
    next iterator starts there. A .jsonl file is resumed at its byte, a .parquet file at its row group and an .arrow
    file at its batch; a .csv, .json or compressed file is read again from its start.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """Args: paths: at least one, of one format."""
        self.paths = tuple(paths)
        self._start: Mapping[str, int] | None = None
        self._at = {"file": 0, "part": 0, "row": 0}

    def state_dict(self) -> dict[str, int]:
        """Returns the file, its part (a byte, a row group or a batch; 0 if it has no parts), and the rows read of that
        part.
        """
        return dict(self._at)

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Makes the next iterator continue from a saved state."""
        self._start = dict(state_dict)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields the rows. Raises: DataError: a file can't be read, or there are no rows."""
        at = self._at = {"file": 0, "part": 0, "row": 0, **(self._start or {})}
        started, self._start = self._start is not None, None
        empty = True
        for number in range(at["file"], len(self.paths)):
            if number != at["file"]:
                at.update(file=number, part=0, row=0)
            for part, row_number, row in _rows_from(self.paths[number], at["part"], at["row"]):
                at.update(part=part, row=row_number + 1)
                empty = False
                yield row
        if empty and not started:
            raise DataError(f"{', '.join(map(str, self.paths[:4]))} has no rows; a data set needs at least one")


def _rows_from(path: Path, part: int, row: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(part, index in the part, row) of each row of a file, after the first `row` rows of a part."""
    kind = file_format(path)
    if path.suffix == ".jsonl":
        with _convert_file_errors(path):
            yield from ((at, 0, value) for at, value in _json_lines(path, part, skip=row > 0))
    elif kind in JSON:
        yield from ((0, n, value) for n, value in enumerate(_json_rows(path)) if n >= row)
    else:
        yield from _table_rows(path, part, row)


@contextmanager
def _convert_file_errors(path: Path) -> Iterator[None]:
    """Converts errors of reading a file into a DataError that names the file, and the line if it is not UTF-8."""
    try:
        if file_format(path) in TEXT:
            _refuse_utf16(path)
        yield
    except Exception as error:
        if isinstance(error, WhetError | MemoryError):
            raise
        if file_format(path) in TEXT and not isinstance(error, OSError):
            for _ in _text_lines(path):
                pass
        raise DataError(
            f"{path} can't be read as {file_format(path)[1:]}: {format_exception(error)}; {REPAIR}"
        ) from error


def _open_text(path: Path) -> io.BufferedIOBase:
    """Returns a text file, opened as bytes and decompressed."""
    if path.suffix not in COMPRESSED:
        return path.open("rb")
    import pyarrow as pa

    return io.BufferedReader(pa.input_stream(str(path)))  # pyright: ignore[reportArgumentType]


def _refuse_utf16(path: Path) -> None:
    with _open_text(path) as file:
        start = file.read(4000)
    if start.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in start:
        raise DataError(f"{path} is not UTF-8: it looks like UTF-16, or is not text; {UTF8}")


def _text_lines(path: Path, start: int = 0) -> Iterator[tuple[int, int, str]]:
    """(line number, byte, text) of every line. Raises DataError if a line is not UTF-8.

    Args: start: the byte where the first line to read starts; line numbers count from there.
    """
    with _open_text(path) as file:
        if at := start:
            file.seek(start)
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8" if at else "utf-8-sig")
            except UnicodeDecodeError as error:
                problem = (
                    f"{_line_name(number, start)} is not UTF-8: byte {line[error.start]:#x} at column {error.start + 1}"
                )
                raise DataError(f"{path} can't be read as {file_format(path)[1:]}: {problem}; {UTF8}") from error
            yield number, at, text.removesuffix("\n")
            at += len(line)


def _line_name(number: int, start: int) -> str:
    """Returns the name of a line in messages."""
    return f"line {number} after byte {start}" if start else f"line {number}"


# ---- JSON ------------------------------------------------------------------------------------------------------------


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a .jsonl file, of the list in a .json file, or of the only list in the object of a .json
    file.

    A .json file may also have one object per line.
    """
    with _convert_file_errors(path):
        if file_format(path) == ".jsonl" or _has_lines(path):
            yield from (row for _, row in _json_lines(path))
        else:
            yield from _json_values(path)


def _json_values(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file with one JSON value."""
    value = _parse_json("\n".join(line for _, _, line in _text_lines(path)), str(path), lines=True)
    if isinstance(value, dict):
        lists = [item for item in value.values() if isinstance(item, list)]
        if len(lists) != 1:
            raise DataError(f"{path} holds one object with keys {', '.join(value)}; expected a list of objects")
        value = lists[0]
    for place, row in enumerate(value):
        if not isinstance(row, dict):
            raise DataError(f"{path}, element {place}: {type(row).__name__}; a row is an object of columns")
        yield row


def _has_lines(path: Path) -> bool:
    """Returns whether a .json file has one object per line: the first line is an object, or not JSON, and more lines
    follow.
    """
    first = ""
    for _, _, line in _text_lines(path):
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


def _json_lines(path: Path, start: int = 0, skip: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """(byte, object) of each line of a file. Args: start: the byte of the first line. skip: leave that line out."""
    for number, at, line in _text_lines(path, start):
        if not line.strip() or (skip and at == start):
            continue
        row = _parse_json(line, f"{path}, {_line_name(number, start)}")
        if not isinstance(row, dict):
            raise DataError(f"{path}, {_line_name(number, start)}: {type(row).__name__}; a row is an object of columns")
        yield at, row


def _parse_json(text: str, where: str, lines: bool = False) -> Any:
    """Returns the value of a JSON text. Args: where: its place, for messages. lines: the text has several lines; name
    one.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"{where}, line {error.lineno}" if lines else where
        near = "" if lines else f" at column {error.colno}: {text[:60]!r}"
        raise DataError(f"{place}: not JSON: {error.msg}{near}") from error
    except RecursionError as error:
        raise DataError(f"{where}: nested too deeply to be read; flatten it") from error
    except ValueError as error:  # an integer with more digits than Python accepts
        raise DataError(f"{where}: {error}; write the number as a string") from error


# ---- tables ----------------------------------------------------------------------------------------------------------


def _read_table(path: Path) -> pa.Table:
    """Returns the table of a csv, parquet or arrow file."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    if file_format(path) == ".csv":
        return csv.read_csv(path, **_csv_options())
    if path.suffix == ".parquet":
        return parquet.ParquetFile(path).read()
    with pa.memory_map(str(path)) as file:
        try:
            return pa.ipc.open_stream(file).read_all()  # as datasets writes it
        except pa.ArrowInvalid:
            file.seek(0)
            return pa.ipc.open_file(file).read_all()  # as Feather writes it


def _open_batches(path: Path, start: int = 0) -> tuple[pa.Schema, Iterator[tuple[int, pa.RecordBatch]]]:
    """Returns the schema of a csv, parquet or arrow file, and its batches as (part, batch), starting with part `start`.

    A part is a row group of a parquet file and a batch of an arrow file; a csv file is one part.
    """
    import pyarrow as pa
    from pyarrow import csv, parquet

    if file_format(path) == ".csv":
        reader = csv.open_csv(path, **_csv_options())
        return reader.schema, ((0, batch) for batch in reader)
    if path.suffix == ".parquet":
        file = parquet.ParquetFile(path)
        groups = range(start, file.num_row_groups)
        return file.schema_arrow, ((group, b) for group in groups for b in file.iter_batches(BATCH, row_groups=[group]))
    mapped = pa.memory_map(str(path))
    try:
        reader = pa.ipc.open_stream(mapped)
        return reader.schema, ((number, b) for number, b in enumerate(reader) if number >= start)
    except pa.ArrowInvalid:
        mapped.seek(0)
        feather = pa.ipc.open_file(mapped)
        return feather.schema, ((n, feather.get_batch(n)) for n in range(start, feather.num_record_batches))


def _csv_options() -> dict[str, Any]:
    from pyarrow import csv

    return {
        "read_options": csv.ReadOptions(use_threads=False),  # errors then have the number of the row
        "parse_options": csv.ParseOptions(newlines_in_values=True),
    }


def _table_rows(path: Path, first: int, skip: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(part, index in the part, row) of a csv, parquet or arrow file, with the features that datasets stored in it.

    Args: first: the first part to read. skip: the number of its rows to skip.
    """
    import datasets
    import pyarrow as pa

    number = {first: 0}
    with _convert_file_errors(path):
        for part, batch in _open_batches(path, first)[1]:
            for start in range(0, len(batch), BATCH):
                offset = number.setdefault(part, 0)
                table = pa.Table.from_batches([batch.slice(start, BATCH)])
                number[part] += len(table)
                skipped = min(max(skip - offset, 0), len(table)) if part == first else 0
                rows = datasets.Dataset(_check_table(table.slice(skipped), path, offset + skipped))
                yield from ((part, offset + skipped + n, row) for n, row in enumerate(rows))  # pyright: ignore


def _check_table(table: pa.Table, path: Path, before: int = 0) -> pa.Table:
    """Returns the table, if its data are valid and its columns have different names. Args: before: rows before the
    table.
    """
    import pyarrow as pa

    duplicates = [name for name in table.column_names if table.column_names.count(name) > 1]
    if duplicates:
        name = duplicates[0]
        raise DataError(f"{path} has {table.column_names.count(name)} columns {name!r}; rename all but one")
    for field in table.schema if file_format(path) == ".csv" else ():
        if pa.types.is_binary(field.type):  # pyarrow's type of text that is not UTF-8
            raise ValueError(f"column {field.name!r} is not UTF-8")
        if pa.types.is_floating(field.type) and len(infinite := np.flatnonzero(np.isinf(table[field.name].to_numpy()))):
            raise DataError(
                f"{path}, row {before + infinite[0]}: column {field.name!r} holds a number beyond floating point; "
                "write it as a text in a .jsonl file"
            )
    return validate_table(table)


def validate_table(table: pa.Table) -> pa.Table:
    """Validates every value of a table, and returns it. Raises pyarrow's error if its buffers or texts are broken."""
    table.validate(full=True)
    return table


def _column_types(schema: pa.Schema) -> dict[str, pa.DataType]:
    """Column -> type. Columns of nulls only are left out, because they fit every type."""
    import pyarrow as pa

    return {field.name: field.type for field in schema if not pa.types.is_null(field.type)}


def _check_types(columns: dict[Path, dict[str, pa.DataType]]) -> None:
    """Raises DataError if a column has different types in two files."""
    first: dict[str, tuple[Path, pa.DataType]] = {}
    for path, types in columns.items():
        for name, kind in types.items():
            first_path, first_kind = first.setdefault(name, (path, kind))
            if first_kind != kind:
                raise DataError(
                    f"column {name!r} is {first_kind} in {first_path} and {kind} in {path}; write the files with one "
                    "type, or name a single file"
                )
