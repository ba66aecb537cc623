"""pass@k and majority@k against all subsets and their definitions; standard errors against their formula."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from whet.errors import ConfigError
from whet.evaluation.estimators import estimate, majority_at_k, pass_at_k, resolve_ks

SIZES = [(n, c) for n in (1, 2, 5, 7) for c in range(n + 1)]


@pytest.mark.parametrize(("n", "c"), SIZES)
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n, c):
    right = [i < c for i in range(n)]
    for k in range(1, n + 1):
        hits = [any(chosen) for chosen in itertools.combinations(right, k)]
        assert pass_at_k(n, c, k) == sum(hits) / len(hits)


@pytest.mark.parametrize(("n", "c", "k"), [(1000, 1, 999), (10_000, 3, 512), (4096, 4095, 2), (200, 100, 100)])
def test_pass_at_k_of_many_is_exact_to_the_last_bit(n, c, k):
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert pass_at_k(n, c, k) == float(exact)


def test_pass_at_1_is_the_share_and_pass_at_n_whether_any_is_right():
    for n, c in SIZES:
        assert pass_at_k(n, c, 1) == c / n and pass_at_k(n, c, n) == float(c > 0)


def test_pass_at_k_is_unbiased():
    draws = np.random.default_rng(0).random((4000, 6)) < 0.3
    found = np.mean([pass_at_k(6, int(row.sum()), 3) for row in draws])
    assert found == pytest.approx(1 - 0.7**3, abs=0.01)  # which the share with a right one of 6, 0.88, is far from


@pytest.mark.parametrize(
    ("answers", "passed", "k", "found"),
    [
        ("aab", [1, 1, 0], 3, 1.0),
        ("abb", [1, 0, 0], 3, 0.0),
        ("ab", [1, 0], 2, 0.5),  # a tie
        ("abc", [1, 0, 0], 3, 1 / 3),
        ("aabb", [1, 1, 0, 0], 2, 0.5),  # two groups, each of one mind
        ("abab", [1, 0, 1, 0], 2, 0.5),  # two ties
        ("aaab", [1, 1, 1, 0], 3, 1.0),  # the last is left out
        ("aaab", [1, 1, 1, 0], 2, 0.75),  # two groups that share none, the second a tie
        ([None, None, "a"], [1, 1, 0], 3, 0.0),  # no answer is no vote
        ([None, None], [1, 1], 2, 0.0),  # nobody votes
        ("aa", [1, 0], 2, 0.5),  # one answer, judged both ways
        ("ab", [1, 0], 1, 0.5),
    ],
)
def test_the_majority_of_k(answers, passed, k, found):
    assert majority_at_k(list(answers), passed, k) == found


def test_a_tie_counts_what_choosing_among_it_at_random_gives_on_average():
    rng = np.random.default_rng(1)
    for _ in range(50):
        answers = rng.integers(0, 3, 4).tolist()
        passed = [float(a == 0) for a in answers]
        most = max(answers.count(a) for a in answers)
        tied = [a for a in set(answers) if answers.count(a) == most]
        assert majority_at_k(answers, passed, 4) == pytest.approx(np.mean([a == 0 for a in tied]))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 5, 1), (4, 1, 0), (4, -1, 1)])
def test_what_is_not_defined_is_refused(n, c, k):
    with pytest.raises(ConfigError, match="is not defined"):
        pass_at_k(n, c, k)
    if 0 <= c <= n:
        with pytest.raises(ConfigError, match="is not defined"):
            majority_at_k(["a"] * n, [1] * n, k)


def test_the_standard_error_is_over_prompts_and_nan_does_not_count():
    values = [0.25, 1.0, 0.5, math.nan]
    found = estimate(values)
    assert (found.value, found.prompts) == (pytest.approx(1.75 / 3), 3)
    assert found.se == pytest.approx(np.std(values[:3], ddof=1) / math.sqrt(3))
    assert math.isnan(estimate([0.5]).se) and math.isnan(estimate([]).value) and estimate([]).prompts == 0


def test_the_ks():
    assert resolve_ks(None, 12) == (1, 2, 4, 8, 12)
    with pytest.raises(ConfigError, match="k=9 needs as many completions of each prompt, and there are 8"):
        resolve_ks([1, 9], 8)
