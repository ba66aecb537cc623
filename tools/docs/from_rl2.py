"""docs/from-rl2.md: every key of RL2's commands, and what whet.rl2 does with it."""

from __future__ import annotations

from tools.docs.table import table
from whet.compat.field import Field
from whet.rl2.keys import KEYS, effect_of

__all__ = ["page"]

_INTRO = """# From RL2

RL2's commands run with one word changed, under `torchrun` too:

```
torchrun --nproc_per_node=2 -m whet.rl2 ppo \\
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

A command is translated to a configuration of whet's, and whet's own command runs it. `--print_config` prints the
configuration, as a file for `whet grpo --config` or `whet ppo --config`. `whet.<key>=value` sets a key of whet's that
RL2 lacks (`whet.trainer.seed=1`). Every key below is translated, or refused with the reason; a key that RL2 lacks is
an error that names the nearest. `actor.rollout.*` and `rollout.*` are the same. Three generations of RL2 are read: a
command written with keys of 2026 (`rollout.train.*`, `trainer.total_steps`, `actor.optimizer.lr`) has the defaults of
2026, one with those of the release of September 2025, PyPI's (`train_data.*`, `test_data.*`; `trainer.use_wandb` in
sft, rm and dpo), its own (`actor.tis_coef=2`), any other those of July 2025 (a constant learning rate, 12 updates of
the critic, no least rate).

Under torchrun batches are of all processes, as in RL2 ([Several processes](scaling.md)). There are `ddp_size` copies of
each model, each sharded over `fsdp_size` x `tp_size` processes. `tp_size` processes divide the matrices of layers in
training, and `sp_size` (since 2026 `cp_size`) the tokens of a pass, by Ulysses. No update depends on the sizes. All
roles share one mesh: a size that one role has is that of all, and two different ones are refused. Offloading, on by
default here as there, is off with several processes unless a key is true: FSDP's policy then runs the optimizer's step
on the host.

A value may refer to another of the command, or of its `--config FILE`, as OmegaConf has it:
`trainer.save_dir='ckpts/${trainer.project}/${trainer.experiment_name}'`, `${oc.env:HOME}` and `${oc.env:NAME,default}`.
A reference to a key that is not given is an error; other resolvers are refused.

With the chat template (`apply_chat_template`, on by default) the column `messages` is read, without it `prompt`, as in
RL2. Where a row has both, a line at the start names the column. In September 2025 a row's `prompt` came first, as plain
text, and does here too.

## Environments

An environment is the file of July 2025: `reward_fn(messages, answer)`, `interact(messages)` and `TOOL`, taken as it is
([Environments](environments.md)). Files of the later forms run unchanged too: those with `step(state, action,
extra_info)`, with or without `reset(extra_info)`, and those with `env_step(sample)` that make `generate` by
`base_generate`; whet calls the function itself, and RL2 need not be installed. In whet's own commands it is named,
`rollout.env_path=env.py:step`. An episode has one number, the sum of the steps' rewards. What `next_state` adds to the
state and the action is a user's message in the chat template, and follows unchanged with `apply_chat_template=false`. A
`next_state` that rewrites them begins another sequence of the episode with its text as the prompt, as in RL2;
`rollout.max_prompt_length` does not count for it. `done` ends an episode, or the 16th turn (`rollout.max_turns`). A
function `generate` of one's own is refused. A file of the newest form,

```
from functools import partial
from RL2.datasets import base_generate

async def env_step(sample):
    query = asked(sample.action_text)
    if query is not None:
        found = f"\\n<information>{search(query)}</information>\\n"
        return {"next_state": sample.state_text + sample.action_text + found, "reward": 0.0, "done": False}
    right = said(sample.action_text) == sample.sample["answer"]
    return {"next_state": None, "reward": float(right), "done": True}

generate = partial(base_generate, env_step_fn=env_step)
```

is this one in the form of July 2025:

```
def interact(messages):
    query = asked(messages[-1]["content"])
    if query is None:
        return []
    return [{"role": "user", "content": f"\\n<information>{search(query)}</information>\\n"}]

def reward_fn(messages, answer):
    return float(said(messages[-1]["content"]) == answer)
```

`rollout.max_turns` is the largest number of turns. `interact` and `reward_fn` receive the model's turns as text, with
`<think>` and `<tool_call>` as the model wrote them, so a file that parses them does so here too. The messages that
interact returns go through the chat template; with `apply_chat_template=false` they follow unchanged. The reward is
one number for the whole conversation. `answer` is the row's column of that name; other values that a reward needs go
into it, as a mapping.

## What a step computes

The same numbers, which tests compare with RL2's formulas written out: the clipped surrogate, averages over tokens or
sequences of an update, the KL in reward, loss or advantage (there after whitening), the weight min(π / sampler,
tis_coef) of the current policy on surrogate and KL, a critic's loss without ½, advantages whitened over all tokens of
a rollout and returns that are not, the turns of a trajectory joined and what an environment said left out, the
batch's mean where a prompt has one response. whet differs on purpose where RL2 has a defect, or a test could not be
repeated:
"""

_METRICS = """
What RL2 logs has these names in `metrics.jsonl` ([the run folder](run-folder.md) has them all):

| RL2 | whet |
|---|---|
| `actor/llm_old_approx_kl` | `sampling/kl_approx`: the mean over trained tokens of log π_sampler − log π, equal \
with one update per rollout. With more, π is there the policy before them, here that of each update. There \
`kl.reward_estimator` changes it (k1 by default); k3 is `sampling/kl_to_inference`, of π and the sampler exchanged. \
Tokens that a user masks count there, not here |
| `actor/old_ref_approx_kl` | with `kl.type` reward or advantage `kl_sampled/token_mean`, equal with \
`avg_level=token`; `kl_sampled` is the mean over sequences. With `kl.type=loss` it is `kl`, of `kl.loss_estimator` \
and the policy of each update, there of `kl.reward_estimator` and the policy before them |
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
        "the first turn has `max_new_tokens` of the budget, the prompt the rest; an episode ends where it fills the "
        "budget",
    ),
    (
        "with the chat template rm and dpo do not look at a prompt beside whole conversations",
        "one that they do not begin with is an error",
    ),
    (
        "a second run of an `experiment_name` writes over the first",
        "it has a folder of its own, `ckpts/<name>_2`; `load_ckpt_from=latest` goes on with the last of them",
    ),
    (
        "a row without the column that is read (messages with the chat template, prompt without) is a KeyError",
        "where no key names the column, another of the usual names is taken, and a line says so",
    ),
    (
        "checkpoints when `save_freq` says so",
        "by time as well where it says nothing, so that a run can be resumed",
    ),
)
"""What RL2 does, and what whet does in its place."""


def page() -> str:
    """The whole page: what holds of all, and a table for each trainer."""
    parts = [_INTRO, table(["RL2", "whet"], _DIFFERS), _METRICS]
    for verb, keys in KEYS.items():
        rows = [(f"`{name}`", _place(key), key.note) for name, key in keys.items()]
        parts.append(f"## {verb}\n\n{table(['RL2', 'whet', ''], rows)}\n")
    return "\n".join(parts)


def _place(key: Field) -> str:
    if key.key:
        return ", ".join(f"`{name.strip()}`" for name in key.key.split(","))
    return effect_of(key)
