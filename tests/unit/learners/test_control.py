import functools

import pytest
import torch
from helpers import cluster, length_reward, rows, tiny_model

from whet.config import DataConfig, GRPOConfig
from whet.errors import EngineError
from whet.learners.grpo import GRPOLearner
from whet.learners.step import Step
from whet.ops import group_relative, leave_one_out
from whet.rollout.base import EngineCaps
from whet.rollout.hf import HFEngine


def learner(c=None, **algo):
    """A learner of tiny models with a reference; `algo` are fields of GRPOConfig."""
    c = cluster(reference=tiny_model(1), max_steps=2) if c is None else c
    config = GRPOConfig(**{"num_generations": 4, "beta": 0.1, **algo})
    return GRPOLearner(c, config, length_reward, data=DataConfig(batch_size=4, shuffle=False))


def assigned(made):
    """The batch of a first step, up to its advantages."""
    encode = made.cluster.encoder()
    prompts = [encode(row, i) for i, row in enumerate(rows(4))]
    return made.assign_advantages(
        made.score(made.batch(made.reward(made.sample(Step(index=1, prompts=prompts)))))
    ).batch


# ---- where the KL acts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_kl_in_the_reward_is_paid_before_the_estimator(estimator):
    batch = assigned(learner(kl_type="reward", kl_loss_mode="kl", advantage_estimator=estimator))
    paid = -0.1 * (batch.old_logprobs - batch.ref_logprobs).double()
    torch.testing.assert_close(batch.token_rewards.double(), paid, atol=1e-6, rtol=0)
    total = batch.rewards + torch.zeros(16, dtype=torch.float64).index_add(0, batch.sequence, paid)
    known = {"grpo": group_relative, "rloo": leave_one_out}[estimator](total, batch.group_of)
    torch.testing.assert_close(batch.advantages, known[batch.sequence], atol=1e-5, rtol=0)


def test_kl_in_the_advantage_is_taken_after_the_estimator():
    batch = assigned(learner(kl_type="advantage", kl_loss_mode="mse_kl"))
    plain = group_relative(batch.rewards, batch.group_of)[batch.sequence]
    paid = 0.1 * 0.5 * (batch.old_logprobs - batch.ref_logprobs).square()
    torch.testing.assert_close(batch.advantages, plain - paid, atol=1e-6, rtol=0)
    assert batch.token_rewards is None


@pytest.mark.parametrize("kl_type", ["reward", "advantage"])
def test_kl_outside_the_loss_is_no_term_of_it_and_is_logged(kl_type):
    row = learner(kl_type=kl_type, kl_loss_mode="kl").train(rows(4)).rows[0]
    assert row["loss"] == pytest.approx(row["reduced_pg_loss"], abs=1e-7)
    assert row["kl"] != 0.0 and row["kl_coef"] == 0.1
    assert row["rewards/reward_kl_penalty"] != 0.0


def test_kl_outside_the_loss_is_of_the_policy_that_sampled():
    # one update follows each rollout: the loss needs no old logprobs, the KL does
    batch = assigned(learner(kl_type="reward"))
    assert torch.equal(batch.old_logprobs, batch.sampler_logprobs)
    batch = assigned(learner(kl_type="reward", use_rollout_logps=False))
    assert not torch.equal(batch.old_logprobs, batch.sampler_logprobs)
    torch.testing.assert_close(batch.old_logprobs, batch.sampler_logprobs, atol=1e-4, rtol=0)
    assert assigned(learner()).old_logprobs is None


class Silent(HFEngine):
    """An engine that does not say how likely its tokens were."""

    caps = EngineCaps(logprobs=False, shared_weights=True)


def test_a_silent_engine_is_refused_with_the_way_out():
    silent = functools.partial(cluster, reference=tiny_model(1), engine=Silent)
    with pytest.raises(EngineError, match=r"kl_type='reward' .*reports no logprobs; set use_rollout_logps=False"):
        learner(silent(), kl_type="reward").train(rows(4))
    assert learner(silent(), kl_type="reward", use_rollout_logps=False).train(rows(4)).step == 1
