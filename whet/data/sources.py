"""Data sets: from what the user names to rows.

A row is a mapping from column to value. Files on disk are read here, so that an error names the file and the line;
only hub names and streams go through datasets.load_dataset. Left out on purpose: mixing and filtering data sets; a
"file.py:function" that returns rows does that better.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from pathlib import Path
from typing import Any

from whet.errors import ConfigError, DataError, nearest
from whet.refs import is_ref, resolve_ref

__all__ = ["load_rows"]

BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
"""Suffixes of data files, and the builder of datasets that streams them."""
SPLITS = ("train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval")
"""Words in a file's name that say which split it holds."""
EVAL_SPLITS = tuple(word for word in SPLITS if not word.startswith("train"))
"""Splits to evaluate on."""


def load_rows(
    source: Any,
    *,
    split: str | None = "train",
    subset: str | None = None,
    streaming: bool = False,
    limit: int | None = None,
) -> Any:
    """The rows of a data set.

    Args:
        source: a hub name; a folder (saved by save_to_disk, or holding data files, then those named for the split, or
            all where no name says a split); a .json, .jsonl, .csv, .parquet or .arrow file (it is the split, whatever
            its name); "package.module:function" or "file.py:function", called without arguments; or the rows
            themselves, as a list, a datasets.Dataset or any iterable, returned as they are.
        split: which part of a hub data set, a folder or a DatasetDict; None = the part to evaluate on: the only one,
            or the only one named test, validation, dev or the like.
        subset: the configuration of a hub data set that has several.
        streaming: read as the rows are asked for; the rows then have no length and can't be shuffled.
        limit: the first so many rows; None = all.

    Returns:
        A list of dicts, a datasets.Dataset, a datasets.IterableDataset, or the iterable given.

    Raises:
        DataError: nothing there (with the nearest names), no such split or none that is for evaluation, a line that
            can't be read, no rows.
        ConfigError: a function that can't be found, or a limit below 1.

    >>> load_rows([{"prompt": "1+1=", "answer": 2}, {"prompt": "1+2=", "answer": 3}], limit=1)
    [{'prompt': '1+1=', 'answer': 2}]
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit {limit} leaves no rows; give at least 1, or None for all")
    rows = _named(str(source), split, subset, streaming) if isinstance(source, str | Path) else source
    rows = _cut(_of_split(rows, split, source), limit)
    if not isinstance(rows, Iterable):
        raise DataError(f"{source!r} gave {type(rows).__name__}; rows are a list of dicts, a Dataset or an iterable")
    if isinstance(rows, Sized) and len(rows) == 0:
        raise DataError(f"{_called(source)} has no rows; a data set needs at least one")
    return rows


def _named(text: str, split: str | None, subset: str | None, streaming: bool) -> Any:
    """The rows of a file, a folder, a function or a hub name."""
    path = Path(text).expanduser()
    if path.is_file():
        return _files([path], streaming)
    if path.is_dir():
        return _folder(path, split, streaming)
    if is_ref(text):
        made = resolve_ref(text, "data set")
        return made() if callable(made) else made
    looks_local = path.suffix in {*BUILDERS, ".py"} or path.is_absolute() or text.startswith((".", "~"))
    if looks_local or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", text):
        raise DataError(f"no file or folder {text!r}{_beside(path) or '; check the path'}")
    return _hub(text, split, subset, streaming)


def _hub(name: str, split: str | None, subset: str | None, streaming: bool) -> Any:
    """The rows of a hub data set."""
    import datasets

    if split is None:
        names = _asked(name, "its splits", datasets.get_dataset_split_names, name, subset)
        split = _eval_split(names, name)
    return _asked(name, f"split {split!r}", datasets.load_dataset, name, subset, split=split, streaming=streaming)


def _asked(name: str, what: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What the hub answers. Raises DataError where it has nothing, or can't be reached."""
    try:
        return call(*args, **options)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{name!r} is no file or folder here{_beside(Path(name))}; and as a hub data set, {what}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _folder(path: Path, split: str | None, streaming: bool) -> Any:
    """The rows of a folder: saved by datasets, or holding data files of one format."""
    import datasets

    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        saved = _of_split(datasets.load_from_disk(str(path)), split, path)
        return saved.to_iterable_dataset() if streaming else saved
    files = sorted(p for where in (path, path / "data") for p in where.glob("*") if p.suffix in BUILDERS)
    if not files:
        raise DataError(f"folder {str(path)!r} holds no data; expected {', '.join(BUILDERS)} files or a saved Dataset")
    said = sorted({word for word in SPLITS for p in files if _says(p, word)})
    if split is None and said:
        others = [p.name for p in files if not any(_says(p, word) for word in said)]
        split = _eval_split([*said, *others], path)
    chosen = [p for p in files if split is not None and _says(p, split)]
    if not chosen and (said or split not in (None, "train")):
        raise DataError(
            f"folder {str(path)!r} has no split {split!r}; its files: {', '.join(p.name for p in files[:8])}"
            f"{nearest(str(split), said)}"
        )
    chosen = chosen or files
    if len({p.suffix for p in chosen}) > 1:
        raise DataError(
            f"folder {str(path)!r} mixes formats: {', '.join(p.name for p in chosen[:8])}; name the file that you mean"
        )
    return _files(chosen, streaming)


def _says(path: Path, split: str) -> bool:
    """Whether a file's name holds a split's name as a word of its own."""
    return re.search(rf"(^|[-_.]){re.escape(split)}([-_.]|$)", path.stem) is not None


def _files(paths: list[Path], streaming: bool) -> Any:
    """The rows of data files of one format, one after the other."""
    import datasets

    suffix = paths[0].suffix
    if suffix not in BUILDERS:
        raise DataError(f"{str(paths[0])!r} has an unknown format {suffix!r}; known: {', '.join(BUILDERS)}")
    if streaming:
        files = [str(p) for p in paths]
        return datasets.load_dataset(BUILDERS[suffix], data_files=files, split="train", streaming=True)
    if suffix in (".json", ".jsonl"):
        return [row for p in paths for row in _json_rows(p)]
    tables = [datasets.Dataset(_table(p)) for p in paths]
    return tables[0] if len(tables) == 1 else datasets.concatenate_datasets(tables)


def _json_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file, or of the list in a .json file (or under its only key that holds a list)."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error}; convert it, or name its true format by the suffix") from error
    if path.suffix == ".jsonl" or not text.lstrip().startswith(("[", "{")):
        return _json_lines(path, text)
    try:
        whole = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # many write one object per line under this suffix
            return _json_lines(path, text)
        raise DataError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from error
    if isinstance(whole, dict):
        lists = [value for value in whole.values() if isinstance(value, list)]
        if len(lists) != 1:
            raise DataError(f"{path} holds one object with keys {', '.join(whole)}; expected a list of objects")
        whole = lists[0]
    for place, row in enumerate(whole):
        if not isinstance(row, dict):
            raise DataError(f"{path}, element {place}: {type(row).__name__}; a row is an object of columns")
    return whole


def _json_lines(path: Path, text: str) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}, line {number}: not JSON: {error.msg} at column {error.colno}: {line[:60]!r}"
            ) from error
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: {type(row).__name__}; a row is an object of columns")
        rows.append(row)
    return rows


def _table(path: Path) -> Any:
    """The Arrow table of a csv, parquet or arrow file."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    try:
        if path.suffix == ".csv":
            one_by_one = csv.ReadOptions(use_threads=False)  # then a bad row is named by its number
            table = csv.read_csv(path, one_by_one, csv.ParseOptions(newlines_in_values=True))
            _ = table.column_names  # their encoding is looked at only now
            return table
        if path.suffix == ".parquet":
            return parquet.read_table(path)
        with pa.memory_map(str(path)) as file:
            try:
                return pa.ipc.open_stream(file).read_all()  # as datasets writes it
            except pa.ArrowInvalid:
                file.seek(0)
                return pa.ipc.open_file(file).read_all()  # as Feather writes it
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read as {path.suffix[1:]}: {error}") from error


def _of_split(rows: Any, split: str | None, source: Any) -> Any:
    """One split of a DatasetDict (or a plain mapping of splits); anything else as it is."""
    if not isinstance(rows, Mapping):
        return rows
    if split is None:
        return rows[_eval_split(rows, source)]
    if split not in rows:
        raise DataError(f"{_called(source)} has no split {split!r}{nearest(split, rows)}; it has {', '.join(rows)}")
    return rows[split]


def _eval_split(names: Iterable[Any], source: Any) -> Any:
    """The split to evaluate on where none was named. Raises DataError where that is not clear."""
    names = list(names)
    found = names if len(names) == 1 else [name for name in names if name in EVAL_SPLITS]
    if len(found) != 1:
        raise DataError(
            f"{_called(source)} has {', '.join(map(str, names)) or 'no split'}, and {len(found)} of them are named for "
            "evaluation; say which: set data.eval_split, give data.eval_path one file, or from Python eval_ds one "
            "split's rows"
        )
    return found[0]


def _cut(rows: Any, limit: int | None) -> Any:
    """The first `limit` rows."""
    if limit is None:
        return rows
    if _is_dataset(rows):
        return rows.select(range(min(limit, len(rows))))
    return rows[:limit] if isinstance(rows, Sequence) else _First(rows, limit)


def _is_dataset(rows: Any) -> bool:
    """Whether rows are a datasets.Dataset, asked without importing datasets where nobody else did."""
    import sys

    return "datasets" in sys.modules and isinstance(rows, sys.modules["datasets"].Dataset)


class _First:
    """The first rows of an iterable, as often as the iterable itself can be read."""

    def __init__(self, rows: Iterable[Any], limit: int) -> None:
        self.rows, self.limit = rows, limit

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.rows), self.limit)


def _called(source: Any) -> str:
    """What to call a source in a message."""
    return repr(str(source)) if isinstance(source, str | Path) else f"the {type(source).__name__} given"


def _beside(path: Path) -> str:
    """The nearest names in the folder where a path should be."""
    folder = path.expanduser().parent
    return nearest(path.name, [p.name for p in folder.iterdir()]) if folder.is_dir() else f"; no folder {folder}"
