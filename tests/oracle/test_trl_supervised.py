"""SFTTrainer, DPOTrainer and RewardTrainer against TRL's: the same script with either import, on a tiny model."""

import datasets
import numpy as np
import pytest
import torch
from helpers import PAD, Events, full, tiny_model, weights_of
from transformers import Qwen3Config, Qwen3ForSequenceClassification

import whet.trl
from whet.data.tokenizer import byte_tokenizer
from whet.trl.supervised.packs import pack_best_fit
from whet.types import Example, TrainSequence

trl = pytest.importorskip("trl")

FIELDS = {
    "adam_epsilon": 1e-2,  # below it a step is of the gradient; without, of its sign, which rounding decides near 0
    "bf16": False,
    "disable_tqdm": True,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "gradient_checkpointing": False,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "max_steps": 2,
    "per_device_eval_batch_size": 8,
    "per_device_train_batch_size": 2,
    "report_to": "none",
    "save_strategy": "no",
    "train_sampling_strategy": "sequential",
    "use_cpu": True,
}


def reward_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 8}  # fmt: skip
    return Qwen3ForSequenceClassification(Qwen3Config(vocab_size=264, num_labels=1, pad_token_id=PAD, **sizes))


ROUNDING = 2 * 64**0.5 * torch.finfo(torch.float32).eps
"""Relative, of sums of 64 numbers in another order; metrics of DPO are a tenth of differences of sums of up to 100."""
AFTER = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_prediction_step")
"""What is told after an update here, which is one call."""


def trained(module, method, rows, folder, model, kwargs, **given):
    """A run of a few steps, and what its callbacks were told."""
    events = Events()
    data = datasets.Dataset.from_list(rows)
    args = getattr(module, f"{method}Config")(str(folder / "out"), **{**FIELDS, **kwargs})
    trainer = getattr(module, f"{method}Trainer")(str(model), args=args, train_dataset=data, eval_dataset=data,
                                                  processing_class=byte_tokenizer(), callbacks=[events],
                                                  **given)  # fmt: skip
    trainer.train()
    return trainer, [event for event in events.seen if event[0] not in AFTER]


def check(method, rows, kwargs, tmp_path, *, given=lambda: {}, leave=(), lacks=(), weights=3e-5):
    """Runs both; asserts that logs and weights are equal. Returns: both trainers."""
    model = tmp_path / "model"
    (reward_model() if method == "Reward" else tiny_model()).save_pretrained(model)
    ours, events = trained(whet.trl, method, rows, tmp_path / "whet", model, kwargs, **given())
    theirs, told = trained(trl, method, rows, tmp_path / "trl", model, kwargs, **given())
    assert events == told
    logs, expected = ours.state.log_history, theirs.state.log_history
    assert [row["step"] for row in logs] == [row["step"] for row in expected]
    for mine, row in zip(logs, expected, strict=True):
        assert row.keys() - mine.keys() <= {"eval_steps_per_second", *lacks}, "a metric of TRL's is not logged"
        for name, value in row.items():
            if any(word in name for word in ("runtime", "second", "flos", *leave, *lacks)):
                continue
            rel = ROUNDING if name.endswith("loss") else 1e-4
            assert mine[name] == pytest.approx(value, rel=rel, abs=10 * ROUNDING), (row["step"], name)
    now, wanted = weights_of(ours.model), weights_of(theirs.model)
    for name, w in wanted.items():
        torch.testing.assert_close(now[name], w, rtol=weights, atol=weights, msg=lambda m, n=name: f"{n}: {m}")
    return ours, theirs


TEXTS = [{"text": f"{i} and {i * i} make {i + i * i}, said {'so ' * (i % 4)}"} for i in range(7)]
ANSWERS = [{"prompt": f"{i}+{i}=", "completion": f" {i + i}" + "!" * (i % 3)} for i in range(7)]
TALKS = [
    {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i * i}" * (1 + i % 3)}]}
    for i in range(7)
]


IDS = [{"input_ids": list(range(50 + i, 58 + 2 * i)), "labels": [-100, *range(51 + i, 57 + 2 * i), -100]}
       for i in range(7)]  # fmt: skip
BY_MICRO_BATCH = ("mean_token_accuracy", "entropy")
"""Metrics that are means over an update's tokens, where TRL has means of those of its micro-batches."""


def test_arguments_that_are_set_late_and_a_second_train_do_what_they_do_there(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    found = []
    for module in (whet.trl, trl):
        args = module.SFTConfig(str(tmp_path / "out"), **{**FIELDS, "eval_strategy": "no"})
        made = module.SFTTrainer(str(tmp_path / "model"), args, train_dataset=datasets.Dataset.from_list(TEXTS),
                                 processing_class=byte_tokenizer())  # fmt: skip
        made.args.learning_rate, made.args.max_steps = 3e-3, 3
        rows = [made.train() and made.state.log_history[:-1] for _ in range(2)]
        assert [row["learning_rate"] for row in rows[1]] == pytest.approx([3e-3, 2e-3, 1e-3])
        found.append(([row["loss"] for run in rows for row in run], weights_of(made.model)))
    (losses, now), (expected, wanted) = found
    assert losses == pytest.approx(expected, rel=1e-6)
    for name, w in wanted.items():
        torch.testing.assert_close(now[name], w, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize(
    ("rows", "kwargs", "given"),
    [
        (
            TEXTS,
            {
                "gradient_accumulation_steps": 2,
                "max_steps": -1,
                "num_train_epochs": 1,
                "warmup_steps": 2,
                "lr_scheduler_type": "constant",
            },
            {},
        ),
        (
            ANSWERS,
            {
                "loss_type": "dft",
                "max_length": 7,
                "eval_steps": 1,
                "logging_steps": 2,
                "max_steps": 3,
                "lr_scheduler_type": "reduce_lr_on_plateau",  # which sees no evaluation that is better by so much
                "lr_scheduler_kwargs": {"patience": 0, "threshold": 9.0, "threshold_mode": "abs"},
            },
            {},
        ),
        full(ANSWERS, {"completion_only_loss": False, "max_length": 6, "truncation_mode": "keep_end"}, {}),
        (
            TALKS,
            {"max_grad_norm": 0.5, "weight_decay": 0.1, "warmup_steps": 1},
            {"optimizer_cls_and_kwargs": (torch.optim.NAdam, {"lr": 1e-2, "betas": (0.8, 0.9)})},
        ),
        full([{"q": r["prompt"]} for r in ANSWERS], {}, {"formatting_func": lambda r: r["q"] + "?"}),
        full(IDS, {}, {}),
        (TEXTS, {"packing": True, "max_length": 40, "per_device_train_batch_size": 1}, {}),
        full(TEXTS, {"packing": True, "packing_strategy": "bfd_split", "max_length": 16}, {}),
        (ANSWERS, {"packing": True, "packing_strategy": "wrapped", "max_length": 16}, {}),
        full(TEXTS, {"packing": True, "packing_strategy": "wrapped", "max_length": 16}, {}),
    ],
    ids=["text", "dft", "keep_end", "messages", "formatted", "ids", "packed", "split", "wrapped", "wrapped texts"],
)
def test_sft(rows, kwargs, given, tmp_path):
    leave = BY_MICRO_BATCH if "gradient_accumulation_steps" in kwargs else ()
    leave = ("eval_",) if kwargs.get("packing") else leave  # there a mean over packs, or of nothing
    ours, theirs = check("SFT", rows, kwargs, tmp_path, given=lambda: given, leave=leave)
    mine, row = ours.train_dataset, theirs.train_dataset
    assert {*mine.column_names} <= {*row.column_names}
    assert mine["input_ids"] == row["input_ids"]
    assert mine["labels"] == row["labels"]


PAIRS = [{"prompt": f"{i}+{i}=", "chosen": f" {i + i}" + "!" * (i % 3), "rejected": f" {i * i}?"} for i in range(7)]
TALKING_PAIRS = [
    {"chosen": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"yes{i}"}],
     "rejected": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"no, {i * i}"}]}
    for i in range(7)
]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "kwargs"),
    [
        (PAIRS[:3], {"max_steps": -1, "num_train_epochs": 1}),
        (PAIRS, {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}),
        (PAIRS, {"loss_type": ["ipo"], "ld_alpha": 0.5, "max_length": 9, "truncation_mode": "keep_end"}),
        (PAIRS, {"f_divergence_type": "alpha_divergence", "use_weighting": True, "precompute_ref_log_probs": True}),
        full(TALKING_PAIRS, {"sync_ref_model": True, "ref_model_sync_steps": 1, "beta": 0.5}),
    ],
    ids=["sigmoid", "mpo", "ipo", "precomputed", "synced"],
)
def test_dpo(rows, kwargs, tmp_path):
    check("DPO", rows, kwargs, tmp_path)


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
def test_packs_are_trl_s(strategy):
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 14, 300).tolist()
    data = datasets.Dataset.from_dict({"input_ids": [[i] * n for i, n in enumerate(lengths)]})
    expected = trl.pack_dataset(data, 10, strategy)["seq_lengths"]
    ids = [np.full(n, i) for i, n in enumerate(lengths)]
    rows = [TrainSequence(prefix=row[:1], tokens=row[1:], mask=np.ones(len(row) - 1, bool)) for row in ids]
    packs = pack_best_fit([Example(sequences=(row,)) for row in rows], 10, split=strategy == "bfd_split")
    found = [[1 + len(s.tokens) for s in pack.sequences] for pack in packs]
    if strategy == "bfd":
        assert found == expected
    else:  # a part of one token trains nothing, and is left out
        assert sum(map(sum, found)) == sum(n for pack in expected for n in pack if n > 1)


def test_reward(tmp_path):
    rows = [{**row, "margin": i / 10} for i, row in enumerate(PAIRS)]
    check("Reward", rows, {"center_rewards_coefficient": 0.1, "max_length": 9}, tmp_path)
