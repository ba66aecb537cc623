"""Dynamic sampling: which groups a step keeps, where the others come from, and what is counted."""

import logging

import numpy as np
import pytest
import torch
from helpers import cluster, completion, length_reward, rows, same, weights_of

from whet.config import DataConfig, GRPOConfig
from whet.errors import ConfigError
from whet.learners.dynamic_sampling import filter_groups
from whet.learners.grpo import GRPOLearner
from whet.rewards.manager import RewardManager
from whet.types import Group


def of_parity(prompts, completion_ids, **_):
    """Spread in the groups of odd rows; in those of even ones one reward, and one completion without any."""
    seen = {}
    given = []
    for prompt in prompts:
        seen[prompt] = seen.get(prompt, -1) + 1
        given.append(float(seen[prompt]) if int(prompt[:-3]) % 2 else None if seen[prompt] else 1.0)
    return given


def learner(made=None, reward=of_parity, *, data=None, **algo):
    config = {"num_generations": 2, "beta": 0.0, "dynamic_sampling": True, **algo}
    data = DataConfig(**{"batch_size": 2, "shuffle": False, **(data or {})})
    made = cluster(engine="mock", max_steps=1) if made is None else made
    return GRPOLearner(made, GRPOConfig(**config), reward, data=data)


def kept(made, monkeypatch):
    """The rows of the groups of each update."""
    seen, update = [], made.update

    def noted(step, mini):
        seen.append([g.prompt.row for g in step.rewards.groups])
        assert mini.num_groups == len(step.groups) == len(step.prompts)
        return update(step, mini)

    monkeypatch.setattr(made, "update", noted)
    return seen


def counts(row):
    return {name.split("/")[1]: row[name] for name in row if name.startswith("dynamic_sampling/")}


def test_a_step_is_filled_from_further_batches_in_their_order(monkeypatch):
    made = learner(cluster(engine="mock", max_steps=2))
    seen, versions, sample, batch = kept(made, monkeypatch), [], made.sample, made.batch
    monkeypatch.setattr(made, "sample", lambda step: sample(step).replace(versions=(step.index, 9 + step.first)))
    monkeypatch.setattr(made, "batch", lambda step: batch(versions.append(step.versions) or step))
    run = made.train(rows(10))
    assert seen == [[1, 3], [5, 7]]  # each from two batches of two prompts
    assert versions == [(1, 9, 11), (2, 9, 11)]  # of all that was sampled for it
    found = counts(run.rows[0])
    assert found.pop("tokens_left_out") > 0
    assert found == {
        "batches": 2.0,
        "groups_left_out": 2.0,
        "completions_left_out": 4.0,
        "reward": pytest.approx(2 / 3),
    }
    assert run.rows[0]["reward"] == run.rows[0]["rewards/of_parity"] == 0.5  # of what is trained on
    assert run.rows[0]["completions/tokens"] == sum(len(c.tokens) for g in made_groups(made, run, 1) for c in g)


def test_what_is_left_over_of_the_last_batch_is_thrown_away(monkeypatch):
    spread = lambda prompts, **_: [float(i % 2) if int(p[:-3]) >= 2 else 1.0 for i, p in enumerate(prompts)]
    made = learner(reward=spread, data={"batch_size": 3})
    seen = kept(made, monkeypatch)
    made.train(rows(9))
    assert seen == [[2, 3, 4]]  # 5 teaches something too


def made_groups(made, run, step):
    """The completions of the kept groups of a step: those of the mock engine are always the same."""
    again = learner(cluster(engine="mock", max_steps=step))
    held = []
    again.after_step = lambda run, s: held.append(s) or GRPOLearner.after_step(again, run, s)
    again.train(rows(10))
    return [g.completions for g in held[-1].groups]


@pytest.mark.parametrize(
    ("count", "most", "want", "why"),
    [
        (10, 1, [1], "1 of 2 groups have different rewards (max_num_gen_batches=1)"),
        (4, 10, [1, 3], None),
        (2, 10, [1], "1 of 2 groups have different rewards (the data ended)"),
    ],
)
def test_a_step_that_can_not_be_filled_trains_on_what_there_is(count, most, want, why, monkeypatch, caplog):
    made = learner(cluster(engine="mock", max_steps=1, num_epochs=1), max_num_gen_batches=most)
    seen = kept(made, monkeypatch)
    with caplog.at_level(logging.WARNING, "whet"):
        made.train(rows(count))
    assert seen == [want]
    found = [r.getMessage() for r in caplog.records if "different rewards" in r.getMessage()]
    assert len(found) == (why is not None)
    if why:
        assert why in found[0]


@pytest.mark.parametrize("most", [1, 9])  # of the second: equal once they are clipped, as the advantages have it
def test_where_no_group_teaches_anything_the_step_keeps_its_first_and_changes_nothing(most, monkeypatch):
    reward = lambda completions, **_: [float(1 + i % most) for i in range(len(completions))]
    made = learner(reward=reward, max_num_gen_batches=2, reward_clip_range=(0.0, 1.0))
    seen, before = kept(made, monkeypatch), weights_of(made.cluster.actor.module)
    run = made.train(rows(8))
    assert seen == [[0, 1]] and counts(run.rows[0])["groups_left_out"] == 2
    assert same(before, weights_of(made.cluster.actor.module))


def test_what_teaches_is_a_spread_or_a_mean_between_the_bounds():
    groups = [Group(prompt=p, completions=(completion([5]), completion([6], 1))) for p in prompts(4)]
    given = iter([[1.0, 1.0, 0.0, 1.0, None, 1.0, None, None]])
    rewarded = RewardManager([lambda completions, **_: next(given)])(groups, [["a", "b"]] * 4)
    assert filter_groups(rewarded).tolist() == [False, True, False, False]
    assert filter_groups(rewarded, (0.0, 1.0)).tolist() == [False, True, False, False]
    assert filter_groups(rewarded, (0.5, 2.0)).tolist() == [True, False, True, False]  # no reward: never
    assert not filter_groups(rewarded, clip=(5.0, 6.0)).any()  # equal once they are clipped, as the advantages have it
    assert filter_groups(rewarded, clip=(-9.0, 9.0)).tolist() == filter_groups(rewarded).tolist()
    some = rewarded.select([1, 2])
    assert [g.prompt.row for g in some.groups] == [1, 2] and some.total.tolist()[:2] == [0.0, 1.0]
    assert np.isnan(some.total[2]) and some.inputs.trajectory_ids == ["1_0", "1_1", "2_0", "2_1"]
    assert some.metrics["rewards/lambda"].value == 2 / 3


def prompts(count):
    from helpers import prompt

    return [prompt([5, 6], row) for row in range(count)]


def test_further_batches_draw_numbers_of_their_own():
    asked = []

    class Noting(GRPOLearner):
        def rollout(self, prompts, *, step, mode, first=0):
            groups = super().rollout(prompts, step=step, mode=mode, first=first)
            asked.append((first, [c.tokens.tolist() for g in groups for c in g.completions]))
            return groups

    config = GRPOConfig(num_generations=2, beta=0.0, dynamic_sampling=True, max_num_gen_batches=3)
    data = DataConfig(batch_size=2, shuffle=False)
    made = Noting(cluster(max_steps=1), config, lambda completions, **_: [0.0] * len(completions), data=data)
    made.train([{"prompt": "1+1="}] * 8)
    assert [first for first, _ in asked] == [0, 2, 4]
    assert len({str(tokens) for _, tokens in asked}) == 3  # equal prompts, other draws


def test_a_resumed_run_draws_from_where_the_data_were(tmp_path):
    def train(name, steps, **more):
        folder = str(tmp_path / name)
        made = learner(
            cluster(max_steps=steps, num_epochs=9, run_dir=folder, **more), length_reward, data={"shuffle": True}
        )
        return made, made.train(rows(5))

    whole, run = train("whole", 4)
    train("parts", 2)
    parts, again = train("parts", 4, resume="latest", allow_config_change=True)
    assert same(weights_of(whole.cluster.actor.module), weights_of(parts.cluster.actor.module))
    timeless = [{k: v for k, v in row.items() if k.split("/")[0] not in ("time", "perf", "memory")} for row in run.rows]
    for row, other in zip(timeless, again.rows, strict=True):
        assert {k: other[k] for k in row} == row


@pytest.mark.parametrize(
    ("algo", "training", "says"),
    [
        ({}, {}, "set trainer.max_steps"),
        ({"dynamic_sampling": False, "group_reward_bounds": (0.0, 1.0)}, {}, "no effect without dynamic_sampling=True"),
        ({"group_reward_bounds": (1.0, 0.0)}, {"max_steps": 1}, r"low < high, got \(1.0, 0.0\)"),
    ],
)
def test_settings_that_can_not_work_are_refused(algo, training, says):
    with pytest.raises(ConfigError, match=says):
        learner(cluster(engine="mock", **training), **algo)


def test_a_rollout_that_has_no_place_for_the_first_prompt_is_refused():
    class Own(GRPOLearner):
        def rollout(self, prompts, *, step, mode):
            return []

    config = GRPOConfig(beta=0.0, dynamic_sampling=True)
    with pytest.raises(ConfigError, match=r"Own\.rollout does not take `first`"):
        Own(cluster(engine="mock", max_steps=1), config, of_parity)


def test_the_gradient_is_that_of_the_kept_groups_alone(monkeypatch):
    made = learner(cluster(max_steps=1), length_reward)
    steps, update = [], made.update
    monkeypatch.setattr(made, "update", lambda step, mini: steps.append((step, mini)) or update(step, mini))
    made.train(rows(8))
    ((step, batch),) = steps
    assert torch.equal(batch.group_of.unique(), torch.arange(2)) and np.isfinite(step.rewards.total).all()
    assert [len(np.unique(part)) for part in step.rewards.totals_by_group] == [2, 2]
