"""Ranks in one process, and several of them played by threads that meet where processes would."""

from types import SimpleNamespace

import pytest
from meeting import together

from whet.errors import ConfigError, OtherRankError, RewardError
from whet.parallel.fsdp import FSDPPlacement
from whet.parallel.ranks import Ranks


def test_one_process_decides_works_and_writes_alone():
    ranks = Ranks()
    assert ranks.broadcast("mine") == "mine" and ranks.is_writer
    assert ranks.scatter_gather(list, (1, 2, 3)) == [[1, 2, 3]]
    assert ranks.scatter_gather(len, []) == [0]


def test_what_rank_0_does_alone_holds_for_all_and_so_does_its_error():
    called = []

    def make(ranks):
        return ranks.call_on_writer(lambda: called.append(ranks.rank) or "made")

    def fail(ranks, error):
        def raises():
            raise error

        return ranks.call_on_writer(raises)

    assert together(2, make) == ["made"] * 2 and called == [0]
    for error, kind, text in (
        (ConfigError("no folder"), ConfigError, "no folder"),
        (OSError("disk full"), OtherRankError, "rank 0 of 2 failed: OSError; its own output says why"),
    ):
        found = together(2, lambda ranks: _raised(lambda: fail(ranks, error)))
        assert found[0] is error and (type(found[1]), str(found[1])) == (kind, text)


def _raised(fn):
    try:
        return fn()
    except Exception as error:
        return error


def test_rank_0_decides_and_writes():
    assert together(3, lambda r: r.broadcast(r.rank * 10)) == [0, 0, 0]
    assert together(3, lambda r: r.is_writer) == [True, False, False]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_every_item_is_worked_on_once_and_all_ranks_have_all_results_in_order(count):
    seen = []

    def work(ranks):
        return ranks.scatter_gather(lambda own: (seen.extend(own), list(own))[1], range(count))

    found = together(3, work)
    assert sorted(seen) == list(range(count))
    assert found[0] == found[1] == found[2]
    assert [x for part in found[0] for x in part] == list(range(count))
    assert len(found[0]) == max(1, min(3, count))


@pytest.mark.parametrize("count, shares", [(0, {0: []}), (1, {2: [0]}), (3, {0: [0], 2: [1, 2]})])
def test_neighbours_work_on_the_same_items_and_the_results_of_the_first_are_taken(count, shares):
    seen = []

    def work(ranks):
        return ranks.scatter_gather(
            lambda own: (seen.append(list(own)), (ranks.rank, list(own)))[1], range(count), together=2
        )

    assert together(4, work) == [list(shares.items())] * 4
    assert sorted(seen) == sorted([*shares.values(), *shares.values()])


def test_a_failure_of_one_rank_is_an_error_on_all():
    def judge(own):
        if 2 in own:
            raise RewardError("no answer")
        return len(own)

    one, two = together(2, lambda r: r.scatter_gather(judge, [0, 1, 2, 3]))
    assert type(one) is OtherRankError and str(one) == "rank 1 of 2 failed: RewardError; its own output says why"
    assert type(two) is RewardError and str(two) == "no answer"


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_every_rank_runs_as_many_passes_also_where_there_are_none(count):
    def split(ranks):
        return FSDPPlacement(SimpleNamespace(pass_size=1), ranks).split_passes(list(range(count)))

    one, two = together(2, split)
    assert len(one) == len(two) == (count + 1) // 2
    assert sorted(x for x, counts in (*one, *two) if counts) == list(range(count))
