"""A custom callback: it reads the logs, requests a checkpoint, and stops the run early."""

from local import SMALL, gsm8k, tiny_model
from transformers import TrainerCallback

from whet.trl import GRPOConfig, GRPOTrainer


class StopWhenGood(TrainerCallback):
    def __init__(self, enough):
        self.enough = enough
        self.rewards = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" in logs:
            self.rewards.append(logs["reward"])
            control.should_training_stop = logs["reward"] >= self.enough

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            control.should_save = True
        return control


def reward_letters(completions, **kwargs):
    return [float(len(set(completion))) for completion in completions]


stop = StopWhenGood(enough=1.0)
trainer = GRPOTrainer(
    model=tiny_model(),
    reward_funcs=reward_letters,
    args=GRPOConfig(output_dir="callback-grpo", learning_rate=1e-5, **{**SMALL, "max_steps": 20}),
    train_dataset=gsm8k().rename_column("question", "prompt"),
    callbacks=[stop],
)
trainer.train()
print(f"stopped after {trainer.state.global_step} steps at {stop.rewards[-1]:.2f}")
