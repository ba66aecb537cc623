"""RL2's commands, with one word changed: `python -m whet.rl2 ppo key=value ...`, under torchrun too.

A command is translated to a configuration of whet's and run by whet's own command: keys.py is the table of RL2's keys,
translate.py what several of them say together. `--print_config` prints the configuration, for `whet grpo --config`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["main", "run", "usage"]

DOTTED = re.compile(r"[a-z_]+(?:\.[a-z_]+)+")
"""What may be a key in a message: a file's name looks alike."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command of RL2's.

    Args: argv: ppo and its words; None = the process's own.
    Returns: the exit status, as of whet.cli.main.
    """
    from whet.cli import explained

    words = list(sys.argv[1:] if argv is None else argv)
    verb = words.pop(0) if words else "--help"
    return explained(f"whet.rl2 {verb}".removesuffix(" --help"), lambda: run(verb, words))


def run(verb: str, words: Sequence[str]) -> Any:
    """Translates a command and carries it out.

    Returns: the run's summary; None where only something was printed.
    Raises: ConfigError: an unknown trainer, and what `translated` refuses.
    """
    from whet.cli import print_text
    from whet.config.base import leaves
    from whet.errors import WhetError, lookup_error
    from whet.rl2.parsed_args import read
    from whet.rl2.translate import RULES, of_given

    if verb in ("-h", "--help", "help") or any(w in ("-h", "--help") for w in words):
        print_text(usage(None if verb not in RULES else verb))
        return None
    if verb not in RULES:
        raise lookup_error("trainer of RL2's", verb, RULES)
    printing = [w for w in words if w in ("--print_config", "--print-config")]
    given = read(verb, [w for w in words if w not in printing])
    config = of_given(given)
    if printing:
        from whet.config import dump

        print_text(dump(config), end="")
        return None
    from whet.observe.progress import setup_logging

    setup_logging()
    from whet.rl2.execute import carried_out

    try:
        return carried_out(given, config)
    except WhetError as error:
        if not {key for key, *_ in leaves(type(config), True)}.isdisjoint(DOTTED.findall(str(error))):
            error.args = (f"{error}\n(keys named here are whet's: give them as whet.<key>=value)",)
        raise


def usage(verb: str | None) -> str:
    """The text of `--help`. Args: verb: the trainer to list the keys of; None = the commands alone."""
    from whet.rl2.keys import KEYS, effect_of

    head = (
        "usage: python -m whet.rl2 ppo|sft|rm|dpo [--config FILE ...] [--print_config] [key=value ...]\n\n"
        "RL2's commands with one word changed: RL2.trainer.ppo is whet.rl2 ppo. whet.<key>=value is a key of whet's.\n"
        "--print_config prints whet's configuration as YAML. docs/from-rl2.md says what each key is here."
    )
    if verb is None:
        return head
    lines = [f"  {name}  {key.to or effect_of(key)}" for name, key in KEYS[verb].items()]
    return f"{head}\n\nKeys of {verb}, and whet's:\n" + "\n".join(lines)
