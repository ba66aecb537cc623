"""PEFT: training an adapter instead of all weights."""

from local import SMALL, gsm8k, tiny_model
from peft import LoraConfig

from whet.trl import GRPOConfig, GRPOTrainer


def reward_letters(completions, **kwargs):
    return [float(len(set(completion))) for completion in completions]


trainer = GRPOTrainer(
    model=tiny_model(),
    reward_funcs=reward_letters,
    args=GRPOConfig(output_dir="lora-grpo", learning_rate=1e-3, **SMALL),
    train_dataset=gsm8k().rename_column("question", "prompt"),
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model("lora-grpo/adapter")
