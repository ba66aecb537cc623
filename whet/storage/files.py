"""Atomic file writes: a temporary file with a random name next to the target, fsync, then rename.

A temporary file is always created, never opened: its name is unpredictable, and an existing file or link is an error.
Killed processes leave files named `.tmp-<16 hex digits>-<name>`; whoever locks the folder next removes them.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

from whet.errors import CheckpointError, ConfigError

__all__ = [
    "check_writable",
    "create_file",
    "finite_or_none",
    "fsync",
    "is_temporary",
    "make_writable_folder",
    "open_for_append",
    "read_json",
    "remove_path",
    "temporary_path",
    "to_json",
    "unused_path",
    "write_atomic",
    "write_error",
]

_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{16}-.+", re.DOTALL)


def write_atomic(path: Path, content: bytes | Callable[[BinaryIO], None]) -> None:
    """Writes a file atomically: after a kill at any moment, it has the old content or the new content.

    Args: path: a file in an existing folder. content: its bytes, or a function that writes them.
    Raises: CheckpointError: the disk is full or the folder can't be written; the old file stays.
    """
    place = temporary_path(path)
    try:
        with create_file(place) as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                content(file)
            file.flush()
            os.fsync(file.fileno())
        place.replace(path)
        fsync(path.parent)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        with suppress(OSError):
            place.unlink(missing_ok=True)


def temporary_path(path: Path) -> Path:
    """Returns an unpredictable name next to a file or folder, with the same suffix."""
    return path.with_name(f".tmp-{secrets.token_hex(8)}-{path.name}")


def is_temporary(name: str) -> bool:
    """Returns whether a name comes from `temporary_path`.

    >>> is_temporary(temporary_path(Path("x.json")).name), is_temporary(".tmp-mine"), is_temporary("x.json")
    (True, False, False)
    """
    return _TEMPORARY.fullmatch(name) is not None


def create_file(path: Path) -> BinaryIO:
    """Opens a new file for writing. Raises: FileExistsError: the path exists, even as a dangling link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def open_for_append(path: Path) -> BinaryIO:
    """Opens a file for appending, or creates it. Raises: OSError: it is a symbolic link or not a regular file."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(handle, "ab")


def unused_path(path: Path, word: str) -> Path:
    """Returns the first of <stem>.<word>-1<suffix>, <stem>.<word>-2<suffix> ... that doesn't exist, even as a dangling
    link.

    >>> unused_path(Path("nowhere/metrics.jsonl"), "before").name
    'metrics.before-1.jsonl'
    """
    n = 1
    while os.path.lexists(candidate := path.with_name(f"{path.stem}.{word}-{n}{path.suffix}")):
        n += 1
    return candidate


def remove_path(path: Path, *, strict: bool = False) -> None:
    """Removes a file, a link (not its target) or a folder. An absent path is not an error.

    Args: path: the path to remove. strict: raise OSError if it can't be removed; otherwise ignore it.
    """
    with nullcontext() if strict else suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=not strict)
        else:
            path.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    """Flushes a file's content, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_writable_folder(path: str | Path, key: str) -> Path:
    """Creates a folder if it is absent, and checks that files can be written to it, so that a run fails at its start.

    Args: path: the folder. key: its configuration key, for the message.
    Returns: the absolute path, since a reward function may change the working folder.
    Raises: ConfigError: the folder can't be created or written.
    """
    folder = Path(path).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"{key}={path} can't be written: {error}; fix its permissions, or give another folder"
        ) from error
    return folder


def check_writable(path: str | Path, key: str) -> None:
    """Checks that files can be written to a folder, and leaves no new folder behind.

    Raises: ConfigError: as make_writable_folder.
    """
    folder = Path(path).absolute()
    created = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    make_writable_folder(folder, key)
    for place in created:
        with suppress(OSError):  # another process may already use it
            place.rmdir()


def write_error(path: Path, error: OSError) -> CheckpointError:
    """Returns the error for a file of a run that couldn't be written.

    >>> print(write_error(Path("a/x.json"), OSError("No space left")))
    a/x.json can't be written: No space left; make room or fix its permissions, then resume with trainer.resume=latest
    """
    return CheckpointError(
        f"{path} can't be written: {error}; make room or fix its permissions, then resume with trainer.resume=latest"
    )


def read_json(source: Path | bytes) -> Any:
    """Parses JSON from an untrusted file or line.

    Args: source: the file, or its bytes.
    Raises: OSError: the file can't be read. ValueError: it is not JSON in UTF-8, is cut short, has NaN or too many
        digits in a number, or is nested too deep.

    >>> read_json(b'{"step": 3}')
    {'step': 3}
    """
    data = source.read_bytes() if isinstance(source, Path) else source
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def finite_or_none(value: object) -> float | None:
    """Returns a finite number as a float; None for every other value.

    >>> finite_or_none(3), finite_or_none(10**400), finite_or_none(math.nan), finite_or_none("3")
    (3.0, None, None, None)
    """
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:
        return None


def to_json(value: Any, indent: int | None = None) -> str:
    """Standard JSON: NaN and infinities become null; numpy's numbers and arrays become numbers and lists.

    Args: value: nested dicts, lists and scalars. indent: spaces per level; None = one line.
    """
    return json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value)
