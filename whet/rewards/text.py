"""Reward functions for text that need nothing but the standard library: 1.0 right, 0.0 wrong, None not applicable.

Those with an `answer` compare with that column: a text, a number, or a list of which any will do; None or "", or one
that the function can't read = not applicable. A run refuses rows whose answers can't be read before its first step
(RewardManager.check_answers). The gold answer scores 1, the empty completion 0, nothing that is read raises. Left out
on purpose: the running of code. Formulas: maths.py. Numbers with fractions, units and powers of ten: numbers.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from whet.errors import ConfigError
from whet.rewards.function_info import per_completion

__all__ = [
    "boxed",
    "exact_match",
    "format_match",
    "fuzzy_match",
    "gold_boxed",
    "gold_number",
    "golds_of",
    "last_box",
    "last_number",
    "read_box",
    "read_number",
    "scored",
    "similarity",
    "stripped",
    "text_of",
    "unrewarded",
]

NUMBER = re.compile(
    r"(?:(?<![\w)\]}])-)?"  # a sign, but not the minus of "5-3"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"  # thousands in threes, fraction
    r"(?:[eE][+-]?[0-9]{1,3}(?![0-9]))?"
)
"""A decimal number as people and models write it."""
FRACTION = re.compile(r"[-−]?[0-9][0-9,]*\s*/\s*[0-9][0-9,]*")
R1_FORMAT = r"<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>"
"""A thought and an answer, each once and in its tags."""


def text_of(completion: Any) -> str:
    """The text of a completion: itself, or what the last message of a conversation says.

    >>> text_of("4"), text_of([{"role": "assistant", "content": "4"}]), text_of([]), text_of(None)
    ('4', '4', '', '')
    """
    if isinstance(completion, list | tuple):
        completion = completion[-1] if completion else ""
        completion = completion.get("content") if isinstance(completion, Mapping) else completion
    if isinstance(completion, list | tuple):  # parts, of which some are pictures
        said = (part.get("text") if isinstance(part, Mapping) else part for part in completion)
        return "".join(part for part in said if isinstance(part, str))
    return completion if isinstance(completion, str) else ""


def exact_match(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """1 where the completion is the answer, apart from white space around it.

    Args: completions [N]: texts or messages. answer [N]: the column.
    Returns: [N].

    >>> exact_match([" 4", "four", ""], [4, 4, 4])
    [1.0, 0.0, 0.0]
    """
    return _judged(completions, answer, stripped, stripped)


def last_number(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """1 where the last number of the completion equals the last number of the answer, by value.

    Args: completions [N]: texts or messages. answer [N]: the column; a worked solution ("... #### 1,000") will do.
    Returns: [N]; None where the answer has no number, or is a fraction, whose last number alone says little.

    >>> last_number(["so 3 + 4 = 7.0.", "it is 5-7", "no idea"], ["7", "#### 7", 7])
    [1.0, 1.0, 0.0]
    """
    return _judged(completions, answer, read_number, gold_number)


def boxed(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    r"""1 where the content of the last \boxed{...} equals the answer, as numbers or as plainly written LaTeX.

    Spaces, $, \left, \right, \text{} and the like don't count, \dfrac is \frac, \frac{1}{2} is 1/2.

    Args: completions [N]: texts or messages. answer [N]: the column, boxed itself or not.
    Returns: [N].

    >>> boxed([r"thus \boxed{\dfrac{1}{2}}", "1/2", r"\boxed{1,000.0}"], ["1/2", "1/2", 1000])
    [1.0, 0.0, 1.0]
    """
    return _judged(completions, answer, read_box, gold_boxed)


def fuzzy_match(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """How alike the completion and the answer are, apart from case and white space; of several answers the nearest.

    s = 2 L / (|a| + |b|), L the length of the longest common subsequence of the two texts, in characters: 1 where they
    are the same, 0 where they share nothing.

    Args: completions [N]: texts or messages. answer [N]: the column.
    Returns: [N], between 0 and 1.
    Source: the normalised indel similarity; agrees with rapidfuzz's fuzz.ratio / 100.

    >>> fuzzy_match(["new  york", "Nwe York", ""], ["New York"] * 3)
    [1.0, 0.875, 0.0]
    """

    def score(text: str, golds: list[str]) -> float:
        said = _plain(text)
        return max(similarity(said, _plain(gold)) for gold in golds) if said else 0.0

    return scored(completions, answer, score)


def similarity(a: str, b: str) -> float:
    """2 L / (|a| + |b|), L the length of the longest common subsequence; 1 for two empty texts.

    Source: Hyyrö, Bit-parallel LCS-length computation revisited (2004): a row of the table is one integer.

    >>> similarity("abcd", "acbd"), similarity("a", "b")
    (0.75, 0.0)
    """
    if not a or not b:
        return float(a == b)
    places: dict[str, int] = {}
    for i, letter in enumerate(a):
        places[letter] = places.get(letter, 0) | 1 << i
    full = row = (1 << len(a)) - 1
    for letter in b:
        met = row & places.get(letter, 0)
        row = ((row + met) | (row - met)) & full
    return 2 * (len(a) - row.bit_count()) / (len(a) + len(b))


@per_completion
def format_match(completions: Sequence[Any], *, pattern: str = R1_FORMAT) -> list[float | None]:
    r"""1 where the whole completion, without white space around it, has the form of a regular expression; else 0.

    Args: completions [N]: texts or messages. pattern: Python's; the dot is any character, a line's end too. By default
        <think> ... </think> <answer> ... </answer>.
    Returns: [N].
    Raises: ConfigError: no regular expression.

    >>> format_match(["<think>2+2</think> <answer>4</answer>", "<answer>4</answer>", ""])
    [1.0, 0.0, 0.0]
    >>> format_match(["4.", "four"], pattern=r"[0-9]+\.?")
    [1.0, 0.0]
    """
    try:
        form = re.compile(pattern, re.DOTALL)
    except (re.error, TypeError) as error:
        raise ConfigError(f"pattern {pattern!r} is no regular expression: {error}") from error
    texts = [text_of(completion).strip() for completion in completions]
    return [float(bool(text) and form.fullmatch(text) is not None) for text in texts]


def unrewarded(completions: Sequence[Any], **_: Any) -> list[float | None]:
    """Not applicable, to any completion: where a teacher alone teaches.

    >>> unrewarded(["4"])
    [None]
    """
    return [None] * len(completions)


def scored(
    completions: Sequence[Any], answer: Sequence[Any], score: Callable[[str, list[str]], float | None]
) -> list[float | None]:
    """What a function of a text and its golds says of each completion; None where there is no gold.

    Args: completions [N]: texts or messages. answer [N]: the column. score: given at least one gold.

    >>> scored(["a", "b"], [["a", "c"], None], lambda text, golds: float(text in golds))
    [1.0, None]
    """
    pairs = zip(completions, map(golds_of, answer), strict=True)
    return [score(text_of(completion), golds) if golds else None for completion, golds in pairs]


def golds_of(answer: Any) -> list[str]:
    """What a row of the column accepts, as texts: any of them will do.

    >>> golds_of(4), golds_of(["a", None, " "]), golds_of(None)
    (['4'], ['a'], [])
    """
    accepted = answer if isinstance(answer, list | tuple) else [answer]
    return [str(one) for one in accepted if one is not None and str(one).strip()]


def _judged(
    completions: Sequence[Any], answer: Sequence[Any], read: Callable[[str], Any], gold: Callable[[str], Any]
) -> list[float | None]:
    """1.0 where the answer read from a completion is one of its golds; None where no gold can be read."""

    def score(text: str, golds: list[str]) -> float | None:
        known = [found for one in golds if (found := gold(one)) is not None]
        return float(read(text) in known) if known else None

    return scored(completions, answer, score)


def stripped(text: str) -> str | None:
    """The text without white space around it; None = there is nothing.

    >>> stripped(" 4 "), stripped(" ")
    ('4', None)
    """
    return text.strip() or None


def read_number(text: str) -> Decimal | None:
    """The last number of a text; None = there is none.

    >>> read_number("3 + 4 = 7.0.")
    Decimal('7.0')
    """
    found = NUMBER.findall(text.replace("−", "-"))
    return Decimal(found[-1].replace(",", "")) if found else None


def gold_number(text: str) -> Decimal | None:
    """The last number of an answer; None = there is none, or it is one half of a fraction.

    >>> gold_number("#### 18"), gold_number("3/4")
    (Decimal('18'), None)
    """
    return None if FRACTION.fullmatch(text.strip()) else read_number(text)


def last_box(text: str) -> str | None:
    r"""What the last \boxed{...} holds; None where there is none, or it is not closed.

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
    r"""What the last \boxed{...} holds, in normal form; None where there is none, or it is not closed, or empty.

    >>> read_box(r"\boxed{\dfrac{1}{2}}")
    '1/2'
    """
    held = last_box(text)
    return None if held is None else _normal(held)


def gold_boxed(text: str) -> str | Decimal | None:
    """An answer in normal form, boxed itself or not; None = there is nothing, or its box is not closed."""
    return read_box(text) if r"\boxed{" in text else _normal(text)


def _normal(latex: str) -> str | Decimal | None:
    """A short formula in one of the forms that mean the same; a number where it is one, None where nothing is left."""
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}", r"\1", latex.replace("−", "-"))
    text = re.sub(r"\\(?:left|right)(?![a-zA-Z])|\\[!,;: ]|[$\s]|\\%", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac\{(-?[0-9]+)\}\{([0-9]+)\}", r"\1/\2", text).rstrip(".")
    return Decimal(text.replace(",", "")) if NUMBER.fullmatch(text) else text or None


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
