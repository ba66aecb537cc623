"""The commands of `whet`: what each does, which words and flags it takes, and the class of its configuration."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = [
    "COMMANDS",
    "FLAGS",
    "INFO_COMMANDS",
    "OTHER_NAMES",
    "RUN_COMMANDS",
    "SUPERVISED_COMMANDS",
    "TRAINING_COMMANDS",
    "check_command_config",
    "config_class",
    "load_command_config",
]

COMMANDS = {
    "demo": "train a small model by GRPO as a demonstration: no GPU, no network, one or two minutes",
    "grpo": "train a policy by GRPO: --config run.yaml, key=value",
    "ppo": "train a policy and its critic by PPO: --config run.yaml, key=value",
    "sft": "fine-tune a model on conversations: --config run.yaml, key=value",
    "rm": "train a reward model on pairs of answers: --config run.yaml, key=value",
    "dpo": "train a policy on preferences (DPO, SimPO, KTO, ...): --config run.yaml, key=value",
    "data": "print rows as the model reads them, and their lengths: whet data [sft] key=value",
    "plan": "print the memory that a run takes on a GPU: whet plan model=FOLDER [memory_gb=24] key=value",
    "generate": "complete prompts: model=FOLDER prompt=TEXT",
    "chat": "chat with a model: model=FOLDER",
    "serve": "serve a model behind an OpenAI-compatible API: whet serve MODEL",
    "eval": "evaluate a model on a data set: model=FOLDER data=FILE reward=NAME",
    "report": "write an HTML report of one or more runs: whet report RUN [RUN ...]",
    "watch": "serve the live report of a run at http://127.0.0.1:7860: whet watch RUN [RUN ...]",
    "compare": "print the settings and metrics in which runs differ: whet compare RUN RUN [...]",
    "push": "upload a run's model to the Hugging Face hub: whet push RUN repo=NAME",
    "recipes": "list the recipes; whet recipes copy NAME copies one to this folder",
    "docs": "list the pages of the documentation; whet docs NAME prints one, or finds a word",
    "schema": "print the JSON schema of a YAML file, for editors: whet schema grpo",
    "completion": "print a shell completion script: whet completion bash, zsh or fish",
    "doctor": "check this machine: device, driver, engines, free memory, the largest model that fits",
    "env": "print versions and hardware, for a bug report; whet env check tests an environment",
    "version": "print the version",
}
"""Command -> what it does."""
OTHER_NAMES = {
    "evaluate": "whet eval",
    "finetune": "whet sft",
    "infer": "whet generate",
    "reward": "whet rm",
    "rl": "whet grpo",
    "train": "whet grpo, ppo, sft, rm or dpo",
}
"""Name that a command has in other programs -> the command here."""
SUPERVISED_COMMANDS = ("sft", "rm", "dpo")
"""The commands that train on rows, without sampling."""
RUN_COMMANDS = ("grpo", "ppo", *SUPERVISED_COMMANDS)
"""The commands that train a model of the user's."""
TRAINING_COMMANDS = ("demo", *RUN_COMMANDS)
"""The commands that train."""
INFO_COMMANDS = {
    "recipes": "[copy NAME [FOLDER]]",
    "docs": "[NAME | WORD ...]",
    "schema": "[COMMAND]",
    "completion": "bash|zsh|fish",
    "doctor": "",
    "env": "[check [rows=3] [gold=COLUMN] rollout.env_path=FILE key=value ...]",
    "version": "",
}
"""Command that only prints information -> its arguments."""
FLAGS = {
    "print_config": ("chat", "compare", "eval", "generate", "push", "report", "serve", "watch", *RUN_COMMANDS),
    "profile": TRAINING_COMMANDS,
}
"""Flag (a word without a value, --help aside) -> the commands that take it."""


_CONFIGS = {
    "eval": ("evaluate", "EvalRunConfig", "load_eval", "check_eval", "EVAL_SHORTHANDS"),
    "push": ("push", "PushConfig", "load_push", "check_push", ""),
    "report": ("report", "ReportConfig", "load_report", "check_report", ""),
    "watch": ("report", "WatchConfig", "load_watch", "check_watch", ""),
    "compare": ("report", "CompareConfig", "load_compare", "check_compare", ""),
    "serve": ("serve", "ServeConfig", "load_serve", "check_serve", "SAMPLING_SHORTHANDS"),
    "generate": ("generate", "GenerateConfig", "load_sampling", "check_sampling", "SAMPLING_SHORTHANDS"),
    "chat": ("generate", "ChatConfig", "load_sampling", "check_sampling", "SAMPLING_SHORTHANDS"),
}
"""Command that does not train -> its module in whet.config, and there the class, what loads it and checks it, its
short keys."""


def config_class(command: str) -> tuple[Any, Any]:
    """Returns the configuration class of a command, and its short keys."""
    from whet import config

    if command in _CONFIGS:
        name, cls, _, _, shorthands = _CONFIGS[command]
        module = import_module(f"whet.config.{name}")
        return getattr(module, cls), getattr(module, shorthands) if shorthands else {}
    if command in SUPERVISED_COMMANDS:
        kind = {"sft": config.SFTRunConfig, "rm": config.RMRunConfig, "dpo": config.DPORunConfig}[command]
        return kind, config.shorthands(kind)
    return (config.PPORunConfig if command == "ppo" else config.RunConfig), config.SHORTHANDS


def load_command_config(command: str, words: list[str]) -> Any:
    """Returns the configuration of a command from its words; None for `whet demo`, which reads its words later."""
    if command == "demo":
        return None
    kind, short = config_class(command)
    if command in TRAINING_COMMANDS:
        from whet.config.resume import load_resumable

        return load_resumable(kind, words, short)
    name, _, load, _, _ = _CONFIGS[command]
    fn = getattr(import_module(f"whet.config.{name}"), load)
    return fn(kind, words) if load == "load_sampling" else fn(words)


def check_command_config(command: str, config: Any) -> None:
    """Raises ConfigError for missing settings before anything large is imported; for a run, with everything else that
    is wrong.
    """
    if command in RUN_COMMANDS:
        from whet.config import check_complete, check_supervised
        from whet.errors import ConfigError

        try:
            (check_supervised if command in SUPERVISED_COMMANDS else check_complete)(config)
        except ConfigError:
            from whet.cli.preflight import check_run

            check_run(config)
            raise
    elif command != "demo":
        name, _, _, check, _ = _CONFIGS[command]
        getattr(import_module(f"whet.config.{name}"), check)(config)
