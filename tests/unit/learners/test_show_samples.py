"""trainer.show_samples: one prompt of a step with its best and its worst completion; what the progress line shows."""

import dataclasses
import logging

from helpers import cluster, completion, length_reward, prompt, rows

from whet.config import DataConfig, GRPOConfig
from whet.evaluation.sample import MAX_CHARACTERS, describe_sample
from whet.learners.grpo import GRPOLearner
from whet.rewards.manager import RewardManager
from whet.types import Group


def rewarded(rewards, texts, sources=("2+2=",), ends=None):
    """Groups of completions with these rewards and texts, two each."""
    groups, flat = [], iter(ends or ["stop"] * len(rewards))
    for row, source in enumerate(sources):
        done = tuple(completion([row + 1, i], i, finish=next(flat)) for i in range(2))
        groups.append(Group(prompt=dataclasses.replace(prompt("p", row), source=source), completions=done))
    pairs = [list(texts[i : i + 2]) for i in range(0, len(texts), 2)]
    return RewardManager(lambda completions: list(rewards))(groups, pairs)


def test_a_prompt_with_its_best_and_worst_completion():
    found = rewarded([0.0, 1.0], ["5", "4"], ends=["length", "stop"])
    assert describe_sample(20, found).split("\n") == [
        "sample of step 20, row 0: 2+2=",
        "  best (reward 1, 2 tokens): 4",
        "  worst (reward 0, 2 tokens, truncated): 5",
    ]


def test_the_prompt_is_another_each_time_and_one_whose_rewards_differ_where_there_is_one():
    texts, sources = ["a", "b", "c", "d", "e", "f"], ("x", "y", "z")
    found = rewarded([1.0, 1.0, 0.5, None, 0.0, 2.0], texts, sources)
    assert {describe_sample(step, found).split("\n")[0][-1] for step in range(3)} == {"z"}
    found = rewarded([1.0, 0.0, 1.0, 0.0, 0.0, 2.0], texts, sources)
    assert [describe_sample(step, found).split("\n")[0][-1] for step in range(3)] == ["x", "y", "z"]
    alike = describe_sample(1, rewarded([1.0, 1.0], ["a", "b"]))
    assert alike.split("\n")[1:] == ["  one of 2, no reward better than another (reward 1, 2 tokens): a"]
    assert "no reward, 2 tokens" in describe_sample(1, rewarded([None, None], ["a", "b"]))


def test_messages_lines_and_control_characters_are_readable():
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
    answers = [[{"role": "assistant", "content": text}] for text in ("a\n\x1b[2J" + "b" * 2 * MAX_CHARACTERS, "c")]
    shown = describe_sample(1, rewarded([1.0, 0.0], answers, [chat]))
    asked, best = "sample of step 1, row 0: system: Add.\n    user: 1+1", "  best (reward 1, 2 tokens): a\n    ␛[2Jb"
    assert shown.startswith(f"{asked}\n{best}")
    assert "characters] bbb" in shown and len(shown) < 2 * MAX_CHARACTERS and shown.endswith("): c")


def test_a_run_shows_samples_every_n_steps_and_its_lengths_in_the_progress_line(caplog, capsys):
    caplog.set_level(logging.INFO, "whet")
    made = cluster(engine="mock", max_steps=4, show_samples=2, pbar_description="Training", reference=None)
    learner = GRPOLearner(made, GRPOConfig(num_generations=2, beta=0.0), length_reward, data=DataConfig(batch_size=2))
    run = learner.train(rows(8))
    assert [m[:16] for m in caplog.messages if m.startswith("sample of")] == ["sample of step 2", "sample of step 4"]
    row = {**run.rows[-1], "kl": 0.00123}
    truncated = f"{row['completions/clipped_ratio']:.0%}"
    assert run.task.progress_fields(row) == {
        "len": f"{row['completions/mean_length']:.0f}",
        "truncated": truncated,
        "kl": "0.0012",
    }
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("Training 4/4  reward ") and line.endswith(" left")
    assert f"truncated {truncated}" in line and "kl" not in line
