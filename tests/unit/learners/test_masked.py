import sys

import pytest

from tests.helpers import completion, prompt, tiny_model
from whet import ClusterConfig, GRPOConfig, GRPOLearner, RLCluster
from whet.learners.policy import sequences_with_signal
from whet.learners.step import Step
from whet.types import Group


def learner(**algo):
    cluster = RLCluster(actor=tiny_model(), tokenizer="byte", cluster_config=ClusterConfig())
    return GRPOLearner(cluster, GRPOConfig(beta=0.0, **algo), reward_fns=lambda completions: [1.0, 0.0])


def rewarded(made, group):
    return made.reward(Step(index=1, groups=[group]))


@pytest.mark.parametrize(("asked", "trained"), [(True, [True, True, False]), (False, [True] * 3)])
def test_truncated_completions_leave_the_mask_when_asked(asked, trained):
    group = Group(prompt=prompt("a"), completions=(completion([7, 256]), completion([8], 1, finish="length")))
    made = learner(mask_truncated_completions=asked)
    step = made.batch(rewarded(made, group))
    assert step.batch.mask.tolist() == trained
    assert step.rewards.total.tolist() == [1.0, 0.0]  # they still count in the baseline of their group


def test_a_loss_aggregation_may_be_a_reference(tmp_path, monkeypatch):
    source = "def ones(mask, unit_of, norm, num_units):\n    return mask.double()\n"
    (tmp_path / "weighting_of_mine.py").write_text(source)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    made = learner(loss_agg_mode="weighting_of_mine:ones")
    group = Group(prompt=prompt("a"), completions=(completion([7, 256]), completion([8], 1)))
    batch = made.assign_advantages(made.batch(rewarded(made, group))).batch
    assert made.cluster.actor_trainer.add_loss_weights(batch).weights.tolist() == [1.0, 1.0, 1.0]


def test_only_the_length_limit_truncates():
    group = Group(prompt=prompt("a"), completions=(completion([7], finish="error"), completion([8], 1, finish="abort")))
    made = learner(mask_truncated_completions=True)
    assert made.batch(rewarded(made, group)).batch.mask.tolist() == [True, True]


def test_a_completion_without_a_trained_token_has_no_signal():
    group = Group(prompt=prompt("a"), completions=(completion([7, 256]), completion([8], 1, finish="length")))
    made = learner(mask_truncated_completions=True)
    batch = made.assign_advantages(made.batch(rewarded(made, group))).batch
    assert batch.advantages[2] != 0 and sequences_with_signal(batch).tolist() == [0]
