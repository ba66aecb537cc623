"""TRL's command line, with one word changed: `python -m whet.trl grpo --config config.yaml --learning_rate 1e-6`.

The flags, the keys of the file and the data sets are those of `trl grpo`; whet.trl's trainers train.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from whet.fronts.command import run_command, run_main

__all__ = ["main", "run"]

log = logging.getLogger("whet")

COMMANDS = {"dpo": "DPO", "grpo": "GRPO", "kto": "KTO", "reward": "Reward", "rloo": "RLOO", "sft": "SFT"}
"""The commands of TRL's that are there -> what their trainers' names begin with."""
_LAUNCHED = {"--accelerate_config": ("single_gpu",), "--num_processes": ("1",), "--num_machines": ("1",)}
"""Flags of TRL's launcher, and the values with which one process trains."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command of TRL's.

    Args: argv: the command and its words; None = those of the process.
    Returns: the exit status, as of whet.cli.main.
    """
    return run_main("whet.trl", run, argv)


def run(verb: str, words: Sequence[str]) -> Any:
    """Trains as a command says, and saves the model in output_dir.

    Returns: the trainer; None after the usage.
    Raises: ConfigError: an unknown command, flag or key of the file; no data set, or two.
    """
    return run_command("TRL", verb, COMMANDS, _usage, partial(_train, verb, words))


def _train(verb: str, words: Sequence[str]) -> Any:
    """Trains, saves the model, and pushes it where that was asked for. Returns: the trainer."""
    from whet.cli.output import print_text
    from whet.trl.scripts import get_peft_config, get_quantization_config

    script, args, model, mixture = _parsed(verb, words)
    asked = {"revision": model.model_revision, "trust_remote_code": args.trust_remote_code, "dtype": model.dtype}
    asked["attn_implementation"] = model.attn_implementation
    args.model_init_kwargs = {**asked, **(args.model_init_kwargs or {})}
    rewards = {"reward_funcs": _rewards(script)} if verb in ("grpo", "rloo") else {}
    rows = _rows(script, mixture)
    evaluated = args.eval_strategy != "no" or args.eval_on_start
    trainer = _trainer(verb)(
        model=_model_name(model),
        args=args,
        train_dataset=_split(rows, script.dataset_train_split, "dataset_train_split"),
        eval_dataset=_split(rows, script.dataset_test_split, "dataset_test_split") if evaluated else None,
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
    """The text of `--help`."""
    return (
        "python -m whet.trl COMMAND --config config.yaml --flag value ...: TRL's command line on whet's learners.\n\n"
        f"COMMAND is one of {', '.join(COMMANDS)}; python -m whet.trl COMMAND --help lists its flags.\n"
        "The file's keys are the flags; the command line goes before the file. One process trains: no launcher is\n"
        "needed. docs/from-trl.md says what each field is here."
    )


def _trainer(verb: str) -> Any:
    from whet import trl

    return getattr(trl, f"{COMMANDS[verb]}Trainer")


def _parsed(verb: str, words: Sequence[str]) -> tuple[Any, ...]:
    """The script's, the training's, the model's and the data sets' arguments."""
    from whet.errors import ConfigError, nearest
    from whet.trl.scripts import DatasetMixtureConfig, ModelConfig, RewardScriptArguments, ScriptArguments, TrlParser

    script = RewardScriptArguments if verb in ("grpo", "rloo") else ScriptArguments
    parser = TrlParser((script, _trainer(verb).CONFIG, ModelConfig, DatasetMixtureConfig), prog=f"whet.trl {verb}")
    *found, of_file, of_words = parser.parse_args_and_config(
        words, return_remaining_strings=True, separate_remaining_strings=True
    )
    left = _unlaunched([*of_file, *of_words])
    if left:
        known = [f"--{f.name}" for one in found for f in dataclasses.fields(one)]
        raise ConfigError(f"unknown argument {left[0]!r}{nearest(left[0].partition('=')[0], known)}")
    return tuple(found)


def _unlaunched(words: list[str]) -> list[str]:
    """Words without the launcher's flags. Raises ConfigError: a flag that asks for several processes."""
    from whet.errors import ConfigError

    left = [part for word in words for part in (word.split("=", 1) if word.split("=")[0] in _LAUNCHED else [word])]
    for flag, taken in _LAUNCHED.items():
        while flag in left:
            at = left.index(flag)
            value = left[at + 1] if at + 1 < len(left) else ""
            if value not in taken:
                raise ConfigError(
                    f"{flag}={value!r} is not supported: one process trains here; leave it out, and for the same step "
                    "multiply gradient_accumulation_steps by the number of processes"
                )
            del left[at : at + 2]
    return left


def _rewards(script: Any) -> list[Any]:
    """The reward functions and models. Raises ConfigError: none, or no such one."""
    from whet.errors import ConfigError, lookup_error
    from whet.trl import rewards
    from whet.util.references import is_ref, resolve_ref

    ready = {name: getattr(rewards, name) for name in ("accuracy_reward", "reasoning_accuracy_reward",
                                                       "think_format_reward")}  # fmt: skip
    ready["get_soft_overlong_punishment"] = rewards.get_soft_overlong_punishment(1280, 256)
    found: list[Any] = [script.reward_model_name_or_path] if script.reward_model_name_or_path else []
    for name in script.reward_funcs or ():
        if name in ready:
            found.append(ready[name])
        elif is_ref(name):
            found.append(resolve_ref(name, "reward_funcs"))
        elif "." in name:
            found.append(resolve_ref(":".join(name.rsplit(".", 1)), "reward_funcs"))
        else:
            raise lookup_error("reward_funcs", name, [*ready, "module.function", "file.py:function"])
    if not found:
        raise ConfigError(f"there is no reward: give --reward_funcs ({', '.join(ready)}, or module.function)")
    return found


def _model_name(model: Any) -> str:
    from whet.errors import ConfigError

    if not model.model_name_or_path:
        raise ConfigError("there is no model: give --model_name_or_path, a hub name or a folder")
    return model.model_name_or_path


def _rows(script: Any, mixture: Any) -> Mapping[str, Any]:
    """The data sets by split. Raises ConfigError: none is named."""
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
    if Path(name).suffix in FORMATS and Path(name).is_file():  # which TRL has as a mixture of one
        return {script.dataset_train_split: load_rows(name, streaming=script.dataset_streaming)}
    from datasets import load_dataset

    found: Any = load_dataset(name, name=script.dataset_config, streaming=script.dataset_streaming)
    return found


def _split(rows: Mapping[str, Any], name: str, flag: str) -> Any:
    """A split. Raises ConfigError: there is none of this name."""
    from whet.errors import ConfigError

    if name not in rows:
        raise ConfigError(f"--{flag} {name}: the data have no such split; they have {', '.join(rows)}")
    return rows[name]
