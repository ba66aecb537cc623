"""A conversational data set with a held-out part, which is evaluated during training."""

from local import SMALL, gsm8k, tiny_model

from whet.trl import GRPOConfig, GRPOTrainer


def as_conversation(row):
    return {
        "prompt": [
            {"role": "system", "content": "You are brief."},
            {"role": "user", "content": "How many pens?"},
            {"role": "assistant", "content": "Of whom?"},
            {"role": "user", "content": row["question"]},
        ]
    }


def polite(prompts, completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [float("please" in content) + len(content) / 100 for content in contents]


dataset = gsm8k(6).map(as_conversation).train_test_split(test_size=2, shuffle=False)

trainer = GRPOTrainer(
    model=tiny_model(),
    reward_funcs=polite,
    args=GRPOConfig(
        output_dir="chat-grpo", learning_rate=1e-5, chat_template_kwargs={"enable_thinking": False},
        eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4, num_generations_eval=2, **SMALL,
    ),
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"],
)  # fmt: skip
trainer.train()
print(trainer.evaluate()["eval_reward"])
