"""Edges of the formulas: unknown logprobs, ratios beyond every bound, rewards out of place, rounding."""

import math

import pytest
import torch

from whet.ops import POLICY_LOSSES, TOKEN_MASKS, AdvantageInputs, grpo_advantages
from whet.ops.policy_losses import IMPORTANCE_LEVELS
from whet.types import LossInputs

LEVELS = [None, *IMPORTANCE_LEVELS]


def inputs(logprobs, old, advantages, **columns):
    n = len(logprobs)
    return LossInputs(
        sequence=torch.zeros(n, dtype=torch.long),
        mask=torch.ones(n, dtype=torch.bool),
        logprobs=torch.tensor(logprobs, dtype=torch.float64, requires_grad=True),
        old_logprobs=torch.tensor(old, dtype=torch.float64),
        advantages=torch.full((n,), float(advantages), dtype=torch.float64),
        **columns,
    )


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES.keys() - {"gkd", "reinforce"}))  # which have no ratio
@pytest.mark.parametrize("level", LEVELS)
def test_an_old_logprob_that_is_unknown_counts_as_a_policy_that_has_not_moved(name, level):
    words = {} if level is None else {"importance_sampling_level": level}
    teacher = {"token_columns": {"teacher_logprobs": torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)}}
    found = []
    for old in (math.nan, -0.7):  # the second is what the policy says now
        x = inputs([-0.5, -0.7, -0.9], [-0.6, old, -0.8], 1.0, **teacher)
        try:
            loss, _ = POLICY_LOSSES[name](x, **words)
        except TypeError:
            pytest.skip("this loss has a ratio of its own, or none")
        found.append((loss, *torch.autograd.grad(loss.sum(), x.logprobs)))
    for unknown, known in zip(*found, strict=True):
        assert unknown.isfinite().all()
        torch.testing.assert_close(unknown, known)


@pytest.mark.parametrize("name", ["dppo-tv", "dppo-kl"])
@pytest.mark.parametrize(("old", "new", "advantage"), [(-0.1, -30.1, -1), (-30.1, -0.1, 1), (-0.1, -300.0, -1)])
def test_a_token_that_has_moved_beyond_every_bound_is_masked(name, old, new, advantage):
    assert TOKEN_MASKS[name](inputs([new], [old], advantage)).tolist() == [0.0]


def test_a_token_reward_before_the_first_trained_token_is_that_tokens():
    x = AdvantageInputs(
        rewards=torch.tensor([1.0, 0.0]),
        group_of=torch.tensor([0, 0]),
        trajectory=torch.tensor([0, 0, 0, 1, 1]),
        mask=torch.tensor([False, True, True, False, False]),
        token_rewards=torch.tensor([5.0, 0.0, 2.0, 7.0, 0.0]),
    )
    assert x.rewards_by_token.tolist() == [0.0, 5.0, 3.0, 0.0, 0.0]  # the second has no trained token
    assert x.returns.tolist() == [8.0, 7.0]


def test_rewards_that_differ_by_rounding_alone_are_equal():
    rewards = torch.tensor([0.1 + 0.2, 0.3], dtype=torch.float64)
    assert grpo_advantages(rewards, torch.tensor([0, 0]), advantage_eps=0.0).tolist() == [0.0, 0.0]
