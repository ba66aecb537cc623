import ast
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

FILE = Path(__file__).parents[2] / "examples" / "grpo_from_scratch.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("grpo_from_scratch", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.full
def test_the_model_learns_the_task_from_chance(example, capsys):
    assert example.main(seed=0) > 0.9
    first = float(capsys.readouterr().out.splitlines()[0].split()[3])
    assert first < 0.2  # one of ten tokens is right


def test_the_same_seed_gives_the_same_run_and_another_seed_another(example, monkeypatch, capsys):
    monkeypatch.setattr(example, "STEPS", 4)
    runs = []
    for seed in (3, 3, 4):
        example.main(seed=seed)
        runs.append(capsys.readouterr().out)
    assert runs[0] == runs[1] != runs[2]


def test_reward_is_the_share_of_the_letter(example):
    assert example.reward(["a=", "a=", "b="], ["aba=", "", "b"]) == [0.5, 0.0, 1.0]


def test_the_tutorial_is_short_and_needs_only_torch_transformers_and_ops():
    source = FILE.read_text()
    assert len(source.splitlines()) <= 200
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    assert {n for n in names if n not in sys.stdlib_module_names} == {"torch", "transformers", "whet.ops"}
