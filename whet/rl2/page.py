"""docs/from-rl2.md, from the table of keys.

python -m whet.rl2.page > docs/from-rl2.md
"""

from __future__ import annotations

import sys

from whet.rl2.keys import KEYS, Key

__all__ = ["page", "usage"]

SAID = {
    "one": "refused above 1",
    "none": "no effect",
    "refused": "refused",
}
"""What stands in the second column where no key of whet's does."""

_INTRO = """# From RL2

RL2's commands run with one word changed, under `torchrun` too:

```
torchrun --nproc_per_node=1 -m whet.rl2 ppo \\
    data.train_data_path=train@Chenmien/SearchR1 \\
    data.prompts_per_rollout=256 \\
    data.responses_per_prompt=8 \\
    actor.model_name=Qwen/Qwen2.5-3B-Instruct \\
    actor.max_length_per_device=8192 \\
    rollout.max_turns=4 \\
    rollout.train_sampling_params.max_new_tokens=512 \\
    rollout.env_path=envs/searchr1.py \\
    adv.estimator=reinforce
```

A command becomes a configuration of whet's, which whet's own command runs: `--print_config` prints it, to be kept as
a file for `whet grpo --config` or `whet ppo --config`. `whet.<key>=value` adds a key of whet's that RL2 has none for
(`whet.trainer.seed=1`). Every key below has its place, or is refused with the reason; one that RL2 has not is an
error with the nearest. `actor.rollout.*` and `rollout.*` are the same. Three generations of RL2 are read: a command
written with keys of 2026 (`rollout.train.*`, `trainer.total_steps`, `actor.optimizer.lr`) has the defaults of 2026, one
with those of the release of September 2025, PyPI's (`train_data.*`, `test_data.*`; `trainer.use_wandb` in sft, rm and
dpo), its own (`actor.tis_coef=2`), any other those of July 2025 (a constant learning rate, 12 updates of the critic, an
entropy bonus of 1e-4).

An environment is the file of July 2025: `reward_fn(messages, answer)`, `interact(messages)` and `TOOL`, taken as it
is ([Environments](environments.md)). The later forms (`step` and `reset`, `generate`) are refused.

## What a step computes

The same numbers, which tests compare with RL2's formulas written out: the clipped surrogate, averages over tokens or
sequences of an update, the KL in reward, loss or advantage (there after whitening), the weight min(π / sampler,
tis_coef) of the current policy on surrogate and KL, a critic's loss without ½, advantages whitened over all tokens of
a rollout and returns that are not, the turns of a trajectory joined and what an environment said left out, the
batch's mean where a prompt has one response. whet differs on purpose where RL2 has a defect, or a test could not be
repeated:
"""

_DIFFERS = (
    (
        "`dynamic_filtering` makes the step smaller",
        "other prompts take the place of those left out, up to 10 batches of them",
    ),
    (
        "three rewards of 0.9 have a deviation of 1e-8, and so an advantage of 0.5",
        "equal rewards have the advantage 0",
    ),
    (
        "one response with `norm_var` is NaN",
        "it has the advantage 0 where all rewards are equal",
    ),
    (
        "`avg_level=sequence` raises; a trajectory that forks counts for each of its sequences",
        "it trains; a trajectory counts once",
    ),
    (
        "a slice of an update may split a prompt's responses, or be empty",
        "groups stay whole",
    ),
    (
        "`freeze_steps=4` leaves the actor as it is for 3 steps",
        "for 4",
    ),
    (
        "the divisor of whitening is std + 1.2e-7",
        "√(variance + 1e-8)",
    ),
    (
        "weight decay of all parameters",
        "of matrices",
    ),
    (
        "a resumed run starts again at step 1; nothing is seeded",
        "it resumes at its step, with equal bits",
    ),
    (
        "an assistant turn is encoded again as text",
        "token ids are those that were sampled",
    ),
    (
        "no limit of prompts; `max_length_per_device` is checked in training",
        "the first turn has `max_new_tokens` of the budget, the prompt the rest; with turns the prompt has a quarter",
    ),
    (
        "checkpoints when `save_freq` says so",
        "by time as well where it says nothing, so that a run can be resumed",
    ),
)
"""What RL2 does, and what whet does in its place."""


def page() -> str:
    """The whole page: what holds of all, and a table for each trainer."""
    parts = [_INTRO, "| RL2 | whet |", "|---|---|", *(f"| {there} | {here} |" for there, here in _DIFFERS), ""]
    for verb, keys in KEYS.items():
        parts += [f"## {verb}\n", "| RL2 | whet | |", "|---|---|---|"]
        parts += [f"| `{name}` | {_place(key)} | {_cell(key.note)} |" for name, key in keys.items()]
        parts.append("")
    return "\n".join(parts)


def _place(key: Key) -> str:
    if key.to:
        return ", ".join(f"`{name.strip()}`" for name in key.to.split(","))
    return SAID.get(key.how, "checked")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def usage(verb: str | None) -> str:
    """Help. Args: verb: of which trainer the keys are listed; None = of none."""
    head = (
        "usage: python -m whet.rl2 ppo|sft|rm|dpo [--config FILE ...] [--print_config] [key=value ...]\n\n"
        "RL2's commands with one word changed: RL2.trainer.ppo is whet.rl2 ppo. whet.<key>=value is a key of whet's.\n"
        "--print_config prints whet's configuration as YAML. docs/from-rl2.md says what each key is here."
    )
    if verb is None:
        return head
    lines = [f"  {name}  {key.to or SAID.get(key.how, 'checked')}" for name, key in KEYS[verb].items()]
    return f"{head}\n\nKeys of {verb}, and whet's:\n" + "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(page())
