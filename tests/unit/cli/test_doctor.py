import pytest

from whet.cli import main
from whet.cli.doctor import _sizes, _sizes_of, doctor_text, largest_models
from whet.train.memory_plan import GB


def test_the_doctor_says_what_runs_on_a_machine_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["doctor"]) == 0
    lines = dict(line.removeprefix("- ").split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["device"].startswith("no GPU") and lines["free memory"].startswith("no GPU; whet plan")
    assert "FLOP/s (1024 x 1024" in lines["matrix product"] and lines["rollout engine"] == "embedded, on the CPU"
    assert lines["rollout_engine=auto"] == "embedded, since the policy is not on a GPU"
    assert {"driver", "torch", "bfloat16", "C++ compiler", "vllm", "sglang"} <= set(lines)


def test_sizes_of_alike_layers_are_those_of_the_whole_model():
    assert _sizes("0.6B", ())[1] == _sizes_of("0.6B", (), 28)[1]


@pytest.mark.full
def test_the_largest_models_are_those_of_the_plan():
    assert largest_models(24 * GB) == {"all weights": "0.6B", "LoRA": "8B", "LoRA on 4 bits": "8B"}
    assert largest_models(2 * GB) == {"all weights": None, "LoRA": None, "LoRA on 4 bits": None}


def test_the_doctor_names_them(monkeypatch):
    monkeypatch.setattr("whet.cli.doctor.largest_models", lambda memory: {"all weights": "0.6B", "LoRA": None})
    text = doctor_text(24 * GB)
    assert "- free memory: 24.0 GB\n- largest Qwen3 by plan, all weights: 0.6B\n" in text
    assert "largest Qwen3 by plan, LoRA: none" in text
