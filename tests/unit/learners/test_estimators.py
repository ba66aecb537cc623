"""What a configuration's choice of the estimator and of rewards does in a learner."""

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch
from helpers import cluster, completion, length_reward, prompt, rows
from torch import tensor

from whet.config import DataConfig, GRPOConfig, Mode, OverlongBuffer
from whet.config.algo import NEED_GROUPS
from whet.errors import ConfigError, DataError
from whet.learners.from_config import make_estimator, reward_functions
from whet.learners.grpo import GRPOLearner
from whet.learners.step import Step
from whet.ops import ADVANTAGE_ESTIMATORS, drgrpo_advantages, with_greedy_rewards
from whet.rewards.length import overlong
from whet.rewards.manager import RewardManager
from whet.rewards.reward_batch import RewardBatch
from whet.types import Group

NAN = math.nan


def learner(reward=length_reward, c=None, **algo):
    config = GRPOConfig(**{"num_generations": 3, "beta": 0.0, **algo})
    return GRPOLearner(c or cluster(), config, reward, data=DataConfig(batch_size=3, shuffle=False))


def first_step(made, mode=Mode.TRAIN):
    prompts = [made.cluster.encoder()(row, i) for i, row in enumerate(rows(3))]
    step = made.reward(made.sample(Step(index=1, prompts=prompts, mode=mode)))
    return step if mode is Mode.EVAL else made.assign_advantages(made.score(made.batch(step)))


def tokens_of(groups):
    return [c.tokens.tolist() for g in groups for c in g.completions]


# ---- a greedy completion of each prompt ------------------------------------------------------------------------------


def test_remax_takes_off_the_reward_of_the_greedy_completion():
    step = first_step(learner(advantage_estimator="remax"))
    greedy = [float(step.rewards.greedy[g]) for g in step.batch.group_of.tolist()]
    want = (tensor(step.rewards.total) - tensor(greedy))[step.batch.trajectory]
    assert step.batch.advantages.tolist() == pytest.approx(want.tolist())
    assert want.abs().max() > 0


def test_the_greedy_completion_is_the_likeliest_one_and_changes_no_draw():
    made = learner(advantage_estimator="remax")
    step, plain = first_step(made), first_step(learner())
    assert tokens_of(step.groups) == tokens_of(plain.groups)
    likeliest = made.cluster.sample(
        step.prompts, sampling=dataclasses.replace(made.cluster.sampling(), temperature=0.0)
    )
    assert [g.greedy.tokens.tolist() for g in step.groups] == tokens_of(likeliest)
    assert all(g.greedy is None for g in plain.groups) and plain.rewards.greedy is None


def test_the_greedy_completion_is_rewarded_and_counted_and_not_in_the_batch():
    step, plain = first_step(learner(advantage_estimator="remax")), first_step(learner())
    assert torch.equal(step.batch.tokens, plain.batch.tokens)
    assert step.rewards.total.tolist() == plain.rewards.total.tolist()
    texts = [learner().cluster.decode(g.greedy.tokens) for g in step.groups]
    assert step.rewards.greedy.tolist() == length_reward(texts)
    assert step.metrics["greedy/reward"].value == pytest.approx(np.mean(length_reward(texts)))
    assert step.metrics["greedy/tokens"].value == sum(len(g.greedy.tokens) for g in step.groups)
    other = ("rollout/", "rewards/advantage", "advantage", "time/")
    shared = {n: m for n, m in plain.metrics.items() if not n.startswith(other)}
    assert {n: step.metrics[n] for n in shared} == shared


def test_evaluation_draws_no_greedy_completions():
    step = first_step(learner(advantage_estimator="remax"), Mode.EVAL)
    assert all(g.greedy is None for g in step.groups) and step.rewards.greedy is None


def test_prompts_given_to_the_engine_in_parts_get_the_same_greedy_completions():
    whole = first_step(learner(advantage_estimator="remax"))
    made = learner(advantage_estimator="remax", c=cluster(mini_batch_size=3, rollout_micro_batch_size=1))
    parts = first_step(made)
    assert [g.greedy.tokens.tolist() for g in parts.groups] == [g.greedy.tokens.tolist() for g in whole.groups]
    assert tokens_of(parts.groups) == tokens_of(whole.groups)


def test_a_rollout_of_the_users_own_without_greedy_completions_is_told_what_is_missing():
    class Own(GRPOLearner):
        def rollout(self, prompts, *, step, mode):
            return self.cluster.sample(prompts, num_generations=2, step=step, mode=mode)

    config = GRPOConfig(beta=0.0, advantage_estimator="remax")
    with pytest.raises(DataError, match="needs greedy_rewards, which this batch does not have"):
        first_step(Own(cluster(), config, length_reward))


def test_an_estimator_of_the_users_own_may_ask_for_greedy_completions():
    @with_greedy_rewards
    def better(x, *, margin=0.5):
        return (x.returns > x.need("greedy_rewards")[x.group_of] + margin).double()

    step = first_step(learner(advantage_estimator=functools.partial(better, margin=0.0)))
    greedy = torch.from_numpy(step.rewards.greedy)[step.batch.group_of]
    assert step.batch.trajectory_advantages.tolist() == (tensor(step.rewards.total) > greedy).double().tolist()


def test_greedy_rewards_of_parts_are_those_of_the_whole():
    def judged(rewards):
        groups = [Group(prompt=prompt("a", row=i), completions=(completion([5]),)) for i in range(len(rewards))]
        manager = RewardManager(lambda completions: list(rewards))
        return manager(groups, [["x"]] * len(groups))

    parts = [judged([1.0, 0.0]).with_greedy(judged([0.5, None])), judged([2.0]).with_greedy(judged([3.0]))]
    whole = RewardBatch.cat(parts)
    assert whole.greedy.tolist() == pytest.approx([0.5, NAN, 3.0], nan_ok=True)
    assert whole.metrics["greedy/reward"].value == pytest.approx(1.75) and whole.metrics["greedy/tokens"].value == 3.0
    assert whole.select([2, 0]).greedy.tolist() == [3.0, 0.5]
    assert RewardBatch.cat([parts[0], judged([2.0])]).greedy is None  # not of each group
    with pytest.raises(DataError, match="1 greedy completions for 2 groups"):
        judged([1.0, 0.0]).with_greedy(judged([1.0]))


def test_greedy_rewards_follow_the_groups_that_dynamic_sampling_keeps(monkeypatch):
    def by_row(trajectory_ids):
        """0 and 1 in odd rows, nothing to learn in even ones; greedy ones, the third, ten times their row."""
        pairs = [map(int, name.split("_")) for name in trajectory_ids]
        return [10.0 * row if g == 2 else float(g) if row % 2 else 1.0 for row, g in pairs]

    config = GRPOConfig(beta=0.0, advantage_estimator="remax", dynamic_sampling=True)
    data = DataConfig(batch_size=2, shuffle=False)
    made = GRPOLearner(cluster(engine="mock", max_steps=1), config, by_row, data=data)
    seen, after = [], made.after_step
    monkeypatch.setattr(made, "after_step", lambda run, step: (seen.append(step.batch), after(run, step)))
    made.train(rows(6))
    (batch,) = seen
    assert batch.trajectory_advantages.tolist() == [-10.0, -9.0, -30.0, -29.0]  # of rows 1 and 3


# ---- groups of one ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NEED_GROUPS)
def test_groups_of_one_are_refused_for_estimators_that_compare_within_groups(name):
    with pytest.raises(ConfigError, match="num_generations must be greater than 1, got 1: a completion is compared"):
        GRPOConfig(num_generations=1, advantage_estimator=name)


@pytest.mark.parametrize(
    "name", [*sorted({"reinforce", "reinforce_plus_plus", "remax"}), drgrpo_advantages, "whet.ops:drgrpo_advantages"]
)
def test_groups_of_one_are_taken_for_the_others_and_for_functions(name):
    step = first_step(learner(num_generations=1, advantage_estimator=name))
    assert step.batch.num_sequences == 3
    assert bool(step.batch.advantages.abs().max() > 0) == (name in ADVANTAGE_ESTIMATORS)


def test_groups_of_one_are_not_chosen_by_whether_their_rewards_differ():
    one = {"num_generations": 1, "advantage_estimator": "remax", "dynamic_sampling": True}
    with pytest.raises(ConfigError, match="dynamic_sampling with num_generations=1 would leave out every group"):
        GRPOConfig(**one)
    assert GRPOConfig(**one, group_reward_bounds=(0.0, 1.0)).num_generations == 1


# ---- fields ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({}, [0.5 / (0.5**0.5 + 1e-6), -0.5 / (0.5**0.5 + 1e-6), 1.5 / (4.5**0.5 + 1e-6), -1.5 / (4.5**0.5 + 1e-6)]),
        ({"scale_rewards": "none"}, [0.5, -0.5, 1.5, -1.5]),
        ({"advantage_ddof": 0, "advantage_eps": 0.5}, [0.5, -0.5, 0.75, -0.75]),
        ({"advantage_estimator": "reinforce", "global_norm": True}, [-1.0, -2.0, 3.0, 0.0]),
        ({"advantage_estimator": "reinforce", "norm_var": True, "advantage_eps": 0.0},
         [0.5**0.5, -(0.5**0.5), 0.5**0.5, -(0.5**0.5)]),
    ],
)  # fmt: skip
def test_fields_of_the_configuration_reach_the_estimator(fields, want):
    found = make_estimator(GRPOConfig(**fields))(tensor([1.0, 0.0, 5.0, 2.0]), tensor([0, 0, 1, 1]))
    assert found.tolist() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"advantage_eps": -1.0}, "advantage_eps must not be negative, got -1.0"),
        ({"gamma": 1.5}, "gamma must be between 0 and 1, got 1.5"),
        ({"scale_rewards": "std"}, "scale_rewards"),
        ({"advantage_ddof": 2}, "advantage_ddof"),
        (
            {"overlong_buffer": {"overlong_buffer_penalty": -1.0}},
            "overlong_buffer_penalty must be non-negative, got -1",
        ),
        (
            {"overlong_buffer": {"max_response_length": 9}},
            "overlong_buffer_length must be at most max_response_length, 9",
        ),
    ],
)
def test_fields_out_of_range_are_refused(fields, said):
    with pytest.raises(ConfigError, match=said):
        GRPOConfig(**fields)


def test_gamma_reaches_estimators_per_token():
    bound = make_estimator(GRPOConfig(advantage_estimator="reinforce_plus_plus", gamma=0.5))
    assert bound.keywords == {"gamma": 0.5}


# ---- the punishment of overlong completions --------------------------------------------------------------------------

BUFFER = {"overlong_buffer_length": 4, "overlong_buffer_penalty": 2.0, "max_response_length": 8}


def test_the_overlong_buffer_adds_a_reward_function_of_weight_one():
    config = GRPOConfig(overlong_buffer=OverlongBuffer(enable=True, **BUFFER), reward_weights=(0.5,))
    fns, weights = reward_functions(length_reward, config)
    assert fns[0] is length_reward and weights == (0.5, 1.0)
    assert fns[1].func is overlong and fns[1].keywords == BUFFER
    mine = [length_reward]
    assert reward_functions(mine, GRPOConfig()) == (mine, None) and len(mine) == 1
    assert reward_functions("exact_match", GRPOConfig(reward_weights=(2.0,))) == (["exact_match"], (2.0,))


def test_overlong_completions_are_punished_by_their_tokens():
    step = first_step(learner(lambda completions: [1.0] * len(completions), overlong_buffer={"enable": True, **BUFFER}))
    lengths = step.batch.lengths.tolist()
    assert max(lengths) == 8  # the limit of the rollout
    assert step.rewards.total.tolist() == [1.0 - 2.0 * max(0, n - 4) / 4 for n in lengths]
    assert "rewards/overlong" in step.metrics
