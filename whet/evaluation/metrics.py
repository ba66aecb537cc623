"""From judged completions to the numbers of an evaluation, over all prompts and by source.

Dim letters: n completions of a prompt.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whet.errors import ConfigError, RewardError, format_exception, lookup_error
from whet.evaluation.estimators import Estimate, estimate, majority_at_k, pass_at_k
from whet.rewards.call import function_name
from whet.rewards.library import ANSWERS, READ_BY
from whet.rewards.reward_batch import RewardBatch
from whet.util.references import is_ref, resolve_callable

__all__ = ["AnswerFn", "PromptResult", "compute_metrics", "compute_passed", "prompt_results", "resolve_answer_fn"]

AnswerFn = Callable[[str], Hashable | None]
"""From the text of a completion to what it answers; None = nothing."""
NO_SOURCE = "(none)"
"""The source of a row without one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptResult:
    """One prompt with its completions, judged. Arrays are in the order of generations.

    Example: two completions, one right: PromptResult(row=0, source=None, totals=[1, 0], table={"exact_match": [1, 0]},
    lengths=[2, 3], truncated=[False, False], answers=["4", "5"]).
    """

    row: int
    """Place in the data set."""
    source: str | None
    """The value of the column by which results are broken down; None = there is no such column."""
    totals: np.ndarray
    """float64 [n]: the weighted rewards; NaN = no function applies."""
    table: Mapping[str, np.ndarray]
    """float64 [n] by function, unweighted."""
    lengths: np.ndarray
    """int [n]: tokens, stop token included."""
    truncated: np.ndarray
    """bool [n]: ended by the limit."""
    answers: Sequence[Hashable | None]
    """[n]: what majority@k votes on."""


def prompt_results(rewarded: RewardBatch, *, source_column: str | None, read: AnswerFn) -> list[PromptResult]:
    """The prompts of a judged batch.

    Args: source_column: None = no breakdown. read: from a text to its answer.
    Raises: RewardError: `read` raises, or gives what can't be compared.
    """
    found = []
    for i, (group, texts) in enumerate(zip(rewarded.groups, rewarded.texts, strict=True)):
        part = rewarded.group_of == i
        source = group.prompt.columns.get(source_column) if source_column is not None else None
        found.append(
            PromptResult(
                row=group.prompt.row,
                source=None if source_column is None else NO_SOURCE if source is None else str(source),
                totals=rewarded.total[part],
                table={name: values[part] for name, values in rewarded.table.items()},
                lengths=np.array([len(c.tokens) for c in group.completions]),
                truncated=np.array([c.finish_reason == "length" for c in group.completions]),
                answers=[_read(read, text, group.prompt.row) for text in texts],
            )
        )
    return found


def _read(read: AnswerFn, text: str, row: int) -> Hashable | None:
    try:
        answer = read(text)
        hash(answer)
    except Exception as error:
        raise RewardError(
            f"answer_fn {function_name(read)} failed on a completion of row {row}: {format_exception(error)}; it "
            "takes a text and gives its answer, a string or a number, or None"
        ) from error
    return answer


def resolve_answer_fn(given: Any, reward_fns: Sequence[Any]) -> tuple[AnswerFn, str]:
    """What majority@k votes on, and what it is called.

    Args: given: a function, a name or a reference; None = what the first reward function that says so reads: whet's
        own, and one with the attribute `answer_fn`; else the whole text. reward_fns: in their order.
    Raises: ConfigError: an unknown name, or what is referred to can't be called.

    >>> from whet.rewards.text import last_number
    >>> read, name = resolve_answer_fn(None, [last_number])
    >>> read("2 and 2 are 4."), name
    (Decimal('4'), 'last_number')
    """
    if given is None:
        for fn in reward_fns:
            own = READ_BY.get(fn) if inspect.isfunction(fn) else None
            own = vars(fn).get("answer_fn") if own is None and hasattr(fn, "__dict__") else own
            if own is not None:
                return own, function_name(fn)
        return ANSWERS["whole"], "whole"
    if not isinstance(given, str):
        if not callable(given):
            raise ConfigError(f"answer_fn is a function or its name, got {type(given).__name__} {given!r:.60}")
        return given, function_name(given)
    if not is_ref(given):
        if given not in ANSWERS:
            raise lookup_error("answer_fn", given, [*ANSWERS, "package.module:name", "file.py:name"])
        return ANSWERS[given], given
    return resolve_callable(given, "answer_fn"), given


def compute_passed(found: Sequence[PromptResult], by: str | None, threshold: float | None) -> list[np.ndarray] | None:
    """Whether each completion passes, by prompt: 1, 0, or NaN where it has no reward.

    Args: by: the reward function that decides; None = the weighted total. threshold: the least reward that passes;
        None = 1.0 if all rewards are 0 or 1.
    Returns: float64 [n] for each prompt; None where no threshold is given and some reward is neither 0 nor 1.
    Raises: ConfigError: there is no such function.
    """
    if by is not None and found and by not in found[0].table:
        raise lookup_error("pass_reward", by, found[0].table)
    values = [one.totals if by is None else one.table[by] for one in found]
    if threshold is None:
        if not all(np.isin(v[~np.isnan(v)], (0.0, 1.0)).all() for v in values):
            return None
        threshold = 1.0
    return [np.where(np.isnan(v), math.nan, v >= threshold) for v in values]


def compute_metrics(
    found: Sequence[PromptResult], passed: Sequence[np.ndarray] | None, ks: Sequence[int]
) -> dict[str, Estimate]:
    """The numbers of some prompts: name -> mean over prompts and standard error.

    reward, rewards/<function>: the mean of a prompt's completions. pass@k, majority@k: see estimators; a prompt with
    fewer than k judged completions does not count. tokens: the mean length. truncated: the share ended by the limit.
    """
    rewards = {"reward": [_mean(one.totals) for one in found]}
    for name in found[0].table if found else ():
        rewards[f"rewards/{name}"] = [_mean(one.table[name]) for one in found]
    metrics = {name: estimate(values) for name, values in rewards.items()}
    if passed is not None:
        known = [(p[~np.isnan(p)], [a for a, x in zip(one.answers, p) if x == x]) for one, p in zip(found, passed)]
        for k in ks:
            metrics[f"pass@{k}"] = estimate([_pass(p, k) for p, _ in known])
        for k in ks:
            if k > 1:
                metrics[f"majority@{k}"] = estimate([_majority(a, p, k) for p, a in known])
    metrics["tokens"] = estimate([_mean(one.lengths) for one in found])
    metrics["truncated"] = estimate([_mean(one.truncated) for one in found])
    return metrics


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)] if values.dtype.kind == "f" else values
    return float(known.mean()) if len(known) else math.nan


def _pass(passed: np.ndarray, k: int) -> float:
    return pass_at_k(len(passed), int(passed.sum()), k) if len(passed) >= k else math.nan


def _majority(answers: Sequence[Hashable | None], passed: np.ndarray, k: int) -> float:
    return majority_at_k(answers, passed.tolist(), k) if len(passed) >= k else math.nan
