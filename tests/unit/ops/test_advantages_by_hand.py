"""Each estimator on numbers small enough to be worked out on paper; the working stands beside them."""

import math

import pytest
import torch
from helpers import advantage_inputs as inputs
from torch import tensor

from whet.errors import DataError
from whet.ops.advantages import ADVANTAGE_ESTIMATORS, estimate, gdpo_advantages, grpo_advantages, reinforce_advantages

NAN = math.nan
TWO = tensor([0, 0, 1, 1])


def call(name, rewards, groups, **options):
    return ADVANTAGE_ESTIMATORS[name](tensor(rewards, dtype=torch.float64), tensor(groups), **options).tolist()


def close(*values):
    return pytest.approx(list(values), abs=1e-6)


def test_every_estimator_is_worked_out_here():
    with open(__file__) as file:
        text = file.read()
    assert [name for name in ADVANTAGE_ESTIMATORS if f'"{name}"' not in text and name != "gae"] == []


def test_grpo():
    # mean 1/2, deviations ±1/2, sample variance 4/4/3 = 1/3: 0.5 / (0.577350 + 1e-4) = 0.865875
    got = grpo_advantages(tensor([1.0, 0, 0, 1]), torch.zeros(4, dtype=torch.long), advantage_eps=1e-4)
    assert got.tolist() == close(0.865875, -0.865875, -0.865875, 0.865875)
    # the population's deviation is 1/2
    assert call("grpo", [1.0, 0, 0, 1], [0, 0, 0, 0], advantage_ddof=0, advantage_eps=0.0) == [1, -1, -1, 1]


def test_grpo_by_the_deviation_of_all_rewards():
    # all: mean 2, squares 4 + 1 + 1 + 4 = 10, / 3, root 1.825742; group means .5 and 3.5
    want = close(-0.273861, 0.273861, -0.273861, 0.273861)
    assert call("grpo", [0.0, 1, 3, 4], [0, 0, 1, 1], scale_rewards="batch", advantage_eps=0.0) == want
    # rewards that do not apply are in none of these numbers
    got = call("grpo", [0.0, NAN, 1, 3, 4, NAN], [0, 0, 0, 1, 1, 1], scale_rewards="batch", advantage_eps=0.0)
    assert got == close(-0.273861, 0, 0.273861, -0.273861, 0.273861, 0)


def test_mean_and_leave_one_out_in_groups_of_different_size():
    # means 2 and 1/2; the others' means (3 + 2)/2, (1 + 2)/2, (1 + 3)/2 and 1, 0
    assert call("drgrpo", [1.0, 0, 3, 1, 2], [7, 5, 7, 5, 7]) == [-1, -0.5, 1, 0.5, 0]
    assert call("rloo", [1.0, 0, 3, 1, 2], [7, 5, 7, 5, 7]) == [-1.5, -1, 1.5, 1, 0]
    # of these: mean 0, squares 2.25 + 1 + 2.25 + 1 = 6.5, / 4, root 1.274755; a group of one is in none of it
    want = close(-1.176697, -0.784465, 1.176697, 0.784465, 0, 0)
    got = call("rloo", [1.0, 0, 3, 1, 2, 9], [7, 5, 7, 5, 7, 8], normalize_advantages=True, advantage_eps=0.0)
    assert got == want


def test_opo_weighs_the_baseline_by_length():
    # group 0: (3·1 + 1·0 + 2·0.5) / 6 = 2/3; group 1 has one reward. Untrained tokens are not counted.
    mask = [True, True, True, True, False, True, True, True]
    x = inputs([1.0, 0.0, 0.5, 9.0], [0, 0, 0, 1], [3, 2, 2, 1], mask)
    got = ADVANTAGE_ESTIMATORS["opo"](x).tolist()
    assert got == close(1 / 3, -2 / 3, -1 / 6, 0)


def test_pass_at_k_pays_the_best_alone():
    # group 0: 4 - 2, deviation of 1, 4, 2 = √(7/3); group 1: two are best; group 2: one reward and one that is none
    rewards, groups = [1.0, 4, 2, 5, 5, 1, 3, NAN], [0, 0, 0, 1, 1, 1, 2, 2]
    got = call("grpo_passk", rewards, groups, advantage_eps=0.0)
    assert got == close(0, 2 / math.sqrt(7 / 3), 0, 0, 0, 0, 0, 0)
    assert call("grpo_passk", rewards, groups, scale_rewards="none") == [0, 2, 0, 0, 0, 0, 0, 0]


def test_maxrl_divides_by_success():
    # successes 1/4 and 3/4: (1 - 1/4)·4 = 3 and (1 - 3/4)·4/3 = 1/3; none and all give 0
    rewards = [1.0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    got = call("maxrl", rewards, [0] * 4 + [1] * 4 + [2] * 2 + [3] * 2, advantage_eps=0.0)
    assert got == close(3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0, 0, 0)
    with pytest.raises(DataError, match=r"reward 1 is -1.0; maxrl divides by the mean"):
        call("maxrl", [1.0, -1.0], [0, 0])


def test_scalerl_divides_by_the_deviation_of_advantages():
    # centred ∓1/2 and ∓3/2: squares 1/2 + 9/2 = 5, / 3
    std = math.sqrt(5 / 3)
    got = call("scalerl", [0.0, 1, 3, 6], [0, 0, 1, 1], advantage_eps=0.0)
    assert got == close(-0.5 / std, 0.5 / std, -1.5 / std, 1.5 / std)
    # a group that agrees counts with its zeros: 5 / 5 → 1
    got = call("scalerl", [0.0, 1, 3, 6, 2, 2], [0, 0, 1, 1, 2, 2], advantage_eps=0.0)
    assert got == close(-0.5, 0.5, -1.5, 1.5, 0, 0)


def test_reinforce_takes_the_mean_of_the_group_or_of_the_batch():
    rewards = [1.0, 0, 5, 2]  # mean 2, deviation √(1 + 4 + 9 + 0)/√3 = √(14/3)
    assert call("reinforce", rewards, [0, 0, 1, 1]) == [0.5, -0.5, 1.5, -1.5]
    assert call("reinforce", rewards, [0, 0, 1, 1], global_norm=True) == [-1, -2, 3, 0]
    assert call("reinforce", rewards, [0, 1, 2, 3]) == [-1, -2, 3, 0]  # groups of one
    std = math.sqrt(14 / 3)
    scaled = call("reinforce", rewards, [0, 0, 1, 1], global_norm=True, norm_var=True, advantage_eps=0.0)
    assert scaled == close(-1 / std, -2 / std, 3 / std, 0)
    half = math.sqrt(0.5)
    own = call("reinforce", [1.0, 0, 5, NAN], [0, 0, 1, 1], norm_var=True, advantage_eps=0.0)
    std = math.sqrt(7)  # of 1, 0, 5: mean 2, squares 1 + 4 + 9 = 14, / 2: the group of one takes the batch's
    assert own == close(0.5 / half, -0.5 / half, 3 / std, 0)


def test_reinforce_plus_plus_whitens_discounted_returns():
    # KL penalties -1, 0 | 2: returns with γ = 1/2: -1 + (0 + 4)/2 = 1, 4 | 2 + 0 = 2. Mean 7/3, squares
    # (16 + 25 + 1)/9 = 14/3, / 2 = 7/3
    x = inputs([4.0, 0.0], [0, 1], [2, 1], token_rewards=tensor([-1.0, 0.0, 2.0]))
    got = ADVANTAGE_ESTIMATORS["reinforce_plus_plus"](x, gamma=0.5).tolist()
    std = math.sqrt(7 / 3)
    assert got == close((1 - 7 / 3) / std, (4 - 7 / 3) / std, (2 - 7 / 3) / std)


def test_turn_rloo_compares_the_return_of_each_turn():
    # two turns of one token with rewards 1 and 2, an answer between; the other has one turn of 0.5 + 1
    x = inputs([0.0, 1.0], [0, 0], [3, 1], [True, False, True, True], token_rewards=tensor([1.0, 0.0, 2.0, 0.5]))
    assert ADVANTAGE_ESTIMATORS["turn_rloo"](x).tolist() == [3 - 1.5, 0, 2 - 1.5, 1.5 - 3]


def test_a_return_goes_past_tokens_that_are_not_trained():
    # tokens: trained, the environment's with a reward of 1, trained: both trained ones earn what comes after them
    x = inputs([2.0, 0.0], [0, 1], [3, 1], [True, False, True, True], token_rewards=tensor([0.0, 1.0, 0.0, 0.0]))
    got = ADVANTAGE_ESTIMATORS["reinforce_plus_plus"](x, gamma=1.0).tolist()  # returns 3, 2, 0: mean 5/3, variance 7/3
    std = math.sqrt(7 / 3)
    assert got == close((4 / 3) / std, 0, (1 / 3) / std, (-5 / 3) / std)


def test_reinforce_plus_plus_baseline_whitens_over_tokens():
    # centred -1 (3 tokens), 1 (1 token) | 0 (1 token, agrees with itself): mean -2/5, squares
    # 3·9/25 + 49/25 + 4/25 = 80/25, / 4 = 4/5
    x = inputs([1.0, 3.0, 8.0], [0, 0, 1], [3, 1, 1])
    got = ADVANTAGE_ESTIMATORS["reinforce_plus_plus_baseline"](x).tolist()
    std = math.sqrt(0.8)
    assert got == close(-0.6 / std, -0.6 / std, -0.6 / std, 1.4 / std, 0.4 / std)


def test_remax_takes_off_the_greedy_reward():
    greedy = tensor([0.5, NAN, 2.0], dtype=torch.float64)
    x = inputs([1.0, 0.0, 3.0, NAN, 2.0], [0, 0, 1, 2, 2], [2, 1, 1, 1, 1], greedy_rewards=greedy)
    assert ADVANTAGE_ESTIMATORS["remax"](x).tolist() == [0.5, 0.5, -0.5, 0, 0, 0]
    # with rewards of tokens: what comes from a token on
    x = inputs([1.0], [0], [2], token_rewards=tensor([-0.25, -0.5]), greedy_rewards=greedy[:1])
    assert ADVANTAGE_ESTIMATORS["remax"](x).tolist() == [-0.25, 0.0]


def test_gdpo_normalises_each_function_by_itself():
    # a in group 0: ±1/√2 · … (0, 1) -> ∓0.707107; in group 1 all agree. b: (0, 10) -> ∓0.707107, (10, 0) -> ±0.707107
    table = {"a": tensor([0.0, 1, 1, 1]).double(), "b": tensor([0.0, 10, 10, 0]).double()}
    x = inputs([0.0, 12, 12, 2], TWO, table=table, reward_weights={"a": 2.0, "b": 1.0})
    half = 1 / math.sqrt(2)
    sums = tensor([-3 * half, 3 * half, half, -half], dtype=torch.float64)  # mean 0, squares 2·(9/2 + 1/2) = 10, / 3
    want = (sums / math.sqrt(10 / 3)).tolist()
    assert gdpo_advantages(x, advantage_eps=0.0).tolist() == pytest.approx(want, abs=1e-6)
    # "gdpo" of one function alone is GRPO, normalised once more
    alone = inputs([0.0, 12, 12, 2], TWO)
    once = grpo_advantages(alone.rewards, TWO, advantage_eps=0.0).double()
    assert gdpo_advantages(alone, advantage_eps=0.0).tolist() == close(*(once / once.std()).tolist())


def test_gdpo_leaves_a_function_out_where_it_has_no_say():
    table = {"a": tensor([0.0, 1, NAN]).double(), "b": tensor([NAN, NAN, NAN]).double()}
    x = inputs([0.0, 1.0, NAN], [0, 0, 0], table=table)
    assert gdpo_advantages(x, advantage_eps=0.0).tolist() == close(-1 / math.sqrt(2), 1 / math.sqrt(2), 0)


def test_parameters_reach_an_estimator_bound():
    x = inputs([1.0, 0.0], [0, 1])
    assert estimate(lambda r, g: reinforce_advantages(r, g, global_norm=True), x).tolist() == [0.5, -0.5]
