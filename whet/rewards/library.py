"""whet's reward functions by name, and the functions with which they read the answer of a completion."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from whet.rewards.code import code_tests
from whet.rewards.length import within_length
from whet.rewards.maths import math_match
from whet.rewards.numbers import number_match, read_value
from whet.rewards.reasoning_gym import reasoning_gym, reasoning_gym_number
from whet.rewards.text import (
    boxed,
    exact_match,
    format_match,
    fuzzy_match,
    last_number,
    read_box,
    read_number,
    strip_or_none,
)
from whet.rewards.verifiers import verifiers

__all__ = ["ANSWERS", "READ_BY", "REWARDS"]

REWARDS: dict[str, Callable[..., list[Any] | Awaitable[list[Any]]]] = {
    "boxed": boxed,
    "code_tests": code_tests,
    "exact_match": exact_match,
    "format_match": format_match,
    "fuzzy_match": fuzzy_match,
    "last_number": last_number,
    "math_match": math_match,
    "number_match": number_match,
    "reasoning_gym": reasoning_gym,
    "reasoning_gym_number": reasoning_gym_number,
    "verifiers": verifiers,
    "within_length": within_length,
}
"""Reward functions by name."""
ANSWERS: dict[str, Callable[[str], Any]] = {
    "boxed": read_box,
    "last_number": read_number,
    "number_match": read_value,
    "whole": strip_or_none,
}
"""Name -> a function that reads the answer of a text: the last boxed formula, the last number, the boxed or last number
with its fractions and powers, or the whole text. It returns None if there is no answer."""
READ_BY: dict[Callable[..., Any], Callable[[str], Any]] = {
    boxed: read_box,
    exact_match: strip_or_none,
    last_number: read_number,
    number_match: read_value,
}
"""Reward function -> the function that reads what it compares with the answer column."""
