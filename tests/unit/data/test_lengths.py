import numpy as np
import pytest

from whet.data.lengths import LengthStats


@pytest.mark.parametrize("high", [1, 7, 23, 400])
def test_a_histogram_counts_every_row_once_in_ranges_of_one_width(high):
    lengths = np.random.default_rng(high).integers(1, high + 1, 300).tolist()
    spread, counted = LengthStats(lengths), 0
    for line in spread.histogram(20):
        label, count, *bar = line.split()
        low, _, top = label.partition("-")
        inside = [n for n in lengths if int(low) <= n <= int(top or low)]
        assert int(count) == len(inside) and (len(bar) == 1 if inside else not bar)
        counted += len(inside)
    assert counted == 300 and len(spread.histogram()) <= 10 and max(map(len, spread.histogram(20))) <= 40
    assert spread.longest == max(lengths) and spread.over(high // 2) == sum(n > high // 2 for n in lengths)
    assert (
        sum(n <= spread.percentile_95 for n in lengths) >= 0.95 * 300 > sum(n < spread.percentile_95 for n in lengths)
    )


def test_of_no_rows():
    assert (
        str(LengthStats()) == "no rows"
        and LengthStats().histogram() == []
        and LengthStats().describe_over(3, "x") == ""
    )
