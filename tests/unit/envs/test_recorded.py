"""Recorded answers: a run whose environment never repeats itself is resumed and repeated to the bit."""

import json
import os
import random
from types import SimpleNamespace

import agent_runs
import environment_runs
import numpy as np
import pytest
from helpers import rows, same, weights_of

from whet.envs.recorded import DivergedError, RecordedAnswers, Tape
from whet.envs.tools import ToolCounts
from whet.errors import RewardError
from whet.types import Prompt

CREATED = []


class Weather:
    """Says something else each time; nothing of it depends on a seed."""

    draw = random.SystemRandom()

    def __init__(self):
        CREATED.append(self)

    def reset(self, prompt, **columns):
        return f" [{self.draw.randrange(100)}]"

    def look(self, where: str) -> int:
        """Looks.

        Args:
            where: to look.
        """
        return self.draw.randrange(1000)

    def step(self, message):
        self.done = self.draw.random() < 0.2
        return str(self.draw.randrange(1000))

    def get_turn_reward(self):
        return None if self.draw.random() < 0.3 else self.draw.random()

    def get_reward(self):
        return self.draw.random()


def asks(messages):
    """The same as a function."""
    CREATED.append(messages)
    return [{"role": "user", "content": str(random.SystemRandom().randrange(1000))}]


def agent(base_url, api_key, row):
    """The same as an agent: it asks on or begins again, sometimes two questions at once or one that is refused."""
    CREATED.append(row)
    draw, messages = random.SystemRandom(), [{"role": "user", "content": row["prompt"]}]
    for _ in range(draw.randrange(1, 4)):
        messages += [agent_runs.ask(base_url, api_key, messages, max_tokens=draw.randrange(1, 6))]
        messages += [{"role": "user", "content": str(draw.randrange(1000))}]
    if draw.random() < 0.5:
        agent_runs.refused(lambda: agent_runs.post(base_url, api_key, messages=messages, n=0))
    agent_runs.post(base_url, api_key, messages=[*messages[2:]], n=2)
    if draw.random() < 0.3:
        agent_runs.ask(base_url, api_key, [{"role": "user", "content": "x" * 2000}])  # no room: it raises
    return np.float32(draw.random()) if draw.random() < 0.5 else None


def train(env, tmp_path, name, *, parts=(2,), answers="answers", evaluates=True):
    data = rows(8, answer=["1"] * 8)
    reward = lambda completions, **_: [float(len(str(c)) % 7) for c in completions]
    learner = agent_runs.learner if env is agent else environment_runs.learner
    options = {"answers_dir": str(tmp_path / answers)} if answers else {}
    CREATED.clear()
    for last in parts:
        made = learner(
            env,
            reward=reward if env is asks else None,
            rollout=options,
            max_steps=last,
            run_dir=str(tmp_path / name),
            checkpointing_options={"save_interval_steps": 1},
            **({"eval_every_n_steps": 2} if evaluates else {}),
            **({"resume": "latest"} if last != parts[0] else {}),
        )
        run = made.train(data, data[:2] if evaluates else None)
        made.close()
    return weights_of(made.cluster.actor.module), {k: v for k, v in run.rows[-1].items() if "time" not in k}


@pytest.mark.parametrize("env", [Weather, asks, agent])
@pytest.mark.full
def test_a_recorded_run_is_resumed_and_repeated_to_the_bit_without_the_environment(env, tmp_path):
    whole, row = train(env, tmp_path, "whole")
    assert CREATED and not same(whole, train(env, tmp_path, "other", answers="elsewhere")[0])
    again, repeated = train(env, tmp_path, "again")
    assert same(whole, again) and CREATED == []
    parts, _ = train(env, tmp_path, "parts", parts=(1, 2))  # it also evaluates after step 1
    assert same(whole, parts)
    for name in ("reward/mean", "turns/mean", "tools/call_frequency"):
        assert row.get(name) == repeated.get(name)


def test_an_episode_that_goes_another_way_asks_the_environment_and_is_recorded_anew(tmp_path):
    train(asks, tmp_path, "first", parts=(1,), evaluates=False)
    (file,) = (tmp_path / "answers").glob("*-000001-*.jsonl")
    lines = file.read_text().strip().splitlines()
    record = json.loads(lines[0])
    record["calls"][-1][1] = "another"
    file.write_text("\n".join([json.dumps(record), *lines[1:], '{"key": "torn']))  # it was killed
    train(asks, tmp_path, "second", parts=(1,), evaluates=False)
    assert len(CREATED) == len(record["calls"])
    added = json.loads(file.read_text().splitlines()[-1])
    assert added["key"] == record["key"] and added["calls"] != record["calls"]


def test_what_is_no_json_can_not_be_recorded(tmp_path):
    RecordedAnswers(tmp_path / "new")
    with pytest.raises(RewardError, match=r"step answered \{1, 2\}, which JSON can't hold"):
        Tape(replays=False).add("step", [1], {1, 2})


KEY, CONTEXT = (0, 1, 0, 0), np.array([5])


def at(tokens):
    return Prompt(tokens=np.array(tokens), source="", row=0)


def tape_of(answer):
    tape = Tape(replays=False)
    tape.add("step", CONTEXT, answer)
    tape.keep_counts(ToolCounts(calls=3, failures=1))
    return tape


def test_a_record_is_found_by_its_prompt_as_often_as_it_is_asked_for_and_the_newest_holds(tmp_path):
    RecordedAnswers(tmp_path).write(KEY, at([7]), tape_of("old"))
    (old,) = tmp_path.glob("*.jsonl")
    old = old.rename(tmp_path / "0-000001-0.jsonl")
    RecordedAnswers(tmp_path).write(KEY, at([7]), tape_of("new"))
    (new,) = {*tmp_path.glob("*.jsonl")} - {old}
    for first, last, answer in ((old, new, "new"), (new, old, "old")):
        os.utime(first, (1, 1)), os.utime(last, (2, 2))
        answers = RecordedAnswers(tmp_path)
        for _ in range(2):
            found, counts = answers.find(KEY, at([7])), ToolCounts()
            found.keep_counts(counts)
            assert found.next("step", CONTEXT) == answer and (counts.calls, counts.failures) == (3, 1)
        assert answers.find(KEY, at([8])) is None


@pytest.mark.parametrize("reason", ["stop", "error"])
def test_an_episode_that_goes_another_way_begins_anew_and_is_recorded_unless_it_fails(tmp_path, reason):
    answers, resets = RecordedAnswers(tmp_path), []
    answers.write(KEY, at([7]), tape_of("old"))
    episode = SimpleNamespace(rng_key=KEY, prompt=at([7]), reset=lambda: resets.append(1))

    def run_once(tape):
        if tape.replays:
            raise DivergedError
        tape.add("step", CONTEXT, "new")
        return [SimpleNamespace(finish_reason=reason)]
        yield

    with pytest.raises(StopIteration):
        next(answers.replay_or_run(episode, run_once))
    found = RecordedAnswers(tmp_path).find(KEY, at([7])).next("step", CONTEXT)
    assert resets == [1] and found == ("old" if reason == "error" else "new")
