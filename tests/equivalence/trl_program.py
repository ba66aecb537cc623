"""A program for TRL with an adapter, a reference, evaluations, checkpoints and a resume. Args: a folder with a model.

Of several processes each takes its share of the same step.
"""

import json
import os
import sys
from pathlib import Path

from helpers import length_reward, tiny_model
from peft import LoraConfig
from trl_scripts import COMMON, TEXTS

from whet.data.tokenizer import byte_tokenizer
from whet.trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

size = int(os.environ.get("WORLD_SIZE", "1"))
fields = {**COMMON, "per_device_train_batch_size": 4 // size, "per_device_eval_batch_size": 4 // size,
          "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}  # fmt: skip
columns = zip(TEXTS, TEXTS[::-1], TEXTS[3:] + TEXTS[:3], strict=True)
pairs = [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in columns]
rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs]


def score(completion_ids, log_metric, log_extra, **_):
    log_metric("longest", float(max(map(len, completion_ids))))
    log_extra("tokens", [len(ids) for ids in completion_ids])
    return length_reward(["x" * len(ids) for ids in completion_ids])


def sft(folder, steps):
    args = SFTConfig(folder, **{**fields, "max_steps": steps}, train_sampling_strategy="sequential", max_length=32)
    adapter = LoraConfig(r=2, target_modules="all-linear")
    return SFTTrainer(f"{sys.argv[1]}/model", args, train_dataset=rows, eval_dataset=rows[:3], peft_config=adapter,
                      processing_class=byte_tokenizer())  # fmt: skip


def grpo(folder, steps):
    args = GRPOConfig(folder, **{**fields, "max_steps": steps}, num_generations=4, max_completion_length=6, beta=0.1,
                      log_completions=True)  # fmt: skip
    return GRPOTrainer(tiny_model(), score, args, rows, rows[:3], processing_class=byte_tokenizer())


def dpo(folder, steps):
    args = DPOConfig(folder, **{**fields, "max_steps": steps}, max_length=32, save_only_model=True)
    return DPOTrainer(f"{sys.argv[1]}/model", args=args, train_dataset=pairs, eval_dataset=pairs[:3],
                      processing_class=byte_tokenizer())  # fmt: skip


for make in (sft, grpo, dpo):
    trainer = make(f"{sys.argv[1]}/{make.__name__}", 1)
    trainer.train()
    if make is not dpo:
        trainer = make(f"{sys.argv[1]}/{make.__name__}", 3)
        trainer.train(resume_from_checkpoint=True)
    trainer.save_model(f"{sys.argv[1]}/{make.__name__}-final")
    if make is sft:
        trainer.model.save_pretrained(f"{sys.argv[1]}/sft-adapter")
        Path(sys.argv[1], "sft-adapter/README.md").unlink(missing_ok=True)  # PEFT's card
    if trainer.is_world_process_zero():
        with open(f"{sys.argv[1]}/{make.__name__}.json", "w") as file:
            json.dump(trainer.state.log_history, file)
