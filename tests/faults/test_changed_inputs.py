"""A resumed run reads what it read before: what has changed meanwhile is refused by name, or said where it is code."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers import cluster, length_reward, rows, same, tiny_model, weights_of
from transformers import AutoTokenizer

from whet.checkpoints import Checkpoints
from whet.config import CheckpointingOptions, DataConfig, GRPOConfig
from whet.errors import CheckpointError
from whet.learners.grpo import GRPOLearner

EACH_STEP = CheckpointingOptions(save_interval_steps=1)


@pytest.fixture
def folders(tmp_path, model_folder):
    """Two folders of models of one's own: the actor's and the reference's."""
    for name in ("actor", "reference"):
        shutil.copytree(model_folder, tmp_path / name)
    tiny_model(1).save_pretrained(tmp_path / "reference")
    return tmp_path


def train(root, data=None, eval_ds=None, *, steps=2, reward=length_reward, beta=0.1, actor=None, **training):
    """A run of the two models in root/run; resumed where it has begun."""
    run = root / "run"
    options = {"run_dir": str(run), "max_steps": steps, "checkpointing_options": EACH_STEP, **training}
    c = cluster(
        str(root / "actor") if actor is None else actor,
        reference=str(root / "reference") if beta else None,
        tokenizer=AutoTokenizer.from_pretrained(root / "actor"),
        rollout={"max_tokens_to_generate": 4},
        resume="latest" if run.exists() else None,
        **options,
    )
    made = GRPOLearner(c, GRPOConfig(num_generations=2, beta=beta), reward, data=DataConfig(batch_size=2))
    return made.train(rows(8) if data is None else data, eval_ds)


def edit(path, **fields):
    """Changes fields of a JSON file; returns what undoes it."""
    before = path.read_text()
    path.write_text(json.dumps({**json.loads(before), **fields}))
    return lambda: path.write_text(before)


def snapshot(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


# ---- models and tokenizer --------------------------------------------------------------------------------------------


def test_a_reference_with_other_weights_is_refused_until_it_is_put_back(folders, caplog):
    train(folders, steps=1)
    before = snapshot(folders / "run")
    path = folders / "reference" / "model.safetensors"
    old, data = path.read_bytes(), bytearray(path.read_bytes())
    data[-2] ^= 1  # of the last number alone
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as error:
        train(folders)
    text = str(error.value)
    assert "reference: other weights: " in text and "put them back" in text and "another trainer.run_dir" in text
    assert snapshot(folders / "run") == before  # a refused resume takes nothing away
    path.write_bytes(old)
    assert train(folders).step == 2
    path.write_bytes(data)
    assert train(folders, steps=3, allow_config_change=True).step == 3
    assert "what the run reads has changed" in caplog.text and "reference: other weights" in caplog.text
    assert train(folders, steps=4).step == 4  # what was allowed once is what the run reads now


def test_of_the_actors_folder_all_but_its_weights_is_still_read(folders):
    train(folders, steps=1, beta=0.0)
    tiny_model(5).save_pretrained(folders / "actor")
    resumed = train(folders, beta=0.0)
    assert resumed.step == 2  # the weights are the checkpoint's
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
            train(folders, steps=3, beta=0.0)
        undo()
        template.write_text(kept)
    rules = json.loads((folders / "actor" / "tokenizer.json").read_text())
    rules["model"]["vocab"] |= {"a": rules["model"]["vocab"]["b"], "b": rules["model"]["vocab"]["a"]}
    undo = edit(folders / "actor" / "tokenizer.json", model=rules["model"])
    with pytest.raises(CheckpointError, match="tokenizer: other vocabulary"):
        train(folders, steps=3, beta=0.0)
    undo()
    edit(folders / "actor" / "tokenizer.json", normalizer={"type": "Lowercase"})
    with pytest.raises(CheckpointError, match="tokenizer: other rules"):
        train(folders, steps=3, beta=0.0)


def test_modules_from_python_count_by_their_weights(tmp_path, tokenizer):
    def go(seed, steps, **training):
        c = cluster(
            tiny_model(), reference=tiny_model(seed), run_dir=str(tmp_path), max_steps=steps,
            checkpointing_options=EACH_STEP, **training,
        )  # fmt: skip
        made = GRPOLearner(c, GRPOConfig(num_generations=2, beta=0.1), length_reward, data=DataConfig(batch_size=2))
        return made.train(rows(8))

    go(1, 1)
    with pytest.raises(CheckpointError, match="reference: other weights"):
        go(2, 2, resume="latest")
    assert go(1, 2, resume="latest").step == 2


def test_a_reference_in_another_dtype_is_said_not_to_be_compared(folders, caplog):
    from whet.config import RoleConfig

    def go(dtype, **training):
        c = cluster(
            tiny_model(), reference=RoleConfig(model=str(folders / "reference"), dtype=dtype), max_steps=1,
            run_dir=str(folders / "run"), checkpointing_options=EACH_STEP, **training,
        )  # fmt: skip
        GRPOLearner(c, GRPOConfig(num_generations=2), length_reward, data=DataConfig(batch_size=2)).train(rows(4))

    go("float32")
    go("bfloat16", resume="latest", allow_config_change=True)
    assert "reference: its weights are in torch.bfloat16, not torch.float32: not compared" in caplog.text


# ---- data ------------------------------------------------------------------------------------------------------------


def test_changed_evaluation_data_are_refused_and_the_same_go_on(folders):
    evals = rows(3, answer=["1", "2", "3"])
    train(folders, None, evals, steps=1, beta=0.0)
    for other, said in (
        (evals[:2], "3 prompts -> 2 prompts"),
        (None, "3 prompts -> none"),
        ([evals[1], evals[0], evals[2]], "a.* prompts, but one was changed or moved"),
        ([*evals[:2], {**evals[2], "answer": "4"}], "the same prompts, but another column"),
    ):
        with pytest.raises(CheckpointError, match=f"evaluation data: {said}"):
            train(folders, None, other, beta=0.0)
    assert train(folders, None, iter(evals), beta=0.0).step == 2


def test_a_stream_that_was_shortened_or_changed_where_it_was_read_is_refused(folders):
    whole, again = folders / "whole", folders / "again"
    for root in (whole, again):
        shutil.copytree(folders / "actor", root / "actor")
    straight = train(whole, iter(rows(8)), steps=4, beta=0.0)
    train(again, iter(rows(8)), steps=2, beta=0.0)
    before = snapshot(again / "run")
    for other, said in (
        (rows(3), r"the data end after 3 rows, and the checkpoint had read 4 of this pass.*another run_dir"),
        (rows(8)[1:], "the first 4 rows are not those that the run had read"),
        ([{**r, "answer": 1} for r in rows(8)], "the first 4 rows are not those"),
    ):
        with pytest.raises(CheckpointError, match=said):
            train(again, iter(other), steps=4, beta=0.0)
        assert snapshot(again / "run") == before
    resumed = train(again, iter(rows(8)), steps=4, beta=0.0)
    assert resumed.step == 4
    assert same(*(weights_of(run.cluster.actor.module) for run in (straight, resumed)))


def test_ready_made_batches_that_are_others_are_refused(folders):
    batches = [{"prompts": [f"{i}=", f"{i}+"], "answer": torch.tensor([i, -i])} for i in range(4)]
    train(folders, batches, steps=2, beta=0.0)
    changed = [*batches]
    changed[1] = {**batches[1], "answer": torch.tensor([1, 5])}
    for other, said in ((batches[:3], "have length 4, these have 3"), (changed, "the first 2 batches are not those")):
        with pytest.raises(CheckpointError, match=said):
            train(folders, other, steps=3, beta=0.0)
    assert train(folders, batches, steps=3, beta=0.0).step == 3


# ---- code ------------------------------------------------------------------------------------------------------------


def test_a_changed_reward_file_is_a_warning_that_names_it(folders, caplog):
    path, text = folders / "my_rewards.py", "def score(completions, **_):\n    return [float(len(c)) for c in completions]\n"
    path.write_text(text)
    train(folders, steps=1, reward=f"{path}:score", beta=0.0)
    train(folders, steps=2, reward=f"{path}:score", beta=0.0)
    assert "has changed since" not in caplog.text
    path.write_text(text + "# other\n")
    assert train(folders, steps=3, reward=f"{path}:score", beta=0.0).step == 3
    said = [r.getMessage() for r in caplog.records if "has changed since" in r.getMessage()]
    assert len(said) == 1 and said[0].startswith(f"{path} has changed since the checkpoint: reward function score")
    caplog.clear()
    train(folders, steps=4, beta=0.0)
    assert f"reward function length_reward ({Path(length_reward.__code__.co_filename)}) was not there" in caplog.text
    assert "reward function score was there at the checkpoint, and is not now" in caplog.text
    for name in [name for name in sys.modules if name.startswith("whet_file_my_rewards")]:
        del sys.modules[name]


# ---- checkpoints of other versions -----------------------------------------------------------------------------------


def rewritten(root, change):
    """Changes the state in the newest checkpoint of a run."""
    folder = max((root / "run" / "checkpoints").glob("step-*"))
    state = Checkpoints.state(folder)
    change(state)
    torch.save(state, folder / "run.pt")
    (folder / "sums.json").unlink(missing_ok=True)


def test_a_checkpoint_that_notes_nothing_is_taken_with_a_note(folders, caplog):
    def older(state):
        del state["format"], state["reads"], state["stream"]["read_digest"], state["stream"]["length"]

    train(folders, iter(rows(8)), steps=2)
    rewritten(folders, older)
    tiny_model(7).save_pretrained(folders / "reference")
    assert train(folders, iter(rows(9)[1:]), steps=3).step == 3
    assert "of an earlier version of whet" in caplog.text and "nothing could be compared" in caplog.text
    caplog.clear()
    rewritten(folders, older)
    with pytest.raises(CheckpointError, match="the data end after 5 rows, and the checkpoint had read 6"):
        train(folders, iter(rows(5)), steps=4)
