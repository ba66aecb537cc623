"""SFTTrainer, DPOTrainer and RewardTrainer: data of every form, what is refused, files, adapters, references."""

import json

import datasets
import pytest
import torch
from helpers import same, tiny_model, weights_of
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback, TrainingArguments

from whet.data.tokenizer import byte_tokenizer
from whet.errors import ConfigError, DataError
from whet.trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

KINDS = {"SFT": (SFTTrainer, SFTConfig), "DPO": (DPOTrainer, DPOConfig), "Reward": (RewardTrainer, RewardConfig)}
ARGUMENTS = ("callbacks", "compute_metrics", "compute_loss_func", "data_collator", "eval_dataset", "formatting_func",
             "optimizer_cls_and_kwargs", "optimizers", "peft_config", "processing_class", "ref_model",
             "preprocess_logits_for_metrics", "quantization_config")  # fmt: skip
SMALL = {"bf16": False, "disable_tqdm": True, "gradient_checkpointing": False, "learning_rate": 1e-2,
         "logging_steps": 1, "max_steps": 2, "per_device_train_batch_size": 2, "save_strategy": "no"}  # fmt: skip
ANSWERS = [{"prompt": f"{i}+{i}=", "completion": str(i + i)} for i in range(4)]
PAIRS = [{"prompt": f"{i}+{i}=", "chosen": str(i + i), "rejected": "?"} for i in range(4)]
ROWS = {"SFT": ANSWERS, "DPO": PAIRS, "Reward": PAIRS}
TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


def trainer(folder, method="SFT", rows=None, *, model=None, **kwargs):
    """A front on a tiny model; keywords that the trainer takes go there, the others to its configuration."""
    own = {n: kwargs.pop(n) for n in list(kwargs) if n in ARGUMENTS}
    kind, config = KINDS[method]
    args = config(str(folder), **{**SMALL, **kwargs})
    own = {"processing_class": byte_tokenizer(), **own}
    model = tiny_model() if model is None else model
    return kind(model, args=args, train_dataset=ROWS[method] if rows is None else rows, **own)


def tokens(made):
    """Of the first row: what is given, and what is trained as text."""
    (s,) = made.train_rows()[0].sequences
    decode = byte_tokenizer().decode
    return decode(s.prefix), decode(s.tokens[s.mask])


# ---- data ----------------------------------------------------------------------------------------------------------


END = "<|im_end|>"


@pytest.mark.parametrize(
    ("row", "kwargs", "given", "trained"),
    [
        ({"text": "abc"}, {}, "a", f"bc{END}"),
        ({"words": "abc"}, {"dataset_text_field": "words"}, "a", f"bc{END}"),
        ({"prompt": "ab", "completion": "c"}, {}, "ab", f"c{END}"),
        ({"prompt": "ab", "completion": "c"}, {"completion_only_loss": False}, "a", f"bc{END}"),
        ({"text": "abcdef"}, {"max_length": 3}, "a", "bc"),
        ({"text": "abcdef"}, {"max_length": 3, "truncation_mode": "keep_end"}, "e", f"f{END}"),
        ({"prompt": "ab", "completion": "c"}, {"eos_token": "<|im_start|>"}, "ab", "c<|im_start|>"),
        ({"input_ids": [97, 98, 99]}, {}, "a", "bc"),
        ({"input_ids": [97, 98, 99], "labels": [-100, -100, 99]}, {}, "ab", "c"),
        (
            {"input_ids": [97, 98, 99, 100], "completion_mask": [0, 0, 1, 1], "assistant_masks": [0, 1, 1, 0]},
            {"completion_only_loss": True, "assistant_only_loss": True},
            "ab",
            "c",
        ),
        ({"messages": TALK}, {"assistant_only_loss": True}, None, f"b{END}\nd{END}\n"),
        ({"prompt": TALK[:3], "completion": TALK[3:]}, {}, None, f"d{END}\n"),
        ({"prompt": TALK[:1], "completion": TALK[1:]}, {}, None, f"b{END}\nd{END}\n"),  # not the user's turn, as there
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, {}, "<|im_start|>", None),
    ],
)
def test_what_is_trained_of_a_row(row, kwargs, given, trained, tmp_path):
    made = trainer(tmp_path, rows=datasets.Dataset.from_list([row]), **kwargs)
    before, after = tokens(made)
    assert given in (None, before)
    assert after == trained or (trained is None and after.startswith("user\na"))


def test_rows_that_teach_nothing_are_left_out_and_counted(tmp_path, caplog):
    same_twice = {"prompt": "a", "chosen": "b", "rejected": "b"}
    assert len(trainer(tmp_path, "DPO", [*PAIRS, same_twice]).train_rows()) == 4
    assert len(trainer(tmp_path, rows=[*ANSWERS, {"prompt": "a", "completion": " "}]).train_rows()) == 4
    assert caplog.text.count("rows with nothing to train, left out: 1") == 2
    assert SFTConfig(max_seq_length=7).max_length == 7
    SFTConfig(dataset_kwargs={"add_special_tokens": False, "append_concat_token": False, "skip_prepare_dataset": True})
    assert "dataset_kwargs: add_special_tokens, append_concat_token is not read" in caplog.text
    assert DPOConfig(max_prompt_length=512).max_length == 1024
    assert "as in later releases, max_length=1024 limits prompt and answer together" in caplog.text


def test_a_file_s_chat_template_and_a_function_that_makes_texts(tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    made = trainer(tmp_path, rows=[{"messages": TALK}], chat_template_path=str(tmp_path / "t.jinja"))
    assert tokens(made) == ("<", "a><b><c><d>")
    made = trainer(tmp_path, rows=[{"q": "a", "n": 1}], formatting_func=lambda row: f"{row['q']}{row['n']}")
    assert tokens(made) == ("a", f"1{END}")


@pytest.mark.parametrize(
    ("method", "given", "kind", "message"),
    [
        ("SFT", {"compute_loss_func": len}, ConfigError, "compute_loss_func is not supported: write a loss"),
        ("SFT", {"data_collator": len}, ConfigError, "data_collator is not supported.*completion_only_loss"),
        ("Reward", {"optimizer_cls_and_kwargs": (len, {}), "optimizers": (len, None)}, ConfigError, "give one of them"),
        ("SFT", {"formatting_func": len}, ConfigError, "has no separate completion"),
        ("SFT", {"assistant_only_loss": True, "rows": [{"text": "a"}]}, ConfigError, "not conversational"),
        ("SFT", {"eos_token": "<none>"}, ConfigError, "`eos_token` .*not found in the vocabulary"),
        ("SFT", {"dataset_kwargs": {"skip_prepare_dataset": True}}, ConfigError, "needs rows of input_ids"),
        ("SFT", {"rows": [{"words": "abc"}]}, DataError, "row 0 has the columns words"),
        ("SFT", {"rows": [{"text": "abc"}], "max_length": 1}, DataError, "no row is left to train on"),
        ("SFT", {"rows": [{"input_ids": [1, 2], "labels": [1]}]}, DataError, "row 0 has 2 token ids and 1 labels"),
        ("SFT", {"rows": iter(ANSWERS), "max_steps": -1}, ConfigError, "set max_steps"),
        ("SFT", {"dataloader_drop_last": True, "gradient_accumulation_steps": 9}, ConfigError, "drops all 4 rows"),
        ("DPO", {"rows": [{"prompt": "a", "chosen": "b"}]}, DataError, "chosen and rejected"),
        ("DPO", {"args": 1}, ConfigError, "no field 'args'"),
        ("DPO", {"rows": {"train": PAIRS}}, DataError, "`train_dataset` must be a `Dataset`.*, got `dict`"),
        ("SFT", {"eval_dataset": []}, DataError, "eval_dataset has no rows"),
        ("SFT", {"eval_strategy": "epoch"}, ConfigError, "eval_strategy='epoch' asks for .* no eval_dataset"),
        (
            "SFT",
            {"eval_dataset": {"a": ANSWERS, "b": ANSWERS}, "metric_for_best_model": "eval_loss"},
            ConfigError,
            "several evaluation sets; choose eval_a_loss or eval_b_loss",
        ),
        (
            "DPO",
            {"eval_dataset": PAIRS, "metric_for_best_model": "eval_acuracy"},
            ConfigError,
            "no evaluation has this metric",
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else str(value),
)
def test_what_is_not_there_is_refused_by_name(method, given, kind, message, tmp_path):
    with pytest.raises(kind, match=message):
        trainer(tmp_path, method, **given)


def test_streams_are_read_as_they_are_trained_on_and_packed_alike(tmp_path):
    rows = [{"text": "x" * n} for n in (2, 5, 3, 6)]
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset()
    packs = {}
    for name, data in (("rows", rows), ("stream", stream)):
        made = trainer(tmp_path, rows=data, packing=True, max_length=9, per_device_train_batch_size=1)
        packs[name] = [[len(s.tokens) for s in e.sequences] for e in made.train_rows()]
        made.train()
        assert made.state.global_step == 2
    assert packs["rows"] == packs["stream"] == [[6], [5, 2], [3]]


# ---- training ------------------------------------------------------------------------------------------------------


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == 1


def test_plain_training_arguments_are_taken_as_in_trl(tmp_path):
    pytest.importorskip("accelerate")
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", max_steps=3, warmup_steps=2, optim="sgd",
                             lr_scheduler_type="cosine", save_strategy="no", hub_token="x")  # fmt: skip
    made = SFTTrainer(tiny_model(), args, train_dataset=ANSWERS, processing_class=byte_tokenizer())
    found = {
        name: getattr(made.args, name) for name in ("max_steps", "warmup_steps", "optim", "hub_token", "max_length")
    }
    assert found == {"max_steps": 3, "warmup_steps": 2, "optim": "sgd", "hub_token": "x", "max_length": 1024}
    assert made.args.lr_scheduler_type == "cosine"
    with pytest.raises(ConfigError, match=r"TrainingArguments; give whet\.trl's DPOConfig"):
        DPOTrainer(tiny_model(), args=args, train_dataset=PAIRS, processing_class=byte_tokenizer())


@pytest.mark.parametrize("method", KINDS)
def test_evaluation_checkpoints_and_a_resumed_run(method, tmp_path):
    sets = {"a": ROWS[method][:1], "b": ROWS[method][1:3]}
    more = {"eval_dataset": sets, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    if method == "Reward":  # its schedule and its state are those of the class's
        more["optimizer_cls_and_kwargs"] = (torch.optim.NAdam, {"lr": 1e-2})
    else:  # a rate that goes by evaluations, of which none is so much better
        kind = {"SFT": "greedy", "DPO": "reduce_lr_on_plateau"}[method]
        kwargs = {"patience": 0, "threshold": 9.0, "threshold_mode": "abs"}
        more |= {"lr_scheduler_type": kind, "lr_scheduler_kwargs": kwargs, "metric_for_best_model": "eval_a_loss"}
    whole = trainer(tmp_path / "whole", method, max_steps=3, **more)
    whole.train()
    logged = [row["step"] for row in whole.state.log_history if "eval_a_loss" in row]
    assert logged == [1, 2, 3]
    rates = [row["learning_rate"] for row in whole.state.log_history if "learning_rate" in row]
    assert rates[0] == 1e-2 and len({*rates}) == (3 if method == "Reward" else 2)
    assert whole.state.epoch == 1.5
    first = trainer(tmp_path / "part", method, max_steps=3, callbacks=[Stop()], **more)
    first.train()
    again = trainer(tmp_path / "part", method, max_steps=3, **more)
    again.train(resume_from_checkpoint=True)
    assert same(weights_of(whole.model), weights_of(again.model))
    assert again.state.log_history[0]["loss"] == whole.state.log_history[0]["loss"]
    again.save_model(str(tmp_path / "final"))
    kind = AutoModelForSequenceClassification if method == "Reward" else AutoModelForCausalLM
    assert same(weights_of(kind.from_pretrained(tmp_path / "final")), weights_of(again.model))
    assert again.evaluate("b")["eval_b_loss"] == pytest.approx(again.evaluate(sets["b"])["eval_loss"])


def test_an_adapter_is_trained_with_its_dropout_and_the_reference_is_its_base(tmp_path):
    peft = pytest.importorskip("peft")
    model = tiny_model()
    before = weights_of(model)
    config = peft.LoraConfig(r=4, lora_dropout=0.3, target_modules="all-linear")
    made = trainer(tmp_path, "DPO", model=model, peft_config=config, save_strategy="steps", save_steps=2)
    assert made.models.trained.loaded.adapter.dropout == 0.3
    made.train()
    assert made.state.log_history[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)  # the base is the reference
    assert made.state.log_history[1]["rewards/margins"] != pytest.approx(0, abs=1e-5)
    now = {name.replace(".base_layer", ""): p for name, p in made.model.get_base_model().named_parameters()}
    assert all(torch.equal(now[name], p) for name, p in before.items())
    assert (tmp_path / "checkpoint-2" / "adapter_model.safetensors").exists()


TRLS = ["sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
        "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"]  # fmt: skip


def test_every_loss_of_trl_s_is_whet_s_and_sigmoid_reads_no_label_smoothing_as_there(tmp_path, caplog):
    for name in TRLS:
        assert DPOConfig(loss_type=name, label_smoothing=0.1).to_whet().loss_type[0] == name or name == "sigmoid"
    losses = {}
    for loss in ("sigmoid", "whet.ops.preference:sigmoid"):
        for smoothing in (0.0, 0.4):
            made = trainer(tmp_path, "DPO", loss_type=loss, label_smoothing=smoothing, ref_model=tiny_model(1))
            losses[loss[-10:], smoothing] = made.evaluate(PAIRS)["eval_loss"]
    assert losses["sigmoid", 0.0] == losses["sigmoid", 0.4] == losses["ce:sigmoid", 0.0] != losses["ce:sigmoid", 0.4]
    assert "label_smoothing=0.4 has no effect on the sigmoid loss" in caplog.text


def test_which_reference_a_preference_loss_has(tmp_path):
    model = tiny_model()
    with pytest.raises(ConfigError, match="cannot be the same object"):
        trainer(tmp_path, "DPO", model=model, ref_model=model)
    assert trainer(tmp_path, "DPO", loss_type=["sft"]).ref_model is None
    assert same(weights_of(trainer(tmp_path, "DPO").ref_model), weights_of(model))
    other = tiny_model(1)
    made = trainer(tmp_path, "DPO", ref_model=other, eval_dataset=PAIRS[:2], precompute_ref_log_probs=True)
    found = made.evaluate()
    made.train()
    assert found["eval_rewards/chosen"] == pytest.approx(
        trainer(tmp_path, "DPO", ref_model=tiny_model(1)).evaluate(PAIRS[:2])["eval_rewards/chosen"], rel=1e-5
    )
    with pytest.raises(ConfigError, match="Cannot compute reference log-probs for a dataset passed to `evaluate"):
        made.evaluate([{**PAIRS[0], "chosen": "other"}])


def test_a_reference_read_ahead_reads_other_rows_before_a_run_and_with_an_adapter_after_it_but_no_stream(tmp_path):
    other = [{**PAIRS[0], "chosen": "other"}]
    peft = pytest.importorskip("peft")
    for kwargs in ({}, {"peft_config": peft.LoraConfig(r=4, target_modules="all-linear")}):
        made = trainer(tmp_path, "DPO", precompute_ref_log_probs=True, **kwargs)
        assert made.evaluate(other)["eval_loss"] == pytest.approx(0.6931, abs=1e-4)
        made.train()
    assert made.evaluate(other)["eval_loss"] != pytest.approx(0.6931, abs=1e-4)
    for kwargs in ({"rows": iter(PAIRS)}, {"eval_dataset": {"a": iter(PAIRS)}}):
        with pytest.raises(ConfigError, match="precompute_ref_log_probs=True` is not supported with IterableDataset"):
            trainer(tmp_path, "DPO", precompute_ref_log_probs=True, **kwargs)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("IA3Config", "peft_config is of the class IA3Config: .* give peft.LoraConfig"),
        ("PromptTuningConfig", r"tunes a prompt, which only a language model reads.*reward model"),
    ],
)
def test_a_reward_model_refuses_other_adapters_than_lora_with_the_reason(kind, message, tmp_path):
    more = {"num_virtual_tokens": 3} if kind == "PromptTuningConfig" else {}
    config = getattr(pytest.importorskip("peft"), kind)(task_type="SEQ_CLS", **more)
    tiny_model().save_pretrained(tmp_path / "base")
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path / "out", "Reward", model=str(tmp_path / "base"), peft_config=config)


@pytest.mark.parametrize("method", KINDS)
def test_data_sets_are_held_as_token_ids_under_trl_s_columns_and_are_needed(method, tmp_path):
    columns = {"SFT": {"input_ids", "labels"}, "DPO": {"prompt_ids", "chosen_ids", "rejected_ids"},
               "Reward": {"chosen_ids", "rejected_ids"}}[method]  # fmt: skip
    made = trainer(tmp_path, method, eval_dataset=ROWS[method][:1])
    assert len(made.train_dataset) == 4 and set(made.train_dataset.column_names) == columns
    assert set(made.eval_dataset.column_names) == columns
    made = trainer(tmp_path, method, eval_dataset={"a": ROWS[method][:1], "b": ROWS[method][1:]})
    assert {name: len(rows) for name, rows in made.eval_dataset.items()} == {"a": 1, "b": 3}
    made.eval_dataset = ROWS[method][:2]
    made.evaluate()
    assert len(made.eval_dataset) == 2
    assert (
        made.model.model_tags == ["whet", {"Reward": "reward-trainer"}.get(method, method.lower())]
        and not made.aux_loss_enabled
    )
    kind, config = KINDS[method]
    with pytest.raises(ValueError, match="`train_dataset` is required"):
        kind(tiny_model(), args=config(str(tmp_path), **SMALL), processing_class=byte_tokenizer())


@pytest.mark.parametrize(
    "fields",
    [
        {"use_dora": True, "lora_dropout": 0.2},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 4}, "layers_to_transform": [1]},
        {"target_parameters": ["q_proj.weight"], "target_modules": []},
        {"bias": "all"},
        {"init_lora_weights": "pissa"},
        {"trainable_token_indices": [97, 98]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_an_adapter_that_is_more_than_one_product_runs_in_peft_s_own_layers(fields, tmp_path, caplog):
    peft = pytest.importorskip("peft")
    base, asked = tmp_path / "base", {"r": 4, "target_modules": ["q_proj", "v_proj"], **fields}
    tiny_model().save_pretrained(base)
    more = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    whole = trainer(tmp_path / "out", "DPO", model=str(base), peft_config=peft.LoraConfig(**asked), **more)
    assert "PEFT's own layers run" in caplog.text
    before = {n: p.clone() for n, p in whole.model.named_parameters()}
    whole.train()
    assert whole.state.log_history[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)  # the base is the reference
    moved = {n for n, p in whole.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n, p in whole.model.named_parameters() if p.requires_grad}
    assert all(".layers.1." in n for n in moved) or "layers_to_transform" not in fields
    read = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "out" / "checkpoint-2")
    ids = torch.arange(97, 107)[None]
    with torch.no_grad():
        same_logits = read.eval()(ids).logits, whole.model.eval()(ids).logits
    torch.testing.assert_close(*same_logits, rtol=1e-4, atol=1e-4)
    again = trainer(tmp_path / "out", "DPO", model=str(base), peft_config=peft.LoraConfig(**asked), **more)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert same(weights_of(again.model), weights_of(whole.model))


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig", "PrefixTuningConfig"])
def test_a_prompt_is_learned_by_peft_s_own_module_and_a_resumed_run_goes_on_with_it(kind, tmp_path, caplog):
    peft = pytest.importorskip("peft")
    base, config = tmp_path / "base", getattr(peft, kind)(num_virtual_tokens=3, task_type="CAUSAL_LM")
    tiny_model().save_pretrained(base)
    more = {"peft_config": config, "save_strategy": "steps", "save_steps": 1}
    whole = trainer(tmp_path / "out", "DPO", model=str(base), **more)
    assert "each row starts with virtual tokens" in caplog.text
    before = {n: p.clone() for n, p in whole.model.named_parameters()}
    whole.train()
    moved = {n for n, p in whole.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in before if n.startswith("prompt_encoder.")}
    kind, folder = AutoModelForCausalLM, tmp_path / "out" / "checkpoint-2"
    read = peft.PeftModel.from_pretrained(kind.from_pretrained(base), folder)
    ids = torch.arange(97, 107)[None]
    with torch.no_grad():
        torch.testing.assert_close(read.eval()(ids).logits, whole.model.eval()(ids).logits, rtol=1e-4, atol=1e-4)
    again = trainer(tmp_path / "out", "DPO", model=str(base), **more)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert same(weights_of(again.model), weights_of(whole.model))


def test_the_loss_of_a_model_whose_prompt_is_learned_is_peft_s(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_model(), config)
    made = trainer(tmp_path, rows=[{"text": "abcd"}], model=model, eval_dataset=[{"text": "abcd"}, {"text": "ab"}])
    assert made.model is model
    found, total, count = made.evaluate()["eval_loss"], 0.0, 0
    for ids in made.eval_dataset["input_ids"]:
        labels = torch.tensor([[-100, *ids[1:]]])  # the first token is given
        with torch.no_grad():
            total += float(model(torch.tensor([ids]), labels=labels).loss) * (len(ids) - 1)
        count += len(ids) - 1
    assert found == pytest.approx(total / count, rel=1e-4)
    made.train()
    refused = peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="PREFIX_TUNING does not work with gradient checkpointing"):
        trainer(tmp_path, peft_config=refused, gradient_checkpointing=True)


def test_common_mistakes_raise_the_class_that_trl_raises_and_no_column_is_taken_for_another(tmp_path):
    peft = pytest.importorskip("peft")
    with pytest.raises(TypeError, match="SFTConfig has no field 'loss_tipe'; did you mean loss_type"):
        SFTConfig(str(tmp_path), loss_tipe="nll")
    with pytest.raises(TypeError, match=r"`peft_config` must be a `peft.PeftConfig` instance .* got dict"):
        trainer(tmp_path, peft_config={"r": 4})
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    with pytest.raises(ValueError, match="You passed a `PeftModel` instance together with a `peft_config`"):
        trainer(tmp_path, model=peft.get_peft_model(tiny_model(), config), peft_config=config)
    with pytest.raises(ValueError, match="dataset_text_field='body' is not a column of the rows, which have text"):
        trainer(tmp_path, rows=[{"text": "abc"}], dataset_text_field="body")


def test_an_adapter_of_a_reward_model_trains_the_head_only_where_peft_does(tmp_path, caplog):
    peft = pytest.importorskip("peft")
    tiny_model().save_pretrained(tmp_path / "base")
    targets = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    for fields, trained in (({}, False), ({"modules_to_save": ["score"]}, True), ({"task_type": "SEQ_CLS"}, True)):
        config = peft.LoraConfig(**targets, **fields)
        made = trainer(tmp_path, "Reward", model=str(tmp_path / "base"), peft_config=config)
        head = next(p for n, p in made.model.named_parameters() if "score" in n)
        before = head.clone()
        assert trained == (not before.any())  # a frozen head of 0 would teach nothing
        made.train()
        assert trained == (not torch.equal(head, before))
    assert caplog.text.count("as in TRL, peft_config does not train the score head") == 1


@pytest.mark.parametrize("method", KINDS)
def test_compute_metrics_is_given_logits_or_scores_and_labels(method, tmp_path):
    seen = []

    def metrics(found):
        seen.append(found)
        return {"mine": 0.5, "eval_own": 1.5}

    rows = ROWS[method][:3]
    made = trainer(tmp_path, method, eval_dataset=rows, compute_metrics=metrics, per_device_eval_batch_size=2,
                   eval_strategy="steps", eval_steps=2, metric_for_best_model="mine")  # fmt: skip
    made.train()
    assert made.state.best_metric == made.state.log_history[-2]["eval_mine"] == 0.5
    found = made.evaluate()
    assert found["eval_own"] == 1.5
    logits, labels = seen[-1].predictions, seen[-1].label_ids
    if method == "Reward":
        chosen, rejected = logits[[0, 1, 4], 0], logits[[2, 3, 5], 0]
        assert (chosen - rejected).mean() == pytest.approx(found["eval_margin"], rel=1e-4) and labels == ()
        return
    assert logits.shape[:2] == labels.shape and len(labels) == (3 if method == "SFT" else 6)
    if method == "SFT":
        loss = torch.nn.functional.cross_entropy(torch.tensor(logits[:, :-1]).flatten(0, 1),
                                                 torch.tensor(labels[:, 1:]).flatten())  # fmt: skip
        assert loss.item() == pytest.approx(found["eval_loss"], rel=1e-4)
        small = trainer(tmp_path, eval_dataset=rows, preprocess_logits_for_metrics=lambda x, _: x.argmax(-1),
                        compute_metrics=lambda found: {"width": found.predictions.ndim})  # fmt: skip
        assert small.evaluate()["eval_width"] == 2


@pytest.mark.parametrize("method", KINDS)
def test_parameters_are_float16_where_the_model_is_asked_for_so(method, tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    made = trainer(
        tmp_path,
        method,
        model=str(tmp_path / "base"),
        model_init_kwargs={"dtype": torch.float16, "low_cpu_mem_usage": True},
        bf16=None,
    )
    before = {n: p.clone() for n, p in made.model.named_parameters()}
    made.train()
    now = dict(made.model.named_parameters())
    assert {p.dtype for p in now.values()} == {torch.float16}
    assert not any(torch.equal(before[n], p) for n, p in now.items() if "norm" not in n)


CODE = """
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model, Qwen3PreTrainedModel


class OwnConfig(Qwen3Config):
    model_type = "own-qwen3"


class OwnModel(Qwen3ForCausalLM):
    config_class = OwnConfig


class OwnForSequenceClassification(Qwen3PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model, self.score = Qwen3Model(config), torch.nn.Linear(config.hidden_size, 1, bias=False)
        self.post_init()
"""


def own_code(tmp_path, monkeypatch):
    """The folder of a model whose code lies beside its weights."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "own"
    tiny_model().save_pretrained(folder)
    (folder / "modeling_own.py").write_text(CODE)
    named = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    named["AutoModelForSequenceClassification"] = "modeling_own.OwnForSequenceClassification"
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own-qwen3", "architectures": ["OwnModel"], "auto_map": named}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_code_beside_the_weights_of_policy_and_reference_runs_only_where_it_is_trusted(tmp_path, monkeypatch):
    folder = own_code(tmp_path, monkeypatch)
    with pytest.raises(
        ConfigError, match=r"contains Python code, which runs only with your permission.* set trust_remote_code=True$"
    ):
        trainer(tmp_path, "DPO", model=str(folder))
    made = trainer(tmp_path, "DPO", model=str(folder), trust_remote_code=True)
    assert {type(made.model).__name__, type(made.ref_model).__name__} == {"OwnModel"}
    made.train()
    assert made.state.log_history[1]["rewards/margins"] != 0


def test_a_reward_model_of_trusted_code_is_the_classifier_of_that_code_and_an_adapter_fits_it(tmp_path, monkeypatch):
    peft = pytest.importorskip("peft")
    folder = own_code(tmp_path, monkeypatch)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS")
    for own in ({}, {"peft_config": config}):
        made = trainer(tmp_path, "Reward", model=str(folder), trust_remote_code=True, **own)
        inner = made.model.get_base_model() if own else made.model
        assert type(inner).__name__ == "OwnForSequenceClassification"
        made.train()


def test_a_revision_in_model_init_kwargs_is_that_of_model_and_tokenizer(tmp_path, monkeypatch):
    asked = []
    tiny_model().save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")

    def snapshot(*named):
        asked.append(named)
        return str(tmp_path / "base")

    monkeypatch.setattr("whet.storage.model_paths._snapshot", snapshot)
    pin = {"model_init_kwargs": {"revision": "v1"}}
    made = trainer(tmp_path, model="org/tiny", processing_class=None, **pin)
    assert set(asked) == {("org/tiny", "v1")} and len(asked) > 1
    made.train()


def test_wrapped_packs_are_cut_where_they_are_full_and_evaluations_are_packed_too(tmp_path):
    rows = [{"text": "abcd"}, {"text": "ef"}, {"text": "ghi"}]
    made = trainer(tmp_path, rows=rows, packing=True, packing_strategy="wrapped", max_length=5, eval_dataset=rows)
    decode = byte_tokenizer().decode
    assert [decode(ids) for ids in made.train_dataset["input_ids"]] == [f"abcd{END}", f"ef{END}gh", f"i{END}"]
    assert len(made.eval_dataset) == 3
    made.train()
    both = {}
    for packs in (None, False):
        made = trainer(tmp_path, rows=rows, packing=True, max_length=8, eval_packing=packs, eval_dataset=rows)
        both[packs] = len(made.eval_dataset), made.evaluate()["eval_loss"]
    assert (both[None][0], both[False][0]) == (2, 3) and both[None][1] == pytest.approx(both[False][1])


def test_what_trl_refuses_of_rows_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`max_length` is not enforced"):
        trainer(tmp_path, padding_free=True)
    moving = datasets.Dataset.from_list(ANSWERS).with_transform(lambda batch: batch)
    with pytest.raises(
        ValueError, match=r"Dataset\.with_transform\(\).*skip_prepare_dataset.*transform return trainer-r"
    ):
        trainer(tmp_path, rows=moving)
    rows = [{"input_ids": [97, 98], "assistant_masks": [0, 1]}]
    with pytest.raises(ValueError, match="Add a 'labels' column"):
        trainer(tmp_path, rows=rows, dataset_kwargs={"skip_prepare_dataset": True})


def test_texts_without_a_prompt_share_their_characters_but_a_blank_at_the_end(tmp_path):
    rows = [{"chosen": "a b", "rejected": "a c"}, {"chosen": "now", "rejected": "never"}]
    made = trainer(tmp_path, "DPO", rows).train_dataset
    decode = byte_tokenizer().decode
    shown = [[decode(row[f"{name}_ids"]) for name in ("prompt", "chosen", "rejected")] for row in made]
    assert shown == [["a", f" b{END}", f" c{END}"], ["n", f"ow{END}", f"ever{END}"]]


def test_a_message_may_have_tool_calls_in_place_of_a_content(tmp_path):
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
    made = trainer(tmp_path, rows=[{"messages": [TALK[0], call, *TALK[1:]]}])
    assert len(made.train_rows()) == 1


def test_reward_models_warn_of_old_columns_and_refuse_several_labels(tmp_path):
    rows = [{"chosen_input_ids": [97, 98], "rejected_input_ids": [97, 99]}] * 2
    with pytest.warns(FutureWarning, match="will not be supported in v1"):
        made = trainer(tmp_path, "Reward", rows)
    assert made.train_dataset["chosen_ids"][0] == [97, 98]
    several = AutoModelForSequenceClassification.from_config(tiny_model().config)
    with pytest.raises(ValueError, match="reward models require `num_labels=1`, and this one has 2"):
        trainer(tmp_path, "Reward", model=several)


def test_rows_of_token_ids_and_a_head_of_its_own_for_a_reward_model(tmp_path):
    rows = [{"chosen_ids": [97, 98], "rejected_ids": [97, 99, 100], "margin": 0.5}] * 2
    made = trainer(tmp_path, "Reward", rows)
    (a, b) = made.train_rows()[0].sequences
    assert (a.prefix.tolist(), b.tokens.tolist()) == ([97], [99, 100])
    assert made.train_rows()[0].columns["margin"] == (0.5, 0.5)
    made.train()
    assert made.state.log_history[0]["mean_reward"] == 0  # a new head
    assert made.state.log_history[1]["mean_reward"] != 0


def test_methods_that_nothing_calls_are_refused():
    with pytest.raises(ConfigError, match="compute_loss would never be called"):
        type("Mine", (SFTTrainer,), {"compute_loss": lambda self: 0})


def test_a_score_is_trained_where_answers_differ_in_their_first_token_alone(tmp_path):
    rows = [{"chosen": "x", "rejected": "y"}] * 4
    config = tiny_model().config
    config.num_labels = 1
    judge = AutoModelForSequenceClassification.from_config(config)
    made = trainer(tmp_path, "Reward", rows, model=judge)
    assert [len(s.prefix) + len(s.tokens) for s in made.train_rows()[0].sequences] == [2, 2]
    with pytest.raises(DataError, match="differ only in their first token"):
        trainer(tmp_path, "DPO", rows)
