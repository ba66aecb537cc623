"""TRL's callbacks in whet's trainers, its helpers for models, and names that are not there."""

import types

import datasets
import pytest
import torch
from helpers import tiny_model, weights_of
from transformers import GenerationConfig

import whet.trl
from whet.data.tokenizer import byte_tokenizer
from whet.errors import ConfigError
from whet.trl.missing_names import MISSING_NAMES

ROWS = [{"prompt": f"{i}+{i}=", "chosen": f"{2 * i}", "rejected": "no"} for i in range(3)]
SHORT = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=256, pad_token_id=257)


def trainer(folder, **fields):
    data = datasets.Dataset.from_list(ROWS)
    args = whet.trl.DPOConfig(
        str(folder / "out"), max_steps=2, eval_strategy="steps", eval_steps=1, report_to="none", use_cpu=True,
        bf16=False, disable_tqdm=True, gradient_checkpointing=False, save_strategy="no", learning_rate=1e-2, **fields,
    )  # fmt: skip
    return whet.trl.DPOTrainer(tiny_model(), args=args, train_dataset=data, eval_dataset=data,
                               processing_class=byte_tokenizer())  # fmt: skip


def test_callbacks_generate_are_judged_and_move_the_reference(tmp_path, capsys):
    made = trainer(tmp_path, ref_model_sync_steps=2, ref_model_mixup_alpha=1.0)
    asked = []
    judge = types.SimpleNamespace(judge=lambda prompts, pairs, shuffle: asked.append((prompts, pairs)) or [1, 0, 1])
    seen = whet.trl.LogCompletionsCallback(made, SHORT, num_prompts=2, freq=2)
    follow = whet.trl.SyncRefModelCallback(made.ref_model, made.accelerator)
    for callback in (seen, whet.trl.WinRateCallback(judge, made, SHORT), follow, whet.trl.RichProgressCallback()):
        made.add_callback(callback)
    made.train()
    assert [row[:2] for row in seen.table] == [("2", "0+0="), ("2", "1+1=")]
    rates = [row["eval_win_rate"] for row in made.state.log_history if "eval_win_rate" in row]
    assert rates == pytest.approx([2 / 3] * 3)
    ids = byte_tokenizer()("0+0=", return_tensors="pt").input_ids
    said = byte_tokenizer().decode(tiny_model().generate(ids, generation_config=SHORT)[0, 4:], skip_special_tokens=True)
    assert asked[0][0] == [row["prompt"] for row in ROWS]
    assert [pairs[0][0] for _, pairs in asked] == [said] * 3
    for name, weight in weights_of(made.model).items():
        torch.testing.assert_close(weights_of(made.ref_model)[name], weight)
    assert "step 2" in capsys.readouterr().out


def test_a_soft_judge_gives_the_probability_that_the_reference_is_better():
    logged, judge = [], types.SimpleNamespace(judge=lambda prompts, pairs, shuffle, return_scores: [0.5, 0.25, 0.9])
    made = types.SimpleNamespace(eval_dataset=ROWS, log=logged.append)
    callback = whet.trl.WinRateCallback(judge, made, use_soft_judge=True)
    callback.ref_completions = ["a"] * 3
    callback._judge(types.SimpleNamespace(report_to=()), byte_tokenizer(), ["b"] * 3)
    assert logged == [{"eval_avg_win_prob": pytest.approx(0.45), "eval_win_rate": pytest.approx(2 / 3)}]


def test_a_reference_moves_as_trl_s(monkeypatch):
    theirs = pytest.importorskip("trl").SyncRefModelCallback
    found = []
    for sync in (whet.trl.SyncRefModelCallback.sync_target_model, theirs._sync_target_model):
        reference = whet.trl.create_reference_model(tiny_model(1))
        sync(tiny_model(), reference, 0.6)
        found.append(weights_of(reference))
    for name, weight in found[1].items():
        torch.testing.assert_close(found[0][name], weight)


def test_a_template_is_taken_over_with_its_tokens(tmp_path):
    source = byte_tokenizer()
    source.add_tokens(["<new>"])
    source.save_pretrained(tmp_path)
    found = []
    for module in (whet.trl, pytest.importorskip("trl")):
        bare = byte_tokenizer()
        bare.chat_template = None
        model, tokenizer, added = module.clone_chat_template(tiny_model(), bare, str(tmp_path))
        size = model.get_input_embeddings().num_embeddings
        found.append((tokenizer.chat_template, added, size, len(tokenizer), model.generation_config.eos_token_id))
    assert found[0] == found[1]


def test_a_base_model_gets_chatml():
    tokenizer = byte_tokenizer()
    with pytest.raises(ConfigError, match="already added to the tokenizer"):
        whet.trl.setup_chat_format(tiny_model(), tokenizer)
    tokenizer.chat_template = None
    model, tokenizer = whet.trl.setup_chat_format(tiny_model(), tokenizer, resize_to_multiple_of=32)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert model.get_input_embeddings().num_embeddings % 32 == 0
    assert tokenizer.convert_ids_to_tokens(model.config.eos_token_id) == tokenizer.pad_token == "<|im_end|>"


def test_every_name_of_the_installed_trl_is_there_or_refused_with_the_reason():
    theirs = pytest.importorskip("trl")
    assert {*theirs._import_structure} and [
        name for names in theirs._import_structure.values() for name in names
        if name not in whet.trl.__all__ and name not in MISSING_NAMES
    ] == []  # fmt: skip
    assert {"get_kbit_device_map", "GKDTrainer", "OnlineDPOTrainer"} <= {*MISSING_NAMES}  # of earlier releases
    for name, why in MISSING_NAMES.items():
        with pytest.raises(ImportError, match=f"whet.trl has no {name}: {why[:9]}"):
            getattr(whet.trl, name)
    assert not hasattr(whet.trl, "GRPOTrainr")
