"""Checks a data set for reward functions: the columns that they name, and the answers that they read."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from whet.errors import DataError, format_value, raise_all
from whet.rewards.call import RewardFn, RewardInputs, select_keywords
from whet.rewards.numbers import number_match, read_value
from whet.rewards.text import accepted_answers, boxed, gold_boxed, gold_number, last_number

__all__ = ["check_answers", "check_columns"]

GOLDS: dict[Callable[..., Any], Callable[[str], Any]] = {
    boxed: gold_boxed,
    last_number: gold_number,
    number_match: read_value,
}
"""Reward function -> its reader of answers, which returns None for an unreadable answer. math_match is left out: it
reads nearly any text, and is slow."""


def check_columns(
    fns: Mapping[str, RewardFn],
    columns: Iterable[str],
    algo_fields: Mapping[str, Any],
    extras: Mapping[str, Any] | None = None,
) -> None:
    """Checks that all arguments of reward functions are available.

    Args: fns: the functions by name. columns: the data set's columns, without the prompt. algo_fields, extras: further
        available arguments.
    Raises: ConfigError: arguments that are not available, of all functions at once.
    """
    empty = RewardInputs(
        prompts=[],
        completions=[],
        completion_ids=[],
        trajectory_ids=[],
        columns={name: [] for name in columns},
        extras=extras or {},
    )
    select = partial(select_keywords, offered=empty.keywords(), by_name=algo_fields, extras=empty.extras.keys())
    raise_all(partial(select, fn, name=name) for name, fn in fns.items())


def check_answers(fns: Mapping[str, RewardFn], rows: Iterable[tuple[int, Mapping[str, Any]]], what: str) -> None:
    """Checks the answers of a data set. A completion gets no reward if a function can't read the row's answer.

    Args: fns: the functions by name. rows: (number, columns) of each row, iterated only if a function reads answers.
        what: a noun for the rows, for the message.
    Raises: DataError: unreadable answers, of all functions at once.

    >>> check_answers({"last_number": last_number}, [(7, {"answer": "8"}), (9, {"answer": None})], "rows")
    """
    readers = {name: reader for name, fn in fns.items() if (reader := _find_reader(fn)) is not None}
    answers = [(row, accepted_answers(columns.get("answer"))) for row, columns in rows] if readers else []
    problems = []
    for name, read in readers.items():
        unread = [(row, golds[0]) for row, golds in answers if golds and all(read(gold) is None for gold in golds)]
        if unread:
            examples = ", ".join(f"row {row}: {format_value(answer, 40)}" for row, answer in unread[:3])
            more = ", ..." * (len(unread) > 3)
            problems.append(
                f"{name} can't read the answer of {len(unread)} of {len(answers)} {what} ({examples}{more}), which "
                "would have no reward; use another function (number_match reads fractions, math_match formulas, "
                "exact_match texts), correct or empty these answers, or accept them by trainer.on_reward_error=none "
                "(of whet eval: on_reward_error=none)"
            )
    if problems:
        raise DataError("\n".join(problems))


def _find_reader(fn: Any) -> Callable[[str], Any] | None:
    """Returns a function's reader of answers; None = it reads no answers, or any."""
    is_partial = isinstance(fn, functools.partial)
    inner = fn.func if is_partial and "answer" not in fn.keywords else fn
    return GOLDS.get(inner) if inspect.isfunction(inner) else None
