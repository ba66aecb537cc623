"""The commands of `whet` on several processes write what one process writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import full, rows
from processes import free_port, needs_gloo, start, wait
from run_folders import assert_same_run, run_commands

from whet.cli import main

REWARD = """
def length(completions, **_):
    return [float(sum(map(ord, text)) % 7) for text in completions]
"""
COMMON = ["trainer.run_dir=run", "trainer.pbar_description=null", "trainer.max_segments_per_packed_row=4"]
GRPO = ["grpo", "model=model", "actor.dtype=float32", "data=rows.jsonl", "data.eval_path=eval.jsonl",
        "reward=reward.py:length", "data.batch_size=3", "algo.num_generations=3", "actor.optim.lr=1e-3",
        "rollout.max_tokens_to_generate=8", *COMMON]  # fmt: skip


@pytest.fixture
def folders(tmp_path, model_folder):
    """Two folders with the same model, rows and reward function, for two runs."""
    made = []
    for name in ("one", "several"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model").symlink_to(model_folder)
        for file, count in (("rows.jsonl", 12), ("eval.jsonl", 3)):
            (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows(count)))
        (folder / "reward.py").write_text(REWARD)
        made.append(folder)
    return made


def compare(folders, monkeypatch, commands, size=2):
    """Runs commands on several processes, and in this one meanwhile; compares the run folders."""
    one, several = folders
    processes = start(size, run_commands, several, free_port(), commands)
    try:
        monkeypatch.chdir(one)
        for words in commands:
            assert main(words) == 0
    finally:
        wait(processes, several)
    assert_same_run(one / "run", several / "run")


@needs_gloo
@pytest.mark.timeout(200)
@pytest.mark.parametrize("size", [2, full(4)])
def test_grpo_evaluates_saves_and_resumes_as_one_process(folders, monkeypatch, size):
    more = [*GRPO, "trainer.checkpointing_options.save_interval_steps=1"]
    compare(folders, monkeypatch, [[*more, "trainer.max_steps=1"],
                                   [*more, "trainer.max_steps=3", "trainer.resume=latest"]], size)  # fmt: skip


@needs_gloo
@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("front", ["command", "script"])
def test_torchrun_itself_starts_them(folders, monkeypatch, front):
    one, several = folders
    words = [*GRPO, "trainer.max_steps=2"]
    (several / "train.py").write_text(f"import sys\nfrom whet.cli import main\nsys.exit(main({words!r}))\n")
    program = ["-m", "whet", *words] if front == "command" else ["train.py"]
    root = str(Path(__file__).parents[2])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *program]
    done = subprocess.run(torchrun, cwd=several, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("2 processes train together: FSDP over gloo") == 1
    monkeypatch.chdir(one)
    assert main(words) == 0
    assert_same_run(one / "run", several / "run")
