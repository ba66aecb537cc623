import json
from types import SimpleNamespace

import pytest
import torch
from helpers import cluster, length_reward, rows, tiny_model

from whet.config import CheckpointingOptions, DataConfig, GRPOConfig, OptimConfig, RoleConfig
from whet.errors import ConfigError
from whet.learners.grpo import GRPOLearner
from whet.models import precision
from whet.models.load import load_model
from whet.models.precision import compute_dtype


@pytest.fixture
def cpu(monkeypatch):
    """A CPU whose instructions and speed are set by the test; probes are counted."""
    state = SimpleNamespace(instructions=True, speed=2.0, probes=[])

    def probe(width, rows=512):
        state.probes.append(width)
        return state.speed

    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: state.instructions)
    monkeypatch.setattr(precision, "probe_bf16", probe)
    return state


@pytest.mark.parametrize(
    ("instructions", "speed", "expected"),
    [(True, 1.3, "bfloat16"), (True, 1.29, "float32"), (True, 0.2, "float32"), (False, 9.0, "float32")],
)
def test_auto_is_bf16_on_a_cpu_only_where_instructions_and_probe_agree(cpu, instructions, speed, expected):
    cpu.instructions, cpu.speed = instructions, speed
    assert compute_dtype("auto", load_model(tiny_model())) is getattr(torch, expected)
    assert cpu.probes == ([32] if instructions else [])  # at the model's width; not at all without the instructions


def test_a_dtype_that_is_named_is_taken_without_a_probe(cpu):
    loaded = load_model(tiny_model())
    assert [compute_dtype(n, loaded) for n in ("float32", "bfloat16")] == [torch.float32, torch.bfloat16]
    assert cpu.probes == []
    with pytest.raises(ConfigError, match="dtype='fp8' is not one of auto, float32, bfloat16"):
        compute_dtype("fp8", loaded)


@pytest.mark.parametrize(("hardware", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_fp32_on_a_gpu_that_only_emulates_bf16(monkeypatch, hardware, expected):
    supported = lambda including_emulation=True: (
        hardware or including_emulation
    )  # an older GPU says yes to the plain question
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    weight = SimpleNamespace(device=torch.device("cuda"))
    loaded = SimpleNamespace(module=SimpleNamespace(parameters=lambda: iter([weight])))
    assert compute_dtype("auto", loaded) is expected  # pyright: ignore[reportArgumentType]


def test_two_models_of_a_width_are_timed_once(monkeypatch):
    times = iter([[4.0], [2.0], [1.0], [2.0]])  # a second look at the clock would say the contrary
    monkeypatch.setattr(precision, "_mlp_seconds", lambda *_: next(times))
    assert precision.probe_bf16(7, 3) == precision.probe_bf16(7, 3) == 2.0


def trained(model_folder, run_dir, steps, **training):
    role = RoleConfig(model=model_folder, optim=OptimConfig(lr=1e-2))
    options = {"run_dir": str(run_dir), "max_steps": steps, **training}
    options["checkpointing_options"] = CheckpointingOptions(save_interval_steps=1)
    c = cluster(role, reference=model_folder, actor_optimizer=None, **options)
    algo = GRPOConfig(num_generations=4, beta=0.02)
    GRPOLearner(c, algo, length_reward, data=DataConfig(batch_size=2)).train(rows(8))
    return c.dtypes, json.loads((run_dir / "environment.json").read_text())["compute_dtype"]


def test_the_choice_is_noted_in_the_run_folder_and_kept_on_resume_whatever_the_clock_says(cpu, model_folder, tmp_path):
    chosen = {"actor": "bfloat16", "reference": "bfloat16"}
    assert trained(model_folder, tmp_path, 1) == (chosen, chosen)
    cpu.speed, cpu.probes = 0.5, []
    assert trained(model_folder, tmp_path, 2, resume="latest") == (chosen, chosen)
    assert cpu.probes == []
