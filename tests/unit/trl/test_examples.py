"""examples/trl: each script does the same with either import."""

import importlib.util
import sys
import tempfile
from pathlib import Path

import pytest
from helpers import length_reward, rows, tiny_model

from whet.data.tokenizer import byte_tokenizer
from whet.errors import WhetError
from whet.trl import GRPOConfig, GRPOTrainer

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "trl"
OURS, THEIRS = "from whet.trl import", "from trl import"
SCRIPTS = ("callback", "conversational", "gsm8k", "lora", "resume", "several_rewards", "vllm_colocate")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a script in a folder of its own; gives its trainer, what it printed and the folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def script(name, line):
        folder = tmp_path / line.split()[1]
        folder.mkdir()
        monkeypatch.chdir(folder)
        text = (FOLDER / f"{name}.py").read_text()
        assert text.count(OURS) == 1
        space = {"__name__": "__main__"}
        exec(compile(text.replace(OURS, line), f"{name}.py", "exec"), space)
        return space["trainer"], capsys.readouterr().out, folder

    yield script
    sys.modules.pop("local", None)


def files(folder):
    """The files that a run leaves to its user."""
    whole = ("adapter_model.safetensors", "model.safetensors", "trainer_state.json", ".parquet")
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.name.endswith(whole)}


def test_all_of_them_are_here():
    assert sorted(p.stem for p in FOLDER.glob("*.py") if p.stem != "local") == sorted(SCRIPTS)


LONGER = ("callback", "several_rewards", "vllm_colocate")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full if n in LONGER else ()) for n in SCRIPTS])
def test_a_script_does_the_same_with_either_import(name, run):
    pytest.importorskip("peft" if name == "lora" else "trl")
    ours, said, made = run(name, OURS)
    assert ours.__module__.startswith("whet.")
    assert ours.state.global_step == (1 if name == "callback" else 2)
    assert [row["step"] for row in ours.state.log_history if "loss" in row][-1] == ours.state.global_step
    if name == "vllm_colocate" and importlib.util.find_spec("vllm") is None:
        assert "vLLM is not installed" in said
    pytest.importorskip("trl")
    theirs, _, expected = run(name, THEIRS)
    assert theirs.__module__.startswith("trl.")
    assert files(made) >= files(expected) != set() or name in ("several_rewards", "vllm_colocate")
    assert ours.state.global_step == theirs.state.global_step
    for mine, row in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        assert row.keys() - mine.keys() <= {"eval_steps_per_second"}
        assert row["step"] == mine["step"]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is here")
def test_use_vllm_without_vllm_names_it(tmp_path):
    args = GRPOConfig(str(tmp_path), use_vllm=True, bf16=False, max_completion_length=8)
    with pytest.raises(WhetError, match=r"(?i)vllm.*install"):
        GRPOTrainer(tiny_model(), length_reward, args, rows(8), processing_class=byte_tokenizer()).train()
