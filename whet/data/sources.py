"""Loads the rows of a data source: files, folders, globs, URLs, hub names, functions, or rows in memory.

A row is a mapping from column to value. whet.data.files reads local files, so errors name the file and the line.
datasets.load_dataset reads hub data sets, and whet.data.mixture combines several sources.
Left out on purpose: filtering rows; a "file.py:function" that returns rows can do it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from whet.config.data import SOURCE_KEYS, Sources, source_paths
from whet.data.files import FORMATS, file_format, read_files, stream_files, validate_table
from whet.data.mixture import MixedRows, MixedStream
from whet.data.read_errors import convert_read_errors
from whet.data.reasoning_gym import PREFIX as REASONING_GYM
from whet.data.reasoning_gym import check_tasks, task_rows
from whet.data.verifiers import PREFIX as VERIFIERS
from whet.data.verifiers import check_taskset, taskset_rows
from whet.errors import ConfigError, DataError, WhetError, format_exception, format_value, nearest
from whet.storage.model_paths import hub_unreachable_reason, split_revision
from whet.util.references import check_access, is_ref, resolve_ref

__all__ = ["check_source", "have_same_rows", "load_rows"]

log = logging.getLogger("whet")

LOG_AFTER_S = 3.0
"""Waiting for the hub is logged after this many seconds."""
SPLITS = ("train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval")
"""Words in a file name that name its split."""
EVAL_SPLITS = tuple(word for word in SPLITS if not word.startswith("train"))
"""The names of evaluation splits."""


def load_rows(
    source: Any,
    *,
    split: str | None = "train",
    subset: str | None = None,
    streaming: bool = False,
    limit: int | None = None,
    is_part: bool = False,
) -> Any:
    """Returns the rows of a data set.

    Args:
        source: a hub name, optionally with "@revision" (a branch, tag or commit); a folder, saved by save_to_disk or
            with data files (those named for the split, or all if no name has a split); a .json, .jsonl, .csv, .parquet
            or .arrow file (it is the split, whatever its name), the first three also compressed; a glob of such files;
            a URL of one; tasks of reasoning-gym, "reasoning_gym:chain_sum?min_terms=2&size=1000&seed=0",
            with the splits train and test; a taskset of verifiers, "verifiers:name?size=1000";
            "package.module:function" or "file.py:function", called without arguments; a list of these, and of
            mappings {path, weight, subset, split, limit}; or the rows themselves, as a list of mappings with other
            keys, a datasets.Dataset or any iterable, returned as they are.
        split: the split of a hub data set, a folder or a DatasetDict. None = the split to evaluate on: the only one, or
            the only one named test, validation, dev or the like. "split@source" names both in one text.
        subset: the configuration of a hub data set with several.
        streaming: read rows on demand; they have no length then, and can't be shuffled.
        limit: only the first N rows; None = all.
        is_part: the source must have splits; a single file, a single saved data set and rows in memory have none.

    Returns:
        A list of dicts, a datasets.Dataset, a datasets.IterableDataset, or the iterable given.

    Raises:
        DataError: the source does not exist (the message has the nearest names), no such split or no evaluation split,
            a line that can't be read, or no rows.
        ConfigError: a function that can't be found, a limit below 1, or a source without splits if is_part.

    >>> load_rows([{"prompt": "1+1=", "answer": 2}, {"prompt": "1+2=", "answer": 3}], limit=1)
    [{'prompt': '1+1=', 'answer': 2}]
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit {limit} leaves no rows; give at least 1, or None for all")
    if _is_source_list(source):
        return _load_several(source, split=split, subset=subset, streaming=streaming, limit=limit)
    if isinstance(source, str | Path):
        split, source = _parse_split(str(source), split)
        rows = _load_named(source, split, subset, streaming, is_part)
    else:
        rows = source
    rows = _limit_rows(_select_split(rows, split, source), limit)
    if not isinstance(rows, Iterable):
        kind = type(rows).__name__
        raise DataError(f"{format_value(source)} gave {kind}; rows are a list of dicts, a Dataset or an iterable")
    if isinstance(rows, Sized) and len(rows) == 0:
        raise DataError(f"{_describe(source)} has no rows; a data set needs at least one")
    return rows


def _is_source_list(source: Any) -> bool:
    """Returns whether a source is a list of sources, and not of rows."""
    first = next(iter(source), None) if isinstance(source, list | tuple) else None
    named = isinstance(first, Mapping) and "path" in first and set(first) <= set(SOURCE_KEYS)
    return named or isinstance(first, str | Path)


def _load_several(
    source: Sequence[Any], *, limit: int | None, streaming: bool, **defaults: Any
) -> MixedRows | MixedStream:
    """Returns the rows of a list of sources. Args: defaults: split and subset of sources that do not name them."""
    if limit is not None:
        raise ConfigError(
            f"limit {limit} applies to one data set; set it for each of the list: {{path: ..., limit: {limit}}}"
        )
    named = [item if isinstance(item, Mapping) else {"path": item} for item in source]
    weights: Any = [item.get("weight") for item in named]
    parts = []
    for item in named:
        options = {name: item[name] for name in ("split", "subset", "limit") if item.get(name) is not None}
        parts.append(load_rows(item["path"], streaming=streaming, **{**defaults, **options}))
    if streaming or not all(isinstance(part, Sized) for part in parts):
        return MixedStream(parts, [1.0 if weight is None else weight for weight in weights])
    return MixedRows(parts, None if weights[0] is None else weights)


def _parse_split(text: str, split: str | None) -> tuple[str | None, str]:
    """Returns the split and the source of "split@source", RL2's form; a text that is an existing path is not split."""
    named, at, source = text.partition("@")
    if not (at and source and re.fullmatch(r"[\w.-]+(\[[\w%:]+\])?", named)):
        return split, text
    with convert_read_errors(format_value(text), "check the path and its permissions"):
        return (split, text) if Path(text).expanduser().exists() else (named, source)


def _load_named(text: str, split: str | None, subset: str | None, streaming: bool, is_part: bool) -> Any:
    """Returns the rows of a file, a folder, a function, tasks of reasoning-gym or a hub name."""
    if text.startswith(REASONING_GYM):
        return task_rows(text, split)
    if text.startswith(VERIFIERS):
        return taskset_rows(text, split)
    with convert_read_errors(format_value(text), "check the path and its permissions"):
        path = Path(text).expanduser()
        check_access(path)
        if is_part and (path.is_file() or (path / "state.json").is_file()):
            raise _no_splits_error(text, split)
        if path.is_file():
            return _load_files([path], streaming)
        if path.is_dir():
            return _load_folder(path, split, streaming)
        if _is_glob(text):
            return _load_files(_expand_glob(text), streaming)
    if _is_url(text):
        return _load_url(text, streaming)
    if is_ref(text):
        loaded = resolve_ref(text, "data set")
        with convert_read_errors(f"data set {text!r}", "fix the function, which is called without arguments"):
            rows = loaded() if callable(loaded) else loaded
        if is_part and not isinstance(rows, Mapping):
            raise _no_splits_error(text, split)
        return rows
    _check_name(text, path)
    return _load_hub(text, split, subset, streaming)


def _is_glob(text: str) -> bool:
    return any(mark in text for mark in "*?[") and "://" not in text


def _expand_glob(text: str) -> list[Path]:
    """Returns the files of a glob, sorted by name. Raises DataError: there are none."""
    path = Path(text).expanduser()
    files = sorted(found for found in Path(path.anchor).glob(str(path.relative_to(path.anchor))) if found.is_file())
    if not files:
        raise DataError(f"no file matches {format_value(text)}; check the path (** stands for any folders)")
    _check_same_format(files, format_value(text))
    return files


def _check_same_format(files: Sequence[Path], what: str) -> None:
    """Raises DataError unless all files have one format."""
    if len({file_format(path) for path in files}) > 1:
        names = ", ".join(path.name for path in files[:8])
        raise DataError(f"{what} mixes formats: {names}; name the files of one format, e.g. by *.jsonl")


def _is_url(text: str) -> bool:
    return re.match(r"\w+://", text) is not None


def _load_url(text: str, streaming: bool) -> Any:
    """Returns the rows of a data file at a URL. HTTP files are downloaded first; datasets reads other protocols."""
    import datasets

    suffix = file_format(Path(text.split("?")[0]))
    if suffix not in FORMATS:
        raise DataError(f"{text!r} has an unknown format {suffix!r}; known: {', '.join(FORMATS)}")
    with convert_read_errors(text, "check the address and the network"), _log_waiting(text):
        if text.startswith(("http://", "https://")):
            return _load_files(
                [_download(text)], streaming
            )  # an error names the file, which ends in the URL's own name
        kind = {".jsonl": "json"}.get(suffix, suffix[1:])
        return datasets.load_dataset(kind, data_files=text, split="train", streaming=streaming)


def _download(url: str) -> Path:
    """Downloads a file into the cache of datasets. Raises: OSError: no answer, or less than the whole file."""
    from urllib.parse import quote
    from urllib.request import urlopen

    from datasets import config

    folder = Path(config.HF_DATASETS_CACHE) / "whet-downloads" / hashlib.sha256(url.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / Path(url.split("?")[0]).name
    part = folder / f"{path.name}.{os.getpid()}.part"
    log.info("downloading %s", url)
    try:
        with urlopen(quote(url, safe="%/:?&=#+~@!$,;'()*[]"), timeout=30) as answer, part.open("wb") as file:
            shutil.copyfileobj(answer, file)
            size = int(answer.headers.get("Content-Length", file.tell()))
            if file.tell() < size:  # http.client does not say it
                raise OSError(f"the connection ended after {file.tell()} of {size} bytes")
        return part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _check_name(text: str, path: Path) -> None:
    """Raises DataError for a path that does not exist, and a text that can't be a hub name."""
    text, _ = split_revision(text)
    looks_local = path.suffix in (*FORMATS, ".py") or path.is_absolute() or text.startswith((".", "~"))
    if looks_local or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", text):
        raise DataError(f"no file or folder {format_value(text)}{_nearest_name(path) or '; check the path'}")


def _no_splits_error(text: str, split: str | None) -> ConfigError:
    return ConfigError(
        f"data.eval_split={split}: {format_value(text)} has no splits, so its training rows would be evaluated; give "
        "data.eval_path the rows to evaluate on, or set data.eval_fraction=0.1"
    )


def have_same_rows(path: Sources, split: str | None, eval_path: Sources, eval_split: str | None) -> bool:
    """Returns whether two sources have a split of a data set in common, judging by their names.

    >>> have_same_rows("a.jsonl", "train", "./a.jsonl", None), have_same_rows("a/b", "train", "a/b", "test")
    (True, False)
    """
    parts = lambda source, usual: {_path_and_split(text, usual) for text in source_paths(source)}
    return not parts(path, split).isdisjoint(parts(eval_path, eval_split))


def _path_and_split(text: str, split: str | None) -> tuple[Path, str | None]:
    """Returns the path and the split of a data source; a file has no split."""
    split, text = _parse_split(text, split)
    place = Path(text).expanduser().resolve()
    return place, None if file_format(place) in FORMATS else split


def check_source(source: str, part: str | None = None) -> None:
    """Checks that a data source may exist, without reading it or asking the hub.

    Args: part: a split that the source must have; None = no check.
    Raises: DataError: no such file or folder. ConfigError: a function that can't be found, or a file if `part` is set.
    """
    _, text = _parse_split(source, None)
    if text.startswith((REASONING_GYM, VERIFIERS)):
        (check_tasks if text.startswith(REASONING_GYM) else check_taskset)(text)
        return
    with convert_read_errors(format_value(text), "check the path and its permissions"):
        path = Path(text).expanduser()
        if part is not None and path.is_file():
            raise _no_splits_error(text, part)
        if path.exists():
            return
        if _is_glob(text):
            _expand_glob(text)
            return
    if _is_url(text):
        return
    if is_ref(text):
        resolve_ref(text, "data set")
    else:
        _check_name(text, path)


def _load_hub(name: str, split: str | None, subset: str | None, streaming: bool) -> Any:
    """Returns the rows of a hub data set."""
    import datasets

    name, revision = split_revision(name)
    _check_hub(name)
    pinned = {} if revision is None else {"revision": revision}
    if split is None:
        names = _call_hub(name, "its splits", datasets.get_dataset_split_names, name, subset, **pinned)
        split = _eval_split(names, name)
    options = {"split": split, "streaming": streaming, **pinned}
    return _call_hub(name, f"split {split!r}", datasets.load_dataset, name, subset, **options)


def _check_hub(name: str) -> None:
    """Asks the hub once for a name that is not in the cache, because datasets would retry for half a minute.

    Raises: DataError: the hub does not answer. datasets reports all other errors.
    """
    from datasets import config
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return
    log.info("%r is not a file or folder here; asking the hub for a data set of that name", name)
    kept = (
        Path(config.HF_DATASETS_CACHE) / name.replace("/", "___"),
        Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}",
    )
    if any(path.is_dir() for path in kept):
        return
    try:
        with _log_waiting(name):
            HfApi().dataset_info(name, timeout=10)
    except Exception as error:  # the client lets through what its HTTP library raises
        if (why := hub_unreachable_reason(error)) is not None:
            raise DataError(f"{_missing_path(name)}, and the hub can't be reached ({why}); {_OFFLINE}") from error


def _call_hub(name: str, what: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Calls the hub. Raises DataError: it has no such data set, or can't be reached."""
    try:
        with _log_waiting(name):
            return call(*args, **options)
    except (WhetError, MemoryError):
        raise
    except Exception as error:
        raise DataError(
            f"{_missing_path(name)}; and as a hub data set, {what}: {format_exception(error)}; {_OFFLINE}"
        ) from error


_OFFLINE = "check the name and the network; HF_HUB_OFFLINE=1 uses only the cache"


def _missing_path(name: str) -> str:
    return f"{name!r} is not a file or folder here{_nearest_name(Path(name))}"


@contextmanager
def _log_waiting(name: str) -> Iterator[None]:
    """Logs that whet is waiting for an answer, if it takes several seconds."""
    where = "an answer from" if _is_url(name) else "the hub, which is asked for the data set"
    timer = threading.Timer(LOG_AFTER_S, log.warning, ("waiting for %s %r", where, name))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _load_folder(path: Path, split: str | None, streaming: bool) -> Any:
    """Returns the rows of a folder: saved by datasets, or with data files of one format."""
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        import datasets

        with convert_read_errors(f"{path}, which save_to_disk wrote,", "save the data set again"):
            rows = _select_split(datasets.load_from_disk(str(path)), split, path)
            validate_table(rows.data.table)
            return rows.to_iterable_dataset() if streaming else rows
    files = sorted(p for where in (path, path / "data") for p in where.glob("*") if file_format(p) in FORMATS)
    if not files:
        raise DataError(f"folder {str(path)!r} holds no data; expected {', '.join(FORMATS)} files or a saved Dataset")
    splits = sorted({word for word in SPLITS for p in files if _names_split(p, word)})
    if split is None and splits:
        others = [p.name for p in files if not any(_names_split(p, word) for word in splits)]
        split = _eval_split([*splits, *others], path)
    chosen = [p for p in files if split is not None and _names_split(p, split)]
    if not chosen and (splits or split not in (None, "train")):
        raise DataError(
            f"folder {str(path)!r} has no split {split!r}; its files: {', '.join(p.name for p in files[:8])}"
            f"{nearest(str(split), splits)}"
        )
    chosen = chosen or files
    _check_same_format(chosen, f"folder {str(path)!r}")
    return _load_files(chosen, streaming)


def _names_split(path: Path, split: str) -> bool:
    """Returns whether a file name contains the name of a split as a separate word."""
    return re.search(rf"(^|[-_.]){re.escape(split)}([-_.]|$)", path.stem) is not None


def _load_files(paths: list[Path], streaming: bool) -> Any:
    """Returns the rows of data files of one format, one after the other."""
    suffix = file_format(paths[0])
    if suffix not in FORMATS:
        raise DataError(f"{str(paths[0])!r} has an unknown format {suffix!r}; known: {', '.join(FORMATS)}")
    return stream_files(paths) if streaming else read_files(paths)


def _select_split(rows: Any, split: str | None, source: Any) -> Any:
    """Returns one split of a DatasetDict or another mapping of splits; other rows are returned unchanged."""
    if not isinstance(rows, Mapping):
        return rows
    if split is None:
        return rows[_eval_split(rows, source)]
    if split not in rows:
        names = [str(name) for name in rows]
        fix = ""
        if all(isinstance(v, list | tuple) and v and not isinstance(v[0], Mapping) for v in rows.values()):
            fix = "; if these are columns, pass datasets.Dataset.from_dict(...), or a list of dicts"
        raise DataError(
            f"{_describe(source)} has no split {split!r}{nearest(split, names)}; it has {', '.join(names)}{fix}"
        )
    return rows[split]


def _eval_split(names: Iterable[Any], source: Any) -> Any:
    """Returns the split to evaluate on if none was named. Raises DataError if there is not exactly one candidate."""
    names = list(names)
    candidates = names if len(names) == 1 else [name for name in names if name in EVAL_SPLITS]
    if len(candidates) != 1:
        raise DataError(
            f"{_describe(source)} has {', '.join(map(str, names)) or 'no split'}, and {len(candidates)} of them are "
            "named for evaluation; say which: set data.eval_split, give data.eval_path one file, or from Python give "
            "eval_ds one split's rows"
        )
    return candidates[0]


def _limit_rows(rows: Any, limit: int | None) -> Any:
    """Returns the first `limit` rows."""
    if limit is None:
        return rows
    if _is_dataset(rows):
        return rows.select(range(min(limit, len(rows))))
    return rows[:limit] if isinstance(rows, Sequence) else _FirstRows(rows, limit)


def _is_dataset(rows: Any) -> bool:
    """Returns whether rows are a datasets.Dataset, without importing datasets."""
    import sys

    return "datasets" in sys.modules and isinstance(rows, sys.modules["datasets"].Dataset)


class _FirstRows:
    """The first rows of an iterable; it can be read as often as the iterable itself."""

    def __init__(self, rows: Iterable[Any], limit: int) -> None:
        self.rows, self.limit = rows, limit

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.rows), self.limit)


def _describe(source: Any) -> str:
    """Returns the name of a source in messages."""
    return repr(str(source)) if isinstance(source, str | Path) else f"the {type(source).__name__} given"


def _nearest_name(path: Path) -> str:
    """Returns the nearest name in the folder of a missing path."""
    folder = path.expanduser().parent
    return nearest(path.name, [p.name for p in folder.iterdir()]) if folder.is_dir() else f"; no folder {folder}"
