"""What a model is written in: its own dtype, or the one asked for; what a resume reads stays fp32."""

import json

import pytest
import torch
from helpers import cluster, length_reward, rows, tiny_model
from safetensors.torch import load_file

from whet.config import (
    CheckpointingOptions,
    DataConfig,
    GRPOConfig,
    LoraConfig,
    OptimConfig,
    Role,
    RoleConfig,
    TrainingConfig,
)
from whet.hub.push import push_to_hub
from whet.learners.grpo import GRPOLearner
from whet.models.load import load_model
from whet.train import role_workers
from whet.train.worker import ModelWorker


@pytest.fixture(scope="module")
def half(tmp_path_factory, tokenizer):
    """The folder of a tiny model that was saved in bf16."""
    folder = tmp_path_factory.mktemp("half")
    tiny_model(dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def worker(model, **given):
    loaded = load_model(model, **given)
    made = ModelWorker(loaded, optim=OptimConfig(lr=0.1), dtype=torch.bfloat16 if given else None)
    for p in made.module.parameters():
        p.grad = torch.full_like(p, 0.01) if p.requires_grad else None
    made.optim_step()
    return made


def read(folder, name="model.safetensors", config="config.json"):
    return load_file(folder / name), json.loads((folder / config).read_text()).get("dtype")


def test_a_model_is_written_in_its_own_dtype_or_the_one_asked_for_and_stays_as_it_is(half, tmp_path):
    made = worker(half)
    before = {n: p.clone() for n, p in made.module.named_parameters()}
    for asked, dtype in (("auto", "bfloat16"), ("float32", "float32"), ("float16", "float16")):
        made.export(tmp_path / asked, dtype=asked)
        found, said = read(tmp_path / asked)
        assert said == dtype and found.keys() == before.keys()  # a tied head is saved once
        assert all(torch.equal(w, before[n].to(getattr(torch, dtype))) for n, w in found.items())
    (tmp_path / "state").mkdir()
    made.save(tmp_path / "state")
    kept, said = read(tmp_path / "state")
    assert said == "bfloat16" and all(torch.equal(w, before[n]) and w.dtype == torch.float32 for n, w in kept.items())
    assert all(torch.equal(p, before[n]) for n, p in made.module.named_parameters())
    assert load_model(str(tmp_path / "state")).saved_dtype == torch.bfloat16
    assert load_model(tiny_model(dtype=torch.float64)).saved_dtype == torch.float64


def test_an_adapter_is_written_in_fp32_and_merged_in_its_bases_dtype(half, tmp_path):
    made = worker(half, lora=LoraConfig(r=2))  # its base is computed with in bf16
    for name, options, dtype in (
        ("alone", {}, torch.float32),
        ("asked", {"dtype": "bfloat16"}, torch.bfloat16),
        ("merged", {"merge": True}, torch.bfloat16),
    ):
        made.export(tmp_path / name, **options)
        file = "model.safetensors" if name == "merged" else "adapter_model.safetensors"
        assert {w.dtype for w in load_file(tmp_path / name / file).values()} == {dtype}


def test_a_run_writes_final_so_and_sends_its_checkpoints_so(half, tmp_path):
    made = cluster(
        RoleConfig(model=half),
        run_dir=str(tmp_path / "run"),
        checkpointing_options=CheckpointingOptions(save_interval_steps=1),
        max_steps=1,
        final_dtype="float16",
    )
    GRPOLearner(made, GRPOConfig(num_generations=2, beta=0.0), length_reward, data=DataConfig(batch_size=2)).train(
        rows(4)
    )
    final, said = read(tmp_path / "run" / "final")
    kept, _ = read(tmp_path / "run" / "checkpoints" / "step-000001" / "actor")
    assert said == "float16" and all(torch.equal(w, kept[n].half()) for n, w in final.items())
    sent = push_to_hub(tmp_path / "run", "me/x", which="step-000001", dry_run=True)
    assert sent.files["model.safetensors"] == (tmp_path / "run" / "final" / "model.safetensors").stat().st_size
    assert {"tokenizer.json", "tokenizer_config.json"} & sent.files.keys()
    assert {w.dtype for w in load_file(tmp_path / "run" / "exported" / "model.safetensors").values()} == {torch.float16}


@pytest.mark.parametrize("trained, lora, dtype, kind, want", [
    (True, None, "auto", "cuda", "float32"),  # the masters
    (True, None, "bfloat16", "cuda", "float32"),
    (True, LoraConfig(r=2), "auto", "cuda", "bfloat16"),  # a frozen base never lies on a GPU in fp32
    (False, None, "auto", "cuda", "bfloat16"),
    (False, None, "float32", "cuda", "float32"),
    (False, None, "auto", "cpu", "float32"),
])  # fmt: skip
def test_frozen_weights_go_to_a_gpu_in_the_dtype_that_they_compute_in(monkeypatch, trained, lora, dtype, kind, want):
    asked = {}

    def load(model, **options):
        asked.update(options)
        raise InterruptedError

    monkeypatch.setattr(role_workers, "load_model", load)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    workers = role_workers.RoleWorkers(TrainingConfig())
    workers._device = torch.device(kind)
    role = Role.ACTOR if trained else Role.REFERENCE
    with pytest.raises(InterruptedError):
        workers.load(role, RoleConfig(model="m", dtype=dtype, lora=lora))
    assert asked["dtype"] == want


def test_a_resumed_run_computes_in_the_dtype_of_its_checkpoint_where_the_user_names_none(half, monkeypatch):
    workers = role_workers.RoleWorkers(TrainingConfig())
    workers._saved_dtypes = {"actor": "bfloat16", "reference": "float16"}
    monkeypatch.setattr(workers, "device", lambda role: torch.device("cuda"))
    assert workers._dtype_read(Role.REFERENCE, RoleConfig(), is_frozen=True) == "float16"
    monkeypatch.undo()
    for asked, dtype in (("auto", torch.bfloat16), ("float32", torch.float32)):  # a CPU's own is float32
        source = RoleConfig(model=half, dtype=asked)
        assert workers.add(Role.ACTOR, source, workers.load(Role.ACTOR, source), None, max_tokens=64).dtype == dtype
