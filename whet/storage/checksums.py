"""Checksums of rows, by which a resumed run knows that its data are those that it had."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from whet.types import Example, Prompt

__all__ = ["chain_checksum", "compute_checksums"]


def compute_checksums(rows: Iterable[Any]) -> tuple[int, int]:
    """Checksums of what is trained on and of what goes with it, place by place: a Prompt's tokens and other columns, or
    an Example's tokens with their masks, and its columns; rows that were not encoded count by their place alone.
    """
    prompts = columns = 0
    for row in rows:
        for part in _parts(row):
            prompts = zlib.crc32(part, zlib.crc32(len(part).to_bytes(8, "little"), prompts))
        columns = zlib.crc32(_rendered(row.columns) if isinstance(row, Prompt | Example) else b"", columns)
    return prompts, columns


def _parts(row: Any) -> list[bytes]:
    """The tokens of a row, and what is trained of them."""
    if isinstance(row, Example):
        return [array.tobytes() for s in row.sequences for array in (s.prefix, s.tokens, s.mask)]
    return [row.tokens.tobytes() if isinstance(row, Prompt) else b""]


def chain_checksum(item: Any, before: int) -> int:
    """The checksum of what is read in its own order, with a further item."""
    return zlib.crc32(_rendered(item if isinstance(item, Mapping) else {"": item}, _WHOLE), before)


def _rendered(columns: Mapping[str, Any], encoder: json.JSONEncoder | None = None) -> bytes:
    """Columns as text that is the same in every process: JSON, and a type's name for what JSON doesn't know."""
    encoder = encoder or _JSON
    try:
        return encoder.encode(dict(columns)).encode()
    except (TypeError, ValueError, RecursionError):  # keys that can't be sorted, a value that holds itself
        return encoder.encode({str(name): type(value).__name__ for name, value in columns.items()}).encode()


def _stand_in(value: Any) -> Any:
    """What JSON is given for a value that it doesn't know: numpy's plain numbers and texts as Python's."""
    plain = isinstance(value, np.ndarray | np.generic) and value.dtype.char in _PLAIN
    return value.tolist() if plain else type(value).__name__


def _whole(value: Any) -> Any:
    """The same, with the values of bytes and of every kind of array."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return value.tolist() if hasattr(value, "tolist") else _stand_in(value)


_PLAIN = np.typecodes["AllInteger"] + "?efdU"
"""Types of numpy whose values Python has too."""
_JSON = json.JSONEncoder(sort_keys=True, skipkeys=True, default=_stand_in)
_WHOLE = json.JSONEncoder(sort_keys=True, skipkeys=True, default=_whole)
