"""A resumed run reads what it read before: what has changed meanwhile is refused by name, or said where it is code."""

import json
import shutil
import sys

import pandas
import pytest
import torch
from helpers import cluster, length_reward, rows, tiny_model
from transformers import AutoTokenizer

from whet.config import CheckpointingOptions, DataConfig, GRPOConfig
from whet.errors import CheckpointError
from whet.learners.grpo import GRPOLearner
from whet.train.role_checkpoints import Checkpoints

EACH_STEP = CheckpointingOptions(save_interval_steps=1)


@pytest.fixture
def folders(tmp_path, model_folder):
    """Two folders of models of one's own: the actor's and the reference's."""
    for name in ("actor", "reference"):
        shutil.copytree(model_folder, tmp_path / name)
    tiny_model(1).save_pretrained(tmp_path / "reference")
    return tmp_path


def learner(root, *, steps=2, reward=length_reward, reference=None, **training):
    """A learner of root/actor that goes on with the run in root/run, or begins it."""
    options = {"run_dir": str(root / "run"), "max_steps": steps, "checkpointing_options": EACH_STEP, **training}
    c = cluster(
        str(root / "actor"),
        reference=reference and str(reference),
        tokenizer=AutoTokenizer.from_pretrained(root / "actor"),
        rollout={"max_tokens_to_generate": 4},
        **{"resume": "latest", **options},
    )
    algo = GRPOConfig(num_generations=2, beta=0.1 if reference else 0.0)
    return GRPOLearner(c, algo, reward, data=DataConfig(batch_size=2))


def edit(path, **fields):
    """Changes fields of a JSON file; returns what undoes it."""
    before = path.read_text()
    path.write_text(json.dumps({**json.loads(before), **fields}))
    return lambda: path.write_text(before)


def snapshot(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


# ---- models and tokenizer --------------------------------------------------------------------------------------------


def test_a_reference_with_other_weights_is_refused_until_it_is_put_back(folders, caplog):
    reference = folders / "reference"
    learner(folders, steps=1, reference=reference).train(rows(8))
    before = snapshot(folders / "run")
    path = reference / "model.safetensors"
    old, data = path.read_bytes(), bytearray(path.read_bytes())
    data[-2] ^= 1  # of the last number alone
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as error:
        learner(folders, reference=reference).train(rows(8))
    text = str(error.value)
    assert "reference: other weights: " in text and "put them back" in text and "another trainer.run_dir" in text
    assert snapshot(folders / "run") == before  # a refused resume takes nothing away
    path.write_bytes(old)
    assert learner(folders, reference=reference).train(rows(8)).step == 2
    path.write_bytes(data)
    assert learner(folders, steps=3, reference=reference, allow_config_change=True).train(rows(8)).step == 3
    assert (
        "models, tokenizer or evaluation data differ from the checkpoint's; continuing" in caplog.text
        and "reference: other weights" in caplog.text
    )
    assert learner(folders, steps=4, reference=reference).train(rows(8)).step == 4  # what it reads from now on


def test_of_the_actors_folder_all_but_its_weights_is_still_read(folders):
    learner(folders, steps=1).train(rows(8))
    tiny_model(5).save_pretrained(folders / "actor")
    assert learner(folders).train(rows(8)).step == 2  # the weights are the checkpoint's
    for file, fields, said in (
        ("config.json", {"rms_norm_eps": 0.5}, r"actor: config\.rms_norm_eps: 1e-06 -> 0\.5"),
        ("generation_config.json", {"eos_token_id": [7, 256]}, r"end a completion.*\[256\] -> \[7, 256\]"),
        ("tokenizer_config.json", {"chat_template": "{{ messages }}"}, "tokenizer: other chat_template: "),
    ):
        template = folders / "actor" / "chat_template.jinja"
        kept = template.read_text()
        template.unlink()  # where there is one, it comes before the field
        undo = edit(folders / "actor" / file, **fields)
        if file != "tokenizer_config.json":
            template.write_text(kept)
        with pytest.raises(CheckpointError, match=said):
            learner(folders, steps=3).train(rows(8))
        undo()
        template.write_text(kept)
    rules = json.loads((folders / "actor" / "tokenizer.json").read_text())
    rules["model"]["vocab"] |= {"a": rules["model"]["vocab"]["b"], "b": rules["model"]["vocab"]["a"]}
    undo = edit(folders / "actor" / "tokenizer.json", model=rules["model"])
    with pytest.raises(CheckpointError, match="tokenizer: other vocabulary"):
        learner(folders, steps=3).train(rows(8))
    undo()
    edit(folders / "actor" / "tokenizer.json", normalizer={"type": "Lowercase"})
    with pytest.raises(CheckpointError, match="tokenizer: other rules"):
        learner(folders, steps=3).train(rows(8))


# ---- data ------------------------------------------------------------------------------------------------------------


def test_changed_evaluation_data_are_refused_and_the_same_go_on(folders):
    evals = rows(3, answer=["1", "2", "3"])
    learner(folders, steps=1).train(rows(8), evals)
    resumed = learner(folders)
    for other, said in (
        (evals[:2], "3 prompts -> 2 prompts"),
        (None, "3 prompts -> none"),
        ([evals[1], evals[0], evals[2]], "the number of prompts is the same, but some were changed or reordered"),
        ([*evals[:2], {**evals[2], "answer": "4"}], "the prompts are the same, but another column"),
    ):
        with pytest.raises(CheckpointError, match=f"evaluation data: {said}"):
            resumed.train(rows(8), other)
    assert resumed.train(rows(8), iter(evals)).step == 2


def test_a_stream_that_was_shortened_or_changed_where_it_was_read_is_refused(folders):
    learner(folders, steps=2).train(iter(rows(8)))
    before, resumed = snapshot(folders / "run"), learner(folders, steps=3)
    for other, said in (
        (rows(3), r"the data end after 3 rows, and the checkpoint had read 4 of this pass.*another trainer.run_dir"),
        (rows(8)[1:], "the first 4 rows are not those that the run had read"),
        ([{**r, "answer": 1} for r in rows(8)], "the first 4 rows are not those"),
    ):
        with pytest.raises(CheckpointError, match=said):
            resumed.train(iter(other))
        assert snapshot(folders / "run") == before
    assert resumed.train(iter(rows(8))).step == 3
    table = pandas.read_parquet(folders / "run" / "completions" / "train-000003.parquet")
    assert table.row.tolist() == [4, 4, 5, 5]


# ---- code ------------------------------------------------------------------------------------------------------------


def test_a_changed_reward_file_is_a_warning_that_names_it(folders, caplog):
    text = "def score(completions, **_):\n    return [float(len(c)) for c in completions]\n"
    path = folders / "my_rewards.py"
    path.write_text(text)
    learner(folders, steps=1, reward=f"{path}:score").train(rows(8))
    learner(folders, steps=1, reward=f"{path}:score").train(rows(8))
    assert "has changed since" not in caplog.text
    path.write_text(text + "# other\n")
    assert learner(folders, reward=f"{path}:score").train(rows(8)).step == 2
    said = [r.getMessage() for r in caplog.records if "has changed since" in r.getMessage()]
    assert len(said) == 1 and said[0].startswith(f"{path} has changed since the checkpoint: reward function score")
    for name in [name for name in sys.modules if name.startswith("whet_file_my_rewards")]:
        del sys.modules[name]


# ---- crafted checkpoints ---------------------------------------------------------------------------------------------


def test_a_stream_that_ends_before_the_place_of_the_checkpoint_is_refused(folders):
    learner(folders, steps=2, reference=folders / "reference").train(iter(rows(8)))
    resumed = learner(folders, steps=3, reference=folders / "reference")
    with pytest.raises(CheckpointError, match="the data end after 3 rows, and the checkpoint had read 4"):
        resumed.train(iter(rows(3)))
    assert resumed.train(iter(rows(8))).step == 3


def test_a_data_position_without_a_digest_of_the_rows_read_is_refused(folders):
    learner(folders, steps=2).train(iter(rows(8)))
    folder = folders / "run" / "checkpoints" / "step-000002"
    state = Checkpoints.state(folder)
    del state["stream"]["read_digest"], state["stream"]["length"]
    torch.save(state, folder / "run.pt")
    (folder / "sums.json").unlink()
    with pytest.raises(CheckpointError, match="data position has no length, read_digest: another version of whet"):
        learner(folders, steps=3).train(iter(rows(8)))


def test_no_field_of_a_crafted_state_reaches_the_run(folders):
    learner(folders, steps=1).train(rows(8))
    folder = folders / "run" / "checkpoints" / "step-000001"
    (folder / "sums.json").unlink()
    whole, before = Checkpoints.state(folder), snapshot(folders / "run" / "completions")
    resumed = learner(folders)
    first = tuple(whole["random"]["python"][1])
    for path, value in (
        ("format", 2),
        ("format", "1"),
        ("step", -1),
        ("step", 10**12),
        ("step", True),
        ("step", 1.0),
        ("tokens", -5),
        ("tokens", 2**200),
        ("tokens", None),
        ("stream", []),
        ("stream.used", -2),
        ("stream.used", 6),
        ("stream.used", 2**62),
        ("stream.used", "2"),
        ("stream.batch", -1),
        ("stream.epoch", -1),
        ("stream.epoch", 2**300),
        ("stream.dropped_rows", 0.5),
        ("stream.rows", torch.tensor([8, 8])),
        ("updates", {"actor": -1}),
        ("updates", {}),
        ("cluster.next_id", None),
        ("cluster.next_id", 2**64),
        ("cluster.dtypes", {"actor": 3}),
        ("cluster.lengths", {"train": torch.zeros(3, 2, dtype=torch.long)}),
        ("settings", None),
        ("settings", {"trainer": 5, "algo": torch.ones(2)}),
        ("inputs", 5),
        ("inputs.models", {"actor": []}),
        ("inputs.evaluation", "none"),
        ("inputs.code", {"the learner GRPOLearner": "x"}),
        ("random", {}),
        ("random.python", (3, first[:7], None)),
        ("random.numpy", ("MT19937", [0] * 624, -9, 0, 0.0)),
        ("random.numpy", 3),
        ("random.torch", torch.zeros(4)),
    ):
        state = {name: dict(part) if isinstance(part, dict) else part for name, part in whole.items()}
        *above, name = path.split(".")
        (state[above[0]] if above else state)[name] = value
        torch.save(state, folder / "run.pt")
        with pytest.raises(CheckpointError) as error:
            resumed.train(rows(8))
            pytest.fail(f"{path} = {value} was taken")
        said = str(error.value)
        assert name in said or path.startswith(("random", "settings", "stream.", "inputs")), (path, said)
        assert "resume" in said or "resume with the release" in said, (path, said)
    torch.save({**whole, "cluster": {}}, folder / "run.pt")
    with pytest.raises(CheckpointError, match=r"cluster\.next_id"):  # read before there is a run
        learner(folders)
    assert snapshot(folders / "run" / "completions") == before
    torch.save(whole, folder / "run.pt")
    assert resumed.train(rows(8)).step == 2
