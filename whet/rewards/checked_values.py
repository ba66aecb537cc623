"""What reward functions give, as numbers, and any value as text. Nothing that a value does reaches the caller.

Left out on purpose: text that looks like a number. "1" from a judge may be a score or a label; the function knows. And
torch, which a value brings along where it needs it: worker processes of rewards start without.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard

import numpy as np

from whet.errors import RewardError, RewardValueError, format_exception, format_value

__all__ = ["Judged", "OnError", "checked_rewards", "judged", "raised", "settled"]

LOG = logging.getLogger(__name__)
MAX_REWARD = 1e15
"""The size of a reward: beyond it, differences within a group are lost in double precision."""
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
"""What `float` takes, in part or whole, and a reward is not."""
OnError = Literal["raise", "none"]
"""A failing reward function stops the run, or counts as "not applicable"."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Judged:
    """What a function gave for a batch, as numbers, and what of it was wrong.

    Example: [1, None, "x"] is Judged(rewards=[1.0, nan, nan], wrong=1, problem="... returned 'x' for row 0 ...").
    """

    rewards: np.ndarray
    """float64 [N], NaN = not applicable, or wrong."""
    wrong: int = 0
    """Entries that were no rewards."""
    problem: str | None = None
    """What was wrong; None = nothing."""

    @classmethod
    def failed(cls, problem: str, count: int) -> Judged:
        """Of a function that gave nothing for so many completions.

        >>> Judged.failed("reward function f raised ValueError: no", 2).wrong
        2
        """
        return cls(rewards=np.full(count, math.nan), wrong=count, problem=problem)


def checked_rewards(
    value: Any, ids: Sequence[str], *, name: str, on_error: OnError = "raise", nan_is_none: bool = False
) -> tuple[np.ndarray, int]:
    """What a function returned, as numbers.

    Args:
        value: a list, tuple, array or tensor of numbers, bools or None, one per completion. A tensor may be sparse, lie
            on any device and have a gradient, which is dropped.
        ids: [N] trajectory ids. name: of the function.
        on_error: "raise", or "none": what is wrong becomes NaN and is counted.
        nan_is_none: NaN says what None says; False = it is wrong.

    Returns:
        float64 [N], NaN = not applicable (None); and how many were wrong.

    Raises:
        RewardError: None as a whole, no list, a wrong length, NaN, too large or no number, with row, value and type.

    >>> checked_rewards([1, None, True], ["0_0", "0_1", "0_2"], name="f")
    (array([ 1., nan,  1.]), 0)
    """
    return settled(judged(value, ids, name=name, nan_is_none=nan_is_none), len(ids), on_error)


def settled(found: Judged | RewardError, count: int, on_error: OnError) -> tuple[np.ndarray, int]:
    """The rewards of a function and how many were wrong, which is an error or a warning.

    Args: found: what it gave for so many completions, or its failure. on_error: as checked_rewards.
    Raises: RewardError: something was wrong, and on_error says so.

    >>> settled(Judged(rewards=np.ones(1)), 1, "raise")
    (array([1.]), 0)
    """
    if isinstance(found, RewardError):
        if on_error == "raise":
            raise found
        found = Judged.failed(str(found), count)
    if found.problem is not None:
        if on_error == "raise":
            raise RewardValueError(found.problem)
        LOG.warning("%s; %d such %s counted as not applicable", found.problem, found.wrong, _entry(found.wrong))
    return found.rewards, found.wrong


def judged(value: Any, ids: Sequence[str], *, name: str, nan_is_none: bool = False) -> Judged:
    """What a function returned, as numbers and what is wrong with them, the first entry of that kind named.

    Args: as checked_rewards.

    >>> judged(3, ["0_0", "0_1"], name="f").problem
    "reward function f returned int '3'; return a list of 2 numbers, one per completion"
    """
    problem = _shape_problem(value, len(ids))
    items: list[Any] = []
    if problem is None:
        items, problem = _entries(value, len(ids))
    if problem is not None:
        problem = f"reward function {name} returned {problem}; return a list of {len(ids)} numbers, one per completion"
        problem += " (None entries mean: not applicable)" if value is None else ""
        return Judged.failed(problem, len(ids))
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
    return Judged(rewards=rewards, wrong=wrong, problem=problem)


def raised(what: str, error: BaseException, own: str) -> RewardError:
    """The error for a function that raised.

    Args: what: raised it. error: with its traceback. own: the file that called it, which is not worth naming.

    >>> print(raised("reward function f", ValueError("no"), __file__))
    reward function f raised ValueError: no
    """
    words = format_exception(error)
    text = f"{what} raised {words}"
    frames = traceback.extract_tb(error.__traceback__)
    if frames and frames[-1].filename != own:
        text += f" ({Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line})"
    if isinstance(error, AttributeError) and "'list' object" in words:
        text += "; for conversations a completion is a list of messages: whet.rewards.text.text_of(c) is its text"
    if "main thread" in words or "threaded environment" in words:
        text += (
            "; call train() on the main thread, or set trainer.reward_workers=1, which calls it on that of a process "
            "of its own"
        )
    failed = RewardError(text)
    failed.__cause__ = error
    return failed


def _entry(count: int) -> str:
    return "entry" if count == 1 else "entries"


def _is_tensor(value: Any) -> TypeGuard[Any]:
    """Whether a value is a tensor; without torch there are none."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _kind(value: Any) -> str:
    """What a value is, for messages."""
    if _is_tensor(value):
        return f"a tensor of shape {_shape(value)} on {value.device}"
    if isinstance(value, np.ndarray):
        return f"an array of shape {_shape(value)}"
    return f"of type {type(value).__name__}"


def _shape(value: Any) -> list[int] | str:
    """The shape of an array or tensor; a nested one has none to speak of."""
    try:
        return [int(n) for n in value.shape]
    except Exception as error:
        return f"<{type(error).__name__}>"


def _shape_problem(value: Any, count: int) -> str | None:
    """What is wrong with a returned value as a whole; None = nothing."""
    if value is None:
        return "None"
    if isinstance(value, np.ndarray) or _is_tensor(value):
        return None if _shape(value) == [count] else f"shape {_shape(value)}, {_kind(value)}"
    listed = not isinstance(value, type | str | bytes | bytearray | memoryview | Mapping | set | frozenset)
    if not listed or not hasattr(value, "__len__"):
        return f"{type(value).__name__} {_text(value)!r}"
    try:
        length = len(value)
    except Exception as error:
        return f"{type(value).__name__} {_text(value)!r}, whose length raised {format_exception(error)}"
    return None if length == count else f"{length} reward{'s' * (length != 1)}"


def _text(value: Any) -> str:
    """The beginning of a value's own text."""
    try:
        return str(value)[:60]
    except Exception:
        return format_value(value)


def _entries(value: Any, count: int) -> tuple[list[Any], str | None]:
    """The entries of a list, array or tensor of the right length; and what is wrong, where they can't be read."""
    what = _kind(value) if (isinstance(value, np.ndarray) or _is_tensor(value)) else f"a value {_kind(value)}"
    try:
        if _is_tensor(value):
            value = value.detach()
            return (value if str(value.layout) == "torch.strided" else value.to_dense()).tolist(), None
        if isinstance(value, np.ndarray) and value.dtype.kind not in "mM":  # tolist makes numbers of durations
            return value.tolist(), None
        items = list(itertools.islice(value, count + 1))  # its length may be a lie
    except Exception as error:
        return [], f"{what} that can't be read ({format_exception(error)})"
    if len(items) == count:
        return items, None
    how = "more" if len(items) > count else "fewer"
    return [], f"a value {_kind(value)} with {how} entries than the {count} that its length says"


def _is_nan(item: Any) -> bool:
    """Whether an entry is a number, and that is NaN: what is not equal to itself."""
    try:
        return not isinstance(item, NO_NUMBERS) and bool(item != item)
    except Exception:  # an array of several, or whatever its own methods may raise
        return False


def _number(item: Any) -> float:
    """An entry as a number; NaN where it is none."""
    try:
        if _is_tensor(item):
            item = item.detach().to_dense().item()
        elif isinstance(item, np.ndarray):
            item = item.item()
        return math.nan if isinstance(item, NO_NUMBERS) else float(item)
    except Exception:  # whatever its own __float__ may raise
        return math.nan
