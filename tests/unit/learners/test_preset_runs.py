"""Presets in a learner: the ones that need more of it than a loss."""

import dataclasses

import pytest

from whet import ClusterConfig, GRPOLearner, PPOLearner, RLCluster, RLTrainingConfig, RolloutConfig, presets
from whet.config import PPOConfig
from whet.demo import small_model

ROWS = [{"prompts": ["1+1=", "2+2="]}]


def trained(config, reward):
    """The row of a step of two prompts, an update for each."""
    small = lambda seed: small_model(seed=seed)
    trainer = RLTrainingConfig(max_steps=1, pbar_description=None, mini_batch_size=1)
    cluster = RLCluster(
        actor=small(0),
        reference=small(0) if config.beta else None,
        critic=small(1) if isinstance(config, PPOConfig) else None,
        tokenizer="byte",
        cluster_config=ClusterConfig(rollout_config=RolloutConfig(max_tokens_to_generate=8), training_config=trainer),
    )
    learner = PPOLearner if isinstance(config, PPOConfig) else GRPOLearner
    return learner(cluster, config, reward_fns=[reward]).train(ROWS).rows[0]


def digits(completion_ids, **_):
    """Numbers that differ."""
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def first_prompt_alone(prompts, completion_ids, **_):
    """The same for every completion of the second prompt."""
    return [r if p == "1+1=" else 1.0 for r, p in zip(digits(completion_ids), prompts, strict=True)]


@pytest.mark.parametrize("preset", [presets.scale_rl, presets.rl2_reinforce])
def test_groups_that_agree_are_left_out_and_not_replaced(preset):
    row = trained(preset(num_generations=4), first_prompt_alone)
    assert (row["dynamic_sampling/batches"], row["dynamic_sampling/groups_left_out"]) == (1, 1)
    assert row["grad_norm"] > 0


@pytest.mark.parametrize("preset", [presets.remax, presets.trl_rloo, presets.reinforce_pp, presets.ppo])
def test_a_preset_with_its_own_passes_trains(preset):
    config = preset()
    row = trained(dataclasses.replace(config, num_generations=max(config.num_generations, 2)), digits)
    assert row["grad_norm"] > 0
    assert ("kl_sampled" in row) == (config.beta > 0) and ("greedy/tokens" in row) == (preset is presets.remax)
