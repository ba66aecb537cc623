"""Reward functions for text that need nothing but the standard library: 1.0 right, 0.0 wrong, None not applicable.

All compare with the `answer` column: a text, a number, or a list of which any will do; None or "" = not applicable.
The gold answer scores 1, the empty completion 0, and nothing that a model writes raises. Left out on purpose: symbolic
comparison of formulas and the running of code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from whet.errors import DataError

__all__ = ["ANSWERS", "READ_BY", "REWARDS", "boxed", "exact_match", "last_number", "text_of", "unrewarded"]

NUMBER = re.compile(
    r"(?:(?<![\w)\]}])-)?"  # a sign, but not the minus of "5-3"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"  # thousands in threes, fraction
    r"(?:[eE][+-]?[0-9]{1,3}(?![0-9]))?"
)
"""A decimal number as people and models write it."""


def text_of(completion: Any) -> str:
    """The text of a completion: itself, or what the last message of a conversation says.

    >>> text_of("4"), text_of([{"role": "assistant", "content": "4"}]), text_of([])
    ('4', '4', '')
    """
    if isinstance(completion, str):
        return completion
    content = completion[-1]["content"] if len(completion) else ""
    if isinstance(content, list | tuple):
        content = "".join(part["text"] for part in content if part["type"] == "text")
    return content or ""


def exact_match(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """1 where the completion is the answer, apart from white space around it.

    Args: completions [N]: texts or messages. answer [N]: the column.
    Returns: [N].

    >>> exact_match([" 4", "four", ""], [4, 4, 4])
    [1.0, 0.0, 0.0]
    """
    return _judged(completions, answer, _stripped, _stripped)


def last_number(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """1 where the last number of the completion equals the last number of the answer, by value.

    Args: completions [N]: texts or messages. answer [N]: the column; a worked solution ("... #### 1,000") will do.
    Returns: [N].
    Raises: DataError: an answer without a number.

    >>> last_number(["so 3 + 4 = 7.0.", "it is 5-7", "no idea"], ["7", "#### 7", 7])
    [1.0, 1.0, 0.0]
    """
    return _judged(completions, answer, _last_number, _gold_number)


def boxed(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    r"""1 where the content of the last \boxed{...} equals the answer, as numbers or as plainly written LaTeX.

    Spaces, $, \left, \right, \text{} and the like don't count, \dfrac is \frac, \frac{1}{2} is 1/2.

    Args: completions [N]: texts or messages. answer [N]: the column, boxed itself or not.
    Returns: [N].

    >>> boxed([r"thus \boxed{\dfrac{1}{2}}", "1/2", r"\boxed{1,000.0}"], ["1/2", "1/2", 1000])
    [1.0, 0.0, 1.0]
    """
    return _judged(completions, answer, _boxed, _gold_boxed)


def unrewarded(completions: Sequence[Any], **_: Any) -> list[float | None]:
    """Not applicable, to any completion: where a teacher alone teaches.

    >>> unrewarded(["4"])
    [None]
    """
    return [None] * len(completions)


REWARDS: dict[str, Callable[..., list[float | None]]] = {
    "boxed": boxed,
    "exact_match": exact_match,
    "last_number": last_number,
}
"""Reward functions by name."""


def _judged(
    completions: Sequence[Any], answer: Sequence[Any], read: Callable[[str], Any], gold: Callable[[str], Any]
) -> list[float | None]:
    """1.0 where the answer read from a completion is one of its golds; None where there is no gold."""
    scores: list[float | None] = []
    for completion, accepted in zip(completions, answer, strict=True):
        golds = accepted if isinstance(accepted, list | tuple) else [accepted]
        golds = [str(one) for one in golds if one is not None and str(one).strip()]
        if not golds:
            scores.append(None)
            continue
        said = read(text_of(completion))
        scores.append(float(said is not None and said in [gold(one) for one in golds]))
    return scores


def _stripped(text: str) -> str | None:
    return text.strip() or None


def _last_number(text: str) -> Decimal | None:
    found = NUMBER.findall(text.replace("−", "-"))
    return Decimal(found[-1].replace(",", "")) if found else None


def _gold_number(text: str) -> Decimal:
    number = _last_number(text)
    if number is None:
        raise DataError(f"the answer {text!r} contains no number; use exact_match or boxed for such a column")
    return number


def _boxed(text: str) -> str | Decimal | None:
    r"""What the last \boxed{...} holds, in normal form; None where there is none, or it is not closed, or empty."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    start += len(r"\boxed{")
    depth = 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return _normal(text[start:place]) or None
    return None


def _gold_boxed(text: str) -> str | Decimal | None:
    return _boxed(text) if r"\boxed{" in text else _normal(text)


def _normal(latex: str) -> str | Decimal:
    """A short formula in one of the forms that mean the same; a number where it is one."""
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}", r"\1", latex.replace("−", "-"))
    text = re.sub(r"\\(?:left|right)(?![a-zA-Z])|\\[!,;: ]|[$\s]|\\%", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac\{(-?[0-9]+)\}\{([0-9]+)\}", r"\1/\2", text).rstrip(".")
    return Decimal(text.replace(",", "")) if NUMBER.fullmatch(text) else text


ANSWERS: dict[str, Callable[[str], Any]] = {"boxed": _boxed, "last_number": _last_number, "whole": _stripped}
"""What a text answers, by name: the last boxed formula, the last number, the text itself; None = nothing."""
READ_BY: dict[Callable[..., Any], Callable[[str], Any]] = {
    boxed: _boxed,
    exact_match: _stripped,
    last_number: _last_number,
}
"""What each of the reward functions above compares with the answer column."""
