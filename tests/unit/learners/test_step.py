"""A step as a value: what the stages take and return, what an estimator is given, and what is on policy."""

import pytest
import torch
from helpers import cluster, completion, length_reward, prompt, rows

from whet.config import DataConfig, GRPOConfig
from whet.errors import DataError
from whet.learners.grpo import GRPOLearner
from whet.learners.step import Step
from whet.ops import grpo_advantages
from whet.types import Group


def learner(c=None, reward=length_reward, **algo):
    config = GRPOConfig(**{"num_generations": 2, "beta": 0.0, **algo})
    return GRPOLearner(c or cluster(engine="mock"), config, reward, data=DataConfig(batch_size=2, shuffle=False))


def test_an_estimator_reads_the_table_of_rewards_their_weights_and_lengths():
    seen = []

    def decoupled(x):
        """Each function normalised in its group, then weighed (GDPO); shorter ones a little better."""
        seen.append(x)
        parts = [x.reward_weights[name] * grpo_advantages(r, x.group_of) for name, r in x.table.items()]
        return torch.stack(parts).sum(0) - 0.01 * x.lengths

    def fine(completions):
        return [1.0, 0.0]

    def short(completions):
        return [None, 3.0]

    made = learner(reward=[fine, short], advantage_estimator=decoupled, reward_weights=(1.0, 0.5))
    done = (completion([7, 8, 9]), completion([7], 1))
    group = Group(prompt=prompt("a"), completions=done)
    step = made.assign_advantages(made.batch(made.reward(Step(index=1, groups=[group]))))
    (x,) = seen
    assert list(x.table) == ["fine", "short"] and x.reward_weights == {"fine": 1.0, "short": 0.5}
    assert x.table["fine"].tolist() == [1.0, 0.0] and x.table["short"].dtype == torch.float64
    assert x.table["short"].isnan().tolist() == [True, False] and x.lengths.tolist() == [3, 1]
    want = grpo_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0])) - 0.01 * torch.tensor([3.0, 1.0])
    torch.testing.assert_close(step.batch.advantages, want[[0, 0, 0, 1]])


def test_a_stage_changes_neither_its_step_nor_the_learner():
    made = learner()
    encode = made.cluster.encoder()
    first = Step(index=1, prompts=[encode(row, i) for i, row in enumerate(rows(2))])
    sampled = made.sample(first)
    before = dict(vars(made))
    scored = made.assign_advantages(made.score(made.batch(made.reward(sampled))))
    assert not first.has("groups") and not sampled.has("batch") and "reward" not in sampled.metrics
    assert sampled.versions == (0,) and scored.versions == (0,) and "advantage/abs_mean" in scored.metrics
    (mini,) = made.minibatches(scored)
    assert "grad_norm" in made.update(scored, mini).metrics and "grad_norm" not in scored.metrics
    assert vars(made) == before
    with pytest.raises(DataError, match="step 1 has no batch yet; the stage `batch` writes it"):
        made.score(first)
    with pytest.raises(DataError, match="step 1 has no rewards yet; the stage `reward` writes it"):
        made.batch(sampled)


def test_only_the_first_update_of_fresh_tokens_is_on_policy():
    made = learner(cluster(mini_batch_size=1, lr=1e-2))
    trainer, encode = made.cluster.actor_trainer, made.cluster.encoder()
    differs = "sampling/sampling_logp_difference"  # of sampler and trainer, on policy alone: later it is the update's
    step = made.sample(Step(index=1, prompts=[encode(row, i) for i, row in enumerate(rows(2))]))
    step = made.assign_advantages(made.batch(made.reward(step)))
    first, second = made.minibatches(step)
    seen = [f"{differs}/max" in made.update(step, first).metrics]
    assert trainer.updated_since_sync and not trainer.is_on_policy(second)
    seen.append(f"{differs}/max" in made.update(step, second).metrics)
    made.cluster.sync_weights()
    assert not trainer.updated_since_sync and trainer.stale_versions(step.batch) == [0]
    made.update(step, first)  # the weights have a version of their own now, and these tokens are of the one before
    seen.append(f"{differs}/max" in made.update(step, first).metrics)
    assert seen == [True, False, False]
    weighted = trainer.add_loss_weights(first)
    assert differs in made.cluster.actor.forward_backward(weighted, made.loss, entropy=True)  # the same loss, the same
