"""Reward functions for text that use only the standard library: 1.0 right, 0.0 wrong, None not applicable.

Functions with an `answer` compare a completion with that column: a text, a number, or a list of accepted answers. None,
"" and an answer that the function can't read mean "not applicable". Before its first step a run refuses rows with
answers that can't be read (RewardManager.check_answers). The right answer scores 1, an empty completion 0, and no
completion raises. code.py runs programs, maths.py compares formulas, and numbers.py reads fractions, units and powers
of ten.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from whet.errors import ConfigError
from whet.rewards.function_info import per_completion

__all__ = [
    "accepted_answers",
    "boxed",
    "exact_match",
    "format_match",
    "fuzzy_match",
    "gold_boxed",
    "gold_number",
    "last_box",
    "last_number",
    "no_rewards",
    "read_box",
    "read_number",
    "score_completions",
    "similarity",
    "strip_or_none",
    "text_of",
]

NUMBER = re.compile(
    r"(?:(?<![\w)\]}])-)?"  # a sign, but not the minus of "5-3"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"  # thousands in threes, fraction
    r"(?:[eE][+-]?[0-9]{1,3}(?![0-9]))?"
)
"""A decimal number as people and models write it."""
FRACTION = re.compile(r"[-−]?[0-9][0-9,]*\s*/\s*[0-9][0-9,]*")
R1_FORMAT = r"<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>"
"""A thought and an answer, each once and between its tags."""


def text_of(completion: Any) -> str:
    """Returns the text of a completion: itself, or the text of the last message of a conversation.

    >>> text_of("4"), text_of([{"role": "assistant", "content": "4"}]), text_of([]), text_of(None)
    ('4', '4', '', '')
    """
    if isinstance(completion, list | tuple):
        completion = completion[-1] if completion else ""
        completion = completion.get("content") if isinstance(completion, Mapping) else completion
    if isinstance(completion, list | tuple):  # parts; some are pictures
        texts = (part.get("text") if isinstance(part, Mapping) else part for part in completion)
        return "".join(part for part in texts if isinstance(part, str))
    return completion if isinstance(completion, str) else ""


def exact_match(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """1 where the completion is the answer, apart from white space around it.

    Args: completions [N]: texts or messages. answer [N]: the column.
    Returns: [N].

    >>> exact_match([" 4", "four", ""], [4, 4, 4])
    [1.0, 0.0, 0.0]
    """
    return _score_answers(completions, answer, strip_or_none, strip_or_none)


def last_number(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """1 where the last number of the completion equals the last number of the answer, by value.

    Args: completions [N]: texts or messages. answer [N]: the column; a worked solution ("... #### 1,000") will do.
    Returns: [N]; None where the answer has no number, or is a fraction, which ends in its denominator.

    >>> last_number(["so 3 + 4 = 7.0.", "it is 5-7", "no idea"], ["7", "#### 7", 7])
    [1.0, 1.0, 0.0]
    """
    return _score_answers(completions, answer, read_number, gold_number)


def boxed(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    r"""1 where the content of the last \boxed{...} equals the answer, as numbers or as plainly written LaTeX.

    Spaces, $, \left, \right, \text{} and the like don't count, \dfrac is \frac, \frac{1}{2} is 1/2.

    Args: completions [N]: texts or messages. answer [N]: the column, boxed itself or not.
    Returns: [N].

    >>> boxed([r"thus \boxed{\dfrac{1}{2}}", "1/2", r"\boxed{1,000.0}"], ["1/2", "1/2", 1000])
    [1.0, 0.0, 1.0]
    """
    return _score_answers(completions, answer, read_box, gold_boxed)


def fuzzy_match(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """Returns the similarity of the completion and the answer, apart from case and white space; of several answers the
    nearest.

    s = 2 L / (|a| + |b|), L the length of the longest common subsequence of the two texts, in characters: 1 where they
    are the same, 0 where they share nothing.

    Args: completions [N]: texts or messages. answer [N]: the column.
    Returns: [N], between 0 and 1.
    Source: the normalised indel similarity; agrees with rapidfuzz's fuzz.ratio / 100.

    >>> fuzzy_match(["new  york", "Nwe York", ""], ["New York"] * 3)
    [1.0, 0.875, 0.0]
    """

    def score(text: str, golds: list[str]) -> float:
        completion = _normalize_case(text)
        return max(similarity(completion, _normalize_case(gold)) for gold in golds) if completion else 0.0

    return score_completions(completions, answer, score)


def similarity(a: str, b: str) -> float:
    """2 L / (|a| + |b|), L the length of the longest common subsequence; 1 for two empty texts.

    Source: Hyyrö, Bit-parallel LCS-length computation revisited (2004): a row of the table is one integer.

    >>> similarity("abcd", "acbd"), similarity("a", "b")
    (0.75, 0.0)
    """
    if not a or not b:
        return float(a == b)
    places: dict[str, int] = {}  # bit i of a letter: it is at a[i]
    for i, letter in enumerate(a):
        places[letter] = places.get(letter, 0) | 1 << i
    full = row = (1 << len(a)) - 1
    for letter in b:
        matches = row & places.get(letter, 0)
        row = ((row + matches) | (row - matches)) & full
    return 2 * (len(a) - row.bit_count()) / (len(a) + len(b))


@per_completion
def format_match(completions: Sequence[Any], *, pattern: str = R1_FORMAT) -> list[float | None]:
    r"""1 where the whole completion, without white space around it, matches a regular expression; else 0.

    Args: completions [N]: texts or messages. pattern: in Python's syntax; the dot matches line ends too. By default
        <think> ... </think> <answer> ... </answer>.
    Returns: [N].
    Raises: ConfigError: the pattern is not a regular expression.

    >>> format_match(["<think>2+2</think> <answer>4</answer>", "<answer>4</answer>", ""])
    [1.0, 0.0, 0.0]
    >>> format_match(["4.", "four"], pattern=r"[0-9]+\.?")
    [1.0, 0.0]
    """
    try:
        regex = re.compile(pattern, re.DOTALL)
    except (re.error, TypeError) as error:
        raise ConfigError(f"pattern {pattern!r} is not a regular expression: {error}") from error
    texts = [text_of(completion).strip() for completion in completions]
    return [float(bool(text) and regex.fullmatch(text) is not None) for text in texts]


def no_rewards(completions: Sequence[Any], **_: Any) -> list[float | None]:
    """None (not applicable) for every completion: for a run that learns only from a teacher.

    >>> no_rewards(["4"])
    [None]
    """
    return [None] * len(completions)


def score_completions(
    completions: Sequence[Any], answer: Sequence[Any], score: Callable[[str, list[str]], float | None]
) -> list[float | None]:
    """Scores each completion by a function of its text and the accepted answers; None where there is no answer.

    Args: completions [N]: texts or messages. answer [N]: the column. score: receives at least one accepted
        answer.

    >>> score_completions(["a", "b"], [["a", "c"], None], lambda text, golds: float(text in golds))
    [1.0, None]
    """
    pairs = zip(completions, map(accepted_answers, answer), strict=True)
    return [score(text_of(completion), golds) if golds else None for completion, golds in pairs]


def accepted_answers(answer: Any) -> list[str]:
    """Returns the accepted answers of a row, as texts.

    >>> accepted_answers(4), accepted_answers(["a", None, " "]), accepted_answers(None)
    (['4'], ['a'], [])
    """
    accepted = answer if isinstance(answer, list | tuple) else [answer]
    return [str(one) for one in accepted if one is not None and str(one).strip()]


def _score_answers(
    completions: Sequence[Any], answer: Sequence[Any], read: Callable[[str], Any], read_gold: Callable[[str], Any]
) -> list[float | None]:
    """1.0 where the answer of a completion equals an accepted one; None where no accepted answer can be read."""

    def score(text: str, golds: list[str]) -> float | None:
        answers = [value for gold in golds if (value := read_gold(gold)) is not None]
        return float(read(text) in answers) if answers else None

    return score_completions(completions, answer, score)


def strip_or_none(text: str) -> str | None:
    """Returns the text without white space around it; None if it is empty.

    >>> strip_or_none(" 4 "), strip_or_none(" ")
    ('4', None)
    """
    return text.strip() or None


def read_number(text: str) -> Decimal | None:
    """Returns the last number of a text; None if there is none.

    >>> read_number("3 + 4 = 7.0.")
    Decimal('7.0')
    """
    numbers = NUMBER.findall(text.replace("−", "-"))
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def gold_number(text: str) -> Decimal | None:
    """Returns the last number of an answer; None if there is none, or if the answer is a fraction.

    >>> gold_number("#### 18"), gold_number("3/4")
    (Decimal('18'), None)
    """
    return None if FRACTION.fullmatch(text.strip()) else read_number(text)


def last_box(text: str) -> str | None:
    r"""Returns the content of the last \boxed{...}; None if there is none, or it is not closed.

    >>> last_box(r"\boxed{1}, so \boxed{x^{2}}.")
    'x^{2}'
    """
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    start += len(r"\boxed{")
    depth = 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place]
    return None


def read_box(text: str) -> str | Decimal | None:
    r"""Returns the content of the last \boxed{...} in normal form; None if there is none, or it is not closed, or
    empty.

    >>> read_box(r"\boxed{\dfrac{1}{2}}")
    '1/2'
    """
    content = last_box(text)
    return None if content is None else _normalize(content)


def gold_boxed(text: str) -> str | Decimal | None:
    """Returns an answer in normal form, boxed or not; None if it is empty, or its box is not closed."""
    return read_box(text) if r"\boxed{" in text else _normalize(text)


def _normalize(latex: str) -> str | Decimal | None:
    """Returns a short formula in a normal form: a number if it is one, else a text; None if nothing is left."""
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}", r"\1", latex.replace("−", "-"))
    text = re.sub(r"\\(?:left|right)(?![a-zA-Z])|\\[!,;: ]|[$\s]|\\%", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac\{(-?[0-9]+)\}\{([0-9]+)\}", r"\1/\2", text).rstrip(".")
    return Decimal(text.replace(",", "")) if NUMBER.fullmatch(text) else text or None


def _normalize_case(text: str) -> str:
    return " ".join(text.casefold().split())
