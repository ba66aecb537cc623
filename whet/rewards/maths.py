"""A reward that compares formulas by math-verify (the extra `math`), which is imported when it is first used.

math-verify stops long calculations by an alarm, which only the main thread can set. An alarm can't stop a power with
10^9 digits; there trainer.reward_workers helps, because a worker process can be ended.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Sequence
from typing import Any

from whet.errors import ConfigError
from whet.rewards.function_info import per_completion
from whet.rewards.text import score_completions
from whet.util.install import install_hint

__all__ = ["check_math_verify", "math_match"]

PARSE_S, VERIFY_S = 5, 5
"""Seconds for reading a formula, and for comparing two."""
MAX_CHARACTERS = 20_000
"""Characters that are read, from the end of a completion: the answer is there, and reading is slow."""


def check_math_verify() -> None:
    """Raises ConfigError if math-verify or its parser is not installed."""
    missing = [name for name in ("math_verify", "latex2sympy2_extended") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"this reward needs math-verify (no module {missing[0]}); {install_hint('math')}")


@per_completion
def math_match(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    r"""1 where the formula of the completion means the same as the answer, as \frac{2}{4} and 0.5 do.

    It reads the last box, else the last formula between dollars or the last number. None where the answer itself can't
    be read as a formula. No completion raises.

    Args: completions [N]: texts or messages. answer [N]: the column: LaTeX with or without dollars and box, numbers, a
        worked solution ("... #### 18").
    Returns: [N].
    Raises: ConfigError: math-verify is not installed.
    Source: math-verify's parse and verify, with their defaults.

    Example: math_match([r"so \boxed{\frac{2}{4}}", "it is 0.4"], ["1/2", "1/2"]) -> [1.0, 0.0]
    """
    check_math_verify()
    from math_verify import parse, verify  # pyright: ignore[reportMissingImports]

    can_alarm = threading.current_thread() is threading.main_thread()
    read_s: Any = PARSE_S if can_alarm else None  # its annotation says int, and None is its "no limit"
    read = functools.partial(parse, parsing_timeout=read_s)
    limit: Any = VERIFY_S if can_alarm else None

    def score(text: str, golds: list[str]) -> float | None:
        answers = [formula for formula in map(read, map(_formula, golds)) if formula]
        if not answers:
            return None
        try:
            formula = read(text[-MAX_CHARACTERS:])
            return float(any(verify(gold, formula, timeout_seconds=limit) for gold in answers)) if formula else 0.0
        except Exception:  # any error of sympy
            return 0.0

    return score_completions(completions, answer, score)


def _formula(gold: str) -> str:
    """Returns an answer in a form that math-verify reads as one formula."""
    gold = gold.rpartition("####")[2].strip()
    return gold if r"\boxed" in gold else rf"\boxed{{{gold}}}"
