"""Several weighted rewards: a plain function, an async function, one that applies to some rows, and one that logs."""

import asyncio

from local import SMALL, gsm8k, tiny_model

from whet.trl import GRPOConfig, GRPOTrainer


def no_repetition(completions, **kwargs):
    return [len(set(completion)) / max(len(completion), 1) for completion in completions]


async def judged(prompts, completions, **kwargs):
    async def ask(prompt, completion):  # a real run would call a service here
        await asyncio.sleep(0)
        return float(len(prompt) > len(completion))

    return await asyncio.gather(*(ask(p, c) for p, c in zip(prompts, completions)))


def only_of_math(completions, task, **kwargs):
    return [len(c) / 10 if kind == "math" else None for c, kind in zip(completions, task)]


def brevity(completion_ids, trainer_state, log_metric, log_extra, **kwargs):
    lengths = [len(ids) for ids in completion_ids]
    log_extra("length", lengths)
    log_metric("longest", max(lengths))
    return [1.0 if n < 8 + trainer_state.global_step else 0.0 for n in lengths]


dataset = gsm8k().rename_column("question", "prompt").add_column("task", ["math", "code"] * 2)

trainer = GRPOTrainer(
    model=tiny_model(),
    reward_funcs=[no_repetition, judged, only_of_math, brevity],
    args=GRPOConfig(
        output_dir="rewards-grpo", reward_weights=[1.0, 0.5, 0.5, 0.25], shuffle_dataset=False,
        multi_objective_aggregation="normalize_then_sum", learning_rate=1e-5, **SMALL,
    ),
    train_dataset=dataset,
)  # fmt: skip
trainer.train()
