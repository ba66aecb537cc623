"""The metrics of an evaluation, from completions with rewards: over all prompts and by source.

Dim legend: n completions of a prompt.
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
from whet.rewards.text import text_of
from whet.util.references import is_ref, resolve_callable

__all__ = ["AnswerFn", "PromptResult", "compute_metrics", "compute_passed", "prompt_results", "resolve_answer_fn"]

AnswerFn = Callable[[str], Hashable | None]
"""The text of a completion -> its answer; None = no answer."""
NO_SOURCE = "(none)"
"""The source of a row without a source."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptResult:
    """One prompt with the rewards of its completions. Arrays are in the order of generations.

    Example: two completions, one right: PromptResult(row=0, source=None, totals=[1, 0], table={"exact_match": [1, 0]},
    lengths=[2, 3], truncated=[False, False], answers=["4", "5"]).
    """

    row: int
    """Index in the data set."""
    source: str | None
    """The value of the source column; None = no source column."""
    totals: np.ndarray
    """float64 [n]: the weighted rewards; NaN = no function applies."""
    table: Mapping[str, np.ndarray]
    """float64 [n] for each reward function, unweighted."""
    lengths: np.ndarray
    """int [n]: tokens, stop token included; of an episode with turns also those of the environment."""
    truncated: np.ndarray
    """bool [n]: ended by max_tokens."""
    answers: Sequence[Hashable | None]
    """[n]: the answers that majority@k counts."""


def prompt_results(rewarded: RewardBatch, *, source_column: str | None, read: AnswerFn) -> list[PromptResult]:
    """Returns the results of the prompts of a batch.

    Args: source_column: None = no breakdown. read: text -> answer.
    Raises: RewardError: `read` raises, or returns an unhashable answer.
    """
    results = []
    for i, (group, texts) in enumerate(zip(rewarded.groups, rewarded.texts, strict=True)):
        part = rewarded.group_of == i
        last = [group.completions[place] for place in group.last]
        lengths = [sum(len(c.tokens) for c in group.completions if c.generation == end.generation) for end in last]
        source = group.prompt.columns.get(source_column) if source_column is not None else None
        results.append(
            PromptResult(
                row=group.prompt.row,
                source=None if source_column is None else NO_SOURCE if source is None else str(source),
                totals=rewarded.total[part],
                table={name: values[part] for name, values in rewarded.table.items()},
                lengths=np.array(lengths, int),
                truncated=np.array([c.finish_reason == "length" for c in last]),
                answers=[_read_answer(read, text_of(texts[place]), group.prompt.row) for place in group.last],
            )
        )
    return results


def _read_answer(read: AnswerFn, text: str, row: int) -> Hashable | None:
    try:
        answer = read(text)
        hash(answer)
    except Exception as error:
        raise RewardError(
            f"answer_fn {function_name(read)} failed on a completion of row {row}: {format_exception(error)}; it "
            "takes a text and returns its answer: a string, a number or None"
        ) from error
    return answer


def resolve_answer_fn(answer_fn: Any, reward_fns: Sequence[Any]) -> tuple[AnswerFn, str]:
    """Returns the function that reads the answers for majority@k, and its name.

    Args:
        answer_fn: a function, a name or a reference. None = the answer function of the first reward function that has
            one: many of whet's own do, and any function may have the attribute `answer_fn`; else the whole text.
        reward_fns: in order.
    Raises: ConfigError: an unknown name, or a reference to an object that can't be called.

    >>> from whet.rewards.text import last_number
    >>> read, name = resolve_answer_fn(None, [last_number])
    >>> read("2 and 2 are 4."), name
    (Decimal('4'), 'last_number')
    """
    if answer_fn is None:
        for fn in reward_fns:
            reader = READ_BY.get(fn) if inspect.isfunction(fn) else None
            reader = vars(fn).get("answer_fn") if reader is None and hasattr(fn, "__dict__") else reader
            if reader is not None:
                return reader, function_name(fn)
        return ANSWERS["whole"], "whole"
    if not isinstance(answer_fn, str):
        if not callable(answer_fn):
            raise ConfigError(f"answer_fn is a function or its name, got {type(answer_fn).__name__} {answer_fn!r:.60}")
        return answer_fn, function_name(answer_fn)
    if not is_ref(answer_fn):
        if answer_fn not in ANSWERS:
            raise lookup_error("answer_fn", answer_fn, [*ANSWERS, "package.module:name", "file.py:name"])
        return ANSWERS[answer_fn], answer_fn
    return resolve_callable(answer_fn, "answer_fn"), answer_fn


def compute_passed(results: Sequence[PromptResult], by: str | None, threshold: float | None) -> list[np.ndarray] | None:
    """Returns whether each completion passes: 1 or 0, or NaN without a reward.

    Args: by: the reward function that decides; None = the weighted total. threshold: the least reward that passes;
        None = 1.0 if all rewards are 0 or 1.
    Returns: float64 [n] for each prompt; None if there is no threshold and some reward is neither 0 nor 1.
    Raises: ConfigError: there is no such function.
    """
    if by is not None and results and by not in results[0].table:
        raise lookup_error("pass_reward", by, results[0].table)
    values = [one.totals if by is None else one.table[by] for one in results]
    if threshold is None:
        if not all(np.isin(v[~np.isnan(v)], (0.0, 1.0)).all() for v in values):
            return None
        threshold = 1.0
    return [np.where(np.isnan(v), math.nan, v >= threshold) for v in values]


def compute_metrics(
    results: Sequence[PromptResult], passed: Sequence[np.ndarray] | None, ks: Sequence[int]
) -> dict[str, Estimate]:
    """Returns the metrics of some prompts: name -> mean over prompts and standard error.

    reward, rewards/<function>: the mean over a prompt's completions. pass@k, majority@k: see estimators.py; a prompt
    with fewer than k rewards does not count. tokens: the mean length. truncated: the share that max_tokens ended.
    """
    rewards = {"reward": [_mean(one.totals) for one in results]}
    for name in results[0].table if results else ():
        rewards[f"rewards/{name}"] = [_mean(one.table[name]) for one in results]
    metrics = {name: estimate(values) for name, values in rewards.items()}
    if passed is not None:
        graded = [(p[~np.isnan(p)], [a for a, x in zip(one.answers, p) if x == x]) for one, p in zip(results, passed)]
        for k in ks:
            metrics[f"pass@{k}"] = estimate(
                [pass_at_k(len(p), int(p.sum()), k) if len(p) >= k else math.nan for p, _ in graded]
            )
        for k in ks:
            if k > 1:
                metrics[f"majority@{k}"] = estimate(
                    [majority_at_k(a, p.tolist(), k) if len(p) >= k else math.nan for p, a in graded]
                )
    metrics["tokens"] = estimate([_mean(one.lengths) for one in results])
    metrics["truncated"] = estimate([_mean(one.truncated) for one in results])
    return metrics


def _mean(values: np.ndarray) -> float:
    values = values[~np.isnan(values)] if values.dtype.kind == "f" else values
    return float(values.mean()) if len(values) else math.nan
