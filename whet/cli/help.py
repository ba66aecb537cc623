"""What `--help` prints: the keys that a person sets first; `--help all` every key, `--help SECTION` those of one.

Imports whet.config once a command is known, and nothing of what computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["command_help", "first_keys", "topic_of"]

Group = tuple[str, Mapping[str, str]]
"""A title, and its keys with a line each."""

_MODEL: Group = ("Model", {"model": "the model to train: a folder or hub name"})
_ADAPTER = {
    "actor.lora.rank": "16, say: train an adapter in place of all weights",
}
_OPTIM = {
    "actor.schedule": "constant, linear, cosine ...",
    "actor.warmup_steps": "steps over which the learning rate rises from 0",
}
_DATA = {
    "data": "rows: a json, jsonl, csv or parquet file, folder, hub name",
    "data.batch_size": "rows of a step",
    "data.eval_path": "rows to evaluate on",
    "data.eval_fraction": "or the share of `data` that is kept for that",
    "data.system_prompt": "put before every conversation",
}
_REWARD: Group = (
    "Reward",
    {
        "reward": "file.py:function, or a built-in: exact_match ...; or [a, b]",
        "reward_model.model": "a reward model, whose score is one more reward",
    },
)
_LENGTHS = {
    "rollout.max_tokens_to_generate": "longest completion; 512, or what the context leaves",
    "rollout.max_prompt_length": "longest prompt; the longest in the data",
}
_SAMPLING = {
    **_LENGTHS,
    "rollout.temperature": "1.0 samples from the policy as it is",
    "rollout.env_path": "env.py: tools and turns (whet docs environments)",
}
_RUN = {
    "trainer.run_dir": "output folder; runs/<date>-<time>",
    "trainer.max_steps": "steps of the run; as many as the data have",
    "trainer.eval_every_n_steps": "0: before the first step and after the last alone",
    "trainer.keep_best": "accuracy, say: keep the checkpoint with the best evaluation",
    "trainer.loggers": "tensorboard, wandb, trackio",
    "trainer.resume": "latest: go on in run_dir where it stopped",
    "trainer.seed": "of all draws and of the order of the data",
}
_RL_RUN: Group = (
    "Run",
    {
        "trainer.mini_batch_size": "prompts of an update; all of the step's: one update",
        "trainer.show_samples": "n: every n steps a prompt with its best and worst completion",
        **_RUN,
    },
)
_LR = {"actor.lr": "learning rate; 1e-6, of an adapter 1e-4"}
_SFT_LR = {"actor.lr": "learning rate; 2e-5, of an adapter 1e-4"}
_SFT_RUN: Group = ("Run", {"trainer.num_epochs": "passes over the data; 1", **_RUN})
_SFT_DATA = {**_DATA, "data.max_length": "longest row in tokens; the model's positions"}

FIRST: Mapping[str, Sequence[Group]] = {
    "grpo": (
        (_MODEL[0], {**_MODEL[1], **_LR, **_OPTIM, **_ADAPTER}),
        ("Data", _DATA),
        _REWARD,
        ("Sampling", {"algo.num_generations": "completions of each prompt", **_SAMPLING}),
        (
            "Algorithm",
            {
                "algo.preset": "a published method: dapo, dr_grpo, gspo ...; whet docs papers",
                "algo.advantage_estimator": "drgrpo, rloo, scalerl ...: whet docs algorithms",
                "algo.policy_loss_fn": "gspo-token, cispo, sapo, gmpo ...",
                "algo.beta": "weight of the KL to the reference; 0.0 = none is loaded",
                "algo.num_iterations": "passes over each rollout",
            },
        ),
        _RL_RUN,
    ),
    "ppo": (
        (_MODEL[0], {**_MODEL[1], **_LR, "critic.lr": "the critic's learning rate; 1e-6", **_OPTIM, **_ADAPTER}),
        ("Data", _DATA),
        _REWARD,
        ("Sampling", {"algo.num_generations": "completions of each prompt", **_SAMPLING}),
        (
            "Algorithm",
            {
                "algo.gae_lambda": "1 trusts the rewards alone, 0 the critic",
                "algo.beta": "weight of the KL to the reference; 0.0 = none is loaded",
                "algo.num_iterations": "passes over each rollout",
                "algo.critic_warmup_steps": "steps at the start that train the critic alone",
            },
        ),
        _RL_RUN,
    ),
    "sft": (
        (_MODEL[0], {**_MODEL[1], **_SFT_LR, **_OPTIM, **_ADAPTER}),
        ("Data", {**_SFT_DATA, "data.train_on": "assistant, last (its last turn) or all"}),
        _SFT_RUN,
    ),
    "rm": (
        (
            _MODEL[0],
            {
                **_MODEL[1],
                "reward_model.lr": "learning rate; 1e-4",
                "reward_model.schedule": _OPTIM["actor.schedule"],
                "reward_model.warmup_steps": _OPTIM["actor.warmup_steps"],
                "reward_model.lora.rank": _ADAPTER["actor.lora.rank"],
            },
        ),
        ("Data", {**_SFT_DATA, "data.chosen_column": "column of the better answer; chosen"}),
        ("Objective", {"algo.center_rewards_coefficient": "keeps scores around 0; 0.01 where it is wanted"}),
        _SFT_RUN,
    ),
    "dpo": (
        (_MODEL[0], {**_MODEL[1], **_LR, **_OPTIM, **_ADAPTER, "reference.model": "compared with; the same model"}),
        ("Data", {**_SFT_DATA, "data.chosen_column": "column of the better answer; chosen"}),
        (
            "Objective",
            {
                "algo.loss_type": "ipo, simpo, orpo, kto ...: whet docs preference",
                "algo.beta": "larger stays nearer to the reference",
                "algo.label_smoothing": "the probability that a preference is the wrong way round",
            },
        ),
        _SFT_RUN,
    ),
    "eval": (
        ("Model", {"model": "folder of a model or of a run, or a hub name", "dtype": "what it computes in"}),
        (
            "Data",
            {
                "data": _DATA["data"],
                "data.split": "of a data set on the hub; test, where there is one",
                "data.limit": "only the first N rows",
                "data.system_prompt": "put before every conversation",
                "data.batch_size": "prompts that are completed at a time",
            },
        ),
        ("Reward", {**_REWARD[1], "pass_threshold": "a completion passes from this reward on"}),
        (
            "Sampling",
            {
                "num_generations": "completions of each prompt, for pass@k; 1",
                "temperature": "0.0 = greedy",
                "max_tokens": "longest completion",
                "seed": "of the draws",
            },
        ),
        ("Results", {"out": "folder; evals/<date>-<time>", "resume": "go on in `out`"}),
    ),
    "generate": (
        ("Model", {"model": "folder of a model or of a run, or a hub name", "dtype": "what it computes in"}),
        (
            "Prompts",
            {
                "prompt": "a text, taken literally; several times; - = standard input",
                "prompts": "or a file of rows, a folder, a hub name",
                "limit": "only the first N prompts",
                "system_prompt": "put before every conversation",
                "apply_chat_template": "whether a plain text is a user's turn",
            },
        ),
        (
            "Sampling",
            {
                "num_generations": "completions of each prompt",
                "max_tokens": "longest completion; 256",
                "temperature": "0.7; 0 = greedy",
                "top_p": "nucleus sampling",
                "stop": "strings that end a completion",
                "constraint.regex": "completions of this form; also constraint.json_schema",
                "seed": "the same seed draws the same",
            },
        ),
        ("Output", {"out": "a .jsonl file instead of the screen", "overwrite": "replace it where it exists"}),
    ),
    "chat": (
        ("Model", {"model": "folder of a model or of a run, or a hub name", "dtype": "what it computes in"}),
        (
            "Sampling",
            {
                "system_prompt": "put before the conversation",
                "max_tokens": "longest answer; 256",
                "temperature": "0 = greedy",
                "top_p": "nucleus sampling",
                "chat_template_kwargs": "of the chat template: {enable_thinking: false}",
                "seed": "the same seed draws the same",
            },
        ),
    ),
    "push": (
        (
            "Keys",
            {
                "run": "folder of the run; may be the first word alone",
                "repo": "user/name on the hub; the folder's name",
                "which": "final, best, before_stop, or a checkpoint: step-000100",
                "private": "false = for everybody to see",
                "dry_run": "show what would be sent, and send nothing",
                "merged": "merge an adapter into its base first",
                "license": "for the card; the base model's",
                "evals": "folders of `whet eval`, whose results the card shows",
            },
        ),
    ),
    "data": (
        (
            "Keys",
            {
                "rows=3": "how many rows are shown",
                "model": "its tokenizer and chat template; nothing else is loaded",
                "data": _DATA["data"],
                "data.prompt_column": "else prompt, prompts, messages, question or conversations",
                "data.apply_chat_template": "auto = where the tokenizer has a template",
                "data.system_prompt": _DATA["data.system_prompt"],
                "data.limit": "only the first N rows",
                **_LENGTHS,
            },
        ),
    ),
    "demo": (
        (
            "Keys, as the recipe has them",
            {
                "seed=0": "of all draws and of the order of the data",
                "trainer.run_dir=runs/demo": "output folder; runs/<date>-<time> where none is given",
                "trainer.max_steps=150": "steps",
                "data.batch_size=32": "prompts of a step",
                "algo.num_generations=8": "completions of each prompt",
                "actor.lr=2.0e-4": "learning rate",
                "algo.preset=dapo": "a published method: whet docs papers",
            },
        ),
    ),
}
"""Command -> what a person sets first."""

_EXAMPLES: Mapping[str, Sequence[str]] = {
    "grpo": ("whet grpo model=Qwen/Qwen3-0.6B data=train.jsonl reward=rewards.py:exact trainer.run_dir=runs/a",),
    "ppo": ("whet ppo model=Qwen/Qwen3-0.6B data=train.jsonl reward=rewards.py:exact critic.lr=1e-5",),
    "sft": ("whet sft model=Qwen/Qwen3-0.6B-Base data=chats.jsonl actor.lr=2e-5",),
    "rm": ("whet rm model=Qwen/Qwen3-0.6B data=pairs.jsonl reward_model.lr=1e-5",),
    "dpo": ("whet dpo model=Qwen/Qwen3-0.6B data=pairs.jsonl algo.loss_type=simpo",),
    "eval": (
        "whet eval model=runs/a data=test.jsonl reward=last_number",
        "whet eval --config runs/a/config.yaml model=runs/a num_generations=16 temperature=0.6",
    ),
    "generate": (
        "whet generate model=runs/a prompt='2*2+4*3='",
        "whet generate model=runs/a/final prompts=test.jsonl num_generations=4 out=completions.jsonl",
    ),
    "chat": ("whet chat model=Qwen/Qwen3-0.6B max_tokens=1000",),
    "push": ("whet push runs/a repo=me/sums which=best dry_run=true",),
    "data": (
        "whet data data=rows.jsonl model=FOLDER",
        "whet data sft data=chats.jsonl model=FOLDER rows=1",
    ),
    "demo": ("whet demo seed=1",),
}
_NOTES: Mapping[str, str] = {
    "eval": "--config runs/a/config.yaml stands for that run's evaluation: its data, sampling and rewards.",
    "chat": "In the chat: /reset, /set temperature=0.7, /quit; Ctrl-C stops an answer.",
    "data": "Takes the keys of the command that would train on the rows, `whet grpo` unless another is named.",
    "demo": "Takes every key of `whet grpo`: `whet grpo --help all`.",
}
_NO_FIELD = "algo.preset"
"""A key that stands for many."""
_OTHERS = ("rollout.vllm.", "rollout.sglang.")
"""Beginnings of keys that `--help all` leaves out, and `--help rollout.vllm` shows."""


def topic_of(words: Sequence[str]) -> str | None:
    """What help is asked for; None = it is not asked for.

    >>> topic_of(["--help"]), topic_of(["--help", "all"]), topic_of(["--help=rollout"]), topic_of(["model=m"])
    ('', 'all', 'rollout', None)
    """
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word in ("-h", "--help"):
            return "" if "=" in following or following.startswith("-") else following
        if word.startswith("--help="):
            return word.removeprefix("--help=")
    return None


def first_keys(command: str, kind: type, short: Mapping[str, str]) -> list[str]:
    """The lines of what a person sets first, with the defaults that the class of the configuration has.

    Args: command: of whet. kind: its configuration class. short: its shorthands.
    """
    shown = [
        (title, {key if "=" in key else f"{key}={_default(kind, key, short)}": text for key, text in keys.items()})
        for title, keys in FIRST[command]
    ]
    width = max(len(key) for _, keys in shown for key in keys)
    lines = []
    for title, keys in shown:
        lines += [f"{title}:", *(f"  {key:{width}}  {text}" for key, text in keys.items())]
    return lines


def _default(kind: type, key: str, short: Mapping[str, str]) -> str:
    """A key's default; of what is given in words, none where the key turns a section on."""
    from whet.config.loader import default_text

    return "..." if key.endswith(".lora.rank") or key == _NO_FIELD else default_text(kind, key, short)


def command_help(command: str, about: str, topic: str, kind: type, short: Mapping[str, str], flags: str = "") -> str:
    """The help of a command.

    Args: command: of whet. about: what it does, in a line. topic: "" = what is set first, "all" = every key, else a
        section or key. kind: its configuration class. short: its shorthands. flags: that it takes.
    Raises: ConfigError: it has no such section or key.
    """
    from whet.config import help_text
    from whet.errors import ConfigError, nearest

    if topic and topic != "all":
        keys = help_text(kind, only=short.get(topic, topic))
        if not keys:
            known = [f.name for f in dataclasses.fields(kind)]
            near = nearest(topic, _sections(kind, short))
            raise ConfigError(f"--help {topic}: no such section or key{near}; there are {', '.join(known)}")
        return keys
    words = {"push": "[RUN] ", "data": "[grpo|ppo|sft|rm|dpo] [rows=N] ", "demo": ""}.get(command, "")
    files = "" if command == "demo" else "[--config FILE ...] "
    usage = [f"usage: whet {command} {words}{files}{flags}[key=value ...]", "", about]
    note = [_NOTES[command]] if command in _NOTES else []
    examples = ["Examples:" if len(_EXAMPLES[command]) > 1 else "Example:", *(f"  {e}" for e in _EXAMPLES[command])]
    if topic == "all" and command != "demo":
        keys = help_text(kind, short, hidden=_OTHERS, only="data" if command == "data" else "")
        rest = ["", "Files are read first, in order; then key=value, with or without leading dashes."]
        if "rollout" in _sections(kind, {}):
            rest += ["Keys of vLLM and SGLang: `--help rollout.vllm`, `--help rollout.sglang`; whet docs engines."]
        return "\n".join([*usage, *note, "", "Keys:", keys, *rest, *examples])
    more = []
    if command != "demo":
        more = [f"After = stands the default. `whet {command} --help all`: every key"]
    if command in ("grpo", "ppo", "sft", "rm", "dpo"):
        more[0] += "; `--help trainer`: those of a section"
        more += ["--print_config prints the configuration and exits; --profile profiles the second step."]
    return "\n".join([*usage, *note, "", *first_keys(command, kind, short), *examples, *more])


def _sections(kind: type, short: Mapping[str, str]) -> list[str]:
    """What help can be asked for: keys, and every beginning of one."""
    from whet.config.base import leaves

    keys: list[Any] = [key for key, *_ in leaves(kind, optional=True)]
    return list(dict.fromkeys([*(k.rsplit(".", n)[0] for k in keys for n in range(k.count("."), -1, -1)), *short]))
