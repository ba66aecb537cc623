"""`whet eval` of an environment: the episodes and rewards of a run's own evaluation, kept and continued."""

import functools
import json

import agent_runs
import pandas
import pytest
from chat_templates import TOOLS
from environment_runs import WORLD, learner
from helpers import rows, tiny_model

from whet import evaluate
from whet.data.tokenizer import byte_tokenizer
from whet.errors import ConfigError
from whet.evaluation import evaluator

DATA = rows(3, answer=["1", "22", "333"])
LIMITS = {"max_turns": 3, "max_prompt_length": 600, "max_episode_tokens": 700, "max_tokens_to_generate": 6}
SHOWN = "{{ m.content if loop.last or m.role != 'assistant' else '-' }}"
REWRITES = TOOLS.replace("{{ m.content }}{% for c", SHOWN + "{% for c")


@pytest.fixture
def world(tmp_path):
    (tmp_path / "world.py").write_text(WORLD)
    return f"{tmp_path}/world.py:World"


def measure(world, reward=None, template=TOOLS, generations=1, temperature=0.0, **keys):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    rollout = {"env_path": world, "temperature": temperature, "num_generations_eval": generations, **LIMITS}
    keys |= {"data.apply_chat_template": True, "data.batch_size": 2}
    model = tiny_model(max_position_embeddings=2048)
    return evaluate(model, DATA, reward, tokenizer=tokenizer, rollout=rollout, **keys)


def kept(folder, glob):
    table = pandas.concat(pandas.read_parquet(p) for p in sorted((folder / "completions").glob(glob)))
    return table.drop(columns=["step", "seconds", "reward"]).reset_index(drop=True)


def test_its_episodes_and_rewards_are_those_of_a_runs_evaluation(world, tmp_path):
    folder = tmp_path / "run"
    training = {"eval_every_n_steps": 1, "max_steps": 1, "run_dir": str(folder)}
    made = learner(world, rollout={"eval": {"temperature": 0.0}}, **training)
    made.train(DATA, DATA)
    result = measure(world, out=str(tmp_path / "e"))
    ours, runs = kept(tmp_path / "e", "eval-*"), kept(folder, "eval-000000*")
    same = ["row", "generation", "completion", "reward/environment", "finish_reason", "info"]
    assert ours[same].to_dict() == runs[same].to_dict()
    assert result["rewards/environment"].value == pytest.approx(runs["reward/environment"].mean())
    assert max(json.loads(info)["turns"] for info in ours["info"]) > 1


@pytest.mark.parametrize("template", [TOOLS, REWRITES], ids=["appends", "forks"])
def test_a_continued_evaluation_samples_nothing_again_and_keeps_the_rewards_of_episodes(
    world, template, tmp_path, monkeypatch
):
    call = functools.partial(measure, world, template=template, generations=2, temperature=1.0, out=str(tmp_path / "e"))
    first = call()
    before = kept(tmp_path / "e", "*")
    assert (len(before) > 6) == (template == REWRITES)
    assert first["tokens"].value == pytest.approx(before.tokens.map(len).sum() / 6)  # of all forks of an episode
    monkeypatch.setattr(evaluator.Sampler, "sample", None)
    assert str(call(resume=True)) == str(first)
    told = call(reward=lambda completions, **_: [float(len(c)) for c in completions], resume=True)
    assert told["rewards/environment"].value == first["rewards/environment"].value
    assert told["reward"].value > first["reward"].value
    pandas.testing.assert_frame_equal(kept(tmp_path / "e", "*")[before.columns], before)


def test_an_agent_s_episodes_are_those_of_a_runs_evaluation(tmp_path):
    folder = tmp_path / "run"
    training = {"eval_every_n_steps": 1, "max_steps": 1, "run_dir": str(folder)}
    made = agent_runs.learner(agent_runs.two_turns, rollout={"eval": {"temperature": 0.0}}, **training)
    made.train(DATA, DATA)
    sizes = {"max_prompt_length": 100, "max_tokens_to_generate": 6, "max_episode_tokens": 400, "temperature": 0.0}
    rollout = {"agent": agent_runs.two_turns, **sizes}
    model, tokenizer = tiny_model(max_position_embeddings=512), byte_tokenizer()
    keys = {"data.apply_chat_template": True, "out": str(tmp_path / "e")}
    result = evaluate(model, DATA, None, tokenizer=tokenizer, rollout=rollout, **keys)
    ours, runs = kept(tmp_path / "e", "eval-*"), kept(folder, "eval-000000*")
    same = ["row", "generation", "completion", "reward/agent", "finish_reason", "info"]
    assert ours[same].to_dict() == runs[same].to_dict()
    assert result["rewards/agent"].value == pytest.approx(runs["reward/agent"].mean())
    assert {json.loads(info)["turns"] for info in ours["info"]} == {2}


def test_an_environment_without_a_reward_needs_a_function(world, tmp_path):
    text = WORLD.replace("get_reward", "_unused")
    (tmp_path / "world.py").write_text(text)
    with pytest.raises(ConfigError, match="needs reward"):
        measure(world)
