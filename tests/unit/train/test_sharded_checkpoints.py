"""Sharded checkpoints of one process; those of several are compared in equivalence/test_torchrun.py."""

import time
from pathlib import Path

import pytest
import torch
from helpers import tiny_model
from safetensors.torch import load_file

from whet.config import CheckpointingOptions, OptimConfig, Role
from whet.config.lora import LoraConfig
from whet.data.tokenizer import byte_tokenizer, load_tokenizer
from whet.errors import CheckpointError, ConfigError
from whet.models.load import load_model
from whet.models.lora import add_adapter, save_adapter
from whet.ops import nll
from whet.parallel import shards
from whet.storage.model_paths import ADAPTER_WEIGHTS, model_folder
from whet.train.role_checkpoints import Checkpoints
from whet.train.role_trainer import RoleTrainer
from whet.train.worker import ModelWorker

STATE = {"step": 1, "tokens": 0, "inputs": {}, "observers": {}, "random": {}, "settings": {}, "stream": {}}


def checkpoints(root, seed=0, dtype=None, model=None, **options):
    worker = ModelWorker(load_model(model or tiny_model(seed)), optim=OptimConfig(lr=0.1), dtype=dtype)
    options = CheckpointingOptions(**(options or {"enable_async_checkpointing": True}))
    made = Checkpoints(root, {Role.ACTOR: RoleTrainer(worker, loss=nll)}, options=options)
    made.open()
    return worker, made


def update(worker):
    for name, p in worker.optim.params.items():
        worker.optim.masters[name].grad = torch.ones_like(worker.optim.masters[name]) * p.numel()
    worker.optim_step()


def state(worker):
    moments, _ = worker.optim.state(sharded=True)
    return {**moments, **{name: m.detach() for name, m in worker.optim.masters.items()}}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_an_asynchronous_save_has_the_state_of_its_step(tmp_path, dtype):
    worker, made = checkpoints(tmp_path / "c", dtype=dtype)
    update(worker)
    saved = {name: x.clone() for name, x in state(worker).items()}
    folder = made.save(1, STATE, tokenizer=byte_tokenizer(), keep=None)
    for _ in range(3):  # meanwhile
        update(worker)
    made.wait()
    made.close()
    other, again = checkpoints(tmp_path / "c", seed=1, dtype=dtype)
    again.verify(folder)
    again.load(folder)
    found = state(other)
    assert found.keys() == saved.keys() and all(torch.equal(found[name], saved[name]) for name in saved)
    assert other.updates == 1 and all(
        torch.equal(p, other.optim.masters[n].to(p)) for n, p in other.optim.params.items()
    )


def test_a_model_is_loaded_from_a_sharded_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    worker, made = checkpoints(tmp_path / "c", dtype=torch.bfloat16, sharded=True)
    update(worker)
    folder = made.save(1, STATE, tokenizer=byte_tokenizer(), keep=None)
    read = load_model(folder).module
    assert all(torch.equal(p.float(), worker.optim.masters[n].to(p).float()) for n, p in read.named_parameters())
    assert load_tokenizer(folder)("hi").input_ids == byte_tokenizer()("hi").input_ids
    assert model_folder(folder) == model_folder(folder / "actor") != str(folder / "actor")
    adapted = tiny_model()
    add_adapter(adapted, LoraConfig(r=2))
    worker, made = checkpoints(tmp_path / "a", model=adapted, sharded=True)
    update(worker)
    saved = load_file(Path(model_folder(made.save(1, STATE, tokenizer=byte_tokenizer(), keep=None))) / ADAPTER_WEIGHTS)
    (tmp_path / "whole").mkdir()
    save_adapter(adapted, tmp_path / "whole", worker.optim.masters)
    whole = load_file(tmp_path / "whole" / ADAPTER_WEIGHTS)
    assert saved.keys() == whole.keys() and all(torch.equal(saved[n], whole[n]) for n in whole)
    (folder / "sums.json").write_text("{}")  # another checkpoint, as far as the cache can tell
    next((folder / "shards").iterdir()).write_bytes(b"")
    with pytest.raises(ConfigError, match=r"shards can't be read: .*; take another checkpoint") as caught:
        model_folder(folder)
    assert str(caught.value).count(str(folder)) == 1


@pytest.mark.parametrize("options", [{"sharded": True}, {"enable_async_checkpointing": True}, {"max_to_keep": 1}])
def test_old_checkpoints_go_and_a_protected_one_stays_with_its_pointer(tmp_path, options, monkeypatch):
    write = shards.HuggingFaceStorageWriter.write_data
    monkeypatch.setattr(shards.HuggingFaceStorageWriter, "write_data", lambda *a: (time.sleep(0.2), write(*a))[1])
    _, made = checkpoints(tmp_path, **options)
    made.protect("best", 1)  # which is not saved yet
    for step in (1, 2, 3):
        made.save(step, {**STATE, "step": step}, tokenizer=byte_tokenizer(), keep=1)
    made.wait()
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-000001", "step-000003"]
    assert (tmp_path / "best").read_text().strip() == "step-000001"
    made.save(4, {**STATE, "step": 4}, tokenizer=byte_tokenizer(), keep=None)
    made.close()  # waits too
    assert (tmp_path / "step-000004" / "run.pt").is_file()
    _, other = checkpoints(tmp_path, **options)
    with pytest.raises(CheckpointError, match="belongs to a different run"):
        other.discard(after=1)
    other.run = made.run
    other.discard(after=1)
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-000001"]


def test_a_model_that_is_only_read_and_has_other_weights_is_saved_again_after_a_resume(tmp_path):
    save = lambda made, step: made.save(step, {**STATE, "step": step}, tokenizer=byte_tokenizer(), keep=None)
    (worker, made), (_, again) = (checkpoints(tmp_path / name, max_to_keep=1) for name in "ab")
    for one in (made, again):
        one.only_read = {Role.REFERENCE: ModelWorker(load_model(tiny_model(1)))}
    made.only_read[Role.REFERENCE].load_weights(worker.named_weights())
    again.load(save(made, 1))
    assert made.state(save(again, 2))["replaced"] == ["reference"]


@pytest.mark.parametrize("options", [{"sharded": True}, {"enable_async_checkpointing": True}])
def test_a_save_that_fails_names_step_and_fix_and_keeps_the_one_before(tmp_path, monkeypatch, options):
    _, made = checkpoints(tmp_path, **options)
    made.save(1, STATE, tokenizer=byte_tokenizer(), keep=1)
    made.wait()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards.HuggingFaceStorageWriter, "write_data", full)
    with pytest.raises(
        CheckpointError, match=r"checkpoint of step 2: .*No space left on device; earlier ones are kept"
    ):
        for step in (2, 3):  # an error of a thread is raised by the next save
            made.save(step, {**STATE, "step": step}, tokenizer=byte_tokenizer(), keep=1)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != ".lock") == ["latest", "step-000001"]
    other = load_model(tiny_model(num_hidden_layers=1))
    wrong = Checkpoints(None, {Role.ACTOR: RoleTrainer(ModelWorker(other, optim=OptimConfig()), loss=nll)})
    with pytest.raises(CheckpointError, match=r"holds another model: 'model.layers.1.* is on one side only"):
        wrong.load(tmp_path / "step-000001")
