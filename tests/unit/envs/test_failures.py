"""Episodes that fail: whose failure it is, what follows, and what the others' advantages are, computed by hand."""

import errno
import functools
import math
import socket
import time
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from environment_runs import batch_of, learner, run_conversation
from helpers import completion, prompt, rows, same, weights_of

from whet.config import RolloutConfig
from whet.envs import failures
from whet.envs.failures import EpisodeFailures, classify
from whet.envs.tools import Tools
from whet.errors import ConfigError, InfrastructureError, RewardError
from whet.learners.ppo import PPOLearner
from whet.metrics import flat
from whet.rollout.external_calls import CallTimeoutError
from whet.types import Group

CALL = '<tool_call>\n{"name": "fetch", "arguments": {"place": "%s"}}\n</tool_call>'
mask = functools.partial(EpisodeFailures, on_infrastructure="mask")


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(failures, "RETRY_WAIT_S", 0.0)


def caused(error, cause):
    error.__cause__ = cause
    return error


def raised_from_none(error, handled):
    error.__context__, error.__suppress_context__ = handled, True
    return error


@pytest.mark.parametrize(
    ("error", "want"),
    [
        (KeyError("x"), ("error", "environment")),
        (PermissionError(errno.EACCES, "no"), ("error", "environment")),
        (CallTimeoutError(), ("timed out", "environment")),
        (caused(RewardError("late"), CallTimeoutError()), ("timed out", "environment")),
        (InfrastructureError("gone"), ("error", "infrastructure")),
        (caused(RewardError("f raised"), ConnectionRefusedError()), ("error", "infrastructure")),
        (caused(ValueError("a client's own"), caused(RuntimeError(), socket.gaierror())), ("error", "infrastructure")),
        (TimeoutError("the client's own limit"), ("error", "infrastructure")),
        (OSError(errno.ENOSPC, "disk full"), ("error", "infrastructure")),
        (caused(InfrastructureError("late"), CallTimeoutError()), ("timed out", "infrastructure")),
        (raised_from_none(ValueError("the user's own"), ConnectionError()), ("error", "environment")),
    ],
)
def test_a_failure_is_the_environment_s_or_the_infrastructure_s(error, want):
    assert classify(error) == want


def test_an_error_in_the_handling_of_another_is_caused_by_it():
    def load():
        try:
            raise ConnectionResetError("the server is gone")
        except ConnectionResetError:
            return {}["x"]

    with pytest.raises(KeyError) as told:
        load()
    assert classify(told.value) == ("error", "infrastructure")


class Shop:
    """An environment that does what the model tells it."""

    log: ClassVar[list[str]] = []

    def reset(self, **row):
        self.log.append("reset")

    def fetch(self, place: str) -> str:
        """Fetches.

        Args:
            place: where.
        """
        if place == "gone":
            raise InfrastructureError("the shop's server is gone")
        if place == "late":
            time.sleep(0.3)
        raise ConnectionError(f"no way to {place}")

    def step(self, message):
        name = message["content"]
        if name == "once" and "failed" not in self.log:
            self.log.append("failed")
            raise ConnectionResetError("try again")
        if name == "sleep":
            time.sleep(0.3)
        if name in ("lost", "wrong"):
            raise {"lost": ConnectionError, "wrong": ValueError}[name](name)
        return None if name == "done" else "go on"

    def get_reward(self):
        return 1.0


def record(said, **options):
    """The record of an episode, and its reward."""
    Shop.log = []
    episode, made, _ = run_conversation(Shop, said, failures=mask("none"), **options)
    info = {name: made[-1].info.get(name) for name in ("status", "failure", "turns", "tool_calls")}
    assert made[-1].has_failed == (info["failure"] in ("environment", "infrastructure"))
    return (*info.values(), episode.rewards.get("environment"))


@pytest.mark.parametrize(
    ("said", "options", "want"),
    [
        (["a", "done"], {}, ("finished", None, 2, 0, 1.0)),
        (["a", "b"], {"turns": 2}, ("out of turns", "model", 2, 0, 1.0)),
        (["a", "done"], {"turns": 2}, ("finished", None, 2, 0, 1.0)),
        (["a" * 40, "done"], {"max_tokens": 60}, ("out of context", "model", 1, 0, 1.0)),
        (["a", "sleep"], {"timeout_s": 0.05}, ("timed out", "environment", 2, 0, None)),
        (["a", "sleep"], {"episode_timeout_s": 0.2}, ("timed out", "environment", 2, 0, None)),
        (["a", "done"], {"episode_timeout_s": 0.1, "slow_s": 0.15}, ("timed out", "infrastructure", 1, 0, None)),
        ([CALL % "work", "wrong"], {}, ("error", "environment", 2, 1, None)),
        ([CALL % "work", "lost"], {}, ("error", "infrastructure", 2, 1, None)),
        ([CALL % "gone"], {}, ("error", "infrastructure", 1, 0, None)),
        ([CALL % "late", "done"], {"tool_timeout_s": 0.1}, ("finished", None, 2, 1, 1.0)),  # told to the model
        (["a"], {"ends": "abort"}, ("error", "infrastructure", 1, 0, None)),
    ],
)
def test_an_episode_ends_with_a_record(said, options, want):
    assert record(said, **options) == want


def test_an_episode_is_run_again_with_the_same_draws():
    Shop.log = []
    retry = EpisodeFailures(max_retries=2)
    episode, (c,), contexts = run_conversation(Shop, ["a", "once", "a", "once", "done"], failures=retry)
    assert contexts[:2] == contexts[2:4] and episode.attempts == 2 and Shop.log == ["reset", "failed", "reset"]
    assert c.info["attempts"] == 2 and c.info["status"] == "finished" and c.info["turns"] == 3
    assert episode._draws == 3 * 400 and not retry.count and "retry" not in c.info
    episode, (c,), contexts = run_conversation(Shop, ["lost"] * 9, failures=EpisodeFailures("none", max_retries=3))
    assert len(contexts) == 4 and c.info["attempts"] == 4 and c.has_failed and not episode.rewards
    with pytest.raises(RewardError, match="step of Shop raised ValueError: wrong"):  # on_error decides, at once
        run_conversation(Shop, ["wrong"] * 9, failures=EpisodeFailures())


def test_each_attempt_waits_twice_as_long_as_the_one_before_and_begins_without_its_rewards(monkeypatch):
    monkeypatch.setattr(failures, "RETRY_WAIT_S", 0.5)
    retries, episode, begun = EpisodeFailures(max_retries=2), failures._an_episode(), []

    def attempt():
        begun.append(dict(episode.rewards))
        episode.rewards["environment"] = 1.0
        yield from ()
        return retries.add(caused(RewardError("lost"), ConnectionError()), episode)

    waits = [call.function.args for call in retries.run_with_retries(episode, attempt)]
    assert waits == [(0.5,), (1.0,)] and begun == [{}, {}, {}]


def test_a_step_ends_the_run_above_the_share_of_failed_episodes_and_not_at_it():
    def failed(*lost):
        info = lambda is_lost: {"failure": "infrastructure"} if is_lost else {}
        made = [replace(completion([5], i), info=info(is_lost)) for i, is_lost in enumerate(lost)]
        return [Group(prompt=prompt([5]), completions=tuple(made))]

    EpisodeFailures(max_share=0.25).check_share(failed(True, False, False, False))
    with pytest.raises(RewardError, match="2 of 4 episodes of the step failed by their infrastructure"):
        EpisodeFailures(max_share=0.25).check_share(failed(True, False, True, False))


# ---- in training -----------------------------------------------------------------------------------------------------

WORLD = """
from collections import Counter
from whet.errors import InfrastructureError
attempts = Counter()

class World:
    fails = "{fails}"
    def reset(self, prompt, answer, **row):
        self.key = None

    def step(self, message):
        # which episodes fail depends on what the model says, so that it is the same in each run
        said, first = message["content"], self.key is None
        self.key = self.key or said
        self.size = sum(map(ord, said)) % 7
        attempts[self.key] += first
        if self.fails == "some" and sum(map(ord, self.key)) % 4 == 0:
            raise InfrastructureError("gone")
        if self.fails == "once" and not first and attempts[self.key] == 1:
            raise InfrastructureError("gone for a moment")
        return "and?"

    def get_reward(self):
        return float(self.size)
"""


@pytest.fixture
def world(tmp_path):
    def write(fails, name="env.py"):
        (tmp_path / name).write_text(WORLD.replace("{fails}", fails))
        return f"{tmp_path / name}:World"

    return write


def test_masked_episodes_count_in_no_baseline_and_no_denominator(world):
    """GRPO without a deviation: A = r − the mean of the others' that are known; weights 1/(n·U) without the failed."""
    some = {"on_infrastructure_failure": "mask", "max_turns": 2, "max_failed_share": 1.0}
    made = learner(world("some"), rollout=some, algo={"scale_rewards": "none", "num_generations": 6})
    step, _ = batch_of(made, 3)
    done = [c for g in step.groups for c in g.completions]
    failed = np.array([c.info["status"] == "error" for c in done])
    assert 0 < failed.sum() < len(failed) and np.isnan(step.rewards.total).tolist() == failed.tolist()
    scored = made.assign_advantages(made.score(made.batch(step)))
    batch = scored.batch
    units, advantages, weights = int((~failed).sum()), [], []
    for group, totals in zip(step.groups, step.rewards.total.reshape(3, 6), strict=True):
        known = totals[~np.isnan(totals)]
        for c, total in zip(group.completions, totals, strict=True):
            sampled = int((c.versions >= 0).sum())
            lost = math.isnan(total)
            for version in c.versions:
                trained = version >= 0 and not lost
                advantages.append(total - known.mean() if trained else 0.0)
                weights.append(1 / (sampled * units) if trained else 0.0)
    trained = torch.tensor(weights) > 0
    assert torch.equal(batch.mask, trained)
    torch.testing.assert_close(batch.advantages[trained], torch.tensor(advantages).float()[trained])
    weighted = made.cluster.actor_trainer.add_loss_weights(batch).weights
    torch.testing.assert_close(weighted.double(), torch.tensor(weights).double())
    row = flat(scored.metrics)
    assert row["turns/failed"] == row["turns/failed_infrastructure"] == failed.sum() and row["turns/retried"] == 0


@pytest.mark.parametrize("kind", [None, PPOLearner])
def test_a_run_whose_episodes_are_run_again_is_the_one_without_failures(world, kind):
    weights = []
    for fails in ("once", "never"):
        options = {} if kind is None else {"kind": kind}
        made = learner(world(fails, f"{fails}.py"), rollout={"max_turns": 2}, max_steps=1, **options)
        run = made.train(rows(4, answer=["1"] * 4))
        weights.append(weights_of(made.cluster.actor.module))
        assert (run.rows[0]["turns/retried"] > 0) == (fails == "once") and run.rows[0]["turns/failed"] == 0
    assert same(*weights)


def test_groups_with_failed_episodes_are_replaced(world):
    refill = {"on_infrastructure_failure": "refill", "max_turns": 2, "max_failed_share": 1.0}
    algo = {"scale_rewards": "none", "num_generations": 2}
    made = learner(world("some"), rollout=refill, algo=algo, max_steps=1)
    steps, update = [], made.update
    made.update = lambda step, mini: steps.append(step) or update(step, mini)
    run = made.train(rows(16, answer=["1"] * 16))
    (step,) = steps
    assert len(step.groups) == 2 and not any(c.has_failed for g in step.groups for c in g.completions)
    assert run.rows[0]["dynamic_sampling/groups_left_out"] > 0 and run.rows[0]["dynamic_sampling/batches"] > 1
    assert run.rows[0]["turns/replaced"] == made.failures.count > 0
    totals = step.rewards.total.reshape(2, 2)
    want = torch.tensor(totals - totals.mean(1, keepdims=True)).flatten().float()
    at = step.batch.mask
    torch.testing.assert_close(step.batch.advantages[at], want.index_select(0, step.batch.trajectory)[at])
    with pytest.raises(ConfigError, match="on_infrastructure_failure=refill takes as many prompts"):
        learner(world("some"), rollout=refill, max_steps=None)


def test_a_run_ends_above_the_share_and_keeps_its_finished_steps(world, tmp_path):
    fails = 'self.fails == "some" and sum(map(ord, self.key)) % 4 == 0'
    text = WORLD.replace(fails, "sum(attempts.values()) > 8")
    (tmp_path / "ends.py").write_text(text)
    limits = {"max_failed_share": 0.3, "max_retries": 1, "max_turns": 2}
    made = learner(f"{tmp_path}/ends.py:World", rollout=limits, max_steps=9, run_dir=str(tmp_path / "run"))
    with pytest.raises(RewardError) as told:
        made.train(rows(8, answer=["1"] * 8))
    words = "6 of 6 episodes of the step failed by their infrastructure, more than rollout.max_failed_share=0.3; the"
    assert words in str(told.value)
    assert "step of World raised InfrastructureError: gone" in str(told.value)
    assert (tmp_path / "run" / "checkpoints" / "step-000001").is_dir()


# ---- time limits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_timeout_s": 60.0}, "tool_timeout_s=60.0 is not below turn_timeout_s=60.0"),
        ({"turn_timeout_s": 700.0, "episode_timeout_s": 600.0}, "turn_timeout_s=700.0 is not below episode_timeout_s"),
        (
            {"turn_timeout_s": 3.0},
            "tool_timeout_s=30.0 (the default) is not below turn_timeout_s=3.0, so it would never",
        ),
        ({"turn_timeout_s": None, "episode_timeout_s": 20.0}, "(the default) is not below episode_timeout_s=20.0"),
        ({"turn_timeout_s": 0.0}, "turn_timeout_s must be positive"),
        ({"max_failed_share": 1.5}, "max_failed_share must lie in [0, 1], got 1.5"),
        ({"eval": {"max_retries": 3}}, "eval.max_retries belongs to the whole run"),
    ],
)
def test_time_limits_nest_and_settings_have_ranges(fields, words):
    with pytest.raises(ConfigError) as told:
        RolloutConfig(env_path="env.py:World", max_turns=2, **fields)
    assert words in str(told.value)


def test_an_episode_is_shorter_than_what_it_stands_on(tmp_path):
    (tmp_path / "env.py").write_text(WORLD.replace("{fails}", "").replace('fails = ""', "lifetime_s = 900"))
    RolloutConfig(env_path="env.py", max_turns=2, tool_timeout_s=99.0)  # interact has no tools
    for limit in (None, 900.0):
        with pytest.raises(ConfigError, match=r"World lives 900 s \(its lifetime_s\), and rollout\.epi"):
            learner(f"{tmp_path}/env.py:World", rollout={"episode_timeout_s": limit})
    made = learner(f"{tmp_path}/env.py:World", rollout={"episode_timeout_s": 600.0})
    assert made.environments["train"].environment.has_step


def test_tools_keep_their_schemas_with_other_limits():
    tools = Tools([Shop().fetch])
    assert tools.with_functions({}, tools.limits).schemas is tools.schemas
