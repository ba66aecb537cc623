"""RL2's command line with one word changed: `python -m whet.rl2 ppo key=value ...`, also under torchrun."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from whet.compat.command import run_command, run_main

__all__ = ["main", "run", "usage"]

_PRINT = ("--print_config", "--print-config")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command of RL2's.

    Args: argv: the trainer and its words; None = those of the process.
    Returns: the exit status, as of whet.cli.main.
    """
    return run_main("whet.rl2", run, argv)


def run(trainer: str, words: Sequence[str]) -> Any:
    """Translates a command to a configuration of whet's and trains.

    Returns: the run's summary; None where only a text was printed.
    Raises: ConfigError: an unknown trainer, and the errors of `translate_command`.
    """
    from whet.rl2.keys import KEYS

    if any(word in ("-h", "--help") for word in words):
        trainer, words = "--help", [trainer] if trainer in KEYS else []
    listed = words[0] if trainer == "--help" and words else None
    return run_command("RL2", trainer, KEYS, partial(usage, listed), partial(_train, trainer, words))


def _train(trainer: str, words: Sequence[str]) -> Any:
    """Translates and trains, or prints the configuration."""
    from whet.cli.output import print_text
    from whet.config import dump
    from whet.observe.progress import setup_logging
    from whet.rl2.execute import train
    from whet.rl2.messages import vocabulary
    from whet.rl2.parsed_args import parse_args
    from whet.rl2.translate import translate_args

    args = parse_args(trainer, [word for word in words if word not in _PRINT])
    config = translate_args(args)
    if any(word in _PRINT for word in words):
        print_text(dump(config), end="")
        return None
    setup_logging()
    with vocabulary(args).translating():
        return train(args, config)


def usage(trainer: str | None) -> str:
    """Returns the text of `--help`. Args: trainer: list the keys of this one; None = list no keys."""
    from whet.rl2.keys import KEYS, effect_of

    head = (
        "usage: python -m whet.rl2 ppo|sft|rm|dpo [--config FILE ...] [--print_config] [key=value ...]\n\n"
        "RL2's commands with one word changed: RL2.trainer.ppo is whet.rl2 ppo. whet.<key>=value is a key of whet's.\n"
        "--print_config prints whet's configuration as YAML. docs/from-rl2.md says what each key is here."
    )
    if trainer is None:
        return head
    lines = [f"  {name}  {field.key or effect_of(field)}" for name, field in KEYS[trainer].items()]
    return f"{head}\n\nKeys of {trainer}, and whet's:\n" + "\n".join(lines)
