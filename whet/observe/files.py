"""Files that are whole or absent: a temporary beside the target, fsync, rename."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from whet.errors import CheckpointError, ConfigError

__all__ = ["to_json", "unwritable", "usable_folder", "write_atomic"]


def write_atomic(path: Path, content: bytes | Callable[[BinaryIO], None]) -> None:
    """Writes a file so that a reader, or a kill at any moment, sees the old one or the new one.

    Args: path: the file, in a folder that is there. content: its bytes, or a function that writes them.
    Raises: CheckpointError: the disk is full or the folder can't be written; the old file stays.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                content(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def usable_folder(path: str | Path, key: str) -> Path:
    """A folder that files can be written to, made where it is not there: found out before a run, not after it.

    Args: path: the folder. key: where it was given, for the message.
    Returns: its absolute path: a reward function may change the working folder.
    Raises: ConfigError: it can't be made or written.
    """
    folder = Path(path).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"{key}={path} can't be written: {error}; set its rights, or give another folder") from error
    return folder


def unwritable(path: Path, error: OSError) -> CheckpointError:
    """The error for a file of a run that the disk did not take.

    >>> print(unwritable(Path("a/x.json"), OSError("No space left")))
    a/x.json can't be written: No space left; make room or set the rights, then go on with trainer.resume=latest
    """
    return CheckpointError(
        f"{path} can't be written: {error}; make room or set the rights, then go on with trainer.resume=latest"
    )


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON that every reader takes: NaN and infinities become null, numpy's numbers plain ones.

    Args: value: nested dicts, lists and scalars. indent: spaces, for people.
    """
    return json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if hasattr(value, "item"):
        return _plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value)
