import pytest
import torch

from whet.cli import doctor, main
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


def test_the_doctor_says_why_torch_finds_no_gpu_though_there_is_a_driver(monkeypatch):
    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).")

    monkeypatch.setattr(doctor, "_driver", lambda: "550.54")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "install a CUDA wheel of torch" in doctor_text().splitlines()[-1]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    last = doctor_text().splitlines()[-1]
    assert (
        last.startswith("- to do: torch has CUDA 13.0 and finds no GPU: ") and "too old (found version 12040)" in last
    )


def test_the_doctor_says_what_triton_needs(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "find_spec", lambda name: name == "triton")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert [line.split(":")[0] for line in doctor._to_do(True)] == [
        "Triton needs a C compiler", f"Triton needs {tmp_path}/Python.h"
    ]  # fmt: skip
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CC", "cc")
    assert not list(doctor._to_do(True))


def test_the_doctor_goes_on_where_the_gpu_runs_nothing(monkeypatch):
    def ones(*sizes, **options):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    monkeypatch.setattr(torch, "ones", ones)
    assert "- matrix product: failed: RuntimeError: CUDA error: no kernel image" in doctor_text()
