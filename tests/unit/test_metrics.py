import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.errors import DataError
from whet.metrics import Last, Max, Mean, Min, Sum, flat, merge

whole = st.lists(st.integers(-1000, 1000).map(float), min_size=1, max_size=20)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(whole, st.integers(0, 20))
def test_the_mean_of_parts_is_the_mean_of_the_whole(values, cut):
    a, b = values[:cut], values[cut:]
    merged = Mean(sum(a), len(a)).merge(Mean(sum(b), len(b)))
    assert merged == Mean(sum(values), len(values))
    assert merged.value == sum(values) / len(values)


def test_unequal_halves_are_not_averaged_as_equals():
    assert Mean(6.0, 3).merge(Mean(4.0, 1)).value == 2.5  # the mean of the means would be 3


def test_a_mean_of_nothing_is_nan_and_merges_away():
    assert math.isnan(Mean(0.0, 0).value)
    assert Mean(0.0, 0).merge(Mean(3.0, 2)).value == 1.5


def test_sum_max_min_and_last():
    assert Sum(1.0).merge(Sum(2.5)).value == 3.5
    assert Max(1.0).merge(Max(-2.0)).value == 1.0
    assert Min(1.0).merge(Min(-2.0)).value == -2.0
    assert Last(1.0).merge(Last(-2.0)).value == -2.0


@pytest.mark.parametrize("kind", [Max, Min])
def test_nan_stays_visible_in_extremes_from_either_side(kind):
    assert math.isnan(kind(math.nan).merge(kind(1.0)).value)
    assert math.isnan(kind(1.0).merge(kind(math.nan)).value)


def test_merge_keeps_names_that_one_side_has_and_changes_neither():
    a, b, c = {"x": Sum(1.0)}, {"x": Sum(2.0), "y": Last(3.0)}, {"y": Last(4.0)}
    assert merge(a, b, c) == {"x": Sum(3.0), "y": Last(4.0)}
    assert a == {"x": Sum(1.0)} and b == {"x": Sum(2.0), "y": Last(3.0)}


def test_one_name_of_two_kinds_is_refused():
    with pytest.raises(DataError, match="'x' is both Sum and Mean"):
        merge({"x": Sum(1.0)}, {"x": Mean(1.0, 1)})


def test_flat_gives_plain_floats():
    row = flat({"a": Mean(1, 4), "b": Sum(2)})
    assert row == {"a": 0.25, "b": 2.0} and all(type(v) is float for v in row.values())
