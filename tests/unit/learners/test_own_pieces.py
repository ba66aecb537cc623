"""Functions of a user's own where a name could stand: what is called how, and what is said where that can't be."""

import pytest
import torch
from helpers import cluster, length_reward, rows

from whet.config import DataConfig, GRPOConfig
from whet.errors import ConfigError, DataError
from whet.learners.grpo import GRPOLearner


def learner(**algo):
    config = GRPOConfig(**{"beta": 0.0, **algo})
    return GRPOLearner(cluster(max_steps=1), config, length_reward, data=DataConfig(batch_size=2))


@pytest.mark.parametrize(
    ("algo", "says"),
    [
        ({"policy_loss_fn": lambda logprobs, old, advantages: logprobs}, r"policy loss lambda.*called as fn\(x\)"),
        ({"loss_masks": (lambda: 1,)}, r"loss mask lambda\(\).*fn\(x\)"),
        ({"sampler_is": lambda x, *, threshold: x}, r"sampler_is lambda.*keyword-only and have the name of a field"),
        ({"advantage_estimator": lambda a, b, c: a}, r"fn\(x\) or fn\(rewards, group_ids\)"),
    ],
)
def test_a_function_that_can_not_be_called_is_refused_before_the_first_step(algo, says):
    with pytest.raises(ConfigError, match=says):
        learner(**algo)


@pytest.mark.parametrize("estimator", [lambda x: x.returns, lambda rewards, group_ids, scale=2: rewards * scale])
def test_both_forms_of_an_estimator_and_arguments_with_defaults_are_called(estimator):
    assert learner(advantage_estimator=estimator).train(rows(2)).step == 1


def test_a_loss_without_gradient_is_said_and_not_torchs_error():
    made = learner(policy_loss_fn=lambda x: -x.advantages * x.logprobs.detach())
    with pytest.raises(DataError, match=r"the loss has no gradient: it must be computed from x\.logprobs"):
        made.train(rows(2))


def test_a_loss_without_gradient_may_stand_next_to_an_entropy_bonus():
    made = learner(policy_loss_fn=lambda x: torch.zeros_like(x.logprobs), entropy_coef=0.1)
    assert made.train(rows(2)).rows[0]["loss"] < 0
