"""Tasks of reasoning-gym as a data set: `data=reasoning_gym:chain_sum?min_terms=2&max_terms=2&size=2000&seed=1`.

A name after the colon is one of reasoning-gym's; options after "?" are those of its configuration, and `size` (rows of
the split) and `seed`. The split "test" has another seed and none of the questions of "train".
Columns: prompt, answer, task (the name with its options) and index (the row's number there), from which the reward
function `reasoning_gym` (whet/rewards/reasoning_gym.py) makes the entry again that reasoning-gym scores.
Left out on purpose: reasoning-gym's composite data sets and curricula; a list of sources with weights is a mixture.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

from whet.data.source_options import source_options
from whet.errors import ConfigError, DataError, format_exception, lookup_error
from whet.util.install import install_hint

__all__ = ["PREFIX", "check_tasks", "make_task", "task_rows"]

logger = logging.getLogger("whet")

PREFIX = "reasoning_gym:"
SIZE = 1000
"""Rows of a split where the options give no size."""
TEST_SEED = 1_000_000_007
"""Added to the seed for the test split. Item i has the seed `seed + i`, so a near seed would repeat the rows."""


def task_rows(source: str, split: str | None) -> list[dict[str, Any]]:
    """Returns the rows of a split.

    Args: source: "reasoning_gym:name?option=value&...". split: "train" or "test"; None = "test".
    Returns: dicts with prompt, answer, task and index.
    Raises: ConfigError: the extra is missing, or no such name or option. DataError: another split, or a test split of
        which every question is in the train split too.

    Example: task_rows("reasoning_gym:chain_sum?size=100", "train").
    """
    if split not in ("train", "test", None):
        raise DataError(f"{source!r} has no split {split!r}; give train or test")
    rows = _rows(source)
    if split == "train":
        return rows
    known = {row["prompt"] for row in rows}
    unseen = [row for row in _rows(source, TEST_SEED) if row["prompt"] not in known]
    if not unseen:
        raise DataError(
            f"every question of the test split of {source!r} is in its train split too; make the task larger or give "
            "a smaller size"
        )
    if len(unseen) < len(rows):
        message = "%s: the test split has %d questions; %d that train has too are left out"
        logger.info(message, source, len(unseen), len(rows) - len(unseen))
    return unseen


def check_tasks(source: str) -> None:
    """Raises ConfigError unless the name and the options are reasoning-gym's."""
    _parse(source.removeprefix(PREFIX))


@functools.lru_cache(maxsize=16)
def make_task(task: str) -> Any:
    """Returns the data set of reasoning-gym of a row's column `task`; its items are made when they are asked for."""
    name, options = _parse(task)
    reasoning_gym = _reasoning_gym()
    try:
        return reasoning_gym.create_dataset(name, **options)
    except Exception as error:  # each configuration checks itself by assert
        raise ConfigError(f"reasoning_gym can't make {task!r}: {format_exception(error)}; change an option") from error


def _rows(source: str, more: int = 0) -> list[dict[str, Any]]:
    """Returns all rows of a source whose seed is raised by `more`."""
    name, options = _parse(source.removeprefix(PREFIX))
    options["seed"] += more
    task = f"{name}?{'&'.join(f'{key}={value}' for key, value in options.items())}"
    entries = make_task(task)
    return [
        {"prompt": entry["question"], "answer": entry["answer"], "task": task, "index": i}
        for i, entry in enumerate(entries[k] for k in range(len(entries)))
    ]


def _parse(text: str) -> tuple[str, dict[str, Any]]:
    """Returns the name and the options of "name?option=value&..."; with a size and a seed."""
    from_library = _reasoning_gym().factory.DATASETS
    name = text.partition("?")[0]
    if name not in from_library:
        raise lookup_error("reasoning_gym task", name, sorted(from_library))
    known = [field.name for field in dataclasses.fields(from_library[name][1])]
    options = {"size": SIZE, "seed": 0} | source_options(f"{PREFIX}{text}", known, {"size": 1, "seed": 0})
    return name, options


def _reasoning_gym() -> Any:
    """Returns the package. Raises ConfigError where it is not installed."""
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"tasks of reasoning_gym need the package: {install_hint('gym')} ({format_exception(error)})"
        ) from error
    return reasoning_gym
