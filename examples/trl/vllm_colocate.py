"""Completions by vLLM in the trainer's own process, on its device.

vLLM is installed separately. If it is missing, the script prints a message and leaves use_vllm off. With use_vllm on,
TRL and whet both raise an error that names the package.
"""

import importlib.util

from local import SMALL, gsm8k, tiny_model

from whet.trl import GRPOConfig, GRPOTrainer


def reward_letters(completions, **kwargs):
    return [float(len(set(completion))) for completion in completions]


use_vllm = importlib.util.find_spec("vllm") is not None
if not use_vllm:
    print("vLLM is not installed: completions are made without it")

trainer = GRPOTrainer(
    model=tiny_model(),
    reward_funcs=reward_letters,
    args=GRPOConfig(
        output_dir="vllm-grpo", learning_rate=1e-5, use_vllm=use_vllm, vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3, vllm_importance_sampling_mode="token_truncate", **SMALL,
    ),
    train_dataset=gsm8k().rename_column("question", "prompt"),
)  # fmt: skip
trainer.train()
