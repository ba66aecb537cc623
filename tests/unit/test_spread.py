"""The choice of parameter sets that `make test` runs."""

import itertools

from helpers import spread


def test_every_value_is_shown_and_as_many_cases_as_asked_for():
    cases = [tuple(enumerate(case)) for case in itertools.product("abc", "xy", range(5))]
    for n, count in ((1, 5), (5, 5), (9, 9), (99, 30)):
        kept = spread(cases, n)
        assert len(kept) == count and {v for i in kept for v in cases[i]} == {v for case in cases for v in case}
    assert spread(cases, 9) == spread(cases, 9) and spread([], 3) == set()


def test_pairs_come_before_repetitions():
    cases = [tuple(enumerate(case)) for case in itertools.product("ab", "xy")]
    assert {cases[i] for i in spread(cases, 2)} == {((0, "a"), (1, "x")), ((0, "b"), (1, "y"))}
