"""Finished steps are not lost to an error in a later one, nor rewards to a Ctrl-C that their programs hear too."""

import json
import subprocess

import pytest
from helpers import cluster, length_reward, rows, same, weights_of

from whet.config import CheckpointingOptions, DataConfig, GRPOConfig
from whet.errors import CheckpointError, RewardError
from whet.learners.grpo import GRPOLearner
from whet.storage.checkpoint import read_state

SELDOM = CheckpointingOptions(save_interval_s=1e9)


def train(folder, *, reward=length_reward, count=6, hook=None, **training):
    c = cluster(run_dir=str(folder), **{"checkpointing_options": SELDOM, "max_steps": 3, **training})
    made = GRPOLearner(c, GRPOConfig(num_generations=2, beta=0.0), reward, data=DataConfig(batch_size=2))
    if hook is not None:
        hook(made)
    return made.train(rows(count), rows(1)), weights_of(c.actor.module)


def failing(call, error):
    """The usual reward; an error at its call of that number, evaluations included."""
    calls = []

    def reward(completions, **_):
        calls.append(1)
        if len(calls) == call:
            raise error
        return length_reward(completions)

    reward.__name__ = length_reward.__name__  # by which its metrics are known
    return reward


def numbers(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "memory/"))} for row in found]


def saved(folder):
    return sorted(p.name for p in (folder / "checkpoints").glob("step-*"))


def test_the_steps_before_an_error_are_saved_and_the_run_goes_on_as_if_there_had_been_none(tmp_path, caplog):
    _, weights = train(tmp_path / "whole")
    with pytest.raises(RewardError, match="mine"):
        train(tmp_path / "broken", reward=failing(4, ValueError("mine")))  # evaluation, then step 3
    assert saved(tmp_path / "broken") == ["step-000002"]
    assert "the 2 steps before the error are saved: " in caplog.text
    _, again = train(tmp_path / "broken", resume="latest")
    assert same(again, weights) and numbers(tmp_path / "broken") == numbers(tmp_path / "whole")


def test_an_error_after_an_update_of_its_step_saves_nothing(tmp_path):
    def hook(made):
        update, calls = made.update, []

        def broken(step, mini):
            calls.append(1)
            if len(calls) == 4:  # the second mini-batch of step 2
                raise ValueError("mine")
            return update(step, mini)

        made.update = broken

    with pytest.raises(ValueError, match="mine"):
        train(tmp_path, hook=hook, mini_batch_size=1)
    assert saved(tmp_path) == []


def test_an_error_right_after_a_checkpoint_writes_no_other(tmp_path):
    every_other = CheckpointingOptions(save_interval_steps=2)
    with pytest.raises(RewardError):
        train(tmp_path, reward=failing(4, ValueError()), checkpointing_options=every_other)
    state = read_state(tmp_path / "checkpoints" / "step-000002" / "run.pt")
    assert state["step"] == 2 and saved(tmp_path) == ["step-000002"]


def test_an_error_whose_steps_cannot_be_saved_is_still_the_error(tmp_path, monkeypatch, caplog):
    def hook(made):
        def full(*args, **kwargs):
            raise CheckpointError("no room")

        monkeypatch.setattr(made.cluster.checkpoints, "save", full)

    with pytest.raises(RewardError, match="mine"):
        train(tmp_path, reward=failing(3, ValueError("mine")), hook=hook)
    assert "the 1 steps before the error could not be saved: no room" in caplog.text


def test_a_stop_at_once_says_what_is_not_saved(tmp_path, caplog):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, reward=failing(4, KeyboardInterrupt()), reward_timeout_s=None)
    assert saved(tmp_path) == [] and "stopped at once: there is no checkpoint of step 2" in caplog.text


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_the_programs_of_a_reward_hear_no_ctrl_c(tmp_path, kind):
    def ran(completions):
        program = ["sh", "-c", "kill -INT $$; kill -HUP $$; echo 1"]
        return [float(subprocess.run(program, capture_output=True, text=True).stdout or 0) for _ in completions]

    async def later(completions, **_):
        return ran(completions)

    reward = later if kind == "async" else lambda completions, **_: ran(completions)
    run, _ = train(tmp_path, reward=reward, max_steps=1, count=2)
    assert run.rows[-1]["reward"] == 1.0


def test_the_checkpoints_of_another_run_are_not_taken_up_where_a_run_has_its_own(tmp_path):
    every = CheckpointingOptions(save_interval_steps=1)
    for name in "ab":
        train(tmp_path / name, checkpointing_options=every, checkpoint_root_directory=str(tmp_path / f"root-{name}"))
    before = (tmp_path / "b" / "metrics.jsonl").read_bytes()
    mixed = {"checkpoint_root_directory": str(tmp_path / "root-a"), "resume": "latest", "max_steps": 4}
    with pytest.raises(CheckpointError, match=r"belongs to another run, and .*b holds steps of its own"):
        train(tmp_path / "b", checkpointing_options=every, count=8, **mixed)
    assert (tmp_path / "b" / "metrics.jsonl").read_bytes() == before
