"""Prepares the data sets of GRPOTrainer and RLOOTrainer: rows with a column `prompt`, in memory or streamed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from whet.data.prompts import PromptEncoder
from whet.errors import ConfigError, DataError
from whet.trl.supervised.examples import LazyRows, has_rows

__all__ = ["longest_prompt", "prepare_rows"]

_DROPPED = ("completion", "completion_ids")
"""Columns that clash with the keywords of reward functions, and are left out."""
_STREAM_PROMPT = 4096
"""The assumed length of a stream's longest prompt, in tokens."""


def prepare_rows(data: Any, *, prompt_only: bool = False, without_prompt: bool = False) -> Any:
    """Returns a list of rows without unused columns; a stream stays lazy.

    Args: data: a datasets.Dataset or IterableDataset, a list of dicts, or an iterable of dicts. prompt_only: keep no
        other column (remove_unused_columns). without_prompt: a row without a prompt gets an empty one, to which an
        environment appends.
    Raises: DataError: a row without a column `prompt`.
    """

    def keep(row: Any) -> dict[str, Any]:
        if without_prompt and isinstance(row, Mapping) and "prompt" not in row:
            row = {**row, "prompt": [{"role": "user", "content": ""}]}
        if not isinstance(row, Mapping) or "prompt" not in row:
            form = f"its columns: {', '.join(row)}" if isinstance(row, Mapping) else f"it is a {type(row).__name__}"
            raise DataError(f"a row has no column 'prompt'; {form}; rename the column of the prompts to 'prompt'")
        return {n: v for n, v in row.items() if n == "prompt" or not (prompt_only or n in _DROPPED)}

    return [keep(row) for row in data] if has_rows(data) else LazyRows(data, lambda rows: map(keep, rows))


def longest_prompt(encoder: PromptEncoder, sets: Iterable[Any], positions: int | None, completion: int) -> int:
    """Returns the tokens of the longest prompt, rounded up to a multiple of 64; for a stream, 4096 or what fits the
    model.

    Args: encoder: the encoder of prompts. sets: data sets. positions: the model's; None = no limit. completion: the
        longest completion, in tokens.
    """
    room = None if positions is None else positions - completion
    if room is not None and room < 1:
        raise ConfigError(f"max_completion_length={completion} leaves no room for a prompt: the model has {positions}")
    longest = 1
    for rows in sets:
        if isinstance(rows, list):
            longest = max(longest, *(len(prompt.tokens) for i, row in enumerate(rows) if (prompt := encoder(row, i))))
        else:
            longest = max(longest, min(_STREAM_PROMPT, room or _STREAM_PROMPT))
    return -(-longest // 64) * 64
