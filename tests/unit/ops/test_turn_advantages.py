"""Credit per turn: by hand, against rloo, and unbiased in a game whose every play is enumerated."""

import functools
import itertools
import math

import pytest
import torch
from helpers import advantage_inputs as inputs
from torch import tensor

from whet.ops import AdvantageInputs, rloo_advantages, segment_sum, turn_index, turn_rloo_advantages

# ---- a game: in each of three turns, stop, or go on by one of two ways -----------------------------------------------

STOP, TURNS, GROUP = 0, 3, 2
REWARDS = tensor([[0.5, -1.0, 0.25], [2.0, 0.5, -0.75], [0.0, 4.0, 1.0]]).double()
"""[turn, action]: of a turn. What an action is worth depends on the turns that follow."""
LOGITS = tensor([[0.3, -0.2, 0.4], [-0.5, 0.6, 0.1], [0.2, 0.0, -0.3]]).double()
PLAYS = [
    (*going, last)
    for count in range(1, TURNS + 1)
    for going in itertools.product((1, 2), repeat=count - 1)
    for last in ((STOP,) if count < TURNS else (0, 1, 2))
]
"""Every play: its actions, one a turn; the last one is STOP, or the third."""


def rewards_of(play):
    return [float(REWARDS[k, action]) for k, action in enumerate(play)]


def log_probabilities(logits):
    """[plays, turns]: of each action; 0 where the play has ended."""
    table, none = logits.log_softmax(-1), logits.new_zeros(())
    rows = [[table[k, play[k]] if k < len(play) else none for k in range(TURNS)] for play in PLAYS]
    return torch.stack([torch.stack(row) for row in rows])


def step(games):
    """A step in which each group plays one of `games`, tuples of plays; the environment has a token after each turn."""
    flat = [p for game in games for p in game]
    tokens = [(j, k, kind) for j, play in enumerate(flat) for k in range(len(PLAYS[play])) for kind in range(3)]
    trajectory, of_turn, kind = tensor(tokens).T.contiguous()
    rewards = tensor([rewards_of(PLAYS[flat[j]])[k] for j, k, _ in tokens], dtype=torch.float64)
    x = AdvantageInputs(
        rewards=torch.zeros(len(flat)).double(),
        group_of=torch.arange(len(games)).repeat_interleave(GROUP),
        trajectory=trajectory,
        mask=kind < 2,
        token_rewards=torch.where(kind == 1, rewards, 0.0),  # the second token of each turn has its reward
    )
    assert torch.equal(x.turn_of_token, of_turn)
    return x, kind == 1


GAMES = list(itertools.product(range(len(PLAYS)), repeat=GROUP))


def expected_gradient(estimator):
    """The exact mean of the gradient of (1/G) Σ_i Σ_k A log π(a_k) over all groups of plays, by enumeration."""
    x, ends = step(GAMES)
    advantages = estimator(x).double()[ends]  # one for each turn: all its tokens have the same
    theta = LOGITS.clone().requires_grad_()
    logs, flat = log_probabilities(theta), tensor(GAMES).flatten()
    trajectory = x.trajectory[ends]
    probability = logs.sum(1).exp().detach()[tensor(GAMES)].prod(1).repeat_interleave(GROUP)[trajectory]
    (advantages * probability / GROUP * logs[flat[trajectory], x.turn_of_token[ends]]).sum().backward()
    return theta.grad


def exact_gradient(gamma):
    """Σ_plays p Σ_k ∇log π(a_k) Σ_{l ≥ k} γ^(l − k) r_l: with γ = 1 the gradient of the expected return."""
    theta = LOGITS.clone().requires_grad_()
    logs, total = log_probabilities(theta), 0.0
    for i, play in enumerate(PLAYS):
        rewards = rewards_of(play)
        for k in range(len(play)):
            later = math.fsum(gamma ** (m - k) * rewards[m] for m in range(k, len(play)))
            total = total + logs[i].sum().exp().detach() * logs[i, k] * later
    total.backward()
    return theta.grad


def normalised_per_turn(x):
    """For each turn, the return less the mean of those of the group that have the turn, over their deviation."""
    returns, peers, count, turn = {}, {}, len(x.rewards), x.turn_of_token
    each = segment_sum(x.token_rewards, x.trajectory * TURNS + turn, count * TURNS).view(count, TURNS)
    for j, k in sorted({*zip(x.trajectory.tolist(), turn.tolist(), strict=True)}):
        returns[j, k] = float(each[j, k:].sum())
        peers.setdefault((j // GROUP, k), []).append(returns[j, k])
    advantages = torch.zeros(count, TURNS)
    for (j, k), own in returns.items():
        of_turn = tensor(peers[j // GROUP, k])
        advantages[j, k] = 0.0 if len(of_turn) < 2 else (own - of_turn.mean()) / (of_turn.std() + 1e-6)
    return advantages[x.trajectory, turn]


def test_the_gradient_is_unbiased_where_the_policy_decides_when_to_stop():
    theta = LOGITS.clone().requires_grad_()
    probabilities = log_probabilities(theta).sum(1).exp()
    assert float(probabilities.detach().sum()) == pytest.approx(1.0)
    (probabilities * tensor([math.fsum(rewards_of(play)) for play in PLAYS])).sum().backward()
    torch.testing.assert_close(exact_gradient(1.0), theta.grad)  # the policy gradient theorem
    for gamma in (0.0, 0.7, 1.0):
        found = expected_gradient(functools.partial(turn_rloo_advantages, gamma=gamma))
        torch.testing.assert_close(found, exact_gradient(gamma), atol=1e-6, rtol=1e-6)
    biased = expected_gradient(normalised_per_turn).flatten()
    assert torch.cosine_similarity(biased, theta.grad.flatten(), 0) < 0.97  # not even its direction


# ---- by hand ---------------------------------------------------------------------------------------------------------


def test_another_one_that_has_ended_counts_with_its_last_turn():
    # three plays of a group: turns of one or two tokens with an answer between; returns (4, 3), (1), (2.5, 2, 1)
    mask = tensor([True, False, True, True, True, False, True, False, True])
    token_rewards = tensor([1.0, 0, 0, 1.0, 0.5, 0, 1.0, 0, 0])
    x = inputs([3.0, 0.0, 1.0], [0, 0, 0], [3, 1, 5], mask, token_rewards=token_rewards)
    assert turn_rloo_advantages(x).tolist() == [
        4 - (1 + 2.5) / 2, 0, 3 - (1 + 2) / 2,
        1 - (4 + 2.5) / 2,
        2.5 - (4 + 1) / 2, 0, 2 - (3 + 1) / 2, 0, 1 - (3 + 1) / 2,
    ]  # fmt: skip
    # discounted by turn: (1 + 3/2, 3), (1), (1/2 + 3/4, 1 + 1/2, 1)
    assert turn_rloo_advantages(x, gamma=0.5).tolist() == [
        2.5 - (1 + 1.25) / 2, 0, 3 - (1 + 1.5) / 2,
        1 - (2.5 + 1.25) / 2,
        1.25 - (2.5 + 1) / 2, 0, 1.5 - (3 + 1) / 2, 0, 1 - (3 + 1) / 2,
    ]  # fmt: skip
    x = inputs([3.0, math.nan, 1.0], [0, 0, 0], [3, 1, 5], mask, token_rewards=token_rewards)
    assert turn_rloo_advantages(x).tolist() == [4 - 2.5, 0, 3 - 2, 0, 2.5 - 4, 0, 2 - 3, 0, 1 - 3]  # a failed one


def test_with_the_outcome_alone_it_is_rloo():
    rewards, groups, lengths = [1.0, 0.0, 3.0, 1.0, 2.0, 9.0], [0, 1, 0, 1, 0, 2], [5, 2, 4, 3, 1, 3]
    x = inputs(rewards, groups, lengths, torch.arange(18) % 3 != 1)
    want = rloo_advantages(x.rewards, x.group_of).index_select(0, x.trajectory)
    assert torch.equal(turn_rloo_advantages(x), torch.where(x.mask, want, 0.0))


def test_equal_returns_teach_nothing_exactly():
    x = inputs([0.0] * 3, [0] * 3, [1, 1, 2], token_rewards=tensor([0.3, 0.3, 0.1, 0.2], dtype=torch.float64))
    assert turn_rloo_advantages(x).tolist() == [0.0, 0.0, 0.0, 0.0]


def test_turns_end_where_a_sequence_does():
    sampled = torch.ones(6, dtype=torch.bool)
    assert turn_index(sampled, tensor([0, 0, 1, 1, 2, 3]), tensor([0, 0, 0, 0, 1, 1])).tolist() == [0, 0, 1, 1, 0, 1]
