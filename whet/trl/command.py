"""TRL's command line: `python -m whet.trl grpo --config config.yaml --learning_rate 1e-6`.

It takes the flags, the keys of the file and the data sets of `trl grpo`, and trains with whet.trl's trainers.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from whet.compat.command import run_command, run_main

__all__ = ["main", "run"]

log = logging.getLogger("whet")

COMMANDS = {"dpo": "DPO", "grpo": "GRPO", "kto": "KTO", "reward": "Reward", "rloo": "RLOO", "sft": "SFT"}
"""TRL's command -> the beginning of its trainer's name."""
_LAUNCHER_FLAGS = {"--accelerate_config": ("single_gpu",), "--num_processes": ("1",), "--num_machines": ("1",)}
"""A flag of TRL's launcher -> its values for training in one process."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one of TRL's commands.

    Args: argv: the command and its words; None = the process's arguments.
    Returns: the exit status, as whet.cli.main.
    """
    return run_main("whet.trl", run, argv)


def run(verb: str, words: Sequence[str]) -> Any:
    """Runs a training command, and saves the model in output_dir.

    Returns: the trainer; None after the usage.
    Raises: ConfigError: an unknown command, flag or key; no data set.
    """
    return run_command("TRL", verb, COMMANDS, _usage, partial(_train, verb, words))


def _train(verb: str, words: Sequence[str]) -> Any:
    """Trains, saves the model, and pushes it if push_to_hub is set. Returns: the trainer."""
    from whet.cli.output import print_text
    from whet.errors import ConfigError
    from whet.trl.scripts import get_peft_config, get_quantization_config

    script, args, model, mixture = _parse_words(verb, words)
    init_kwargs = {
        "revision": model.model_revision,
        "trust_remote_code": args.trust_remote_code,
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
    }
    args.model_init_kwargs = {**init_kwargs, **(args.model_init_kwargs or {})}
    rewards = {"reward_funcs": _load_rewards(script)} if verb in ("grpo", "rloo") else {}
    splits = _load_splits(script, mixture)
    evaluates = args.eval_strategy != "no" or args.eval_on_start
    if not model.model_name_or_path:
        raise ConfigError("there is no model: give --model_name_or_path, a hub name or a folder")
    trainer = _trainer_class(verb)(
        model=model.model_name_or_path,
        args=args,
        train_dataset=_get_split(splits, script.dataset_train_split, "dataset_train_split"),
        eval_dataset=_get_split(splits, script.dataset_test_split, "dataset_test_split") if evaluates else None,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
        **rewards,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model(args.output_dir)
    print_text(f"model: {args.output_dir}")
    if args.push_to_hub:
        print_text(f"on the hub: {trainer.push_to_hub(dataset_name=script.dataset_name)}")
    return trainer


def _usage() -> str:
    """Returns the text of `--help`."""
    return (
        "python -m whet.trl COMMAND --config config.yaml --flag value ...: TRL's command line on whet's learners.\n\n"
        f"COMMAND is one of {', '.join(COMMANDS)}; python -m whet.trl COMMAND --help lists its flags.\n"
        "The file's keys are the flags; the command line overrides the file. One process trains, so no launcher is\n"
        "needed. docs/from-trl.md describes each field."
    )


def _trainer_class(verb: str) -> Any:
    from whet import trl

    return getattr(trl, f"{COMMANDS[verb]}Trainer")


def _parse_words(verb: str, words: Sequence[str]) -> tuple[Any, ...]:
    """Parses the arguments of the script, the training, the model and the data sets."""
    from whet.errors import ConfigError, nearest
    from whet.trl.scripts import DatasetMixtureConfig, ModelConfig, RewardScriptArguments, ScriptArguments, TrlParser

    script = RewardScriptArguments if verb in ("grpo", "rloo") else ScriptArguments
    types = (script, _trainer_class(verb).CONFIG, ModelConfig, DatasetMixtureConfig)
    parser = TrlParser(types, prog=f"whet.trl {verb}")
    *parsed, from_file, from_words = parser.parse_args_and_config(
        words, return_remaining_strings=True, separate_remaining_strings=True
    )
    unknown = _drop_launcher_flags([*from_file, *from_words])
    if unknown:
        known = [f"--{f.name}" for arguments in parsed for f in dataclasses.fields(arguments)]
        raise ConfigError(f"unknown argument {unknown[0]!r}{nearest(unknown[0].partition('=')[0], known)}")
    return tuple(parsed)


def _drop_launcher_flags(words: list[str]) -> list[str]:
    """Removes the launcher's flags. Raises ConfigError: a flag for several processes."""
    from whet.errors import ConfigError

    flags = _LAUNCHER_FLAGS
    words = [part for word in words for part in (word.split("=", 1) if word.split("=")[0] in flags else [word])]
    for flag, supported in flags.items():
        while flag in words:
            at = words.index(flag)
            value = words[at + 1] if at + 1 < len(words) else ""
            if value not in supported:
                raise ConfigError(
                    f"{flag}={value!r} is not supported: one process trains here; leave it out, and for the same step "
                    "multiply gradient_accumulation_steps by the number of processes"
                )
            del words[at : at + 2]
    return words


def _load_rewards(script: Any) -> list[Any]:
    """Loads the reward functions and the reward model's name. Raises ConfigError: no reward, or an unknown one."""
    from whet.errors import ConfigError, lookup_error
    from whet.trl import rewards
    from whet.util.references import is_ref, resolve_ref

    builtin = {name: getattr(rewards, name) for name in ("accuracy_reward", "reasoning_accuracy_reward",
                                                         "think_format_reward")}  # fmt: skip
    builtin["get_soft_overlong_punishment"] = rewards.get_soft_overlong_punishment(1280, 256)
    loaded: list[Any] = [script.reward_model_name_or_path] if script.reward_model_name_or_path else []
    for name in script.reward_funcs or ():
        if name in builtin:
            loaded.append(builtin[name])
        elif is_ref(name):
            loaded.append(resolve_ref(name, "reward_funcs"))
        elif "." in name:
            loaded.append(resolve_ref(":".join(name.rsplit(".", 1)), "reward_funcs"))
        else:
            raise lookup_error("reward_funcs", name, [*builtin, "module.function", "file.py:function"])
    if not loaded:
        raise ConfigError(f"there is no reward: give --reward_funcs ({', '.join(builtin)}, or module.function)")
    return loaded


def _load_splits(script: Any, mixture: Any) -> Mapping[str, Any]:
    """Loads the data set's splits by name. Raises ConfigError: no data set is named."""
    from whet.data.files import FORMATS
    from whet.data.sources import load_rows
    from whet.errors import ConfigError
    from whet.trl.scripts import get_dataset

    name = script.dataset_name
    if mixture.datasets:
        if name:
            log.warning("--dataset_name %s is not read: the data sets are those of `datasets`", name)
        return get_dataset(mixture)
    if not name:
        raise ConfigError("there is no data set: give --dataset_name, or `datasets` in a --config file")
    if Path(name).suffix in FORMATS and Path(name).is_file():  # TRL needs a mixture for a file
        return {script.dataset_train_split: load_rows(name, streaming=script.dataset_streaming)}
    from datasets import load_dataset

    splits: Any = load_dataset(name, name=script.dataset_config, streaming=script.dataset_streaming)
    return splits


def _get_split(splits: Mapping[str, Any], name: str, flag: str) -> Any:
    """Returns the split of this name. Raises ConfigError: there is none."""
    from whet.errors import ConfigError

    if name not in splits:
        raise ConfigError(f"--{flag} {name}: the data have no such split; they have {', '.join(splits)}")
    return splits[name]
