"""What is set on a trainer after it was made, and a second train()."""

import pytest
import torch
from helpers import length_reward, rows, same, tiny_model, weights_of

from whet.data.tokenizer import byte_tokenizer
from whet.errors import ConfigError
from whet.trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

ARGS = {"bf16": False, "disable_tqdm": True, "gradient_checkpointing": False, "logging_steps": 1, "max_steps": 2,
        "per_device_train_batch_size": 2, "save_strategy": "no", "learning_rate": 1e-2}  # fmt: skip
TEXTS = [{"text": f"one and {i}"} for i in range(8)]


def sft(folder, data=TEXTS, **kwargs):
    own = {n: kwargs.pop(n) for n in list(kwargs) if n in ("optimizers", "optimizer_cls_and_kwargs", "eval_dataset")}
    args = SFTConfig(str(folder), **{**ARGS, **kwargs})
    return SFTTrainer(tiny_model(), args, train_dataset=data, processing_class=byte_tokenizer(), **own)


def rates(made):
    return [row["learning_rate"] for row in made.state.log_history if "learning_rate" in row]


def test_a_second_train_trains_with_the_schedule_from_its_beginning(tmp_path):
    made = sft(tmp_path, save_strategy="steps", save_steps=2, max_tokens_per_microbatch=32)
    assert made.worker.max_tokens == 32
    made.train()
    first, before = rates(made), weights_of(made.model)
    moments = made.optimizer.state[made.optimizer.param_groups[0]["params"][0]]["exp_avg"].clone()
    assert made.train().global_step == 2
    assert rates(made) == first == pytest.approx([1e-2, 5e-3])
    assert not same(weights_of(made.model), before)
    assert moments.any()
    again = sft(tmp_path)  # the checkpoint is the second run's
    again.train(resume_from_checkpoint=True)
    assert same(weights_of(again.model), weights_of(made.model))
    of_class = sft(tmp_path, optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1}), max_steps=1)
    of_class.train()
    with pytest.raises(ConfigError, match="would train nothing"):
        of_class.train()


def test_what_is_set_before_train_is_what_a_trainer_made_so_does(tmp_path):
    other = [{"text": f"three or {i}"} for i in range(6)]
    made = sft(tmp_path, eval_dataset=TEXTS[:2])
    made.args.learning_rate, made.args.max_steps, made.args.lr_scheduler_type = 3e-3, -1, "cosine"
    made.args.num_train_epochs, made.args.weight_decay = 1, 0.1
    made.train_dataset, made.eval_dataset = other, other[:1]
    made.train()
    wanted = sft(tmp_path, other, learning_rate=3e-3, max_steps=-1, lr_scheduler_type="cosine", num_train_epochs=1,
                 weight_decay=0.1, eval_dataset=other[:1])  # fmt: skip
    wanted.train()
    assert made.state.global_step == made.state.max_steps == 3
    assert rates(made) == rates(wanted)
    assert same(weights_of(made.model), weights_of(wanted.model))
    assert made.evaluate()["eval_loss"] == wanted.evaluate()["eval_loss"]
    made.args.seed = 7
    with pytest.raises(ConfigError, match=r"args.seed was 42 when .* is 7 now; set seed in SFTConfig"):
        made.train()


def test_data_and_reward_functions_are_those_of_now(tmp_path):
    seen = []

    def constant(prompts, **_):
        seen.extend(prompts)
        return [1.0] * len(prompts)

    given = rows(4)
    args = GRPOConfig(str(tmp_path), num_generations=2, max_completion_length=4, max_tokens_per_microbatch=99, **ARGS)
    made = GRPOTrainer(tiny_model(), length_reward, args, given, processing_class=byte_tokenizer())
    assert made.worker.max_tokens == 99
    made.reward_funcs = [constant]
    made.train_dataset = [{"prompt": "7+7="}] * 3
    made.args.max_steps = 1
    made.train()
    assert seen == ["7+7="] * 2
    assert made.state.log_history[0]["rewards/constant/mean"] == 1.0
    assert made.reward_func_names == ["constant"]
    assert made.state.global_step == 1
    made.args.beta = 0.5
    with pytest.raises(ConfigError, match=r"args.beta was 0.0 when the trainer was made"):
        made.train()
    made.beta = 0.5  # which is what the arguments have, so nothing is lost
    made.notes = "of the user's own"
    with pytest.raises(ConfigError, match=r"GRPOTrainer.temperature = 0.1 would change nothing: .*set temperature in"):
        made.temperature = 0.1
