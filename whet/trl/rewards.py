"""TRL's reward functions, with the same names, arguments and values.

The functions that compare formulas need math-verify (the extra `math`). They run on the main thread, where math-verify
can stop a comparison that takes too long.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

from whet.errors import ConfigError

__all__ = [
    "accuracy_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "reasoning_accuracy_reward",
    "think_format_reward",
]

LogExtra = Callable[[str, list[Any]], None]
_THINK = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)
_PARSE_S, _VERIFY_S = 10, 5


def think_format_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """1 where a completion begins with one <think> ... </think>, else 0.

    >>> think_format_reward([[{"content": "<think>a</think>b"}], [{"content": "b"}]])
    [1.0, 0.0]
    """
    return [float(_THINK.match(_text(c)) is not None) for c in completions]


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """DAPO's punishment of completions near the length limit: 0, then falling to −1 over the last tokens.

    Args: max_completion_len: L, where −1 is reached. soft_punish_cache: c, the last tokens before it.
    Returns: fn(completion_ids) -> 0 up to L − c tokens, (L − c − n) / c up to L, −1 beyond.

    >>> get_soft_overlong_punishment(100, 20)(completion_ids=[[1] * 90])
    [-0.5]
    """

    def soft_overlong_punishment_reward(completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        free = max_completion_len - soft_punish_cache
        return [
            0.0 if len(ids) <= free else max((free - len(ids)) / soft_punish_cache, -1.0) if soft_punish_cache else -1.0
            for ids in completion_ids
        ]

    return soft_overlong_punishment_reward


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable[..., list[float]]:
    """Returns the share of repeated n-grams of tokens times a penalty.

    Args: ngram_size: n. max_penalty: the reward of a completion that only repeats itself; not positive.
    Raises: ConfigError: a positive penalty.

    >>> get_repetition_penalty_reward(2)(completion_ids=[[1, 2, 3, 4], [5, 5, 5, 5, 5]])
    [0.0, -0.75]
    """
    if max_penalty > 0:
        raise ConfigError(f"max_penalty {max_penalty} should not be positive; give -1.0, say")

    def repetition_penalty_reward(completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        penalties = []
        for ids in completion_ids:
            grams = list(zip(*(ids[i:] for i in range(ngram_size)), strict=False))
            repeated = 1 - len(set(grams)) / len(grams) if grams else 0
            penalties.append(repeated * max_penalty if repeated else 0.0)
        return penalties

    return repetition_penalty_reward


def accuracy_reward(
    completions: Sequence[Any], solution: Sequence[str], log_extra: LogExtra | None = None, **kwargs: Any
) -> list[float | None]:
    r"""1 if the formula of a completion (boxed ones first) equals the solution's, else 0; None without a formula there.

    Example: accuracy_reward([[{"content": r"It is \boxed{\frac{1}{3}}"}]], [r"\frac{1}{3}"]) -> [1.0]
    """
    return _compute_accuracy([_text(c) for c in completions], solution, log_extra, "[skipped]")


def reasoning_accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[str],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: LogExtra | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """accuracy_reward of the text after the reasoning; 0 if the reasoning does not end.

    Args: reasoning_delimiters: strings that end it; the first one in a completion counts; None = ["</think>"].
    """
    ends = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    answers = [
        next((text.split(end)[-1] for end in ends if end in text), None) for text in (_text(c) for c in completions)
    ]
    return _compute_accuracy(answers, solution, log_extra, "[skipped]")


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable[..., list[float | None]]:
    """accuracy_reward scaled by length: v_min + (v_max − v_min) (1 + cos(π n / L)) / 2, n at most L.

    Args: max_len: L, in tokens. The others: the range of values of wrong and of right completions. The longest wrong
        completion has the greatest value of its range.
    Source: "Demystifying Long Chain-of-Thought Reasoning", arXiv:2502.03373, appendix C.1.
    """

    def cosine_scaled_reward(
        completions: Sequence[Any], solution: Sequence[str], completion_ids: Sequence[Sequence[int]], **kwargs: Any
    ) -> list[float | None]:
        rewards: list[float | None] = []
        for right, ids in zip(accuracy_reward(completions, solution), completion_ids, strict=True):
            low, high = (min_value_correct, max_value_correct) if right else (max_value_wrong, min_value_wrong)
            share = (1 + math.cos(math.pi * min(len(ids) / max_len, 1.0))) / 2
            rewards.append(None if right is None else low + (high - low) * share)
        return rewards

    return cosine_scaled_reward


# ---- helpers ---------------------------------------------------------------------------------------------------------


def _text(completion: Any) -> str:
    """Returns the text of a completion; of a conversation, the text of its first message."""
    return completion if isinstance(completion, str) else str(completion[0]["content"])


def _compute_accuracy(
    answers: Sequence[str | None], solution: Sequence[str], log_extra: LogExtra | None, skipped: str
) -> list[float | None]:
    """Returns the accuracy of each answer, 0 for None (reasoning without an end). Logs the parsed formulas."""
    compare = _load_comparison()
    rewards: list[float | None] = []
    parsed: list[tuple[str, str]] = []
    for answer, gold in zip(answers, solution, strict=True):
        if answer is None:
            rewards.append(0.0)
            parsed.append(("[incomplete reasoning]", "[incomplete reasoning]"))
            continue
        reward, *texts = compare(answer, gold)
        rewards.append(reward)
        parsed.append((texts[0], texts[1] if reward is not None else skipped))
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", [gold for gold, _ in parsed])
        log_extra("answer_parsed", [answer for _, answer in parsed])
    return rewards


def _load_comparison() -> Callable[[str, str], tuple[float | None, str, str]]:
    """Loads math-verify. Returns: fn(answer, gold) -> (reward, parsed gold, parsed answer).

    Raises: ConfigError: math-verify is not installed.
    """
    try:
        from latex2sympy2_extended import NormalizationConfig  # pyright: ignore[reportMissingImports]
        from math_verify import LatexExtractionConfig, parse, verify  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(f"this reward needs math-verify ({error}); pip install math-verify") from error
    main = threading.current_thread() is threading.main_thread()  # elsewhere its time limits can't be set
    extraction = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )

    def compare(answer: str, gold: str) -> tuple[float | None, str, str]:
        limit = _PARSE_S if main else None
        expected = parse(gold, parsing_timeout=limit)  # pyright: ignore[reportArgumentType]
        if len(expected) == 0:
            return None, "[unparseable]", ""
        answered = parse(
            answer,
            extraction_config=[extraction],
            extraction_mode="first_match",
            parsing_timeout=limit,  # pyright: ignore[reportArgumentType]
        )
        right = float(verify(expected, answered, timeout_seconds=_VERIFY_S if main else None))
        return right, str(expected), str(answered) if answered else "[unparseable]"

    return compare
