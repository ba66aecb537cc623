"""Checkpoints of a front: folders by themselves, which others load, and from which a run goes on."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import same, tiny_model, weights_of
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.trainer_callback import ExportableState

from whet.data.tokenizer import byte_tokenizer
from whet.errors import CheckpointError, ConfigError
from whet.trl import SFTConfig, SFTTrainer

ARGS = {"bf16": False, "disable_tqdm": True, "gradient_checkpointing": False, "learning_rate": 1e-2, "logging_steps": 1,
        "max_steps": 4, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 2}  # fmt: skip


class Counts(TrainerCallback, ExportableState):
    """Counts updates, over the breaks of a run."""

    def __init__(self, of=""):
        self.of, self.updates = of, 0

    def state(self):
        return {"args": {"of": self.of}, "attributes": {"updates": self.updates}}

    def on_step_end(self, *_, **__):
        self.updates += 1


def trainer(folder, counted=("a", "b"), **kwargs):
    model = tiny_model()
    model.generation_config.eos_token_id, model.generation_config.top_k = [256, 33], 20
    rows = [{"text": f"one and {i}"} for i in range(8)]
    args = SFTConfig(str(folder), **{**ARGS, **kwargs})
    counts = [Counts(of) for of in counted]
    return SFTTrainer(model, args, train_dataset=rows, processing_class=byte_tokenizer(), callbacks=counts)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder, and its model."""
    made = trainer(tmp_path_factory.mktemp("run") / "out")
    made.train()
    return Path(made.args.output_dir), made


def names(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_a_checkpoint_is_a_folder_of_files_that_transformers_loads(run):
    folder, made = run
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    assert not [p for p in folder.rglob("*") if p.is_symlink()]
    assert {p.suffix for p in (folder / "checkpoint-4").iterdir()} >= {".safetensors", ".json"}
    assert [p.name for p in (folder / "checkpoint-4").glob("*.safetensors")] == ["model.safetensors"]  # of vLLM, too
    loaded = AutoModelForCausalLM.from_pretrained(folder / "checkpoint-4")
    assert same(weights_of(loaded), weights_of(made.model))
    assert loaded.generation_config.eos_token_id == [256, 33]
    assert loaded.generation_config.top_k == 20
    held = torch.load(folder / "checkpoint-4" / "run.pt", weights_only=True)["trl"]["state"]
    assert json.loads(held) == json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text())


@pytest.mark.parametrize(
    ("init", "dtype"),
    [(None, torch.float32), ({"dtype": "bfloat16"}, torch.bfloat16), ({"dtype": "auto"}, torch.bfloat16)],
)
def test_a_model_given_by_name_is_saved_in_the_dtype_that_trl_would_train_it_in(init, dtype, tmp_path):
    tiny_model(dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    given = {**ARGS, "save_only_model": True, "model_init_kwargs": init, "max_steps": 2}
    args = SFTConfig(str(tmp_path / "out"), **given)
    made = SFTTrainer(str(tmp_path / "model"), args, train_dataset=[{"text": "a b"}], processing_class=byte_tokenizer())
    made.train()
    made.save_model(str(tmp_path / "saved"))
    for folder in ("saved", "out/checkpoint-2"):
        saved = weights_of(AutoModelForCausalLM.from_pretrained(tmp_path / folder))  # dtype: that of its config.json
        assert {w.dtype for w in saved.values()} == {dtype}
        assert same(saved, {name: w.to(dtype) for name, w in weights_of(made.model).items()})


def test_one_that_was_packed_and_moved_is_resumed(run, tmp_path, monkeypatch):
    folder, made = run
    monkeypatch.chdir(tmp_path)
    shutil.make_archive(str(tmp_path / "packed"), "tar", folder, "checkpoint-2")
    shutil.unpack_archive(tmp_path / "packed.tar", tmp_path / "new")
    (tmp_path / "new" / f".tmp-{'0' * 16}-checkpoint-4").mkdir()  # of a run that was killed while it saved
    again = trainer("new", ("x", "x"), save_total_limit=1, restore_callback_states_from_checkpoint=True)
    again.train(resume_from_checkpoint=True)
    found = [(c.of, c.updates) for c in again.callback_handler.callbacks if isinstance(c, Counts)]
    assert found == [("a", 4), ("b", 4)]
    assert same(weights_of(again.model), weights_of(made.model))
    assert [row["step"] for row in again.state.log_history] == [1, 2, 3, 4, 4]
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["checkpoint-4"]
    assert names(tmp_path / "new") == [name for name in names(folder) if "checkpoint-4" in name]


def test_a_save_that_fails_leaves_nothing_and_loses_nothing(run, tmp_path, monkeypatch):
    folder, _ = run
    shutil.copytree(folder / "checkpoint-2", tmp_path / "checkpoint-2")
    shutil.copytree(folder / "checkpoint-2", tmp_path / "checkpoint-4")  # of another run, to be replaced
    before = (tmp_path / "checkpoint-4" / "model.safetensors").read_bytes()
    again = trainer(tmp_path)

    def full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(again.processing_class, "save_pretrained", full)
    with pytest.raises(CheckpointError, match="checkpoint-4 could not be written: No space left"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    assert (tmp_path / "checkpoint-4" / "model.safetensors").read_bytes() == before


def test_an_output_dir_that_another_run_writes_or_that_is_a_file_is_refused(run, tmp_path):
    _, made = run
    made.models.checkpoints.open()
    with pytest.raises(ConfigError, match=r"is in use by process .* set another output_dir"):
        trainer(run[0]).train()
    made.models.checkpoints.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"output_dir=.*file"):
        trainer(tmp_path / "file").train()
