"""What holds of every estimator, and of what they are given; each by hand is in test_advantages_by_hand.py."""

import functools
import inspect
import math

import pytest
import torch
from helpers import advantage_inputs as inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from whet.config.algo import NEED_GROUPS
from whet.errors import ConfigError, DataError
from whet.ops.advantages import (
    ADVANTAGE_ESTIMATORS,
    AdvantageInputs,
    GroupedRewards,
    drgrpo_advantages,
    estimate,
    group_spread,
    grpo_advantages,
    needs_greedy_rewards,
    rloo_advantages,
)

NAN = math.nan
ALL = sorted(ADVANTAGE_ESTIMATORS)
CENTRED = ["drgrpo", "grpo", "maxrl", "rloo", "scalerl"]
"""Those whose advantages sum to 0 in every group."""
SHIFTED = [name for name in ALL if name != "maxrl"]
"""Those that a number added to every reward (and value, and greedy reward) changes nothing for."""
PLAIN = [name for name in ALL if "group_ids" in inspect.signature(ADVANTAGE_ESTIMATORS[name]).parameters]
"""Those called with rewards and groups alone."""


def advantages(name, x):
    return estimate(ADVANTAGE_ESTIMATORS[name], x)


@st.composite
def steps(draw, rewards=st.floats(0, 100, width=32) | st.just(NAN), token_rewards=st.booleans()):
    """Steps of up to 12 trajectories in up to 4 groups of any size, with rewards of tokens and masks, or without."""
    number = draw(st.integers(1, 12))
    found = draw(st.lists(rewards, min_size=number, max_size=number))
    groups = torch.tensor(draw(st.lists(st.integers(0, 3), min_size=number, max_size=number)))
    lengths = draw(st.lists(st.integers(1, 4), min_size=number, max_size=number))
    size = sum(lengths)
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    columns = {}
    if draw(token_rewards):
        columns["token_rewards"] = torch.tensor(draw(st.lists(st.floats(0, 9, width=16), min_size=size, max_size=size)))
    columns["greedy_rewards"] = torch.tensor([0.0, 1.0, 2.0, 3.0])[: int(groups.max()) + 1].double()
    return inputs(found, torch.unique(groups, return_inverse=True)[1], lengths, mask, **cut(columns, groups))


def cut(columns, groups):
    return {**columns, "greedy_rewards": columns["greedy_rewards"][: len(groups.unique())]}


def reordered(x, order, labels):
    """The same step with its trajectories in another order and other ids of groups; and where each token came from."""
    places = torch.cat([torch.where(x.trajectory == j)[0] for j in order] + [torch.zeros(0, dtype=torch.long)])
    new = torch.empty_like(order)
    new[order] = torch.arange(len(order))
    greedy = torch.empty(int(labels.max()) + 1, dtype=torch.float64)
    greedy[labels] = x.greedy_rewards
    columns = {n: None if (c := getattr(x, n)) is None else c[places] for n in ("token_rewards", "values", "mask")}
    return places, AdvantageInputs(
        rewards=x.rewards[order],
        group_of=labels[x.group_of[order]],
        trajectory=new[x.trajectory[places]],
        table={n: r[order] for n, r in x.table.items()},
        greedy_rewards=greedy,
        **columns,
    )


# ---- of all estimators ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@settings(derandomize=True, deadline=None, max_examples=15)
@given(x=steps(), seed=st.integers(0, 99))
def test_order_of_trajectories_and_ids_of_groups_change_no_advantage(name, x, seed):
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x.rewards), generator=g)
    labels = torch.randperm(int(x.group_of.max()) + 1, generator=g)
    places, other = reordered(x, order, labels)
    a = advantages(name, x)
    assert a.dtype == torch.float32 and a.isfinite().all()
    torch.testing.assert_close(advantages(name, other), a[places], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ALL)
@settings(derandomize=True, deadline=None, max_examples=15)
@given(x=steps(), extra=st.integers(0, 3))
def test_a_trajectory_without_a_reward_gets_0_and_takes_part_in_nothing(name, x, extra):
    """With it or without it, the others have the same advantages."""
    keep = ~x.rewards.isnan()
    of_kept = keep[x.trajectory]
    rank = torch.cumsum(keep.long(), 0) - 1
    fewer = AdvantageInputs(
        rewards=x.rewards[keep],
        group_of=x.group_of[keep],
        trajectory=rank[x.trajectory[of_kept]],
        mask=x.mask[of_kept],
        token_rewards=None if x.token_rewards is None else x.token_rewards[of_kept],
        values=x.values[of_kept],
        greedy_rewards=x.greedy_rewards[: int(x.group_of[keep].max()) + 1 if keep.any() else 0],
    )
    a, want = advantages(name, x), advantages(name, fewer)
    assert (a[~of_kept] == 0).all()
    torch.testing.assert_close(a[of_kept & x.mask], want[fewer.mask], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SHIFTED)
@settings(derandomize=True, deadline=None, max_examples=15)
@given(x=steps(token_rewards=st.just(False)), shift=st.sampled_from([-3.0, 1.0, 64.0]))
def test_a_number_added_to_every_reward_changes_no_advantage(name, x, shift):
    if name == "gae":
        pytest.skip("the values would have to move as well")
    rounded = (x.rewards * 16).round() / 16  # so that sums are exact, and what was equal stays so
    columns = {"group_of": x.group_of, "trajectory": x.trajectory, "mask": x.mask, "values": x.values}
    before = AdvantageInputs(rewards=rounded, greedy_rewards=x.greedy_rewards, **columns)
    after = AdvantageInputs(rewards=rounded + shift, greedy_rewards=x.greedy_rewards + shift, **columns)
    torch.testing.assert_close(advantages(name, after), advantages(name, before), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CENTRED)
@settings(derandomize=True, deadline=None, max_examples=15)
@given(x=steps(token_rewards=st.just(False)))
def test_advantages_of_a_group_sum_to_zero(name, x):
    one_token = inputs(x.rewards, x.group_of)
    a = advantages(name, one_token).double()
    for group in x.group_of.unique():
        part = a[x.group_of == group]
        assert abs(part.sum().item()) <= 1e-5 * (1 + part.abs().sum().item())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [torch.tensor(0.9), torch.tensor(0.9).double() / 3])
def test_equal_rewards_give_exactly_zero(name, value):
    # seven times .9 in fp32 leaves rounding of 1e-8 in the mean, which a division by 1e-6 makes visible
    greedy, values = value.double().reshape(1), torch.full((14,), float(value), dtype=torch.float64)
    x = inputs([float(value)] * 7, [0] * 7, [2] * 7, greedy_rewards=greedy, values=values)
    assert advantages(name, x).tolist() == [0.0] * 14


@pytest.mark.parametrize("name", ALL)
def test_what_needs_groups_gives_groups_of_one_nothing_and_what_does_not_gives_something(name):
    """The configuration refuses num_generations=1 for the names in NEED_GROUPS."""
    lone = inputs([5.0, 1.0, 2.0], [0, 1, 2])
    assert bool((advantages(name, lone) == 0).all()) == (name in NEED_GROUPS)


def test_every_name_that_needs_groups_is_an_estimator():
    assert set(NEED_GROUPS) <= set(ALL)


@pytest.mark.parametrize("name", PLAIN)
def test_fp32_rewards_are_computed_on_in_float64(name):
    r = torch.arange(200, dtype=torch.float32).remainder(7) / 3 + 1000
    ids = torch.arange(200) % 5
    assert ADVANTAGE_ESTIMATORS[name](r, ids).tolist() == ADVANTAGE_ESTIMATORS[name](r.double(), ids).tolist()


def test_large_offsets_don_t_cost_precision():
    # rewards of 1e6 + {0, .01}: fp32 has a spacing of .0625 there
    r = tensor([1e6, 1e6 + 0.01], dtype=torch.float64)
    assert drgrpo_advantages(r, tensor([0, 0])).tolist() == pytest.approx([-0.005, 0.005], rel=1e-5)


@pytest.mark.parametrize("name", [name for name in ALL if name != "gae"])
def test_infinite_rewards_are_refused(name):
    with pytest.raises(DataError, match="reward 1 is inf"):
        advantages(name, inputs([0.0, math.inf], [0, 0]))


@pytest.mark.parametrize("name", PLAIN)
def test_wrong_shapes_are_refused(name):
    with pytest.raises(DataError, match=r"rewards is \[2\] and group_ids is \[1\]"):
        ADVANTAGE_ESTIMATORS[name](tensor([0.0, 1.0]), tensor([0]))


@pytest.mark.parametrize("name", ["grpo", "grpo_passk"])
def test_an_unknown_scale_lists_the_known(name):
    with pytest.raises(ConfigError, match=r"unknown scale_rewards 'std'.*batch, group, none"):
        ADVANTAGE_ESTIMATORS[name](tensor([0.0]), tensor([0]), scale_rewards="std")


@pytest.mark.parametrize("name", ALL)
def test_no_completions_give_no_advantages(name):
    assert advantages(name, inputs([], torch.zeros(0, dtype=torch.long))).tolist() == []


@pytest.mark.parametrize("name", ALL)
def test_a_trajectory_without_a_trained_token_has_no_advantage_and_stays_in_the_groups_mean(name):
    x = inputs([1.0, 0.0, 4.0], [0, 0, 0], [2, 2, 2], [True, True, False, False, True, True])
    a = advantages(name, x)
    assert a.isfinite().all()
    if name in ("drgrpo", "grpo"):
        other = inputs([1.0, 0.0, 4.0], [0, 0, 0], [2, 2, 2])
        assert torch.equal(a[x.mask], advantages(name, other)[x.mask])


# ---- what they are given -------------------------------------------------------------------------------------------


def test_returns_are_outcomes_with_the_rewards_of_all_tokens():
    x = inputs([1.0, NAN, 2.0], [0, 0, 1], [2, 1, 2], [True, False, True, True, True],
               token_rewards=tensor([0.5, 0.25, 8.0, 0.0, -1.0]))  # fmt: skip
    assert x.returns.tolist() == pytest.approx([1.75, NAN, 1.0], nan_ok=True)
    assert inputs([1.0, NAN], [0, 0]).returns.tolist() == pytest.approx([1.0, NAN], nan_ok=True)


def test_rewards_by_token_are_at_trained_tokens_the_outcome_at_the_last():
    # tokens: trained, an environment's with a reward, trained, an environment's with a reward | the same without any
    mask = [True, False, True, False, False, False]
    x = inputs([10.0, 3.0], [0, 0], [4, 2], mask, token_rewards=tensor([0.5, 0.25, 1.0, 2.0, 7.0, 7.0]))
    assert x.rewards_by_token.tolist() == [0.75, 0.0, 13.0, 0.0, 0.0, 0.0]
    assert x.returns.tolist() == [13.75, 17.0]


def test_rewards_by_token_of_trajectories_whose_tokens_do_not_lie_together():
    x = AdvantageInputs(
        rewards=tensor([1.0, 2.0], dtype=torch.float64),
        group_of=tensor([0, 0]),
        trajectory=tensor([0, 1, 0, 1, 0]),
        mask=tensor([True, True, True, True, False]),
        token_rewards=tensor([0.1, 0.2, 0.3, 0.4, 0.5], dtype=torch.float64),
    )
    assert x.rewards_by_token.tolist() == pytest.approx([0.1, 0.2, 1.8, 2.4, 0.0])
    got = estimate(ADVANTAGE_ESTIMATORS["reinforce_plus_plus"], x)
    returns = tensor([1.9, 2.6, 1.8, 2.4], dtype=torch.float64)
    want = (returns - returns.mean()) / (returns.var() + 1e-8).sqrt()
    assert got.tolist() == pytest.approx([*want.tolist(), 0.0], rel=1e-6)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(x=steps())
def test_rewards_by_token_equal_the_loop(x):
    want = torch.zeros(len(x.mask), dtype=torch.float64)
    for j, outcome in enumerate(x.rewards.tolist()):
        places = torch.where(x.trajectory == j)[0].tolist()
        last = next((t for t in places if x.mask[t]), None)  # of rewards before it too
        for t in places if not math.isnan(outcome) else []:
            last = t if x.mask[t] else last
            if last is not None and x.token_rewards is not None:
                want[last] += float(x.token_rewards[t])
        if last is not None and not math.isnan(outcome):
            want[last] += outcome
    torch.testing.assert_close(x.rewards_by_token, want)


@pytest.mark.parametrize("garbage", [NAN, math.inf])
@pytest.mark.parametrize("name", ALL)
def test_what_is_not_finite_at_an_untrained_token_is_nothing(name, garbage):
    mask = [True, False, True, True]
    given = [0.5, garbage, 0.0, 1.0]
    x = inputs([1.0, 2.0], [0, 0], [2, 2], mask, token_rewards=tensor(given), values=tensor([0.0, garbage, 1.0, 2.0]))
    clean = inputs([1.0, 2.0], [0, 0], [2, 2], mask, token_rewards=tensor([0.5, 0.0, 0.0, 1.0]),
                   values=tensor([0.0, 0.0, 1.0, 2.0]))  # fmt: skip
    kept = x.mask
    assert advantages(name, x)[kept].tolist() == advantages(name, clean)[kept].tolist()


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"token_rewards": tensor([1.0, NAN, 0.0])}, "token_rewards is nan at token 1, which is trained"),
        ({"token_rewards": tensor([1.0])}, r"token_rewards has the shape \[1\]; there are 3 tokens"),
        ({"table": {"f": tensor([1.0])}}, r"table\['f'\] has the shape \[1\]; there are 2 trajectories"),
        ({"greedy_rewards": tensor([1.0, 2.0])}, r"greedy_rewards has the shape \[2\]; there are 1 groups"),
    ],
)
def test_columns_that_do_not_fit_are_refused(columns, said):
    with pytest.raises(DataError, match=said):
        inputs([1.0, 2.0], [0, 0], [2, 1], **columns)


@pytest.mark.parametrize("name", PLAIN)
def test_rewards_of_tokens_join_the_outcome_for_estimators_of_either_form(name):
    x = inputs([1.0, 0.0, 2.0], [0, 0, 0], [2, 1, 1], token_rewards=tensor([0.5, 0.25, 1.0, 0.0]))
    assert advantages(name, x).tolist() == advantages(name, inputs([1.75, 1.0, 2.0], [0, 0, 0], [2, 1, 1])).tolist()


def test_spread_says_which_groups_have_signal():
    rewards = tensor([1.0, 0.0, 0.9, 0.9, NAN, 2.0, NAN, NAN])
    assert group_spread(rewards, tensor([0, 0, 1, 1, 2, 2, 4, 4])).tolist() == [True, False, False, False, False]


def test_deviations_of_too_few_rewards_are_zero():
    g = GroupedRewards.from_group_ids(tensor([3.0, 1.0, 2.0, NAN]), tensor([0, 1, 1, 2]))
    assert g.std(1).tolist() == pytest.approx([0.0, 0.5**0.5, 0.5**0.5, 0.0])
    assert g.std(0).tolist() == [0.0, 0.5, 0.5, 0.0]
    assert g.as_one_group.std(0).tolist() == pytest.approx([(2 / 3) ** 0.5] * 4)


# ---- either form ---------------------------------------------------------------------------------------------------


def step(**columns):
    """Two groups of two; trajectories of 2, 1, 1 and 2 tokens, the second one's only token masked out."""
    return AdvantageInputs(
        rewards=tensor([1.0, 0.0, 2.0, 5.0], dtype=torch.float64),
        group_of=tensor([0, 0, 1, 1]),
        trajectory=tensor([0, 0, 1, 2, 3, 3]),
        mask=tensor([True, True, False, True, True, True]),
        **columns,
    )


def test_an_estimator_of_two_arguments_is_given_rewards_and_groups():
    mine = lambda r, g: r + 10 * g  # whatever their names
    assert estimate(mine, step()).tolist() == [1, 1, 0, 12, 15, 15]
    plain = functools.partial(grpo_advantages, scale_rewards="none")
    assert estimate(plain, step()).tolist() == [0.5, 0.5, -0.5, -1.5, 1.5, 1.5]


def test_an_estimator_of_one_argument_is_given_the_record():
    x = step(table={"a": tensor([1.0, 2.0, 3.0, 4.0])}, token_rewards=torch.arange(6.0))
    assert x.lengths.tolist() == [2, 0, 1, 2]
    assert estimate(lambda x: x.table["a"], x).tolist() == [1, 1, 2, 3, 4, 4]
    assert estimate(lambda x, *, gamma=2.0: gamma * x.need("token_rewards"), x).tolist() == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (lambda r, g: r[:2], r"shape \[2\]; give one finite number for each of the 4 rewards .* 6 tokens"),
        (lambda r, g: r / 0, "not finite for 5 of 6 tokens, the first at token 0; give one finite number"),
        (lambda x: x.need("values"), "needs values, which this batch does not have"),
        (ADVANTAGE_ESTIMATORS["remax"], "needs greedy_rewards, which this batch does not have"),
    ],
)
def test_an_estimator_that_gives_something_else_is_refused(bad, said):
    with pytest.raises(DataError, match=said):
        estimate(bad, step())


def test_a_number_that_is_not_finite_at_a_masked_token_is_nothing():
    assert estimate(lambda x: torch.where(x.mask, 1.0, torch.nan), step()).tolist() == [1, 1, 0, 1, 1, 1]


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "remax", "rloo"])
def test_as_many_tokens_as_trajectories_are_one_for_each_or_refused(name):
    x = inputs([1.0, 0.0], [0, 0], [1, 1], token_rewards=tensor([-0.5, 0.25]))
    want = {"reinforce_plus_plus": [0.5**0.5, -(0.5**0.5)], "remax": [0.5, 0.25], "rloo": [0.25, -0.25]}[name]
    assert advantages(name, x).tolist() == pytest.approx(want)
    x = inputs([1.0, 0.0], [0, 0], [2, 0])  # the second trajectory has no token: an engine's error
    with pytest.raises(DataError, match="2 tokens and as many trajectories, but not one token for each in order"):
        advantages(name, x)


def test_remax_alone_asks_for_greedy_completions():
    assert [name for name in ALL if needs_greedy_rewards(ADVANTAGE_ESTIMATORS[name])] == ["remax"]


def test_leave_one_out_is_the_centred_reward_times_g_over_g_minus_one():
    r, ids = tensor([0.0, 1, 5, 2]), torch.zeros(4, dtype=torch.long)
    torch.testing.assert_close(rloo_advantages(r, ids), drgrpo_advantages(r, ids) * 4 / 3)
