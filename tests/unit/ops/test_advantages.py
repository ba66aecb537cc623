import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from whet.errors import ConfigError, DataError
from whet.ops.advantages import (
    ADVANTAGE_ESTIMATORS,
    AdvantageInputs,
    estimate,
    group_relative,
    group_spread,
    leave_one_out,
    mean_only,
)

NAN = math.nan
ALL = sorted(ADVANTAGE_ESTIMATORS.keys() - {"gae"})  # gae needs values: test_gae.py


def test_standard_deviation_of_a_group_by_hand():
    # mean 1/2, deviations ±1/2, sample variance 4/4/3 = 1/3: 0.5 / (0.577350 + 1e-4) = 0.865875
    got = group_relative(tensor([1.0, 0, 0, 1]), torch.zeros(4, dtype=torch.long), eps=1e-4)
    assert got.tolist() == pytest.approx([0.865875, -0.865875, -0.865875, 0.865875], abs=1e-6)


def test_batch_scale_divides_by_the_deviation_of_all_rewards():
    # all: mean 2, squares 4 + 1 + 1 + 4 = 10, / 3, root 1.825742; group means .5 and 3.5
    got = group_relative(tensor([0.0, 1, 3, 4]), tensor([0, 0, 1, 1]), scale="batch", eps=0.0)
    assert got.tolist() == pytest.approx([-0.273861, 0.273861, -0.273861, 0.273861], abs=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_equal_rewards_give_exactly_zero(name):
    # seven times .9 in fp32 leaves rounding of 1e-8 in the mean, which a division by 1e-6 makes visible
    rewards = torch.full((7,), 0.9, dtype=torch.float32)
    assert ADVANTAGE_ESTIMATORS[name](rewards, torch.zeros(7, dtype=torch.long)).tolist() == [0.0] * 7
    assert ADVANTAGE_ESTIMATORS[name](rewards.double() / 3, torch.zeros(7, dtype=torch.long)).tolist() == [0.0] * 7


@pytest.mark.parametrize("name", ALL)
def test_a_group_of_one_gets_exactly_zero(name):
    assert ADVANTAGE_ESTIMATORS[name](tensor([5.0, 1.0]), tensor([0, 1])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ALL)
def test_a_reward_that_does_not_apply_leaves_the_group_as_if_it_were_not_there(name):
    fn = ADVANTAGE_ESTIMATORS[name]
    got = fn(tensor([1.0, NAN, 0.0, 4.0, NAN]), tensor([0, 0, 0, 0, 1]))
    without = fn(tensor([1.0, 0.0, 4.0]), tensor([0, 0, 0]))
    assert got.tolist() == [without[0], 0, without[1], without[2], 0]
    assert fn(tensor([NAN, NAN, 3.0, NAN]), tensor([0, 0, 1, 1])).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("name", ALL)
@settings(derandomize=True, deadline=None, max_examples=20)
@given(rewards=st.lists(st.floats(-100, 100), min_size=1, max_size=30), seed=st.integers(0, 99))
def test_order_and_labels_of_groups_don_t_matter_and_each_sums_to_zero(name, rewards, seed):
    g = torch.Generator().manual_seed(seed)
    r, ids = torch.tensor(rewards, dtype=torch.float64), torch.randint(4, (len(rewards),), generator=g)
    a = ADVANTAGE_ESTIMATORS[name](r, ids)
    order = torch.randperm(len(rewards), generator=g)
    assert a.dtype == torch.float32 and a.isfinite().all()
    torch.testing.assert_close(
        ADVANTAGE_ESTIMATORS[name](r[order], ids[order] * -7 + 3), a[order], rtol=1e-5, atol=1e-6
    )
    for group in ids.unique():
        part = a[ids == group].double()
        assert abs(part.sum().item()) <= 1e-5 * (1 + part.abs().sum().item())


def test_large_offsets_don_t_cost_precision():
    # rewards of 1e6 + {0, .01}: fp32 has a spacing of .0625 there
    r = tensor([1e6, 1e6 + 0.01], dtype=torch.float64)
    assert mean_only(r, tensor([0, 0])).tolist() == pytest.approx([-0.005, 0.005], rel=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_fp32_rewards_are_computed_on_in_float64(name):
    r = torch.arange(200, dtype=torch.float32).remainder(7) / 3 + 1000
    ids = torch.arange(200) % 5
    assert ADVANTAGE_ESTIMATORS[name](r, ids).tolist() == ADVANTAGE_ESTIMATORS[name](r.double(), ids).tolist()


def test_leave_one_out_is_the_centred_reward_times_g_over_g_minus_one():
    r, ids = tensor([0.0, 1, 5, 2]), torch.zeros(4, dtype=torch.long)
    torch.testing.assert_close(leave_one_out(r, ids), mean_only(r, ids) * 4 / 3)


def test_spread_says_which_groups_have_signal():
    rewards = tensor([1.0, 0.0, 0.9, 0.9, NAN, 2.0, NAN, NAN])
    assert group_spread(rewards, tensor([0, 0, 1, 1, 2, 2, 4, 4])).tolist() == [True, False, False, False, False]


@pytest.mark.parametrize("name", ALL)
def test_infinite_rewards_and_wrong_shapes_are_refused(name):
    with pytest.raises(DataError, match="reward 1 is inf"):
        ADVANTAGE_ESTIMATORS[name](tensor([0.0, math.inf]), tensor([0, 0]))
    with pytest.raises(DataError, match=r"\[2\] and \[1\]"):
        ADVANTAGE_ESTIMATORS[name](tensor([0.0, 1.0]), tensor([0]))


def test_unknown_scale_lists_the_known():
    with pytest.raises(ConfigError, match=r"unknown advantage scale 'group'.*batch, none, std"):
        group_relative(tensor([0.0]), tensor([0]), scale="group")


@pytest.mark.parametrize("name", ALL)
def test_no_completions_give_no_advantages(name):
    none = torch.zeros(0)
    assert (
        ADVANTAGE_ESTIMATORS[name](none, none.long()).tolist() == [] and group_spread(none, none.long()).tolist() == []
    )


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
    plain = functools.partial(group_relative, scale="none")
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
    ],
)
def test_an_estimator_that_gives_something_else_is_refused(bad, said):
    with pytest.raises(DataError, match=said):
        estimate(bad, step())


def test_a_number_that_is_not_finite_at_a_masked_token_is_nothing():
    assert estimate(lambda x: torch.where(x.mask, 1.0, torch.nan), step()).tolist() == [1, 1, 0, 1, 1, 1]


def test_batch_scale_leaves_out_rewards_that_do_not_apply():
    rewards, groups = tensor([0.0, NAN, 1, 3, 4, NAN]), tensor([0, 0, 0, 1, 1, 1])
    got = group_relative(rewards, groups, scale="batch", eps=0.0)
    # of the four that are there: mean 2, squares 4 + 1 + 1 + 4 = 10, / 3, root 1.825742; group means .5 and 3.5
    assert got.tolist() == pytest.approx([-0.273861, 0, 0.273861, -0.273861, 0.273861, 0], abs=1e-6)
