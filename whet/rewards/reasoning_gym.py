"""The reward of reasoning-gym's tasks: their own score_answer of a completion's answer.

Left out on purpose: the format rewards of reasoning-gym's examples; `format_match` is one.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from whet.data.reasoning_gym import make_task
from whet.errors import format_exception
from whet.rewards.text import read_number, text_of

__all__ = ["reasoning_gym", "reasoning_gym_number"]

logger = logging.getLogger("whet")


def reasoning_gym(completions: list[Any], task: list[str], index: list[int], **_: Any) -> list[float]:
    """reasoning-gym's score of each completion, from 0 to 1.

    The answer is the text between the last <answer> and </answer>, or the whole completion where there are no tags.

    Args: completions: texts, or conversations whose last message counts. task, index: columns of the rows that
        `data=reasoning_gym:...` makes.
    Returns: a score per completion. Most tasks give 1 for the exact answer, and less where the text contains it.

    Example: rewards `reasoning_gym` with data `reasoning_gym:chain_sum?min_terms=2&max_terms=2`.
    """
    from reasoning_gym.utils import extract_answer  # pyright: ignore[reportMissingImports]

    texts = [text_of(completion) for completion in completions]
    answers = [text.strip() if (answer := extract_answer(text)) is None else answer for text in texts]
    return [_score(*each) for each in zip(answers, task, index, strict=True)]


def reasoning_gym_number(completions: list[Any], task: list[str], index: list[int], **_: Any) -> list[float]:
    """reasoning-gym's score of the last number of each completion; a completion without a number gets 0.

    A wrong number that only contains the answer (15 for 5, -38 for 38) gets 0 too, where reasoning-gym gives a part.

    Args, Returns: as in `reasoning_gym`.

    Example: for tasks whose answer is a number, on a model that writes sentences.
    """
    answers = [read_number(text_of(completion)) for completion in completions]
    texts = ["" if a is None else f"{a.to_integral() if a == a.to_integral() else a:f}" for a in answers]
    scores = [_score(*each) for each in zip(texts, task, index, strict=True)]
    gold = [str(_entry(name, int(i))["answer"]) for name, i in zip(task, index, strict=True)]
    return [0.0 if text != g and g in text else s for s, text, g in zip(scores, texts, gold, strict=True)]


def _score(answer: str, task: str, index: int) -> float:
    """reasoning-gym's score of an answer; 0 where its scorer can't parse the answer and raises."""
    entries, entry = make_task(task), _entry(task, int(index))
    try:
        return float(entries.score_answer(answer=answer, entry=entry))
    except Exception as error:  # scorers parse what a model wrote: numbers, JSON, moves of games
        _log_once(task.partition("?")[0], format_exception(error))
        return 0.0


@functools.cache
def _log_once(name: str, error: str) -> None:
    logger.warning("reasoning_gym: the scorer of %s raised %s on a completion, which gets 0", name, error)


@functools.lru_cache(maxsize=4096)
def _entry(task: str, index: int) -> Any:
    """Returns the entry of a row: the completions of a group share it."""
    return make_task(task)[index]
