"""Rows from data files, at once or as they are asked for; an error names the file and, where it is known, the line.

Both ways read alike, through pyarrow and Python's own json: what is an error in one is one in the other, and rows are
equal. Only a type that a CSV file changes after its first megabyte is seen in a stream too late to be settled.
JSON and CSV files may be compressed (.gz, .bz2, .zst, .lz4); pyarrow expands them as they are read.
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
"""Suffixes that a file of text may have besides its own."""
REPAIR = "repair the file, or write it again"
UTF8 = "convert it to UTF-8, e.g. with iconv"
BATCH = 1000
"""Rows of a table that a stream holds at a time."""


def file_format(path: Path) -> str:
    """The suffix that says what a data file holds: its last one, or of a compressed file the one before.

    >>> file_format(Path("a/train.jsonl")), file_format(Path("train.csv.gz"))
    ('.jsonl', '.csv')
    """
    inner = Path(path.stem).suffix
    return inner if path.suffix in COMPRESSED and inner in TEXT else path.suffix


def read_files(paths: Sequence[Path]) -> Any:
    """The rows of data files of one format, one after the other.

    Args: paths: at least one.
    Returns: a list of dicts (JSON), or a datasets.Dataset (tables).
    Raises: DataError: a file that can't be read, or whose columns have other types than those of the first.
    """
    import datasets

    if file_format(paths[0]) in JSON:
        return [row for path in paths for row in _json_rows(path)]
    tables: list[Any] = []
    for path in paths:
        with _readable(path):
            tables.append(datasets.Dataset(_checked(_table(path), path)))
    if len(tables) == 1:
        return tables[0]
    _check_types({path: _types(table.data.schema) for path, table in zip(paths, tables, strict=True)})
    with convert_read_errors(" and ".join(map(str, paths[:4])), "write the files with the same columns"):
        return datasets.concatenate_datasets(tables)


def stream_files(paths: Sequence[Path]) -> StreamedFiles:
    """The rows of data files of one format, read when they are asked for.

    Args: paths: at least one.
    Raises: DataError: tables whose columns have other types than those of the first; and, once they are read, all that
        `read_files` raises, and no rows at all.
    """
    if file_format(paths[0]) not in JSON:
        schemas = {}
        for path in paths:
            with _readable(path):
                schemas[path] = _types(_parts(path)[0])
        _check_types(schemas)
    return StreamedFiles(paths)


class StreamedFiles:
    """The rows of data files. They can be read repeatedly, and from the saved place of an earlier reader.

    `state_dict` says where the newest iterator stands, and `load_state_dict` lets the next one begin there, as those of
    datasets.IterableDataset do. A .jsonl file goes on at its byte, a .parquet file at its row group and an .arrow file
    at its batch; a .csv, .json or compressed file is read again from its own beginning.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """Args: paths: at least one, of one format."""
        self.paths = tuple(paths)
        self._start: Mapping[str, int] | None = None
        self._at = {"file": 0, "part": 0, "row": 0}

    def state_dict(self) -> dict[str, int]:
        """The file, the part of it (a byte, a row group, a batch; 0 where it has none), and rows read of that part."""
        return dict(self._at)

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Makes the next iterator continue from a saved state."""
        self._start = dict(state_dict)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The rows. Raises: DataError: a file that can't be read, or no rows at all."""
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
    """(part, number in it, row) of a file's rows, after the first `row` ones of a part."""
    kind = file_format(path)
    if path.suffix == ".jsonl":
        with _readable(path):
            yield from ((at, 0, found) for at, found in _lines(path, part, skip=row > 0))
    elif kind in JSON:
        yield from ((0, n, found) for n, found in enumerate(_json_rows(path)) if n >= row)
    else:
        yield from _table_rows(path, part, row)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns what reading a file raises into a DataError that names it, and of a text the line that is not UTF-8."""
    try:
        if file_format(path) in TEXT:
            _refuse_utf16(path)
        yield
    except Exception as error:
        if isinstance(error, WhetError | MemoryError):  # see reading.each
            raise
        if file_format(path) in TEXT and not isinstance(error, OSError):
            for _ in _text_lines(path):
                pass
        raise DataError(
            f"{path} can't be read as {file_format(path)[1:]}: {format_exception(error)}; {REPAIR}"
        ) from error


def _opened(path: Path) -> io.BufferedIOBase:
    """A file of text, expanded where it is compressed."""
    if path.suffix not in COMPRESSED:
        return path.open("rb")
    import pyarrow as pa

    return io.BufferedReader(pa.input_stream(str(path)))  # pyright: ignore[reportArgumentType]


def _refuse_utf16(path: Path) -> None:
    with _opened(path) as file:
        start = file.read(4000)
    if start.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in start:
        raise DataError(f"{path} is not UTF-8: it looks like UTF-16, or is not text; {UTF8}")


def _text_lines(path: Path, start: int = 0) -> Iterator[tuple[int, int, str]]:
    """(number, byte, text) of every line. Raises DataError where one is not UTF-8.

    Args: start: the byte at which the first line to read begins; numbers count from that line.
    """
    with _opened(path) as file:
        if at := start:
            file.seek(start)
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8" if at else "utf-8-sig")
            except UnicodeDecodeError as error:
                what = f"{_line(number, start)} is not UTF-8: byte {line[error.start]:#x} at column {error.start + 1}"
                raise DataError(f"{path} can't be read as {file_format(path)[1:]}: {what}; {UTF8}") from error
            yield number, at, text.removesuffix("\n")
            at += len(line)


def _line(number: int, start: int) -> str:
    """What to call a line in a message."""
    return f"line {number} after byte {start}" if start else f"line {number}"


# ---- JSON ------------------------------------------------------------------------------------------------------------


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl file, or of the list in a .json file (or under its only key that holds a list).

    Many write one object per line under .json too.
    """
    with _readable(path):
        if file_format(path) == ".jsonl" or _has_lines(path):
            yield from (row for _, row in _lines(path))
        else:
            yield from _whole(path)


def _whole(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file that is one value."""
    whole = _parsed("\n".join(line for _, _, line in _text_lines(path)), str(path), lines=True)
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


def _lines(path: Path, start: int = 0, skip: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """(byte, object) of a file that has one object on each line. Args: start: a byte. skip: leave the first out."""
    for number, at, line in _text_lines(path, start):
        if not line.strip() or (skip and at == start):
            continue
        row = _parsed(line, f"{path}, {_line(number, start)}")
        if not isinstance(row, dict):
            raise DataError(f"{path}, {_line(number, start)}: {type(row).__name__}; a row is an object of columns")
        yield at, row


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


def _parts(path: Path, start: int = 0) -> tuple[pa.Schema, Iterator[tuple[int, pa.RecordBatch]]]:
    """The columns of a csv, parquet or arrow file, and (part, rows) of it in batches, from a part on.

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
        whole = pa.ipc.open_file(mapped)
        return whole.schema, ((n, whole.get_batch(n)) for n in range(start, whole.num_record_batches))


def _csv_options() -> dict[str, Any]:
    from pyarrow import csv

    return {
        "read_options": csv.ReadOptions(use_threads=False),  # then a bad row is named by its number
        "parse_options": csv.ParseOptions(newlines_in_values=True),
    }


def _table_rows(path: Path, first: int, skip: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(part, number in it, row) of a csv, parquet or arrow file, with the features that datasets noted there.

    Args: first: the part to begin with. skip: rows of it that are left out.
    """
    import datasets
    import pyarrow as pa

    number = {first: 0}
    with _readable(path):
        for part, batch in _parts(path, first)[1]:
            for start in range(0, len(batch), BATCH):
                before = number.setdefault(part, 0)
                table = pa.Table.from_batches([batch.slice(start, BATCH)])
                number[part] += len(table)
                left_out = min(max(skip - before, 0), len(table)) if part == first else 0
                rows = datasets.Dataset(_checked(table.slice(left_out), path, before + left_out))
                yield from ((part, before + left_out + n, row) for n, row in enumerate(rows))  # pyright: ignore


def _checked(table: pa.Table, path: Path, before: int = 0) -> pa.Table:
    """The table, if it is sound, and each column can be told from the others; `before`: rows of the file before it."""
    import pyarrow as pa

    twice = [name for name in table.column_names if table.column_names.count(name) > 1]
    if twice:
        raise DataError(f"{path} has {table.column_names.count(twice[0])} columns {twice[0]!r}; rename all but one")
    for field in table.schema if file_format(path) == ".csv" else ():
        if pa.types.is_binary(field.type):  # what pyarrow calls text that is not UTF-8
            raise ValueError(f"column {field.name!r} is not UTF-8")
        if pa.types.is_floating(field.type) and len(beyond := np.flatnonzero(np.isinf(table[field.name].to_numpy()))):
            raise DataError(
                f"{path}, row {before + beyond[0]}: column {field.name!r} holds a number beyond floating point; write "
                "it as a text in a .jsonl file"
            )
    return validate_table(table)


def validate_table(table: pa.Table) -> pa.Table:
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
