"""Programs for RL2 and Tunix on two processes write what they write on one."""

import json

import pytest
from front_programs import rl2, run_programs, tunix
from helpers import tiny_model
from processes import free_port, needs_gloo, start, wait
from run_folders import assert_same_run

from whet.data.tokenizer import byte_tokenizer

ENVIRONMENT = """
def interact(messages):
    if len(messages) > 2:
        return []
    return [{"role": "tool", "content": str(sum(map(ord, messages[-1]["content"])) % 10)}]


def reward_fn(messages, answer):
    return float(sum(map(ord, messages[-1]["content"])) % 7) + len(messages) + int(answer)
"""


@needs_gloo
@pytest.mark.timeout(200)
def test_two_processes_write_the_run_folders_of_one(tmp_path, monkeypatch):
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        tiny_model(max_position_embeddings=256).save_pretrained(folder / "model")
        byte_tokenizer().save_pretrained(folder / "model")
        (folder / "env.py").write_text(ENVIRONMENT)
        rows = [{"messages": [{"role": "user", "content": f"{i}+1="}], "answer": str(i)} for i in range(8)]
        (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    processes = start(2, run_programs, tmp_path / "two", free_port())
    try:
        monkeypatch.chdir(tmp_path / "one")
        rl2(1)
        tunix(1)
    finally:
        wait(processes, tmp_path / "two")
    for run in ("rl2", "tunix"):
        assert_same_run(tmp_path / "one" / run, tmp_path / "two" / run, sizes=run == "rl2")
