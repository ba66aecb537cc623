import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from whet.errors import ConfigError, DataError
from whet.ops import (
    AdvantageInputs,
    advantages_and_returns,
    estimate,
    gae_advantages,
    generalized_advantages,
    masked_whiten,
)

NAN = math.nan


def naive(rewards, values, mask, trajectory, token_rewards, gamma, lam):
    """The definition, a trajectory and a token at a time: sums of deltas, not a recurrence."""
    advantages, returns = [0.0] * len(values), [v if m else 0.0 for v, m in zip(values, mask)]
    for j, outcome in enumerate(rewards):
        at = [i for i in range(len(values)) if mask[i] and trajectory[i] == j]
        if math.isnan(outcome):
            continue
        r = [token_rewards[i] + (outcome if i == at[-1] else 0.0) for i in at]
        v = [values[i] for i in at] + [0.0]
        deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(at))]
        for t, i in enumerate(at):
            advantages[i] = math.fsum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:]))
            returns[i] = advantages[i] + values[i]
    return advantages, returns


def verl(token_level_rewards, values, response_mask, gamma, lam):
    """verl's compute_gae_advantage_return, as it is written there: padded rows, masked steps carried over."""
    nextvalues, lastgaelam, reversed_ = 0, 0, []
    for t in reversed(range(token_level_rewards.shape[-1])):
        delta = token_level_rewards[:, t] + gamma * nextvalues - values[:, t]
        lastgaelam_ = delta + gamma * lam * lastgaelam
        nextvalues = values[:, t] * response_mask[:, t] + (1 - response_mask[:, t]) * nextvalues
        lastgaelam = lastgaelam_ * response_mask[:, t] + (1 - response_mask[:, t]) * lastgaelam
        reversed_.append(lastgaelam)
    advantages = torch.stack(reversed_[::-1], dim=1)
    returns = advantages + values
    n = response_mask.sum()
    mean = (advantages * response_mask).sum() / n
    var = ((advantages - mean).square() * response_mask).sum() / (n - 1)
    return (advantages - mean) * (var + 1e-8).rsqrt(), returns


def inputs(rewards, values, mask, trajectory, token_rewards=None):
    return AdvantageInputs(
        rewards=tensor(rewards, dtype=torch.float64),
        group_of=torch.arange(len(rewards)),
        trajectory=tensor(trajectory),
        mask=tensor(mask),
        values=tensor(values, dtype=torch.float64),
        token_rewards=None if token_rewards is None else tensor(token_rewards, dtype=torch.float64),
    )


def test_three_tokens_by_hand():
    # γ = .5, λ = .5, V = 1, 2, 4, r = 0, .1, 3: δ = 0 + 1 - 1 = 0; .1 + 2 - 2 = .1; 3 - 4 = -1
    # A = -1; .1 - .25 = -.15; 0 + .25 · -.15 = -.0375
    x = inputs([3.0], [1.0, 2.0, 4.0], [True] * 3, [0, 0, 0], [0.0, 0.1, 0.0])
    a = gae_advantages(x, gamma=0.5, gae_lambda=0.5, whiten_advantages=False)
    assert a.tolist() == pytest.approx([-0.0375, -0.15, -1.0], rel=1e-12) and a.dtype == torch.float64
    _, returns = generalized_advantages(
        x.rewards, x.values, x.mask, x.trajectory, token_rewards=x.token_rewards, gamma=0.5, gae_lambda=0.5
    )
    assert returns.tolist() == pytest.approx([0.9625, 1.85, 3.0], rel=1e-12)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), num=st.integers(1, 5), size=st.integers(1, 14))
def test_the_fast_one_is_the_definition_wherever_the_tokens_of_a_trajectory_lie(seed, num, size):
    rng = random.Random(seed)
    trajectory = [rng.randrange(num) for _ in range(size)]  # interleaved, some without a token
    mask = [rng.random() < 0.7 for _ in range(size)]
    rewards = [rng.choice([NAN, 0.7, -1.3, rng.gauss(0, 3)]) for _ in range(num)]
    values, extra = ([rng.gauss(0, 2) for _ in range(size)] for _ in range(2))
    gamma, lam = rng.choice([1.0, 0.9, 0.0]), rng.choice([1.0, 0.7, 0.0])
    expected = naive(rewards, values, mask, trajectory, extra, gamma, lam)
    x = inputs(rewards, values, mask, trajectory, extra)
    dirty = [torch.where(x.mask, c, NAN) for c in (x.values, x.token_rewards)]  # what is masked out doesn't matter
    got = generalized_advantages(
        x.rewards, dirty[0], x.mask, x.trajectory, token_rewards=dirty[1], gamma=gamma, gae_lambda=lam
    )
    for found, wanted in zip(got, expected):
        assert found.tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("kind", ["end", "none", "arbitrary"])
def test_it_is_verls_and_tunixs_with_holes_anywhere(kind):
    g = torch.Generator().manual_seed(0)
    rows, width = 4, 9
    mask = torch.ones(rows, width)
    if kind == "end":
        mask = (torch.arange(width) < tensor([9, 4, 1, 6])[:, None]).double()
    if kind == "arbitrary":
        mask = torch.randint(2, (rows, width), generator=g)
        mask[:, 0] = 1
    mask = mask.double()
    rewards, values = (torch.randn(rows, width, generator=g, dtype=torch.float64) for _ in range(2))
    rewards = rewards * mask  # at other tokens verl drops them: see below
    advantages, returns = verl(rewards, values, mask, 0.9, 0.7)
    trajectory = torch.arange(rows).repeat_interleave(width)
    x = AdvantageInputs(
        rewards=torch.zeros(rows, dtype=torch.float64),
        group_of=torch.arange(rows),
        trajectory=trajectory,
        mask=mask.flatten().bool(),
        values=values.flatten(),
        token_rewards=rewards.flatten(),
    )
    got = gae_advantages(x, gamma=0.9, gae_lambda=0.7)
    torch.testing.assert_close(got[x.mask], advantages.flatten()[x.mask], rtol=1e-9, atol=1e-9)
    _, found = generalized_advantages(
        x.rewards, x.values, x.mask, trajectory, token_rewards=x.token_rewards, gamma=0.9, gae_lambda=0.7
    )
    torch.testing.assert_close(found[x.mask], returns.flatten()[x.mask], rtol=1e-9, atol=1e-9)
    assert not got[~x.mask].any() and not found[~x.mask].any()


def test_a_token_of_an_environment_takes_no_time():
    plain = inputs([1.0], [0.5, 0.25], [True, True], [0, 0])
    holes = inputs([1.0], [0.5, 7.0, 8.0, 0.25, 9.0], [True, False, False, True, False], [0] * 5)
    for whiten in (True, False):
        a, b = (gae_advantages(x, gamma=0.9, gae_lambda=0.7, whiten_advantages=whiten) for x in (plain, holes))
        assert b[holes.mask].tolist() == a.tolist()


def test_a_reward_at_a_token_of_an_environment_is_that_of_the_trained_token_before_and_verl_drops_it():
    rewards, values, mask = [0.0, 2.0, 1.0], [0.5, 9.0, 0.25], [True, False, True]
    x = inputs([0.0], values, mask, [0, 0, 0], rewards)
    got, returns = advantages_and_returns(x, gamma=1.0, gae_lambda=1.0)
    assert got.tolist() == [2.5, 0.0, 0.75] and returns.tolist() == [3.0, 0.0, 1.0]
    _, theirs = verl(*(tensor([c]).double() for c in (rewards, values, mask)), 1.0, 1.0)
    assert theirs[0, [0, 2]].tolist() == [1.0, 1.0]


def test_lambda_one_is_the_return_less_the_value_and_lambda_zero_one_step():
    x = inputs([2.0], [0.5, 1.5, -1.0], [True] * 3, [0, 0, 0])
    assert gae_advantages(x, gae_lambda=1.0, whiten_advantages=False).tolist() == [1.5, 0.5, 3.0]
    assert gae_advantages(x, gae_lambda=0.0, whiten_advantages=False).tolist() == [1.0, -2.5, 3.0]


def test_whitening_leaves_out_what_has_no_reward_and_makes_equal_numbers_zero():
    x = inputs([1.0, NAN, 3.0], [0.0, 5.0, 0.0], [True] * 3, [0, 1, 2])
    torch.testing.assert_close(
        gae_advantages(x), masked_whiten(tensor([1.0, 0, 3]).double(), tensor([True, False, True]))
    )
    _, returns = generalized_advantages(x.rewards, x.values, x.mask, x.trajectory)
    assert returns.tolist() == [1.0, 5.0, 3.0]  # where there is no reward the critic's target is what it said
    equal = inputs([0.1] * 7, [0.0] * 7, [True] * 7, list(range(7)))
    assert gae_advantages(equal).tolist() == [0.0] * 7
    assert estimate(gae_advantages, x).dtype == torch.float32


def test_fractions_of_a_reward_are_kept():
    # Tunix's buffer is of integers: 0.7 becomes 0 and -1.3 becomes -1
    x = inputs([0.7, -1.3], [0.0, 0.0], [True, True], [0, 1])
    assert gae_advantages(x, whiten_advantages=False).tolist() == [0.7, -1.3]


def test_none_of_anything_gives_nothing():
    a, r = generalized_advantages(tensor([1.0]), torch.zeros(2), torch.zeros(2).bool(), torch.zeros(2).long())
    assert a.tolist() == r.tolist() == [0.0, 0.0]


def test_what_is_missing_or_out_of_range_is_refused():
    x = inputs([1.0], [0.0], [True], [0])
    with pytest.raises(ConfigError, match=r"gae_lambda must be between 0 and 1, got 1\.5"):
        gae_advantages(x, gae_lambda=1.5)
    with pytest.raises(DataError, match="the advantage estimator needs values"):
        gae_advantages(AdvantageInputs(rewards=x.rewards, group_of=x.group_of, trajectory=x.trajectory, mask=x.mask))
    with pytest.raises(DataError, match="reward 0 is inf"):
        gae_advantages(inputs([math.inf], [0.0], [True], [0]))
    with pytest.raises(DataError, match=r"values is \[2\] and mask is \[1\]"):
        generalized_advantages(x.rewards, torch.zeros(2), x.mask, x.trajectory)
