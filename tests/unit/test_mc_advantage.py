"""Groups of trajectories: MCAdvantage over TensorDicts and mc_advantage over a stream, without TorchRL."""

import math
import pickle
import sys

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from whet.errors import ConfigError, DataError
from whet.torchrl import MCAdvantage, MCAdvantageSelector, Trajectory, mc_advantage

HALF = 0.5**0.5


@pytest.fixture(autouse=True)
def without_torchrl(monkeypatch):
    monkeypatch.delitem(sys.modules, "torchrl.envs.transforms", raising=False)


def steps(group, rewards, *, done=True, **more):
    """One trajectory [T]."""
    count = len(rewards)
    ends = (torch.arange(count) == count - 1) & done
    query = [group] * count if isinstance(group, str) else torch.tensor([group] * count)
    reward = torch.tensor(rewards)[:, None]
    return TensorDict({"query": query, **more, "next": {"reward": reward, "done": ends[:, None]}}, [count])


def advantages(found):
    return None if found is None else found["advantage"].flatten().tolist()


def by_hand(trajectories, size, bounds=None):
    """Groups in the order they fill up, by loops: [(group, [advantage of each trajectory])]."""
    waiting, found = {}, []
    for group, rewards in trajectories:
        waiting.setdefault(group, []).append(sum(rewards))
        if len(waiting[group]) < size:
            continue
        returns = waiting.pop(group)
        mean = sum(returns) / size
        std = (sum((r - mean) ** 2 for r in returns) / (size - 1)) ** 0.5
        if bounds is None or bounds[0] < mean < bounds[1]:
            found.append((group, [(r - mean) / max(std, 1e-6) for r in returns]))
    return found


@pytest.mark.parametrize("bounds", [None, (0.3, 1.2)])
def test_a_stream_of_trajectories_comes_out_in_groups(bounds):
    g = torch.Generator().manual_seed(3)
    draw = lambda most: int(torch.randint(0, most, (), generator=g))
    given = [("abc"[draw(3)], [float(draw(2)) for _ in range(1 + draw(3))]) for _ in range(60)]
    stream = (Trajectory(group, torch.tensor(r), item=i) for i, (group, r) in enumerate(given))
    found = list(mc_advantage(stream, 3, keep_return_bounds=bounds))
    want = by_hand(given, 3, bounds)
    assert len(found) == len(want) > 5
    for group, (name, numbers) in zip(found, want, strict=True):
        assert [t.group for t, _ in group] == [name] * 3
        assert [given[t.item][0] for t, _ in group] == [name] * 3
        assert [float(a[0]) for _, a in group] == pytest.approx(numbers, abs=1e-6)
        assert all((a == a[0]).all() and a.shape == t.rewards.shape for t, a in group)


def test_steps_are_pooled_where_that_is_asked_for():
    stream = [Trajectory(0, torch.tensor([0.0, 1.0])), Trajectory(0, torch.tensor([5.0]))]
    ((first, second),) = mc_advantage(iter(stream), 2, trajectory_return=None)
    pooled = torch.tensor([0.0, 1.0, 5.0])
    want = (pooled - pooled.mean()) / pooled.std()
    torch.testing.assert_close(torch.cat([first[1], second[1]]), want)


def test_equal_rewards_have_no_advantage_and_near_ones_hardly_any():
    group = lambda *rewards: next(mc_advantage((Trajectory(0, torch.tensor([r]).double()) for r in rewards), 3))
    assert [a.item() for _, a in group(0.1, 0.1, 0.1)] == [0, 0, 0]
    assert max(abs(a.item()) for _, a in group(0.1, 0.1, 0.1 + 1e-10)) < 1e-3


def test_the_transform_waits_and_then_gives_whole_groups():
    groups = MCAdvantage(2, trajectory_return="sum")
    assert groups.inv(steps("a", [0.0, 0.0])) is None and groups.inv(steps("b", [1.0])) is None
    assert (groups.queued_groups, groups.queued_trajectories, groups.max_queued_trajectories_per_group) == (2, 2, 1)
    found = groups.inv(steps("a", [0.0, 1.0, 0.0]))
    assert advantages(found) == pytest.approx([-HALF] * 2 + [HALF] * 3) and list(found["query"]) == ["a"] * 5
    assert groups.queued_groups == 1 and groups.inv(steps("a", [1.0])) is None  # the id begins anew
    groups.clear_queues()
    assert groups.queued_groups == 0 and groups.written_groups == 1 and groups.completed_decisions == 7
    groups.reset_stats()
    assert not any(v for k, v in groups.get_stats().items() if k != "trajectory_return_max")


def test_trajectories_end_to_end_in_rows_and_in_blocks():
    flat = torch.cat([steps(1, [0.0]), steps(2, [1.0, 1.0]), steps(1, [1.0])])
    assert advantages(MCAdvantage(2, trajectory_return="sum").inv(flat)) == pytest.approx([-HALF, HALF])
    rows = torch.stack([steps(1, [0.0, 0.0]), steps(1, [0.0, 1.0])])
    for shaped in (rows, rows[None], rows.flatten(0, 1)):
        assert advantages(MCAdvantage(2, trajectory_return="sum").inv(shaped)) == pytest.approx(
            [-HALF, -HALF, HALF, HALF]
        )


def test_what_waits_is_a_copy():
    groups, data = MCAdvantage(2), steps("a", [0.0])
    groups.inv(data)
    data["next", "reward"].fill_(5.0)  # as a collector that writes over its last batch
    found = groups.inv(steps("a", [1.0]))
    assert advantages(found) == pytest.approx([-HALF, HALF]) and "advantage" not in data.keys()


def test_rows_of_different_lengths_stay_as_they_are():
    ragged = LazyStackedTensorDict(*[steps("a", [float(n)], tokens=torch.ones(1, n))[0] for n in (2, 3)])
    found = MCAdvantage(2).inv(ragged)
    assert advantages(found) == pytest.approx([-HALF, HALF])
    assert [len(row["tokens"]) for row in found.unbind(0)] == [2, 3] and found[1]["query"] == "a"
    longer = MCAdvantage(2)
    longer.inv(steps("a", [0.0], tokens=torch.ones(1, 2)))
    assert [len(r["tokens"]) for r in longer.inv(steps("a", [1.0], tokens=torch.ones(1, 3))).unbind(0)] == [2, 3]


@pytest.mark.parametrize("group", ["text", 7, [3, 4]], ids=str)
def test_groups_are_told_apart_by_text_or_by_the_value_of_a_tensor(group):
    groups = MCAdvantage(2)
    other = {"text": "other", 7: 8}.get(group, [3, 5]) if not isinstance(group, list) else [3, 5]
    assert groups.inv(steps(group, [0.0])) is None and groups.inv(steps(other, [0.0])) is None
    assert advantages(groups.inv(steps(group, [1.0]))) == pytest.approx([-HALF, HALF])


def test_dropped_rescued_and_unselected_are_counted():
    groups = MCAdvantage(2, trajectory_return="sum", keep_return_bounds=(0.1, 0.9), candidate_group_size=4)
    assert [groups.inv(steps(0, [1.0])) for _ in range(2)] == [None, None]
    found = groups.inv(steps(0, [0.0]))
    assert advantages(found) == pytest.approx([HALF, -HALF])
    assert [groups.inv(steps(1, [1.0])) for _ in range(4)] == [None] * 4
    counts = groups.get_stats()
    names = ("written_groups", "rescued_groups", "dropped_groups", "completed_groups", "selected_trajectories",
             "unselected_trajectories", "queued_groups")  # fmt: skip
    assert [counts[n] for n in names] == [1, 1, 1, 2, 2, 1, 0]


class Longest(MCAdvantageSelector):
    """A selector of the user's own, by the trajectories themselves."""

    def __init__(self):
        super().__init__(in_keys=["trajectories"])

    def select(self, candidates, *, group_size, keep_return_bounds=None):
        lengths = [len(t["step"]) for t in candidates["trajectories"].unbind(0)]
        return sorted(range(len(lengths)), key=lengths.__getitem__)[-group_size:]


def test_a_selector_of_ones_own_sees_the_trajectories():
    sizes = {"candidate_group_size": 3, "candidate_selection_min_size": 3}
    groups = MCAdvantage(2, trajectory_return="sum", **sizes, candidate_selector=Longest())
    for count in (1, 3):
        groups.inv(steps(0, [float(count)] * count, step=torch.arange(count)))
    found = groups.inv(steps(0, [0.0, 0.0], step=torch.arange(2)))
    assert found["step"].tolist() == [0, 1, 0, 1, 2]


def test_incomplete_groups_are_bounded_and_time_out():
    now = [0.0]
    groups = MCAdvantage(2, max_queued_groups=2, group_timeout=10.0, clock=lambda: now[0])
    for name in "abc":
        groups.inv(steps(name, [0.0]))
    assert groups.queued_groups == 2 and groups.evicted_groups == 1  # a, which had waited longest
    assert groups.inv(steps("a", [1.0])) is None and groups.evicted_groups == 2  # and now b
    now[0] = 9.0
    assert advantages(groups.inv(steps("c", [1.0]))) == pytest.approx([-HALF, HALF])
    now[0] = 10.5
    assert groups.inv(steps("a", [0.0])) is None  # its first trajectory came too long ago
    assert (groups.expired_groups, groups.discarded_trajectories, groups.queued_groups) == (1, 3, 1)
    stream = mc_advantage(
        (Trajectory(g, torch.ones(1) * i) for i, g in enumerate((0, 1, 2, 2))), 2, max_queued_groups=2
    )
    assert [[t.group for t, _ in group] for group in stream] == [[2, 2]]
    assert [stream.get_stats()[n] for n in ("written_groups", "evicted_groups", "queued_groups")] == [1, 1, 1]


def test_steps_are_pooled_by_default_as_in_torchrl_and_returns_are_not_counted_then():
    groups = MCAdvantage(2)
    groups.inv(steps("a", [0.0, 1.0, 2.0]))
    assert len(groups.queues["a"]) == 1 and not groups.is_shared
    found = groups.inv(steps("a", [1.0]))
    assert advantages(found) == pytest.approx([-(1.5**0.5), 0, 1.5**0.5, 0], abs=1e-6)
    stats = groups.get_stats()
    assert stats["completed_decisions"] == 4 and stats["written_groups"] == 1
    assert [stats[n] for n in ("trajectory_return_sum", "trajectory_return_max", "successful_trajectories")] == [
        0.0,
        -math.inf,
        0,
    ]


def test_the_version_of_2025_groups_by_text():
    groups = MCAdvantage(2, compat="0.9")
    assert groups.prompt_key == "text" and groups.trajectory_return is None and groups.grpo_size == 2
    assert MCAdvantage(2, compat="0.9", trajectory_return="max").trajectory_return == "max"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"grpo_size": 1, "trajectory_return": "sum"}, "grpo_size 1 must be at least 2"),
        ({"grpo_size": 0}, "grpo_size 0 must be at least 1"),
        ({"trajectory_return": "total"}, "unknown trajectory_return 'total'"),
        ({"keep_return_bounds": (0.9, 0.1)}, "must be an increasing pair"),
        ({"keep_return_bounds": (0.1, 0.9)}, "choose by the returns of trajectories"),
        ({"candidate_group_size": 4}, 'set trajectory_return to "sum", "max" or "mean"'),
        ({"candidate_group_size": 1}, "candidate_group_size 1 must be at least grpo_size 2"),
        ({"candidate_selection_min_size": 3}, "must lie between grpo_size 2 and candidate_group_size 2"),
        ({"max_queued_groups": 0}, "max_queued_groups 0"),
        ({"group_timeout": 0}, "group_timeout 0"),
        ({"keep_bounds": (0, 1)}, "unknown option of MCAdvantage 'keep_bounds'; did you mean keep_return_bounds"),
        ({"compat": "2025"}, "release of TorchRL"),
    ],
)
def test_options_that_can_not_be_followed_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        MCAdvantage(**{"grpo_size": 2, **options})


def test_the_function_refuses_unknown_options_at_once():
    with pytest.raises(ConfigError, match="unknown option of mc_advantage 'group_time'; did you mean group_timeout"):
        mc_advantage([], 2, group_time=3)


@pytest.mark.parametrize(
    ("data", "kind", "says"),
    [
        (steps("a", [0.0, 1.0], done=False), RuntimeError, "does not end with"),
        (steps("a", [0.0]).exclude(("next", "reward")), KeyError, "reads .*reward.*, which is not in the data"),
        (steps("a", [0.0]).exclude("query"), KeyError, "query"),
        (steps("a", [float("nan")]), ValueError, "needs one that is finite"),
        (steps("a", [0.0]).set("query", TensorDict({"x": torch.zeros(1)}, [1])), TypeError, "group by a string"),
    ],
)
def test_trajectories_that_do_not_fit_are_named(data, kind, says):
    with pytest.raises(kind, match=says) as found:
        MCAdvantage(2).inv(data)
    assert isinstance(found.value, DataError)


def test_several_writers_are_told_what_to_do():
    with pytest.raises(ConfigError, match="let one process call extend"):
        MCAdvantage(2).share_memory_()


def test_it_is_pickled_and_unknown_attributes_are_errors():
    groups = MCAdvantage(2)
    groups.inv(steps("a", [0.0]))
    again = pickle.loads(pickle.dumps(groups))
    assert advantages(again.inv(steps("a", [1.0]))) == pytest.approx([-HALF, HALF])
    with pytest.raises(AttributeError, match="has no attribute 'queue'"):
        groups.queue


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"strategy": "best"}, "'best'"),
        ({"max_combinations": 0}, "at least 1"),
        ({"in_keys": []}, "in_keys is empty"),
    ],
)
def test_a_selector_s_options(options, says):
    with pytest.raises(ConfigError, match=says):
        MCAdvantageSelector(**options)
    with pytest.raises(DataError, match="1 candidates for a group of 2"):
        MCAdvantageSelector().select(TensorDict({"return": torch.zeros(1)}, [1]), group_size=2)
    with pytest.raises(DataError, match="one number each"):
        MCAdvantageSelector().select(TensorDict({"return": torch.zeros(2, 2)}, [2]), group_size=2)
