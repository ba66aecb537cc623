"""Checks the values that reward functions return, and converts them to numbers. A value's own errors are caught.

A text that looks like a number is not converted: "1" from a judge may be a score or a label, and only the function
knows which. This module does not import torch, because reward workers start without it.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard

import numpy as np

from whet.errors import RewardError, RewardValueError, format_exception, format_value

__all__ = ["CheckedRewards", "OnError", "apply_on_error", "check_values", "error_from_exception"]

LOG = logging.getLogger(__name__)
LIBRARIES = (*{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")},)
"""Folders of the installed packages and of Python, whose lines are not the user's."""
MAX_REWARD = 1e15
"""The largest size of a reward. Beyond it, differences within a group are lost in double precision."""
NO_NUMBERS = (
    str,
    bytes,
    bytearray,
    memoryview,
    complex,
    np.complexfloating,
    np.datetime64,
    np.timedelta64,
)
"""Types that `float` accepts, but that are not rewards."""
OnError = Literal["raise", "none"]
"""Whether a failing reward function stops the run ("raise") or counts as "not applicable" ("none")."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CheckedRewards:
    """A function's rewards of a batch, as numbers, and the first problem with its values.

    Example: [1, None, "x"] is CheckedRewards(rewards=[1.0, nan, nan], wrong=1, problem="... returned 'x' for row 0
    ...").
    """

    rewards: np.ndarray
    """float64 [N]; NaN = not applicable, or invalid."""
    wrong: int = 0
    """The number of invalid entries."""
    problem: str | None = None
    """A message on the first invalid entry; None = all are valid."""

    @classmethod
    def failed(cls, problem: str, count: int) -> CheckedRewards:
        """Returns the result of a function that failed. Args: problem: the message. count: the number of completions.

        >>> CheckedRewards.failed("reward function f raised ValueError: no", 2).wrong
        2
        """
        return cls(rewards=np.full(count, math.nan), wrong=count, problem=problem)


def apply_on_error(result: CheckedRewards | RewardError, count: int, on_error: OnError) -> tuple[np.ndarray, int]:
    """Raises an error for invalid rewards, or logs a warning.

    Args: result: a function's rewards, or its failure. count: the number of completions. on_error: "raise", or
        "none": invalid entries become NaN and are counted.
    Returns: the rewards, and the number of invalid entries.
    Raises: RewardError: there are invalid entries, and on_error is "raise".

    >>> apply_on_error(CheckedRewards(rewards=np.ones(1)), 1, "raise")
    (array([1.]), 0)
    """
    if isinstance(result, RewardError):
        if on_error == "raise":
            raise result
        result = CheckedRewards.failed(str(result), count)
    if result.problem is not None:
        if on_error == "raise":
            raise RewardValueError(result.problem)
        noun = "entry" if result.wrong == 1 else "entries"
        LOG.warning("%s; %d such %s counted as not applicable", result.problem, result.wrong, noun)
    return result.rewards, result.wrong


def check_values(value: Any, ids: Sequence[str], *, name: str, nan_is_none: bool = False) -> CheckedRewards:
    """Converts a function's return value to numbers, without raising.

    Args:
        value: a list, tuple, array or tensor of numbers, bools or None, one per completion. A tensor may be sparse, on
            any device, and require a gradient.
        ids: [N] trajectory ids.
        name: the function's name.
        nan_is_none: whether NaN means "not applicable", like None; False = NaN is invalid.
    Returns: the rewards. `problem` has the row, the value and the type of the first entry that is not a finite number
        of a sensible size, or says that the value is not a list, or that its length is wrong.

    >>> check_values([1, None, True], ["0_0", "0_1", "0_2"], name="f").rewards
    array([ 1., nan,  1.])
    >>> check_values(3, ["0_0", "0_1"], name="f").problem
    "reward function f returned int '3'; return a list of 2 numbers, one per completion"
    """
    problem = _shape_problem(value, len(ids))
    items: list[Any] = []
    if problem is None:
        items, problem = _entries(value, len(ids))
    if problem is not None:
        problem = f"reward function {name} returned {problem}; return a list of {len(ids)} numbers, one per completion"
        problem += " (None entries mean: not applicable)" if value is None else ""
        return CheckedRewards.failed(problem, len(ids))
    rewards, wrong = np.full(len(ids), math.nan), 0
    for i, item in enumerate(items):
        if item is None or (nan_is_none and _is_nan(item)):
            continue
        number = _number(item)
        if abs(number) <= MAX_REWARD:
            rewards[i] = number
            continue
        row, _, generation = ids[i].rpartition("_")
        if problem is None:
            problem = (
                f"reward function {name} returned {format_value(item)} for row {row}, generation {generation} (entry "
                f"{i}), {_kind(item)}; return a finite number up to {MAX_REWARD:g} in size, or None where it does not "
                "apply"
            )
        wrong += 1
    return CheckedRewards(rewards=rewards, wrong=wrong, problem=problem)


def error_from_exception(what: str, error: BaseException, own: str) -> RewardError:
    """Returns the RewardError for an exception of a function, with the line of the user's code that led to it.

    Args: what: the function, for the message. error: the exception. own: the caller's file, which the message leaves
        out.

    >>> print(error_from_exception("reward function f", ValueError("no"), __file__))
    reward function f raised ValueError: no
    """
    exception = format_exception(error)
    text = f"{what} raised {exception}"
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((f for f in reversed(frames) if not f.filename.startswith(LIBRARIES)), frames[-1] if frames else None)
    if frame is not None and frame.filename != own:
        text += f" ({Path(frame.filename).name}:{frame.lineno}: {frame.line})"
    if isinstance(error, AttributeError) and "'list' object" in exception:
        text += "; for conversations a completion is a list of messages: whet.rewards.text.text_of(c) is its text"
    if "main thread" in exception or "threaded environment" in exception:
        text += (
            "; call train() on the main thread, or set trainer.reward_workers=1: a worker process calls the function "
            "on its main thread"
        )
    failed = RewardError(text)
    failed.__cause__ = error
    return failed


def _is_tensor(value: Any) -> TypeGuard[Any]:
    """Returns whether a value is a tensor; without torch nothing is."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _kind(value: Any) -> str:
    """Describes a value's type, for messages."""
    if _is_tensor(value):
        return f"a tensor of shape {_shape(value)} on {value.device}"
    if isinstance(value, np.ndarray):
        return f"an array of shape {_shape(value)}"
    return f"of type {type(value).__name__}"


def _shape(value: Any) -> list[int] | str:
    """Returns the shape of an array or tensor; a nested tensor raises, and its exception is named instead."""
    try:
        return [int(n) for n in value.shape]
    except Exception as error:
        return f"<{type(error).__name__}>"


def _shape_problem(value: Any, count: int) -> str | None:
    """Returns the problem with a returned value as a whole; None = no problem."""
    if value is None:
        return "None"
    if isinstance(value, np.ndarray) or _is_tensor(value):
        return None if _shape(value) == [count] else f"shape {_shape(value)}, {_kind(value)}"
    can_be_list = not isinstance(value, type | str | bytes | bytearray | memoryview | Mapping | set | frozenset)
    if not can_be_list or not hasattr(value, "__len__"):
        return f"{type(value).__name__} {_text(value)!r}"
    try:
        length = len(value)
    except Exception as error:
        return f"{type(value).__name__} {_text(value)!r}, whose length raised {format_exception(error)}"
    return None if length == count else f"{length} reward{'s' * (length != 1)}"


def _text(value: Any) -> str:
    """Returns the beginning of `str(value)`."""
    try:
        return str(value)[:60]
    except Exception:
        return format_value(value)


def _entries(value: Any, count: int) -> tuple[list[Any], str | None]:
    """Returns the entries of a list, array or tensor of the right length, and the problem if they can't be read."""
    what = _kind(value) if (isinstance(value, np.ndarray) or _is_tensor(value)) else f"a value {_kind(value)}"
    try:
        if _is_tensor(value):
            value = value.detach()
            return (value if str(value.layout) == "torch.strided" else value.to_dense()).tolist(), None
        if isinstance(value, np.ndarray) and value.dtype.kind not in "mM":  # tolist converts durations to numbers
            return value.tolist(), None
        items = list(itertools.islice(value, count + 1))  # the length may be wrong
    except Exception as error:
        return [], f"{what} that can't be read ({format_exception(error)})"
    if len(items) == count:
        return items, None
    relation = "more" if len(items) > count else "fewer"
    return [], f"a value {_kind(value)} with {relation} entries than its length, {count}"


def _is_nan(item: Any) -> bool:
    """Returns whether an entry is NaN."""
    try:
        return not isinstance(item, NO_NUMBERS) and bool(item != item)
    except Exception:  # an array of several numbers, or an object with methods that raise
        return False


def _number(item: Any) -> float:
    """Converts an entry to a number; NaN if it is not one."""
    try:
        if _is_tensor(item):
            item = item.detach().to_dense().item()
        elif isinstance(item, np.ndarray):
            item = item.item()
        return math.nan if isinstance(item, NO_NUMBERS) else float(item)
    except Exception:  # an object's __float__ may raise anything
        return math.nan
