"""Reads numbers as people and models write them: thousands, fractions, mixed numbers, powers of ten, units, any digits.

Left out on purpose: arithmetic (2^5, 3 + 4), which maths.py reads, and decimal commas, which look like thousands.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from whet.errors import ConfigError
from whet.rewards.text import last_box, score_completions

__all__ = ["number_match", "read_value"]

MAX_DIGITS = 1000
"""Characters of a number. A longer one is not read, because Python's conversion becomes slow."""
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)"
NUMBER = re.compile(
    rf"""(?<![A-Za-z_^0-9.])                                 # not the 2 of H2O, x_2, cm^2
    (?P<sign>(?:(?<![0-9A-Za-z)\]}}])[-+])?)\s?              # a sign, but not the minus of "5-3"
    (?:(?P<whole>{_DIGITS})\s+(?P<part>{_DIGITS})\s?/\s?(?P<of>{_DIGITS})
      |(?P<value>{_DECIMAL})(?:[eE](?P<e>[-+]?[0-9]{{1,3}})(?![0-9]))?
       (?:\s?/\s?(?P<over>{_DECIMAL})|\s?[*×x]\s?10\s?\^\s?\(?(?P<ten>[-+]?[0-9]{{1,3}})\)?)?
    )(?![0-9]|\s?\^|[eE][-+]?[0-9])                          # not the 5 of 5^2 or of 5e9999""",
    re.VERBOSE,
)
"""A number: 1,234.5, -3/4, 1 1/2, 6.02 × 10^23."""
_LATEX = (
    (re.compile(r"\\[dt]?frac\s*\{\s*([^{}]*?)\s*\}\s*\{\s*([^{}]*?)\s*\}"), r" \1/\2"),
    (re.compile(r"\\[dt]?frac\s*([0-9])\s*([0-9])"), r" \1/\2"),
    (re.compile(r"\\(?:times|cdot)(?![a-zA-Z])"), "×"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\[,!;:]|\\(?:left|right)(?![a-zA-Z])"), ""),
    (re.compile(r"\^\s*\{\s*([-+]?[0-9]+)\s*\}"), r"^\1"),
    (re.compile(r"([_^])\s*\{[^{}]*\}"), r"\1"),
)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_EXPONENT = re.compile("[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")


def number_match(completions: Sequence[Any], answer: Sequence[Any], *, tolerance: float = 0.0) -> list[float | None]:
    r"""1 where the last number of the completion, or of its last box, equals the answer's.

    In a text with \boxed{...} the last box counts, in another text the last number. It may have thousands (1,234),
    decimals, fractions (3/4, \frac{3}{4}, 1 1/2, ½), powers of ten (6.02 × 10^23, 1e3), and digits of any script. Units
    around it are ignored: $5, 5 km, 5 m^2, 5% are 5.

    Args: completions [N]: texts or messages. answer [N]: the column; a worked solution ("... #### 1,000") will do.
        tolerance: t; numbers are equal where |number − gold| ≤ t · |gold|. 0 = exactly.
    Returns: [N]; None where the answer has no number.
    Raises: ConfigError: the tolerance is below 0, or not a number.

    >>> number_match(["it is 3/4 of them", r"\boxed{0.75} m^2, not 2", "0.7501", ""], ["3/4"] * 4)
    [1.0, 1.0, 0.0, 0.0]
    >>> number_match(["about 3.14"], ["3.14159"], tolerance=1e-3)
    [1.0]
    """
    if not (isinstance(tolerance, int | float) and 0 <= tolerance < math.inf):
        raise ConfigError(f"tolerance must be a number of at least 0, got {tolerance!r}; 0 = equal to the digit")
    relative = Fraction(tolerance)

    def score(text: str, golds: list[str]) -> float | None:
        answers = [value for gold in golds if (value := read_value(gold)) is not None]
        if not answers:
            return None
        number = read_value(text)
        return float(number is not None and any(abs(number - gold) <= relative * abs(gold) for gold in answers))

    return score_completions(completions, answer, score)


def read_value(text: str) -> Fraction | None:
    r"""Returns the last number of a text, or of its last box; None if there is none.

    >>> read_value(r"about $1{,}234.5$ km"), read_value("6.02 × 10²"), read_value("H2O")
    (Fraction(2469, 2), Fraction(602, 1), None)
    """
    box = last_box(text)
    text = _EXPONENT.sub(lambda raised: "^" + raised[0].translate(_RAISED), text if box is None else box)
    text = unicodedata.normalize("NFKC", text.replace("½", " ½")).replace("−", "-").replace("⁄", "/")
    text = re.sub(r"[^\W_a-zA-Z0-9]", lambda digit: str(unicodedata.decimal(digit[0], digit[0])), text)
    for latex, plain in _LATEX:
        text = latex.sub(plain, text)
    match = None
    for match in NUMBER.finditer(text):  # noqa: B007  (the last one)
        pass
    return None if match is None or len(match[0]) > MAX_DIGITS else _value(match)


def _value(match: re.Match[str]) -> Fraction | None:
    """Returns the value of a match of NUMBER; None if it divides by 0."""
    sign = -1 if match["sign"] == "-" else 1
    number = {
        name: Fraction(text.replace(",", ""))
        for name in ("whole", "part", "of", "value", "over")
        if (text := match[name])
    }
    if "whole" in number:
        return sign * (number["whole"] + number["part"] / number["of"]) if number["of"] else None
    if not number.get("over", 1):
        return None
    exponent = int(match["e"] or 0) + int(match["ten"] or 0)
    return sign * number["value"] / number.get("over", 1) * Fraction(10) ** exponent
