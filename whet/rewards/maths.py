"""Formulas that mean the same, by math-verify: the extra `math`, imported when it is first needed.

It stops what takes too long by an alarm, which only a main thread has. What no alarm can stop (a power of 10^9 digits),
the end of a worker of trainer.reward_workers does.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Sequence
from typing import Any

from whet.errors import ConfigError
from whet.rewards.function_info import per_completion
from whet.rewards.text import scored
from whet.util.install import install_hint

__all__ = ["math_match", "need_math_verify"]

PARSE_S, VERIFY_S = 5, 5
"""Seconds for reading a formula, and for comparing two."""
MAX_CHARACTERS = 20_000
"""Characters of a completion that are read, from its end: an answer stands there, and reading takes its time."""


def need_math_verify() -> None:
    """Raises ConfigError where math-verify is not installed, or not whole."""
    missing = [name for name in ("math_verify", "latex2sympy2_extended") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"this reward needs math-verify (no module {missing[0]}); {install_hint('math')}")


@per_completion
def math_match(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    r"""1 where the formula of the completion means the same as the answer, as \frac{2}{4} and 0.5 do.

    Read is the last box, else the last formula between dollars or the last number. None where the answer itself can't
    be read as a formula. Nothing that a completion holds raises.

    Args: completions [N]: texts or messages. answer [N]: the column: LaTeX with or without dollars and box, numbers, a
        worked solution ("... #### 18").
    Returns: [N].
    Raises: ConfigError: math-verify is not installed.
    Source: math-verify's parse and verify, with their defaults.

    Example: math_match([r"so \boxed{\frac{2}{4}}", "it is 0.4"], ["1/2", "1/2"]) -> [1.0, 0.0]
    """
    need_math_verify()
    from math_verify import parse, verify  # pyright: ignore[reportMissingImports]

    alarmed = threading.current_thread() is threading.main_thread()
    read_s: Any = PARSE_S if alarmed else None  # its annotation says int, and None is its "no limit"
    read = functools.partial(parse, parsing_timeout=read_s)
    limit: Any = VERIFY_S if alarmed else None

    def score(text: str, golds: list[str]) -> float | None:
        known = [found for found in map(read, map(_formula, golds)) if found]
        if not known:
            return None
        try:
            said = read(text[-MAX_CHARACTERS:])
            return float(any(verify(gold, said, timeout_seconds=limit) for gold in known)) if said else 0.0
        except Exception:  # sympy's own, of what nobody thought of
            return 0.0

    return scored(completions, answer, score)


def _formula(gold: str) -> str:
    """An answer as math-verify reads it as a whole."""
    gold = gold.rpartition("####")[2].strip()
    return gold if r"\boxed" in gold else rf"\boxed{{{gold}}}"
