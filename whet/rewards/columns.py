"""What reward functions ask of a data set: the columns that they name, and answers that they can read."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from whet.errors import DataError, format_value, raise_all
from whet.rewards.call import RewardFn, RewardInputs, keywords
from whet.rewards.numbers import number_match, read_value
from whet.rewards.text import boxed, gold_boxed, gold_number, golds_of, last_number

__all__ = ["check_answers", "check_columns"]

GOLDS: dict[Callable[..., Any], Callable[[str], Any]] = {
    boxed: gold_boxed,
    last_number: gold_number,
    number_match: read_value,
}
"""What reads an answer, where it may find nothing. Not math_match: it reads nearly any text, and takes its time."""


def check_columns(
    fns: Mapping[str, RewardFn],
    columns: Iterable[str],
    algo_fields: Mapping[str, Any],
    extras: Mapping[str, Any] | None = None,
) -> None:
    """Looks whether reward functions get what they need.

    Args: fns: by name. columns: of the data set, without the prompt. algo_fields, extras: what is offered besides.
    Raises: ConfigError: a function needs an argument that is neither a column nor offered; all of them at once.
    """
    empty = RewardInputs(
        prompts=[],
        completions=[],
        completion_ids=[],
        trajectory_ids=[],
        columns={name: [] for name in columns},
        extras=extras or {},
    )
    words = {"extras": empty.extras.keys()}
    raise_all(partial(keywords, fn, empty.offered(), algo_fields, name=name, **words) for name, fn in fns.items())


def check_answers(fns: Mapping[str, RewardFn], rows: Iterable[tuple[int, Mapping[str, Any]]], what: str) -> None:
    """Looks over the answers of a data set: one that a function can't read is None there, and teaches nothing.

    Args: fns: by name. rows: the number and the columns of each, read only where that is needed. what: they are.
    Raises: DataError: some can't be read, of any function.

    >>> check_answers({"last_number": last_number}, [(7, {"answer": "8"}), (9, {"answer": None})], "rows")
    """
    reads = {name: gold for name, fn in fns.items() if (gold := _gold(fn)) is not None}
    answers = [(row, golds_of(columns.get("answer"))) for row, columns in rows] if reads else []
    found = []
    for name, gold in reads.items():
        unread = [(row, golds[0]) for row, golds in answers if golds and all(gold(one) is None for one in golds)]
        if unread:
            some = ", ".join(f"row {row}: {format_value(said, 40)}" for row, said in unread[:3])
            more = ", ..." * (len(unread) > 3)
            found.append(
                f"{name} can't read the answer of {len(unread)} of {len(answers)} {what} ({some}{more}), which would "
                "have no reward; take another function (number_match reads fractions, math_match formulas, "
                "exact_match texts), correct or empty these answers, or let them be by trainer.on_reward_error=none "
                "(of whet eval: on_reward_error=none)"
            )
    if found:
        raise DataError("\n".join(found))


def _gold(fn: Any) -> Callable[[str], Any] | None:
    """What a function reads its answers with; None = it reads none, or any."""
    bound = isinstance(fn, functools.partial)
    own = fn.func if bound and "answer" not in fn.keywords else fn
    return GOLDS.get(own) if inspect.isfunction(own) else None
