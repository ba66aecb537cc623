"""A new trainer resumes a run from its checkpoint."""

from local import SMALL, gsm8k, tiny_model

from whet.trl import GRPOConfig, GRPOTrainer


def reward_letters(completions, **kwargs):
    return [float(len(set(completion))) for completion in completions]


model, dataset = tiny_model(), gsm8k().rename_column("question", "prompt")


def trainer_of(steps):
    args = GRPOConfig(output_dir="resume-grpo", learning_rate=1e-5, save_strategy="steps", save_steps=1,
                      save_total_limit=2, **{**SMALL, "max_steps": steps})  # fmt: skip
    return GRPOTrainer(model=model, reward_funcs=reward_letters, args=args, train_dataset=dataset)


trainer_of(1).train()  # interrupted, say
trainer = trainer_of(2)
trainer.train(resume_from_checkpoint=True)
print([row["step"] for row in trainer.state.log_history if "loss" in row])
