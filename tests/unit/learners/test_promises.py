"""Promises that were once broken: what is on policy, whose optimizer, what is said, and what NaN may reach."""

import logging

import numpy as np
import pyarrow.parquet
import pytest
import torch
from helpers import cluster, completion, length_reward, random_batch, rows, tiny_model

from whet import ClusterConfig, DataConfig, GRPOConfig, GRPOLearner, RLCluster, RLTrainingConfig
from whet.config import Mode, OptimConfig, RoleConfig
from whet.errors import ConfigError, DataError
from whet.learners.step import Step
from whet.models.load import load_model, save_model
from whet.ops import token_weights
from whet.train.worker import ModelWorker
from whet.types import Group


def learner(c=None, *, reward=length_reward, data=None, **algo):
    algo = {"num_generations": 4, "beta": 0.0, **algo}
    return GRPOLearner(c or cluster(), GRPOConfig(**algo), reward, data=DataConfig(**(data or {"batch_size": 4})))


def test_the_stages_called_by_hand_use_the_true_ratio():
    made = learner(cluster(mini_batch_size=1, lr=5e-2))
    encode = made.cluster.encoder()
    step = made.sample(Step(index=1, prompts=[encode(row, i) for i, row in enumerate(rows(4))]))
    step = made.assign_advantages(made.score(made.batch(made.reward(step))))
    assert step.batch.old_logprobs is not None
    for mini in made.minibatches(step):
        step = made.update(step, mini)
    assert step.metrics["is_ratio/max"].value > 1.1  # the policy moved between the four updates


def test_a_learner_that_samples_more_groups_than_it_was_given_is_off_policy_too():
    class Twice(GRPOLearner):
        def sample(self, step):
            return super().sample(step.replace(prompts=[*step.prompts, *step.prompts]))

    c = cluster(max_steps=1, mini_batch_size=2, lr=5e-2)
    made = Twice(c, GRPOConfig(num_generations=4, beta=0.0), length_reward, data=DataConfig(batch_size=2))
    row = made.train(rows(2)).rows[-1]
    assert row["optim/updates"] == 2 and row["is_ratio/max"] > 1.1


def test_a_roles_own_optimizer_is_used_and_two_are_refused(tmp_path):
    folder = str(save_model(load_model(tiny_model()), None, tmp_path))
    role = RoleConfig(model=folder, dtype="float32", optim=OptimConfig(lr=0.5))
    made = RLCluster(actor=role, tokenizer="byte", cluster_config=ClusterConfig())
    assert made.actor.optim.optimizer.param_groups[0]["lr"] == 0.5
    both = ClusterConfig(training_config=RLTrainingConfig(actor_optimizer=OptimConfig(lr=0.1)))
    with pytest.raises(ConfigError, match=r"actor\.optim and training_config\.actor_optimizer both set an optimizer"):
        RLCluster(actor=role, tokenizer="byte", cluster_config=both)


@pytest.mark.parametrize("wrong", [lambda r, g: r * torch.nan, lambda r, g: r[:-1]])
def test_an_estimator_that_gives_nan_or_too_few_is_named(wrong):
    with pytest.raises(DataError, match=r"advantage estimator .* one finite number for each of the 16 rewards"):
        learner(advantage_estimator=wrong).train(rows(4))


def test_a_reward_that_needs_a_missing_column_is_refused_before_the_first_rollout(monkeypatch):
    def reward(completions, answre):
        return [0.0] * len(completions)

    made = learner(reward=reward)
    monkeypatch.setattr(made.cluster, "sample", lambda *a, **k: pytest.fail("sampled"))
    with pytest.raises(ConfigError, match="answre"):
        made.train([{**row, "answer": 1} for row in rows(4)], eval_ds=[{**row, "answer": 1} for row in rows(2)])


def test_prompts_over_the_limit_are_counted_in_the_log(caplog):
    caplog.set_level(logging.INFO, "whet")
    long = [*rows(4), {"prompt": "x" * 100}]
    learner(cluster(rollout={"on_long_prompt": "drop"}, max_steps=1)).train(long, eval_ds=long)
    assert caplog.text.count("rows is over rollout.max_prompt_length 64: the longest has ") == 2
    assert caplog.text.count("(0 cut on the left, 1 left out)") == 2


def test_nan_at_masked_out_tokens_reaches_no_gradient_of_a_users_loss():
    batch = random_batch((3, (4, 4)))
    mask = batch.mask.clone()
    mask[1] = False
    old = torch.full((batch.num_tokens,), -5.0)
    old[1] = torch.nan
    batch = batch.replace(mask=mask, old_logprobs=old, advantages=torch.ones(batch.num_tokens))
    batch = batch.replace(weights=token_weights(batch.mask, batch.trajectory, "token-mean"))
    worker = ModelWorker(load_model(tiny_model()), optim=OptimConfig())
    worker.forward_backward(batch, lambda x: (-(x.logprobs - x.old_logprobs).exp() * x.advantages, {}))
    assert worker.optim_step()["optim/skipped"].value == 0


def test_a_skipped_update_is_said_aloud(caplog):
    made = cluster()
    batch = random_batch((3, (4, 4))).replace(advantages=None)
    made.actor_trainer.set_loss(lambda x: (x.logprobs * torch.inf, {}))
    made.actor_trainer.update(batch)
    assert "update 1 skipped" in caplog.text


def test_a_kl_that_cannot_pull_towards_the_reference_is_said_aloud(caplog):
    c = cluster(reference=tiny_model(1))
    learner(c, beta=0.1)  # the default
    learner(c, beta=0.1, kl_loss_mode="low_var_kl+")
    learner(c, beta=0.1, kl_loss_mode="kl", kl_type="reward")  # where no gradient is taken
    assert "does not pull" not in caplog.text
    learner(c, beta=0.1, kl_loss_mode="kl")
    assert "does not pull towards the reference" in caplog.text


def test_ready_made_batches_under_another_column_name_are_batches():
    batches = [{"q": [f"{i}=", f"{i}+"]} for i in range(2)]
    run = learner(data={"prompt_column": "q"}).train(iter(batches))
    assert [row["prompts/count"] for row in run.rows] == [2.0, 2.0]


def test_unknown_kl_modes_are_refused_before_any_rollout():
    with pytest.raises(ConfigError, match="unknown KL mode 'k4'"):
        learner(cluster(reference=tiny_model(1)), beta=0.1, kl_loss_mode="k4")
    with pytest.raises(ConfigError, match="sampler_is_threshold must be positive"):
        GRPOConfig(sampler_is_threshold=0.0)


def test_data_settings_that_only_the_command_line_reads_are_refused():
    with pytest.raises(ConfigError, match=r"data\.eval_fraction is for `whet grpo`"):
        learner(data={"batch_size": 4, "eval_fraction": 0.1})


def test_a_model_with_broken_weights_is_refused_when_it_loads():
    model = tiny_model()
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(ConfigError, match="NaN or infinite numbers"):
        load_model(model)


def test_rewards_that_a_batch_stage_shapes_are_those_that_are_logged_stored_and_given(tmp_path, caplog):
    class Shaped(GRPOLearner):
        def batch(self, step):
            step = super().batch(step)
            return step.replace(rewards=step.rewards.with_total(np.full(len(step.rewards.total), 0.25)))

    def noted(rewards):
        seen.extend(rewards)
        return {}

    seen = []
    made = Shaped(
        cluster(engine="mock", max_steps=3, run_dir=str(tmp_path)),
        GRPOConfig(num_generations=2, beta=0.0),
        length_reward,
        metric_fns=[noted],
        data=DataConfig(batch_size=2),
    )
    row = made.train(rows(2)).rows[-1]
    assert seen == [0.25] * 12 and row["reward"] == row["reward_max"] == 0.25
    assert row["reward_std"] == 0.0 and row["frac_reward_zero_std"] == 1.0
    assert row["rewards/length_reward"] != 0.25  # the function's own
    stored = pyarrow.parquet.read_table(tmp_path / "completions" / "train-000003.parquet")
    assert stored["reward"].to_pylist() == [0.25] * 4
    assert "reward 0.25" in caplog.text  # the warning that nothing is learned


def test_a_learner_with_a_rollout_of_its_own_is_evaluated_by_it():
    class Echo(GRPOLearner):
        """Two "completions" of each prompt in training, three in evaluation, of as many tokens, and no engine."""

        def rollout(self, prompts, *, step, mode):
            asked.append((mode, step, len(prompts)))
            number = 2 if mode is Mode.TRAIN else 3
            made = tuple(completion([65] * (g + 1), g, version=self.cluster.actor.version) for g in range(number))
            return [Group(prompt=p, completions=made) for p in prompts]

    asked = []
    config = GRPOConfig(num_generations=2, beta=0.0)
    made = Echo(cluster(engine="mock", max_steps=1), config, length_reward, data=DataConfig(batch_size=2))
    rows_of = made.train(rows(2), rows(5)).rows
    assert asked == [(Mode.EVAL, 0, 5), (Mode.TRAIN, 1, 2), (Mode.EVAL, 1, 5)]
    before, step, after = rows_of
    assert step["completions/tokens"] == 2 * 3 and before["completions/tokens"] == after["completions/tokens"] == 5 * 6
    assert after["rewards/best_of_3/mean"] == after["reward_max"] > after["reward"]
