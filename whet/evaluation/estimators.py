"""Estimates from several completions of each prompt: pass@k, majority@k, their means and standard errors.

The evaluation of a training run and `whet eval` both use these functions, so a name has one meaning.
Left out on purpose: confidence intervals, which the reader computes from the value and its standard error.
Dim legend: n completions of a prompt, P prompts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from whet.errors import ConfigError

__all__ = ["Estimate", "estimate", "majority_at_k", "pass_at_k", "resolve_ks"]


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts.

    >>> Estimate(0.5, 0.1, 4)
    Estimate(value=0.5, se=0.1, prompts=4)
    """

    value: float
    """The mean; NaN if no prompt counts."""
    se: float
    """Its standard error; NaN for fewer than two prompts."""
    prompts: int
    """The number of prompts in the mean."""


def estimate(values: Sequence[float] | np.ndarray) -> Estimate:
    """Returns the mean over prompts and its standard error: m = Σx / P, se = sqrt(Σ(x - m)² / (P - 1) / P).

    A prompt counts as one sample, whatever its number of completions, because the completions of a prompt are
    correlated. The standard error covers both sources of noise: the choice of prompts and the sampling.

    Args: values [P]: a number for each prompt; NaN = it does not count.
    Source: Miller 2024, Adding Error Bars to Evals (arXiv 2411.00640), equation 1, clustered by prompt.

    >>> e = estimate([1.0, 0.0, 1.0, 0.0, float("nan")])
    >>> e.value, round(e.se, 4), e.prompts
    (0.5, 0.2887, 4)
    """
    array = np.asarray(values, np.float64)
    array = array[~np.isnan(array)]
    count = len(array)
    if count == 0:
        return Estimate(math.nan, math.nan, 0)
    se = math.nan if count == 1 else float(array.std(ddof=1) / math.sqrt(count))
    return Estimate(float(array.mean()), se, count)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Returns the unbiased estimate of the probability that at least one of k completions passes: c of n completions
    passed.

    1 - C(n - c, k) / C(n, k) = 1 - Π_{j<k} (n - c - j) / (n - j), in integers, and one division at the end.

    Args: n: completions of a prompt. c: the number of them that passed. k: 1 to n.
    Raises: ConfigError: k or c is out of range.
    Source: Chen et al. 2021, Evaluating Large Language Models Trained on Code (arXiv 2107.03374), equation 1; their
        code multiplies floats.

    >>> pass_at_k(4, 1, 2), pass_at_k(4, 3, 2), pass_at_k(4, 0, 4)
    (0.5, 1.0, 0.0)
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ConfigError(f"pass@{k} of {n} completions ({c} passed) is not defined; it needs 1 <= k <= n")
    if c == 0:
        return 0.0
    none, all_ = 1, 1
    for j in range(k):
        none *= max(0, n - c - j)
        all_ *= n - j
    return (all_ - none) / all_


def majority_at_k(answers: Sequence[Hashable | None], passed: Sequence[float], k: int) -> float:
    """Returns how often the most frequent answer of k completions is correct.

    The n completions, in the order of their generation, are split into n // k groups of k; the rest is left out. The
    score of a group is the mean of `passed` over the completions that gave the most frequent answer. If several answers
    have the most votes, the score is the mean over these answers, as a random choice would give. A completion without
    an answer (None) has no vote, and a group without votes has the score 0.

    Args: answers [n]: the answer of each completion; None = no answer. passed [n]: 1 or 0. k: 1 to n.
    Returns: the mean over the groups, in [0, 1].
    Raises: ConfigError: k is out of range.
    Source: majority voting of Wang et al. 2022, Self-Consistency (arXiv 2203.11171); the rule for ties is whet's.

    >>> majority_at_k(["4", "4", "5", None], [1, 1, 0, 0], 4), majority_at_k(["4", "5"], [1, 0], 2)
    (1.0, 0.5)
    """
    n = len(answers)
    if not 1 <= k <= n:
        raise ConfigError(f"majority@{k} of {n} completions is not defined; it needs 1 <= k <= n")
    groups = [slice(first, first + k) for first in range(0, n - k + 1, k)]
    return sum(_majority_score(answers[group], passed[group]) for group in groups) / len(groups)


def _majority_score(answers: Sequence[Hashable | None], passed: Sequence[float]) -> float:
    """Returns the score of one group: the mean of `passed` of the most frequent answer, averaged over ties."""
    votes = Counter(a for a in answers if a is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    scores = {a: sum(p for b, p in zip(answers, passed, strict=True) if b == a) / most for a in votes}
    winners = [scores[a] for a, count in votes.items() if count == most]
    return sum(winners) / len(winners)


def resolve_ks(ks: Sequence[int] | None, n: int) -> tuple[int, ...]:
    """Returns the k of pass@k and majority@k: those of the configuration, or the powers of two up to n, and n.

    Args: ks: of the configuration; None = the default. n: completions of each prompt.
    Raises: ConfigError: one is greater than n.

    >>> resolve_ks(None, 1), resolve_ks(None, 8), resolve_ks(None, 6), resolve_ks([5, 1], 6)
    ((1,), (1, 2, 4, 8), (1, 2, 4, 6), (1, 5))
    """
    if ks is None:
        return tuple(sorted({n, *(2**i for i in range(n.bit_length()))}))
    if max(ks) > n:
        raise ConfigError(
            f"k={max(ks)} needs as many completions of each prompt, and there are {n}; raise num_generations "
            "(rollout.num_generations_eval) to it"
        )
    return tuple(sorted(set(ks)))
