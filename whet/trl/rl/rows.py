"""Prepares data sets: rows with a column `prompt`, map-style or streamed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from whet.data.prompts import PromptEncoder
from whet.errors import ConfigError, DataError

__all__ = ["longest_prompt", "prepare_rows"]

_DROPPED = ("completion", "completion_ids")
"""Columns with the names of sampled values; reward functions don't get them."""
_STREAM_PROMPT = 4096
"""The assumed longest prompt of a stream, in tokens."""


class _Stream:
    """Rows of a stream, one at a time, from its beginning whenever it is asked."""

    def __init__(self, source: Iterable[Any], keep: Any) -> None:
        self._source, self._keep = source, keep

    def __iter__(self) -> Iterator[Any]:
        return (self._keep(row) for row in self._source)


def prepare_rows(data: Any, *, prompt_only: bool = False, without_prompt: bool = False) -> Any:
    """The rows of a data set, without the columns that nothing is given.

    Args: data: a datasets.Dataset or IterableDataset, a list of dicts, an iterable of them. prompt_only: keep no other
        column (remove_unused_columns). without_prompt: a row that has none gets an empty one, which an environment
        fills.
    Raises: DataError: it has no column `prompt`.
    """

    def keep(row: Any) -> dict[str, Any]:
        if without_prompt and isinstance(row, Mapping) and "prompt" not in row:
            row = {**row, "prompt": [{"role": "user", "content": ""}]}
        if not isinstance(row, Mapping) or "prompt" not in row:
            its = f"its columns: {', '.join(row)}" if isinstance(row, Mapping) else f"it is a {type(row).__name__}"
            raise DataError(f"a row has no column 'prompt'; {its}; rename the one that it is")
        return {n: v for n, v in row.items() if n == "prompt" or not (prompt_only or n in _DROPPED)}

    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return [keep(row) for row in data]
    return _Stream(data, keep)


def longest_prompt(encoder: PromptEncoder, sets: Iterable[Any], positions: int | None, completion: int) -> int:
    """Tokens of the longest prompt, rounded up to a multiple of 64; of a stream, 4096 or what the model takes."""
    room = None if positions is None else positions - completion
    if room is not None and room < 1:
        raise ConfigError(f"max_completion_length={completion} leaves no room for a prompt: the model has {positions}")
    found = 1
    for rows in sets:
        if isinstance(rows, list):
            found = max(found, *(len(prompt.tokens) for i, row in enumerate(rows) if (prompt := encoder(row, i))))
        else:
            found = max(found, min(_STREAM_PROMPT, room or _STREAM_PROMPT))
    return -(-found // 64) * 64
