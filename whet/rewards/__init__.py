"""Rewards: their contract, their manager, functions for texts, numbers, programs and lengths, and a judge model."""

from whet.rewards.code import code_tests
from whet.rewards.function_info import per_completion
from whet.rewards.judge import JudgeModel
from whet.rewards.length import overlong, within_length
from whet.rewards.maths import math_match
from whet.rewards.numbers import number_match
from whet.rewards.reasoning_gym import reasoning_gym, reasoning_gym_number
from whet.rewards.text import boxed, exact_match, format_match, fuzzy_match, last_number, text_of
from whet.rewards.verifiers import verifiers

__all__ = [
    "JudgeModel",
    "boxed",
    "code_tests",
    "exact_match",
    "format_match",
    "fuzzy_match",
    "last_number",
    "math_match",
    "number_match",
    "overlong",
    "per_completion",
    "reasoning_gym",
    "reasoning_gym_number",
    "text_of",
    "verifiers",
    "within_length",
]
