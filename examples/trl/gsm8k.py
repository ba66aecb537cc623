"""GSM8K with two rewards: one for the right number, one for the format of the answer."""

import re

from local import SMALL, gsm8k, tiny_model

from whet.trl import GRPOConfig, GRPOTrainer

SYSTEM = "Think, then answer: <think>\n...\n</think>\n<answer>\n...\n</answer>"


def as_prompt(row):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}]
    return {"prompt": messages, "solution": row["answer"].split("####")[1].strip()}


def format_reward(completions, **kwargs):
    form = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)
    return [1.0 if form.fullmatch(completion[0]["content"].strip()) else 0.0 for completion in completions]


def correctness_reward(completions, solution, **kwargs):
    rewards = []
    for completion, expected in zip(completions, solution):
        answer = re.search(r"<answer>(.*?)</answer>", completion[0]["content"], re.DOTALL)
        rewards.append(2.0 if answer and answer[1].strip() == expected else 0.0)
    return rewards


dataset = gsm8k().map(as_prompt, remove_columns=["question", "answer"])

trainer = GRPOTrainer(
    model=tiny_model(),
    reward_funcs=[format_reward, correctness_reward],
    args=GRPOConfig(output_dir="gsm8k-grpo", learning_rate=1e-5, beta=0.04, log_completions=True, **SMALL),
    train_dataset=dataset,
)
trainer.train()
trainer.save_model("gsm8k-grpo/final")
