"""docs/defaults.md: the defaults of whet's command line, of its classes in Python, of Tunix and of TRL side by side.

Every value is read from the classes and tables that the programs themselves use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from tools.docs.from_tunix import TUNIX_FIELDS
from tools.docs.table import table
from whet.config import PPORunConfig, RunConfig, dump_tree
from whet.config.introspection import leaves
from whet.trl.config.grpo import GRPO_FIELDS
from whet.trl.config.training import TRAINING_FIELDS

__all__ = ["differing", "page"]

ABSENT = "-"
TRL: Mapping[str, str] = {
    "rollout.max_tokens_to_generate": "max_completion_length",
    "rollout.temperature": "temperature",
    "rollout.top_p": "top_p",
    "rollout.top_k": "top_k",
    "rollout.min_p": "min_p",
    "rollout.repetition_penalty": "repetition_penalty",
    "rollout.chat_template_kwargs": "chat_template_kwargs",
    "algo.num_generations": "num_generations",
    "algo.beta": "beta",
    "algo.epsilon": "epsilon",
    "algo.epsilon_high": "epsilon_high",
    "algo.num_iterations": "num_iterations",
    "algo.scale_rewards": "scale_rewards",
    "algo.loss_agg_mode": "loss_type",
    "algo.mask_truncated_completions": "mask_truncated_completions",
    "actor.optim.lr": "learning_rate",
    "actor.optim.schedule": "lr_scheduler_type",
    "actor.optim.weight_decay": "weight_decay",
    "actor.optim.warmup_steps": "warmup_steps",
    "actor.optim.max_grad_norm": "max_grad_norm",
    "trainer.seed": "seed",
}
"""Key of `whet grpo` -> TRL's field."""
SHOWN = (
    *("rollout.max_tokens_to_generate", "rollout.max_prompt_length", "rollout.temperature", "rollout.top_p"),
    *("rollout.top_k", "rollout.min_p", "rollout.repetition_penalty", "rollout.chat_template_kwargs"),
    *("data.apply_chat_template", "data.batch_size", "algo.num_generations", "algo.beta", "algo.kl_loss_mode"),
    *("algo.epsilon", "algo.epsilon_high", "algo.num_iterations", "algo.scale_rewards", "algo.loss_agg_mode"),
    *("algo.mask_truncated_completions", "actor.optim.lr", "actor.optim.schedule", "actor.optim.weight_decay"),
    *("actor.optim.warmup_steps", "actor.optim.max_grad_norm", "trainer.max_steps", "trainer.seed"),
)
"""Keys on the page, in order."""
OF_PPO = ("algo.num_generations", "algo.beta", "algo.kl_type", "algo.gae_lambda", "algo.epsilon")
NOTES = """
- `rollout.max_tokens_to_generate: null` of a command is 512, or what the model's context leaves after the longest
  prompt; `rollout.max_prompt_length: null` is the data's own longest prompt, which has to fit the context. The numbers
  that a run took are in its config.yaml. TRL cuts no prompt either.
- `actor.optim.lr: null` is 1e-6, and 1e-4 where an adapter is trained.
- `data.apply_chat_template: auto` applies the tokenizer's chat template to plain text, if there is one. TRL and Tunix
  leave plain text as it is. Conversations go through the template everywhere.
- Tunix's `kl_loss_mode` is k1, whose gradient does not pull towards the reference; whet's is low_var_kl (k3), as is
  TRL's.
- TRL's `loss_type: dapo` is `loss_agg_mode: token-mean`. Its `top_k: 0` is off.
- A step has `data.batch_size` prompts here and in Tunix. TRL counts completions: `per_device_train_batch_size` times
  devices and accumulation.
- `algo.preset=trl_grpo` stands for all that TRL's GRPO computes by default: [papers](papers.md).
"""
INTRO = """# Defaults

The values that are used where nothing is set. The command line (`whet grpo`, `whet ppo` and every recipe; `RunConfig`
in Python) has defaults that train. whet's classes in Python have Tunix's wherever Tunix has the field, so that a
program written for it means the same. `-` marks a field that a library lacks.
"""


def differing(kind: type) -> Iterator[tuple[str, Any, Any]]:
    """The defaults of a command that differ from the classes of its sections: (key, of the command, from Python).

    Args: kind: RunConfig or another configuration of a run.

    >>> [key for key, *_ in differing(PPORunConfig) if key.startswith("algo.")]
    ['algo.beta']
    """
    for key, field, owner in leaves(kind):
        ours, plain = _default(field), _of_python(owner, field.name)
        if ours != plain:
            yield key, ours, plain


def page() -> str:
    """The text of docs/defaults.md."""
    heads = ["key", "command line", "Python", "Tunix"]
    return (
        f"{INTRO}\n"
        "## GRPO\n\n"
        f"{table([*heads, 'TRL 1.16'], _rows(RunConfig, SHOWN, TRL))}\n\n{NOTES.strip()}\n\n"
        "## PPO\n\nAs above, and:\n\n"
        f"{table(heads, _rows(PPORunConfig, OF_PPO, None))}\n\n"
        "## Supervised training\n\n"
        "`whet sft`, `whet rm` and `whet dpo` have the defaults of their classes in Python but for one:\n"
        "`data.apply_chat_template` is `auto` from the command line, `false` in `SupervisedDataConfig`.\n"
    )


def _rows(kind: type, keys: tuple[str, ...], trl: Mapping[str, str] | None) -> Iterator[list[str]]:
    known = {key: (field, owner) for key, field, owner in leaves(kind)}
    for key in keys:
        field, owner = known[key]
        cells = [f"`{key}`", _text(_default(field)), _text(_of_python(owner, field.name)), _tunix(owner, field.name)]
        if trl is not None:
            cells.append(_trl(trl.get(key)))
        yield cells


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _of_python(owner: type, name: str) -> Any:
    """A field's default in the class that a program in Python takes: a run's section has it as its base."""
    plain = owner.__mro__[1] if owner.__module__ == "whet.config.run_sections" else owner
    return _default(next(f for f in dataclasses.fields(plain) if f.name == name))


def _tunix(owner: type, name: str) -> str:
    """A field's default in Tunix's class of the same name."""
    known = {kind.__name__: fields for kind, fields in TUNIX_FIELDS.items()}
    found = next((known[c.__name__][name] for c in owner.__mro__ if name in known.get(c.__name__, {})), None)
    return ABSENT if found is None else _text(found.default)


def _trl(name: str | None) -> str:
    """A field's default in TRL, under its name there."""
    if name is None:
        return ABSENT
    field = GRPO_FIELDS.get(name) or TRAINING_FIELDS[name]
    return f"`{name}`: {_text(field.default)}"


def _text(value: Any) -> str:
    """A value as YAML has it."""
    plain = dump_tree(value)
    words = {None: "null", True: "true", False: "false"}
    text = words[plain] if plain is None or isinstance(plain, bool) else str(plain)
    return f"`{text}`"
