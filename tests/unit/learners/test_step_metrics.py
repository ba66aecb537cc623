"""What is stored of a step: one row for each completion, forks of an episode included."""

import dataclasses

import numpy as np
import pytest
import torch
from helpers import completion, prompt, random_batch, reward_batch

from whet.learners.from_config import advantage_inputs
from whet.learners.step_metrics import completion_columns, rollout_metrics, value_metrics
from whet.ops import advantages_and_returns
from whet.rewards.manager import RewardManager
from whet.types import Group, TokenBatch


def test_forks_carry_the_rewards_of_their_trajectory_and_the_newest_version():
    def exact(completions):
        return [1.0, 0.0]

    forks = (completion([7, 8], version=[3, 4]), completion([9], prefix=[97, 5]), completion([7], 1, version=-1))
    forks = (dataclasses.replace(forks[0], info={"status": "won"}), *forks[1:])
    rewarded = RewardManager(exact)([Group(prompt=prompt("a"), completions=forks)], [["x", "y", "z"]])
    batch = TokenBatch.from_groups(rewarded.groups)
    columns, rewards = completion_columns(rewarded, batch, str)
    assert columns["reward"] == [1.0, 1.0, 0.0] and np.array_equal(rewards["exact"], [1.0, 1.0, 0.0])
    assert columns["version"] == [4, 0, -1] and columns["generation"] == [0, 0, 1]
    assert columns["info"] == [{"status": "won"}, {}, {}]
    assert [ids.tolist() for ids in columns["prompt_tokens"]] == [[97], [97, 5], [97]]  # a fork has one of its own
    assert columns["prompt_text"] == ["[97]", "[97  5]", "[97]"]


def test_a_reward_that_only_some_groups_came_with_is_nan_for_the_others():
    pair = (completion([7, 8]), completion([9], 1))
    groups = [Group(prompt=prompt("a"), completions=pair, rewards={"env": np.array([0.5, 2.0])})]
    groups.append(Group(prompt=prompt("b", 1), completions=pair))
    rewarded = RewardManager(lambda completions: [1.0, 0.0, 1.0, 0.0])(groups, [["w", "x"], ["y", "z"]])
    batch = TokenBatch.from_groups(rewarded.groups)
    _, rewards = completion_columns(rewarded, batch, str)
    table = advantage_inputs(batch, rewarded).table
    assert np.array_equal(rewards["env"], [0.5, 2.0, np.nan, np.nan], equal_nan=True)
    assert np.array_equal(table["env"].numpy(), rewards["env"], equal_nan=True) and len(table) == len(rewards) == 2


def test_the_advantage_of_a_trajectory_is_the_mean_over_its_trained_tokens():
    forks = (completion([7, 8], version=[-1, 4]), completion([9, 7, 8], prefix=[97, 5]), completion([7, 8], 1))
    last = completion([7, 8], 2, version=-1)
    group = Group(prompt=prompt("a"), completions=(*forks, last))
    batch = TokenBatch.from_groups([group])
    batch = batch.replace(advantages=torch.tensor([9.0, 1.0, 2.0, 3.0, 6.0, 0.1, 0.1, 7.0, 7.0]))
    assert np.array_equal(batch.trajectory_advantages, [3.0, np.float32(0.1), np.nan], equal_nan=True)
    assert batch.trajectory_advantages is batch.trajectory_advantages  # made once
    rewarded = RewardManager(lambda completions: [1.0, 0.0, 0.5])([group], [["w", "x", "y", "z"]])
    columns, _ = completion_columns(rewarded, batch, str)
    assert np.array_equal(columns["advantage"], [3.0, 3.0, np.float32(0.1), np.nan], equal_nan=True)


def test_lengths_and_endings_by_hand():
    done = (completion([7, 8, 9], finish="length"), completion([7], 1), completion([8], 2), completion([9], 3))
    failed = rollout_metrics([Group(prompt=prompt("a"), completions=(*done, completion([7], 4, finish="error")))])
    assert failed["completions/clipped_ratio"].value == 0.25  # whose environment failed is not truncated
    found = rollout_metrics([Group(prompt=prompt("abc"), completions=done)])
    assert {name: metric.value for name, metric in found.items()} == {
        "completions/mean_length": 1.5,
        "completions/max_length": 3.0,
        "completions/min_length": 1.0,
        "completions/mean_terminated_length": 1.0,
        "completions/max_terminated_length": 1.0,
        "completions/min_terminated_length": 1.0,
        "completions/clipped_ratio": 0.25,
        "completions/tokens": 6.0,
        "prompts/count": 1.0,
        "prompts/mean_length": 3.0,
    }


def test_what_is_said_of_the_values_is_of_trajectories_with_a_reward():
    # returns 1, 1 and 4 (λ = 1), values 2, 0 and 3: R − V = −1, 1, 1 of variance 8/9, returns of variance 2
    batch = random_batch((3, [2, 1, 3]))
    rewards, values = torch.tensor([1.0, 4.0, torch.nan]).double(), torch.tensor([2.0, 0.0, 3.0, 50.0, -50.0, 90.0])
    batch = batch.replace(values=values)
    x = advantage_inputs(batch, reward_batch(rewards))
    advantages, returns = advantages_and_returns(x, gae_lambda=1.0)
    found = value_metrics(x, batch.replace(advantages=advantages, returns=returns))
    assert found["critic/explained_variance"].value == pytest.approx(1 - (8 / 9) / 2)
    assert [found[f"advantages/returns/{how}"].value for how in ("mean", "max", "min")] == [2.0, 4.0, 1.0]
    assert found["advantages/old_values/max"].value == 90.0
    nothing = batch.replace(advantages=advantages, returns=values.double())
    x = advantage_inputs(nothing, reward_batch(rewards * torch.nan))
    assert "critic/explained_variance" not in value_metrics(x, nothing)
