import json
import time
from types import SimpleNamespace

import pytest
import torch
from helpers import cluster, length_reward, rows, tiny_model

from whet import evaluate
from whet.config import CheckpointingOptions, DataConfig, GRPOConfig, OptimConfig, RoleConfig
from whet.config.evaluate import _settings_of_run
from whet.errors import ConfigError
from whet.learners.grpo import GRPOLearner
from whet.models import precision
from whet.models.load import load_model
from whet.models.precision import auto_dtype, compute_dtype
from whet.rollout.sampler import Sampler


@pytest.fixture
def cpu(monkeypatch):
    """A CPU whose instructions are set by the test."""
    state = SimpleNamespace(flags=["avx2", "avx512f", "avx512_bf16"])
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: "avx512f" in state.flags)
    monkeypatch.setattr(precision, "cpu_info", lambda: {"flags": state.flags})
    return state


@pytest.mark.parametrize(
    ("flags", "width", "expected"),
    [
        (["avx512f", "avx512_bf16"], 128, "bfloat16"),
        (["avx512f", "amx_bf16"], 4096, "bfloat16"),
        (["avx512f", "avx512_bf16"], 64, "float32"),  # calls cost as much as products
        (["avx512f"], 4096, "float32"),  # oneDNN says that it has bf16, and emulates it
        (["avx2", "avx512_bf16"], 4096, "float32"),  # oneDNN may not use what is there
        ([], 4096, "float32"),
    ],
)
def test_auto_is_bf16_on_a_cpu_with_instructions_for_it_from_a_width_on(cpu, flags, width, expected):
    cpu.flags = flags
    loaded = load_model(tiny_model())
    loaded.module.config.hidden_size = width
    assert compute_dtype("auto", loaded) is getattr(torch, expected)


def test_auto_looks_at_no_clock(cpu, monkeypatch):
    def clock():
        raise AssertionError("the dtype was decided by a timing")

    for name in ("perf_counter", "monotonic", "process_time", "time"):
        monkeypatch.setattr(time, name, clock)
    assert auto_dtype(torch.device("cpu"), 128) is torch.bfloat16


def test_a_dtype_that_is_named_is_taken(cpu):
    loaded = load_model(tiny_model())
    assert [compute_dtype(n, loaded) for n in ("float32", "bfloat16")] == [torch.float32, torch.bfloat16]
    with pytest.raises(ConfigError, match=r"unknown dtype 'fp8'.* Known: auto, bfloat16, float32"):
        compute_dtype("fp8", loaded)


@pytest.mark.parametrize(("hardware", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_fp32_on_a_gpu_that_only_emulates_bf16(monkeypatch, hardware, expected):
    supported = lambda including_emulation=True: (
        hardware or including_emulation
    )  # an older GPU says yes to the plain question
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert auto_dtype(torch.device("cuda"), 32) is expected


def trained(model_folder, run_dir, steps, **training):
    role = RoleConfig(model=model_folder, optim=OptimConfig(lr=1e-2))
    options = {"run_dir": str(run_dir), "max_steps": steps, **training}
    options["checkpointing_options"] = CheckpointingOptions(save_interval_steps=1)
    c = cluster(role, reference=model_folder, actor_optimizer=None, **options)
    algo = GRPOConfig(num_generations=4, beta=0.02)
    GRPOLearner(c, algo, length_reward, data=DataConfig(batch_size=2)).train(rows(8))
    return c.dtypes, json.loads((run_dir / "environment.json").read_text())["compute_dtype"]


def test_the_choice_is_noted_in_the_run_folder_and_kept_on_resume_on_another_processor(
    cpu, model_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(precision, "BF16_WIDTH", 32)
    chosen = {"actor": "bfloat16", "reference": "bfloat16"}
    assert trained(model_folder, tmp_path, 1) == (chosen, chosen)
    cpu.flags = []
    assert trained(model_folder, tmp_path, 2, resume="latest") == (chosen, chosen)


def test_a_sampler_reads_a_runs_model_in_the_runs_dtype_and_another_as_training_would(
    cpu, model_folder, tmp_path, monkeypatch
):
    assert Sampler(model_folder).loaded.module.dtype is torch.float32
    monkeypatch.setattr(precision, "BF16_WIDTH", 32)
    assert Sampler(model_folder).loaded.module.dtype is torch.bfloat16
    trained(model_folder, tmp_path, 1)
    cpu.flags = []
    places = (tmp_path, tmp_path / "final", tmp_path / "checkpoints/step-000001")
    assert {Sampler(str(place), model_folder).loaded.module.dtype for place in places} == {torch.bfloat16}
    assert Sampler(str(tmp_path), model_folder, dtype="float32").loaded.module.dtype is torch.float32
    assert Sampler(model_folder).loaded.module.dtype is torch.float32


def test_an_evaluation_computes_as_the_run_of_its_configuration_did_and_says_so(model_folder):
    run = {"actor": {"model": model_folder, "dtype": "bfloat16"}, "data": {"path": "x.jsonl"}, "reward": "exact_match"}
    assert _settings_of_run(run)["dtype"] == "bfloat16"
    assert _settings_of_run({**run, "actor": {"model": model_folder}})["dtype"] == "auto"
    keys = {"tokenizer": "byte", "max_tokens": 2}
    rows = [{"prompt": "1+1=", "answer": "2"}]
    for dtype in ("bfloat16", "float32"):
        assert evaluate(model_folder, rows, "exact_match", dtype=dtype, **keys).about["dtype"] == dtype
