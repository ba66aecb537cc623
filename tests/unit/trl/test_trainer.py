"""GRPOTrainer's behaviours, those that TRL's own tests of it check among them, on tiny models."""

import functools
import json
import logging
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import datasets
import numpy as np
import pandas
import pytest
import torch
from helpers import END, PAD, length_reward, rows, same, tiny_model, weights_of
from huggingface_hub.errors import RepositoryNotFoundError
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    EarlyStoppingCallback,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    TrainerCallback,
)

from whet.data.tokenizer import byte_tokenizer
from whet.errors import CheckpointError, ConfigError, DataError, RewardError
from whet.trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from whet.trl.config.grpo import warn_of_differences
from whet.trl.rl.completions import Completions
from whet.trl.rl.reward_functions import make_reward_functions
from whet.trl.trainer.model import prepare_model

SMALL = {"per_device_train_batch_size": 3, "num_generations": 3, "max_completion_length": 6, "learning_rate": 0.1,
         "logging_steps": 1, "bf16": False, "disable_tqdm": True, "save_strategy": "no", "max_steps": 2,
         "per_device_eval_batch_size": 3, "gradient_checkpointing": False}  # fmt: skip


def trainer(tmp_path, reward=length_reward, *, data=None, model=None, **kwargs):
    """A front on a tiny model; keywords that the trainer takes go there, the others to its configuration."""
    own = {n: kwargs.pop(n) for n in list(kwargs) if n in ("eval_dataset", "callbacks", "optimizers", "peft_config",
           "reward_processing_classes", "tools", "processing_class", "quantization_config", "rollout_func",
           "environment_factory")}  # fmt: skip
    return GRPOTrainer(
        tiny_model() if model is None else model,
        reward,
        GRPOConfig(str(tmp_path), **{**SMALL, **kwargs}),
        rows(4) if data is None else data,
        processing_class=own.pop("processing_class", byte_tokenizer()),
        **own,
    )


def trained(made, **kwargs):
    """Runs it; asserts that it has logged a loss and moved every parameter. Returns: it."""
    before = weights_of(made.model)
    out = made.train(**kwargs)
    assert math.isfinite(out.training_loss)
    assert "train_loss" in made.state.log_history[-1]
    assert [n for n, p in made.model.named_parameters() if torch.equal(p, before[n])] == []
    return made


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"beta": 0.1},
        {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2},
        {"num_iterations": 2, "max_steps": 4},
        {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "num_generations": 6, "max_steps": 4},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
        {"scale_rewards": "batch"},
        {"scale_rewards": False, "loss_type": "dr_grpo"},
        {"multi_objective_aggregation": "normalize_then_sum"},
        {"top_entropy_quantile": 0.5, "entropy_coef": 0.1},
        {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 9.0},
        {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 9.0, "gradient_accumulation_steps": 2},
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "scale_rewards": "none"},
        {"loss_type": "vespo", "scale_rewards": True, "delta": 2.0, "beta": 0.1, "use_bias_correction_kl": False},
        {"loss_type": "cispo", "epsilon_high": 5.0, "scale_rewards": "group", "dataloader_num_workers": 2},
        {"loss_type": "bnpo", "pad_to_multiple_of": 8, "min_p": 0.1, "repetition_penalty": 1.1},
        {"off_policy_mask_threshold": 0.5, "num_iterations": 2, "max_steps": 4},
        {
            "generation_kwargs": {
                "top_k": 20,
                "temperature": 0.8,
                "max_new_tokens": 4,
                "suppress_tokens": [65],
                "stop_strings": ["~"],
                "length_penalty": 1.0,
                "num_beams": 1,
            },
            "top_p": 0.9,
            "min_p": 0.01,
        },
        {"optim": "adafactor"},
        {"optim": "rmsprop", "lr_scheduler_type": "cosine", "warmup_steps": 0.5},
        {"bf16": None, "gradient_checkpointing": True, "cast_lm_head_to_fp32": True, "torch_compile": True},
    ],
    ids=lambda k: ",".join(k) or "defaults",
)
def test_it_trains(kwargs, tmp_path):
    made = trainer(tmp_path, **kwargs)
    ref = None if made.ref_model is None else weights_of(made.ref_model)
    trained(made)
    assert made.state.global_step == kwargs.get("max_steps", 2)
    assert {"loss", "reward", "grad_norm", "learning_rate"} <= made.state.log_history[0].keys()
    if ref is not None:
        assert same(ref, weights_of(made.ref_model)) != kwargs.get("sync_ref_model", False)
        assert "kl" in made.state.log_history[0]
    if "use_adaptive_entropy" in kwargs:  # moved once in each optimizer step, from the second on
        assert made.state.log_history[-2]["entropy_coef"] == pytest.approx(0.11)
        assert made.entropy_coef == pytest.approx(0.11)  # where the arguments have 0.1
    made.close()


def test_the_entropy_bonus_is_coef_times_the_entropy(tmp_path):
    made = trained(trainer(tmp_path, entropy_coef=0.3, loss_type="grpo"))
    row = made.state.log_history[0]
    assert (row["policy_loss"] - row["loss"]) / row["entropy"] == pytest.approx(0.3, rel=1e-4)


def small(config, model, **fields):
    """A tiny model of a kind, over bytes."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 1, "eos_token_id": END, "pad_token_id": PAD, "bos_token_id": None}  # fmt: skip
    return model(config(vocab_size=264, max_position_embeddings=128, **{**sizes, **fields}))


def test_models_of_other_kinds_train_too_and_what_is_not_read_of_one_that_is_loaded_is_told(tmp_path, caplog):
    trained(trainer(tmp_path, model=small(Qwen2Config, Qwen2ForCausalLM), max_steps=1))
    experts = {"head_dim": 8, "moe_intermediate_size": 8, "num_experts": 2, "num_experts_per_tok": 2}
    trained(trainer(tmp_path, model=small(Qwen3MoeConfig, Qwen3MoeForCausalLM, **experts), max_steps=1,
                    model_init_kwargs={"dtype": "float32"}, quantization_config=1))  # fmt: skip
    for told in ("router_aux_loss_coef=0.001", "model_init_kwargs is not read", "quantization_config is not read"):
        assert told in caplog.text


def test_nothing_but_model_rewards_and_rows_is_needed(tmp_path, monkeypatch):
    tiny_model(max_position_embeddings=1024).save_pretrained(tmp_path / "Tiny")
    byte_tokenizer().save_pretrained(tmp_path / "Tiny")
    monkeypatch.chdir(tmp_path)
    made = GRPOTrainer(str(tmp_path / "Tiny"), length_reward, train_dataset=datasets.Dataset.from_list(rows(3)))
    assert made.args.output_dir == "Tiny-GRPO"
    assert made.args.learning_rate == 1e-6
    assert made.max_steps == 9


@pytest.mark.parametrize(
    ("loss", "level", "more", "said"),
    [
        ("dapo", "sequence", {}, "weights each sequence by its completion length"),
        ("grpo", "sequence", {}, ""),
        ("luspo", "token", {}, "needs importance_sampling_level='sequence'"),
        ("vespo", "sequence", {}, "computes sequence ratios itself"),
        ("cispo", "token", {}, "the cap of the weights is epsilon_high=0.2 itself"),
        ("cispo", "token", {"epsilon_high": 5.0}, ""),
        ("dapo", "token", {"beta": 0.1}, "the KL is multiplied by the importance ratio"),
        ("dapo", "token", {"beta": 0.1, "use_bias_correction_kl": False}, ""),
        ("sapo", "token", {"mask_truncated_completions": True}, "count in the mean over rows"),
        ("dapo", "token", {"vllm_device": "cuda:1"}, "vllm_device='cuda:1' is not read"),
    ],
)
def test_what_is_followed_though_it_may_not_be_meant_is_told(loss, level, more, said, caplog):
    warn_of_differences(GRPOConfig(loss_type=loss, importance_sampling_level=level, **more))
    assert said in caplog.text
    assert bool(caplog.text) == bool(said)


# ---- rewards -------------------------------------------------------------------------------------------------------


async def later(completions, **_):
    return [float(len(c)) for c in completions]


class Callable_:
    async def __call__(self, completion_ids, **_):
        return [float(len(ids)) for ids in completion_ids]


def test_functions_of_every_kind_with_columns_state_and_logs_of_their_own(tmp_path):
    seen = []

    def judge(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric, **rest):
        seen.append((prompts, answer, trainer_state.global_step, set(rest)))
        log_extra("upper", [c.upper() for c in completions])
        log_metric("longest", max(map(len, completion_ids)))
        return [float(sum(ids) % 5) if i else None for i, ids in enumerate(completion_ids)]

    data = [{"prompt": f"{i}=", "answer": i, "completion": "?", "level": "x"} for i in range(3)]
    fns = [judge, later, functools.partial(later, extra=1), Callable_()]
    made = trainer(tmp_path, fns, data=data, reward_weights=[1.0, 0.5, 0.0, 0.25], log_completions=True,
                   shuffle_dataset=False, num_completions_to_print=1)  # fmt: skip
    trained(made)
    assert seen[0][:3] == (["0="] * 3, [0] * 3, 0)
    assert seen[1][2] == 1
    assert "level" in seen[0][3]
    assert "completion" not in seen[0][3]
    row = made.state.log_history[0]
    weighed = sum(w * row[f"rewards/{n}/mean"] for w, n in zip((0.5, 0.0, 0.25), ("later", "later_2", "Callable_")))
    assert row["reward"] == pytest.approx(weighed + row["rewards/judge/mean"] * 2 / 3)
    assert row["longest"] <= 6
    table = datasets.Dataset.from_parquet(str(tmp_path / "completions" / "completions_00002.parquet"))
    assert {"step", "prompt", "completion", "judge", "later", "upper", "advantage"} <= set(table.column_names)
    assert table["step"][0] == 2
    assert len(table) == 3


def test_completions_are_shown_by_the_loggers_too(tmp_path, monkeypatch, capsys):
    shown = []
    wandb = SimpleNamespace(run=None, log=shown.append, Table=lambda dataframe: dataframe)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    args = GRPOConfig(str(tmp_path), report_to="wandb", log_completions=True, wandb_log_unique_prompts=True,
                      num_completions_to_print=1)  # fmt: skip
    made = Completions(args)
    for step, run in ((1, None), (2, object())):
        wandb.run = run
        made.prompts, made.completions, made.advantages = ["a", "a", "b"], ["1", "2", "3"], [0.0, 0.5, 1.0]
        made.pending = True
        made.write(step)
    assert [table["completions"]["completion"].tolist() for table in shown] == [["1", "3"]]
    whole = pandas.read_parquet(tmp_path / "completions" / "completions_00002.parquet")
    assert whole["completion"].tolist() == ["1", "2", "3"]
    assert capsys.readouterr().out.count("Step") == 2


def test_rewards_that_are_all_none_or_nan_are_told_of_and_teach_nothing(tmp_path, caplog):
    nan = math.nan
    given = iter([[None, nan, np.float32("nan")], np.full(3, nan), torch.full((3,), nan)])
    made = trainer(tmp_path, lambda **_: next(given), max_steps=3)
    before = weights_of(made.model)
    made.train()
    assert caplog.text.count("All reward functions returned None for the following kwargs") == 3
    assert same(before, weights_of(made.model))
    for wrong in (math.inf, "nan"):
        made = trainer(tmp_path, lambda wrong=wrong, **_: [wrong, 1.0, 2.0])
        with pytest.raises(RewardError, match="row 0, generation 0"):
            made.train()


def test_conversations_and_columns_left_out(tmp_path):
    seen = []

    def judge(prompts, completions, **rest):
        seen.append((prompts[0], completions[0], set(rest)))
        return length_reward([c[0]["content"] for c in completions])

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ mood }}="
    data = [{"prompt": [{"role": "user", "content": str(i)}], "answer": i} for i in range(4)]
    made = trained(trainer(tmp_path, judge, data=data, processing_class=tokenizer, remove_unused_columns=True,
                           chat_template_kwargs={"mood": "!"}, shuffle_dataset=False))  # fmt: skip
    assert seen[0][0] == [{"role": "user", "content": "0"}]
    assert seen[0][1][0]["role"] == "assistant"
    assert "answer" not in seen[0][2]
    assert made.learner.cluster.encoder()({"prompt": data[0]["prompt"]}).tokens.tolist() == list(b"0!=")


def reward_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 8}  # fmt: skip
    return Qwen3ForSequenceClassification(Qwen3Config(vocab_size=264, num_labels=1, pad_token_id=PAD, **sizes))


@pytest.mark.parametrize("by", ["module", "folder"])
def test_reward_models_by_name_and_as_modules(by, tmp_path):
    model = reward_model()
    model.save_pretrained(tmp_path / "judge")
    byte_tokenizer().save_pretrained(tmp_path / "judge")
    given = model if by == "module" else str(tmp_path / "judge")
    made = trained(trainer(tmp_path, [given, length_reward], reward_processing_classes=[byte_tokenizer(), None]))
    name = "judge" if by == "folder" else "Qwen3ForSequenceClassification"
    assert math.isfinite(made.state.log_history[0][f"rewards/{name}/mean"])
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "judge")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path / "judge")
    given = AutoModelForSequenceClassification.from_pretrained(tmp_path / "judge")
    (loaded,) = make_reward_functions([given], None, byte_tokenizer(), made.args)
    assert loaded.tokenizer.chat_template == tokenizer.chat_template  # its own, not the policy's
    inputs = byte_tokenizer()("0+1=ab", return_tensors="pt")
    expected = again(**inputs).logits.item()
    fn = made.reward_funcs[0]
    ids = inputs["input_ids"][0].tolist()
    found = fn(prompts=["0+1="], completions=["ab"], prompt_ids=[ids[:4]], completion_ids=[ids[4:]])
    assert found == pytest.approx([expected], rel=1e-5)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"reward": []}, ConfigError, "No reward source provided: reward_funcs is empty"),
        ({"reward": 5}, ConfigError, "reward_funcs must be a function, the name of .*, got 5"),
        ({"model": 5}, ConfigError, "model must be a module, or a folder or hub name as str, got 5"),
        ({"callbacks": 5}, ConfigError, "callbacks must be a list, got 5"),
        (
            {"reward_weights": [1.0, 2.0]},
            ConfigError,
            r"reward weights \(2\) must match number of reward functions \(1\)",
        ),
        ({"reward_processing_classes": [None, None]}, ConfigError, "must match the number of reward functions"),
        (
            {"reward": [length_reward] * 2, "reward_processing_classes": byte_tokenizer()},
            ConfigError,
            r"classes \(1\) must match",
        ),
        ({"peft_config": object()}, ConfigError, "`peft_config` must be a `peft.PeftConfig` instance"),
        ({"data": rows(2), "gradient_accumulation_steps": 3}, ConfigError, "has 2 rows.*takes 3 prompts.*for 0 steps"),
        ({"data": [{"question": "1"}]}, DataError, "no column 'prompt'"),
        (
            {"data": datasets.DatasetDict(train=datasets.Dataset.from_list(rows(3)))},
            DataError,
            r"`train_dataset` must be a `Dataset` or `IterableDataset`, got `DatasetDict`; .*_dataset=data\['train'\]",
        ),
        ({"data": "rows.jsonl"}, DataError, "must be a `Dataset`.*, got `str`; load it first"),
        ({"data": pandas.DataFrame({"prompt": ["a"]})}, DataError, "got `DataFrame`; convert it: Dataset.from_pandas"),
        ({"data": ["a"] * 9}, DataError, "train_dataset: the rows are str"),
        ({"eval_dataset": {"a": rows(2), "b": []}}, DataError, r"eval_dataset\['b'\] has no rows"),
        (
            {"eval_strategy": "steps"},
            ConfigError,
            "eval_strategy='steps' asks for evaluations, and there is no eval_da",
        ),
        ({"eval_on_start": True}, ConfigError, "eval_on_start=True asks for evaluations"),
        ({"model": "meta"}, ConfigError, "is on the meta device"),
        ({"data": iter(rows(3)), "max_steps": -1}, ConfigError, "set max_steps"),
        ({"model_init_kwargs": {"rope_scaling": 1}, "model": "folder"}, ConfigError, "rope_scaling"),
        ({"optimizers": (None, 1)}, ConfigError, "give both"),
        (
            {
                "data": datasets.IterableDataset.from_generator(lambda: iter(rows(3))),
                "accelerator_config": {"dispatch_batches": True},
            },
            ConfigError,
            "require `dispatch_batches=False`",
        ),
        ({"generation_kwargs": {"do_sample": False}}, ConfigError, "do_sample=False"),
        ({"generation_kwargs": {"max_length": 9}}, ConfigError, "not supported; set max_completion_length"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else str(value),
)
def test_what_is_not_there_is_refused_by_name(given, kind, message, tmp_path):
    if given.get("model") == "meta":
        given = {"model": tiny_model().to("meta")}
    with pytest.raises(kind, match=message):
        trainer(tmp_path, **given)


def test_a_stream_sets_the_loader_s_arguments_as_in_trl(tmp_path, caplog):
    stream = datasets.IterableDataset.from_generator(lambda: iter(rows(4)))
    made = trained(trainer(tmp_path, data=stream, dataloader_num_workers=4))
    assert made.args.accelerator_config.dispatch_batches is False
    assert made.args.dataloader_num_workers == 0
    assert "`dataloader_num_workers=0`, which is taken in place of 4" in caplog.text


def test_a_trainer_without_data_or_with_a_reference_that_can_t_be_synchronized_is_refused(tmp_path):
    args = GRPOConfig(str(tmp_path), **SMALL)
    with pytest.raises(ConfigError, match="`train_dataset` is required"):
        GRPOTrainer(tiny_model(), length_reward, args, processing_class=byte_tokenizer())
    config = pytest.importorskip("peft").LoraConfig(target_modules=["q_proj"])
    with pytest.raises(ConfigError, match="`sync_ref_model=True` while using a PEFT model"):
        trainer(tmp_path, peft_config=config, sync_ref_model=True, beta=0.1)


def test_beams_are_made_by_transformers_generate_and_trained_on(tmp_path, monkeypatch, caplog):
    asked = []

    def generate(self, *args, generation_config, **kwargs):
        asked.append((generation_config.num_beams, generation_config.length_penalty, generation_config.do_sample))
        return own(self, *args, generation_config=generation_config, **kwargs)

    generate.__module__ = "transformers"
    model = tiny_model()
    own = type(model).generate
    monkeypatch.setattr(type(model), "generate", generate)
    trained(trainer(tmp_path, model=model, generation_kwargs={"num_beams": 2, "length_penalty": -0.1, "top_k": 50}))
    assert asked == [(2, -0.1, True)] * 2
    assert "num_beams=2: as in TRL, beam search does not sample from the policy" in caplog.text


def test_a_generate_of_the_model_s_own_class_is_used(tmp_path, monkeypatch):
    model, asked = tiny_model(), []
    own = type(model).generate
    monkeypatch.setattr(type(model), "generate", lambda self, **kw: asked.append(1) or own(self, **kw))
    trained(trainer(tmp_path, model=model))
    assert len(asked) == 2


def test_accumulation_that_would_mix_rollouts_is_taken_as_the_nearest_that_does_not(tmp_path, caplog):
    made = trainer(tmp_path, steps_per_generation=4, gradient_accumulation_steps=3, num_iterations=2, max_steps=4)
    assert "gradient_accumulation_steps=3 with steps_per_generation=4 would mix two rollouts" in caplog.text
    trained(made)
    assert (made.args.batches.rows, made.args.batches.updates, made.state.global_step) == (12, 2, 4)


def test_the_last_rollout_weights_and_tokenizers_of_rewards_are_there_to_read(tmp_path):
    def judge(completions, log_extra, **_):
        log_extra("own", list(completions))
        return [1.0 + len(set(completion)) for completion in completions]

    class Appends(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            made._metrics["train"]["mine"] += [1.0, 2.0]

    made = trainer(
        tmp_path,
        [judge, reward_model()],
        callbacks=[Appends()],
        reward_weights=[0.5, 2.0],
        reward_processing_classes=[None, byte_tokenizer()],
    )
    assert made.reward_weights.tolist() == [0.5, 2.0]
    assert [type(own) for own in made.reward_processing_classes] == [type(None), type(byte_tokenizer())]
    made.reward_weights = torch.tensor([1.0, 0.0])
    with pytest.raises(ConfigError, match=r"reward weights \(1\) must match"):
        made.reward_weights = [1.0]
    trained(made)
    logs = made._logs
    assert logs["extra"]["own"] == logs["completion"]
    assert len(logs["prompt"]) == len(logs["advantages"]) == len(logs["rewards"]["judge"]) == 3
    assert made.state.log_history[-2]["reward"] == pytest.approx(sum(logs["rewards"]["judge"]) / 3)
    assert [row.get("mine") for row in made.state.log_history] == [1.5, 1.5, None]
    assert (made.environments, made.aux_loss_enabled) == ([], False)


def test_nothing_to_resume_is_a_value_error_and_an_object_has_the_name_that_it_gives_itself(tmp_path):
    class Judge:
        __name__ = "mine"

        def __call__(self, completions, **_):
            return [1.0] * len(completions)

    made = trainer(tmp_path, Judge())
    assert made.reward_func_names == ["mine"]
    for asked in (True, str(tmp_path / "none"), 5):
        with pytest.raises(ValueError, match="heckpoint"):
            made.train(resume_from_checkpoint=asked)


def test_loaders_to_look_at_show_the_rows_in_the_order_of_the_run(tmp_path):
    seen = []

    def judge(prompts, completions, **_):
        seen.append([{"prompt": prompt} for prompt in prompts])
        return [float(len(completion)) for completion in completions]

    data = [{"prompt": f"{i}+1="} for i in range(4)]
    made = trainer(tmp_path, judge, data=data, eval_dataset=data[:2], max_steps=4)
    batches = list(made.get_train_dataloader())
    assert len(batches) == 4
    assert [row for batch in made.get_eval_dataloader() for row in batch] == [data[0]] * 3 + [data[1]] * 3
    made.train()
    assert seen == batches


def test_a_reward_function_of_the_wrong_length_is_named_in_a_value_error(tmp_path):
    with pytest.raises(ValueError, match=r"lambda.*2.*3"):
        trainer(tmp_path, lambda completions, **_: [1.0, 2.0]).train()


def test_a_subclass_s_log_is_used_and_methods_that_nothing_calls_are_refused(tmp_path):
    class Mine(GRPOTrainer):
        def log(self, logs, start_time=None):
            super().log({**logs, "mine": 1.0}, start_time)

        def save_model(self, output_dir=None, _internal_call=False):
            (Path(output_dir) / "mine.txt").write_text(str(_internal_call))
            super().save_model(output_dir, _internal_call)

    args = GRPOConfig(str(tmp_path), **{**SMALL, "save_strategy": "steps", "save_steps": 1})
    made = Mine(tiny_model(), length_reward, args, rows(4),
                processing_class=byte_tokenizer())  # fmt: skip
    made.train()
    assert made.state.log_history[0]["mine"] == 1.0
    assert (tmp_path / "checkpoint-1" / "mine.txt").read_text() == "True"
    made.train(resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match=r"compute_loss would never be called.*loss_type"):
        type("Other", (GRPOTrainer,), {"compute_loss": lambda self: 0})
    with pytest.raises(ConfigError, match="training_step would never be called"):
        type("Mixed", (type("Mixin", (), {"training_step": lambda self: 0}), GRPOTrainer), {})


# ---- data ----------------------------------------------------------------------------------------------------------


def test_streams_and_sets_by_name(tmp_path):
    data = datasets.Dataset.from_list(rows(4)).to_iterable_dataset()
    sets = {"a": datasets.Dataset.from_list(rows(2)), "b": rows(1)}
    made = trained(trainer(tmp_path, data=data, eval_dataset=sets, eval_strategy="steps", eval_steps=2,
                           num_generations_eval=3, eval_on_start=True))  # fmt: skip
    logged = [row for row in made.state.log_history if "eval_a_loss" in row]
    assert [row["step"] for row in logged] == [0, 2]
    assert made.evaluate()["eval_b_reward"] >= 0
    assert made.evaluate("a").keys() == made.evaluate(rows(1), metric_key_prefix="eval_a").keys()
    assert made.evaluate()["epoch"] == made.state.epoch
    with pytest.raises(ConfigError, match="there is no evaluation set 'c'"):
        made.evaluate("c")
    with pytest.raises(ConfigError, match="needs eval_dataset"):
        trainer(tmp_path).evaluate()


def test_a_part_of_an_epoch_and_rounding_to_rollouts(tmp_path):
    assert trainer(tmp_path, max_steps=-1, num_train_epochs=1.5).max_steps == 6
    made = trained(trainer(tmp_path, max_steps=3, num_iterations=2))
    assert made.state.global_step == 4
    assert made.state.epoch == 0.5


def test_the_order_stays_without_shuffling(tmp_path):
    seen = []
    fn = lambda prompts, **_: [seen.append(p) or 0.0 for p in prompts]
    trainer(tmp_path, fn, data=rows(4), shuffle_dataset=False, max_steps=4).train()
    assert seen[::3] == [row["prompt"] for row in rows(4)]


def test_a_prompt_is_cut_on_the_left_only_where_that_is_asked_for(tmp_path):
    data = [{"prompt": "abcdefgh"}, *rows(3)]
    assert trainer(tmp_path, data=data).cluster.rollout_for().max_prompt_length == 64
    made = trainer(tmp_path, data=data, max_prompt_length=3)
    assert made.cluster.encoder()(data[0]).tokens.tolist() == list(b"fgh")


# ---- generation ----------------------------------------------------------------------------------------------------


def fixed(*completions):
    """A `generate` that gives these completions in turn."""

    def generate(input_ids, attention_mask, generation_config, **_):
        assert attention_mask.shape == input_ids.shape
        assert END in generation_config.eos_token_id
        made = [completions[i % len(completions)] for i in range(len(input_ids))]
        width = max(map(len, made))
        return torch.cat([input_ids, torch.tensor([m + [PAD] * (width - len(m)) for m in made])], 1)

    return generate


def test_a_generate_on_the_instance_is_used_and_its_old_logprobs_are_the_trainer_s(tmp_path):
    seen = []
    fn = lambda completions, completion_ids, **_: seen.extend(completion_ids) or length_reward(completions)
    made = trainer(tmp_path, fn, num_iterations=2, max_steps=4)
    made.model.generate = fixed([65, 66, END], [67, END], [68, 69, 70])
    trained(made)
    assert seen[:3] == [[65, 66, END], [67, END], [68, 69, 70]]
    row = made.state.log_history[0]
    assert row["completions/clipped_ratio"] == pytest.approx(1 / 3)
    assert row["completions/mean_terminated_length"] == 2.5
    assert "sampling/sampling_logp_difference/max" not in row  # nothing was recorded


@pytest.mark.parametrize("truncated", ["some", "all"])
def test_truncated_completions_are_masked(truncated, tmp_path):
    made = trainer(tmp_path, mask_truncated_completions=True, loss_type="grpo")
    made.model.generate = fixed([65, 66, END] if truncated == "some" else [65, 66], [67, 68], [68, 69, 70])
    before = weights_of(made.model)
    made.train()
    assert same(before, weights_of(made.model)) == (truncated == "all")
    assert (made.state.log_history[0]["loss"] == 0) == (truncated == "all")


def test_a_regular_expression_holds_completions(tmp_path):
    pytest.importorskip("llguidance")
    seen = []
    fn = lambda completions, **_: seen.extend(completions) or length_reward(completions)
    made = trainer(tmp_path, fn, vllm_guided_decoding_regex="[ab]{1,4}", max_steps=1, learning_rate=1e-3)
    made.train()
    assert all(set(text) <= {"a", "b"} for text in seen)


# ---- callbacks, checkpoints, the end -------------------------------------------------------------------------------


class Stop(TrainerCallback):
    rates: ClassVar[list] = []

    def on_step_end(self, args, state, control, model, processing_class, optimizer, lr_scheduler, **_):
        assert isinstance(optimizer, torch.optim.Optimizer)
        self.rates.append(lr_scheduler.get_last_lr()[0])
        control.should_training_stop = state.global_step == 2
        control.should_save = state.global_step == 1


def test_flags_are_done_and_callbacks_come_and_go(tmp_path):
    made = trainer(tmp_path, callbacks=[Stop], max_steps=5, save_strategy="steps", save_steps=100)
    made.train()
    assert Stop.rates == pytest.approx([0.08, 0.06])  # of the update that comes next, as transformers has it
    assert list(made.state.log_history[0])[:3] == ["loss", "grad_norm", "learning_rate"]
    assert made.lr_scheduler.state_dict()["last_epoch"] == 2
    assert made.state.global_step == 2
    assert (tmp_path / "checkpoint-1").is_dir()
    unsaved = trainer(tmp_path / "no", callbacks=[Stop], max_steps=5)
    unsaved.train()
    assert (tmp_path / "no" / "checkpoint-1" / "model.safetensors").is_file()
    assert not (tmp_path / "no" / ".whet").exists()
    made.remove_callback(Stop)
    made.add_callback(stop := Stop())
    assert made.pop_callback(Stop) is stop


def test_an_error_of_a_callback_ends_the_run_as_itself(tmp_path):
    class Broken(TrainerCallback):
        def on_log(self, *_, **__):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trainer(tmp_path, callbacks=[Broken()]).train()


def test_a_checkpoint_is_a_model_and_a_resumed_run_is_the_one_without_a_break(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "whet")
    args = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "num_iterations": 2, "beta": 0.1}
    whole = trained(trainer(tmp_path / "a", **args))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "checkpoint-4")
    assert same(weights_of(loaded), weights_of(whole.model))
    state = json.loads((tmp_path / "a" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    again = trainer(tmp_path / "a", **args)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert same(weights_of(again.model), weights_of(whole.model))
    steps = [row["step"] for row in again.state.log_history]
    assert steps == [row["step"] for row in whole.state.log_history]
    again.train(resume_from_checkpoint=True)  # nothing is left to do
    assert again.state.global_step == 4
    with pytest.raises(CheckpointError, match="No valid checkpoint"):
        trainer(tmp_path / "b").train(resume_from_checkpoint=True)


@pytest.mark.parametrize("limit", [1, 2])
def test_the_best_model_is_kept_and_loaded_at_the_end(limit, tmp_path):
    judged = []

    def judge(completions, **_):
        judged.append(1)
        return [float(i) - 10 * len(judged) for i in range(len(completions))]

    sets = rows(1) if limit == 1 else {"a": rows(2), "b": rows(1)}  # of several the last one's, as in TRL
    made = trainer(tmp_path, judge, eval_dataset=sets, eval_strategy="steps", eval_steps=1, save_strategy="steps",
                   save_steps=1, max_steps=3, load_best_model_at_end=True, metric_for_best_model="eval_reward",
                   save_total_limit=limit, callbacks=[EarlyStoppingCallback(2)])  # fmt: skip
    made.train()
    assert made.state.best_global_step == 1
    assert made.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    best = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    assert same(weights_of(best), weights_of(made.model))
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2


def test_an_optimizer_and_a_schedule_of_the_user_s(tmp_path):
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    made = trained(trainer(tmp_path, model=model, optimizers=(optimizer, schedule), max_grad_norm=0.1))
    assert [row["learning_rate"] for row in made.state.log_history[:2]] == pytest.approx([0.5, 0.05])
    assert made.optimizer is optimizer


def test_saving_the_model_and_only_it(tmp_path):
    made = trained(trainer(tmp_path, save_strategy="steps", save_steps=1, save_only_model=True, save_total_limit=1))
    made.save_model(str(tmp_path / "final"))
    made.save_state()
    for folder in ("final", "checkpoint-2"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert same(weights_of(loaded), weights_of(made.model))
    assert not (tmp_path / "checkpoint-1").exists()
    with pytest.raises(CheckpointError, match=r"no run\.pt"):
        made.train(resume_from_checkpoint=True)


def test_the_metric_names_of_an_earlier_release(tmp_path):
    made = trained(trainer(tmp_path, compat="0.16", max_completion_length=6))
    row = made.state.log_history[0]
    assert row["completion_length"] == row["completions/mean_length"]
    assert row["clip_ratio"] == row["clip_ratio/region_mean"]
    assert row["reward/length_reward"] == row["rewards/length_reward/mean"]
    assert "kl" in row


def test_the_model_is_the_user_s_to_call_but_while_it_is_trained(tmp_path):
    said = []

    def sample(model, **_):
        ids = torch.tensor([[48, 49]])
        said.append(model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False))

    class Samples(TrainerCallback):
        def on_step_end(self, args, state, control, **given):
            sample(given["model"])

    made = trainer(tmp_path, callbacks=[Samples()], gradient_checkpointing=True, eval_dataset=rows(1))
    sample(made.model)
    made.train()
    sample(made.model)
    assert len(said) == 4
    assert made.evaluate()["eval_reward"] >= 0
    sample(made.model)


def test_numbers_are_shown_and_kept(tmp_path, capsys):
    made = trainer(tmp_path)
    made.log_metrics("train", {"b": 2, "a": 1.5})
    assert capsys.readouterr().out.splitlines()[-3:] == ["***** train metrics *****", "  a = 1.5", "  b = 2"]
    made.save_metrics("train", {"a": 1.5})
    made.save_metrics("eval", {"c": 3})
    assert json.loads((tmp_path / "all_results.json").read_text()) == {"a": 1.5, "c": 3}


def test_what_a_script_reads_of_the_trainer(tmp_path):
    made = trainer(tmp_path)
    assert (made.num_generations, made.max_completion_length, made.is_fsdp_enabled) == (3, 6, False)
    assert made.epsilon_low == made.args.epsilon
    assert made.get_num_trainable_parameters() == sum(p.numel() for p in made.model.parameters())
    for name, instead in (("compute_metrics", "on_evaluate"), ("hp_space", "each trial"),
                          ("data_collator", "no loaders"), ("num_generation", "did you mean")):  # fmt: skip
        with pytest.raises(AttributeError, match=f"{name}.*{instead}"):
            getattr(made, name)
    with pytest.raises(AttributeError, match="give the fields that it sets"):
        made.args.set_training(batch_size=2)
    assert made.args.parallel_mode.value == "not_parallel"
    assert made.accelerator.is_main_process
    assert made.accelerator.unwrap_model(made.model) is made.model
    assert made.is_world_process_zero()
    assert made.ref_model is None
    assert made.processing_class is made.tokenizer
    assert made.args.device == made.accelerator.device


class Hub:
    """A hub that takes one commit."""

    token = "x"
    sent: ClassVar[list] = []

    def __init__(self, **_):
        pass

    def whoami(self):
        return {"name": "me", "orgs": []}

    def repo_info(self, repo, *, repo_type):
        raise RepositoryNotFoundError("none", response=SimpleNamespace(headers={}, request=None, status_code=404))

    def create_repo(self, repo, **given):
        self.sent.append((repo, given["private"]))

    def create_commit(self, repo, *, operations, commit_message, revision):
        self.sent.append((commit_message, sorted(o.path_in_repo for o in operations)))
        return SimpleNamespace(commit_url=f"https://hub/{repo}")


def test_a_card_and_what_is_sent_to_the_hub(tmp_path, monkeypatch):
    made = trainer(tmp_path / "mine")
    made.create_model_card("other", "org/data", "sums")
    assert "# other" in (tmp_path / "mine" / "README.md").read_text()
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        made.push_to_hub()
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):  # before anything is trained
        trainer(tmp_path, push_to_hub=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    made = trainer(tmp_path / "mine", push_to_hub=True, hub_token="x", hub_model_id="sums")
    assert made.push_to_hub(dataset_name="org/data") == "https://hub/me/sums"
    assert Hub.sent[0] == ("me/sums", True)
    message, sent = Hub.sent[1]
    assert message == "End of training"
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(sent)
    made.save_model()
    assert Hub.sent[3][0] == "Model save"


def test_a_module_computes_in_bf16_over_fp32_masters_and_keeps_its_dtype_where_it_must(tmp_path):
    made = trainer(tmp_path, bf16=True, beta=0.1, learning_rate=1e-4)
    before = made.worker.optim.masters_by_name()
    assert {p.dtype for p in made.model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in made.ref_model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in before.values()} == {torch.float32}
    made.train()
    made.save_model(str(tmp_path / "final"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype=torch.float32)
    saved = dict(loaded.named_parameters())
    assert all(torch.equal(saved[name], master) for name, master in before.items())
    model = tiny_model()
    own = trainer(tmp_path, model=model, optimizers=(torch.optim.SGD(model.parameters(), lr=0.5), None), bf16=True)
    assert {p.dtype for p in own.model.parameters()} == {torch.float32}
    assert trainer(tmp_path, model=tiny_model(dtype=torch.bfloat16)).model.dtype == torch.bfloat16


@pytest.mark.parametrize("by", ["module", "folder", "wrapped"])
def test_an_adapter_is_trained_and_its_base_is_not(by, tmp_path, caplog):
    peft = pytest.importorskip("peft")
    model = tiny_model()
    before = weights_of(model)
    config = peft.LoraConfig(r=4, lora_dropout=0.1)  # of q_proj and v_proj, as PEFT has it for this kind
    given, own = model, {"peft_config": config}
    if by == "folder":
        model.save_pretrained(tmp_path / "base")
        given = str(tmp_path / "base")
    if by == "wrapped":
        given, own = peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM")), {}
    made = trainer(tmp_path / "out", model=given, beta=0.1, save_strategy="steps", save_steps=1, **own)
    made.train()
    now = {name.replace(".base_layer", ""): p for name, p in made.model.get_base_model().named_parameters()}
    assert all(torch.equal(now[name], p) for name, p in before.items())
    changed = [n for n, p in now.items() if "lora_B" in n and p.any()]
    assert len(changed) == 4
    assert all("q_proj" in n or "v_proj" in n for n in changed)
    assert made.state.log_history[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert (tmp_path / "out" / "checkpoint-2" / "adapter_model.safetensors").exists()
    assert ("lora_dropout=0.1 is taken as 0.0" in caplog.text) == (by != "wrapped")
    made.save_model(str(tmp_path / "final"))
    made.model.save_pretrained(tmp_path / "mine")  # as notebooks do
    for folder in ("final", "mine"):
        loaded = peft.PeftModel.from_pretrained(tiny_model(), tmp_path / folder)
        assert loaded.peft_config["default"].r == 4
        assert same(weights_of(loaded), weights_of(made.model))
    assert not (tmp_path / "mine" / "model.safetensors").exists()
    assert made.model.get_nb_trainable_parameters()[0] == sum(p.numel() for n, p in now.items() if "lora_" in n)
    if by == "wrapped":
        assert made.model is given
    ids = torch.tensor([[48, 49]])
    before_merging = made.model(ids).logits
    merged = made.model.merge_and_unload()
    assert not [name for name, _ in merged.named_modules() if "lora" in name]
    torch.testing.assert_close(merged(ids).logits, before_merging)


@pytest.mark.parametrize(
    "fields",
    [
        {"use_dora": True, "lora_dropout": 0.2},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 4}, "layers_to_transform": [1]},
        {"target_parameters": ["q_proj.weight"], "target_modules": []},
        {"init_lora_weights": "pissa"},
        {"trainable_token_indices": [48, 49]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_the_engine_samples_from_peft_s_own_layers(fields, tmp_path, caplog):
    peft = pytest.importorskip("peft")
    base, asked = tmp_path / "base", {"r": 4, "target_modules": ["q_proj", "v_proj"], **fields}
    tiny_model().save_pretrained(base)
    more = {"beta": 0.1, "save_strategy": "steps", "save_steps": 1}

    def reward(completions, **kwargs):  # different for each completion
        return [float(sum(map(ord, text)) % 97) for text in completions]

    def make():
        return trainer(tmp_path / "out", reward, model=str(base), peft_config=peft.LoraConfig(**asked), **more)

    whole = make()
    assert "PEFT's own layers run" in caplog.text
    assert ("lora_dropout=0.2 is taken as 0.0" in caplog.text) == ("lora_dropout" in fields)
    before = {n: p.clone() for n, p in whole.model.named_parameters()}
    whole.train()
    moved = {n for n, p in whole.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n, p in whole.model.named_parameters() if p.requires_grad}
    first, second = (row for row in whole.state.log_history if "kl" in row)
    assert first["kl"] == pytest.approx(0, abs=1e-6) and second["kl"] > 0  # the base is the reference
    assert second["sampling/sampling_logp_difference/max"] < 1e-4  # of the moved adapter
    read = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "out" / "checkpoint-2")
    ids = torch.arange(97, 107)[None]
    with torch.no_grad():
        torch.testing.assert_close(read.eval()(ids).logits, whole.model.eval()(ids).logits, rtol=1e-4, atol=1e-4)
    again = make()
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert same(weights_of(again.model), weights_of(whole.model))


@pytest.mark.parametrize("by", ["config", "module"])
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig", "PrefixTuningConfig"])
def test_transformers_samples_from_a_model_with_a_learned_prompt(kind, by, tmp_path, caplog):
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(num_virtual_tokens=3, task_type="CAUSAL_LM")
    tiny_model().save_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    prompts = peft.get_peft_model(tiny_model(), config).prompt_encoder.state_dict()
    more = {"beta": 0.1, "save_strategy": "steps", "save_steps": 1, "gradient_checkpointing": kind[:6] == "Prompt"}

    def reward(completions, **kwargs):  # different for each completion
        return [float(sum(map(ord, text)) % 97) for text in completions]

    def make():
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        if by == "config":
            return trainer(tmp_path / "out", reward, model=base, peft_config=config, **more)
        model = peft.get_peft_model(base, config)
        model.prompt_encoder.load_state_dict(prompts)
        return trainer(tmp_path / "out", reward, model=model, **more)

    whole = make()
    assert "using 'hf'" in caplog.text
    before = {n: p.clone() for n, p in whole.model.named_parameters()}
    whole.train()
    moved = {n for n, p in whole.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in before if n.startswith("prompt_encoder.")}
    first, second = (row for row in whole.state.log_history if "kl" in row)
    assert (abs(first["kl"]) < 1e-6) == (by == "module")  # the reference is a given prompt, or the model without one
    assert second["kl"] != 0
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-5 for row in (first, second))
    read = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "out" / "checkpoint-2"
    )
    ids = torch.arange(97, 107)[None]
    with torch.no_grad():
        torch.testing.assert_close(read.eval()(ids).logits, whole.model.eval()(ids).logits, rtol=1e-4, atol=1e-4)
    again = make()
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert same(weights_of(again.model), weights_of(whole.model))


def test_what_can_t_be_sampled_or_adapted_is_refused_with_the_reason(tmp_path, caplog):
    peft = pytest.importorskip("peft")
    with pytest.raises(
        ValueError, match="peft_config is of the class IA3Config: whet saves, resumes and switches off PEFT's LoRA"
    ):
        trainer(tmp_path, peft_config=peft.IA3Config(task_type="CAUSAL_LM"))
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match=r"'vllm' can't read the model's learned prompt .*use_vllm=False"):
        trainer(tmp_path, peft_config=config, use_vllm=True)
    encoder = {"encoder_reparameterization_type": "LSTM", "encoder_dropout": 0.5, "encoder_num_layers": 2}
    made = trainer(tmp_path, peft_config=peft.PromptEncoderConfig(num_virtual_tokens=3, **encoder))
    assert "peft_config.encoder_dropout=0.5 is taken as 0.0" in caplog.text
    made.train()


def test_modules_are_moved_to_the_device_of_the_arguments_as_transformers_trainer_moves_them(tmp_path, monkeypatch):
    for config in (GRPOConfig, DPOConfig):
        monkeypatch.setattr(config, "device", torch.device("meta"))
    model = prepare_model(tiny_model(), GRPOConfig(str(tmp_path)), None, None)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    given = SimpleNamespace(
        _ref_model=tiny_model(), args=DPOConfig(str(tmp_path)), build_models=lambda optim, **roles: roles
    )
    reference = DPOTrainer.make_models(given, model, None)["reference"]
    assert reference is given._ref_model and next(reference.parameters()).is_meta
    monkeypatch.setattr(GRPOConfig, "world_size", 2)  # which shard it, each on its device
    assert not next(prepare_model(tiny_model(), GRPOConfig(str(tmp_path)), None, None).parameters()).is_meta
