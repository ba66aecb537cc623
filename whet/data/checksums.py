"""Checksums of rows; with them a resumed run checks that its data did not change."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from whet.types import Example, Prompt

__all__ = ["chain_checksum", "compute_checksums"]


def compute_checksums(rows: Iterable[Any]) -> tuple[int, int]:
    """Returns two checksums of rows in their order: of the tokens that are trained on, and of the other columns.

    A Prompt adds its tokens and its columns. An Example adds its tokens with their masks, and its columns. A row that
    was not encoded adds only its position.
    """
    prompts = columns = 0
    for row in rows:
        for part in _parts(row):
            prompts = zlib.crc32(part, zlib.crc32(len(part).to_bytes(8, "little"), prompts))
        columns = zlib.crc32(_serialize(row.columns) if isinstance(row, Prompt | Example) else b"", columns)
    return prompts, columns


def _parts(row: Any) -> list[bytes]:
    """Returns the bytes of a row's tokens and masks."""
    if isinstance(row, Example):
        return [array.tobytes() for s in row.sequences for array in (s.prefix, s.tokens, s.mask)]
    return [row.tokens.tobytes() if isinstance(row, Prompt) else b""]


def chain_checksum(item: Any, before: int) -> int:
    """Returns the checksum of a stream after one more item.

    Args: item: the item. before: the checksum of the items before it.
    """
    return zlib.crc32(_serialize(item if isinstance(item, Mapping) else {"": item}, _FULL_JSON), before)


def _serialize(columns: Mapping[str, Any], encoder: json.JSONEncoder | None = None) -> bytes:
    """Returns columns as JSON that is the same in every process; a value that JSON can't hold becomes its
    type's name.
    """
    encoder = encoder or _JSON
    try:
        return encoder.encode(dict(columns)).encode()
    except (TypeError, ValueError, RecursionError):  # keys that can't be sorted, or a value that contains itself
        return encoder.encode({str(name): type(value).__name__ for name, value in columns.items()}).encode()


def _to_jsonable(value: Any) -> Any:
    """Replaces a value that JSON can't hold: numpy's numbers and text become Python's, others their type's name."""
    plain = isinstance(value, np.ndarray | np.generic) and value.dtype.char in _PLAIN
    return value.tolist() if plain else type(value).__name__


def _full_to_jsonable(value: Any) -> Any:
    """As _to_jsonable, but bytes and arrays of every type keep their values."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return value.tolist() if hasattr(value, "tolist") else _to_jsonable(value)


_PLAIN = np.typecodes["AllInteger"] + "?efdU"
"""Type codes of numpy that have a Python type."""
_JSON = json.JSONEncoder(sort_keys=True, skipkeys=True, default=_to_jsonable)
_FULL_JSON = json.JSONEncoder(sort_keys=True, skipkeys=True, default=_full_to_jsonable)
