"""The commands of `whet`: what each does, which words and flags it takes, and the class of its configuration."""

from __future__ import annotations

from typing import Any

__all__ = [
    "COMMANDS",
    "FLAGS",
    "INFO_COMMANDS",
    "OTHER_NAMES",
    "RUN_COMMANDS",
    "SUPERVISED_COMMANDS",
    "TRAINING_COMMANDS",
    "config_class",
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
    "docs": "list the pages of the documentation; whet docs NAME prints one",
    "schema": "print the JSON schema of a YAML file, for editors: whet schema grpo",
    "completion": "print a shell completion script: whet completion bash, zsh or fish",
    "doctor": "check this machine: device, driver, engines, free memory, the largest model that fits",
    "env": "print the versions and the hardware, for a bug report; whet env check plays an environment",
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
    "docs": "[NAME]",
    "schema": "[COMMAND]",
    "completion": "bash|zsh|fish",
    "doctor": "",
    "env": "[check key=value ...]",
    "version": "",
}
"""Command that only prints information -> its arguments."""
FLAGS = {
    "print_config": ("chat", "compare", "eval", "generate", "push", "report", "serve", "watch", *RUN_COMMANDS),
    "profile": TRAINING_COMMANDS,
}
"""Flag (a word without a value, --help aside) -> the commands that take it."""


def config_class(command: str) -> tuple[Any, Any]:
    """Returns the configuration class of a command, and its short keys."""
    from whet import config

    if command == "eval":
        from whet.config.evaluate import EVAL_SHORTHANDS, EvalRunConfig

        return EvalRunConfig, EVAL_SHORTHANDS
    if command == "push":
        from whet.config.push import PushConfig

        return PushConfig, {}
    if command == "report":
        from whet.config.report import ReportConfig

        return ReportConfig, {}
    if command == "watch":
        from whet.config.report import WatchConfig

        return WatchConfig, {}
    if command == "compare":
        from whet.config.report import CompareConfig

        return CompareConfig, {}
    if command == "serve":
        from whet.config.generate import SAMPLING_SHORTHANDS
        from whet.config.serve import ServeConfig

        return ServeConfig, SAMPLING_SHORTHANDS
    if command in ("chat", "generate"):
        from whet.config.generate import SAMPLING_SHORTHANDS, ChatConfig, GenerateConfig

        return GenerateConfig if command == "generate" else ChatConfig, SAMPLING_SHORTHANDS
    if command in SUPERVISED_COMMANDS:
        kind = {"sft": config.SFTRunConfig, "rm": config.RMRunConfig, "dpo": config.DPORunConfig}[command]
        return kind, config.shorthands(kind)
    return (config.PPORunConfig if command == "ppo" else config.RunConfig), config.SHORTHANDS
