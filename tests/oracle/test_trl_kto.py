"""KTOTrainer against TRL's: the same script with either import, on a tiny model."""

import pytest
from helpers import full
from oracle.test_trl_supervised import check

from whet.errors import ConfigError
from whet.trl import KTOConfig, KTOTrainer

ANSWERS = [
    {"prompt": f"{i}+{i}=" + " " * min(i, 2), "completion": f" {i + i}" + "!" * (i % 3) * 3, "label": i != 1}
    for i in range(4)
]
PAIRS = [{"prompt": f"{i}+{i}=", "chosen": f" {i + i}", "rejected": " no" * (1 + i % 3)} for i in range(2)]
TALKS = [
    {
        "prompt": [{"role": "user", "content": f"{i}?"}],
        "completion": [{"role": "assistant", "content": f"{i * i}" * (1 + i % 3)}],
        "label": i % 2 == 0,
    }
    for i in range(4)
]
BY_MICRO_BATCH = ("rewards", "logps", "logits", "entropy")
"""Metrics that are means over an update, where TRL has means of those of its micro-batches."""
WHOLE = {"per_device_train_batch_size": 4, "beta": 1.0, "max_steps": 3}


@pytest.mark.parametrize(
    ("rows", "kwargs"),
    [
        (ANSWERS, {"desirable_weight": 1.5, "undesirable_weight": 0.5}),
        full(ANSWERS, {"max_length": 9}),  # answers are cut, and those of mismatched rows
        (PAIRS, {}),
        (PAIRS, {"loss_type": "apo_zero_unpaired", "sync_ref_model": True, "ref_model_sync_steps": 2}),
        full(TALKS, {}),
        full(ANSWERS, {"loss_type": "apo_zero_unpaired", "gradient_accumulation_steps": 2,
                       "per_device_train_batch_size": 2}),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_losses_gradients_and_weights_are_trl_s(rows, kwargs, tmp_path):
    """On as many rows as a step has: TRL's mismatched rows of an evaluation are those of a micro-batch too."""
    alone = kwargs.get("loss_type") == "apo_zero_unpaired"  # there it logs a kl of 0
    leave = BY_MICRO_BATCH if "gradient_accumulation_steps" in kwargs else ()
    ours, _ = check("KTO", rows, {**WHOLE, **kwargs}, tmp_path, lacks=("kl", "eval_kl") if alone else (), leave=leave)
    assert alone or rows is not ANSWERS or max(row.get("kl", 0) for row in ours.state.log_history) > 0.1


def test_what_trl_refuses_is_refused():
    for given, message in (
        ({"per_device_train_batch_size": 1}, "batch size must be > 1"),
        ({"train_sampling_strategy": "random"}, "requires `train_sampling_strategy='sequential'`"),
        ({"loss_type": "bco"}, "unknown loss_type 'bco'"),
        ({"precompute_ref_log_probs": True}, "not supported with loss_type='kto'"),
    ):
        with pytest.raises(ConfigError, match=message):
            KTOConfig(**given)
    model = object()
    with pytest.raises(ConfigError, match="cannot be the same object"):
        KTOTrainer(model, model)
