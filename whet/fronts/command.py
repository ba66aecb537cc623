"""The command line of a front: `python -m whet.trl sft --flag value`, `python -m whet.rl2 ppo key=value`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

__all__ = ["run_command", "run_main"]


def run_main(program: str, run: Callable[[str, Sequence[str]], Any], argv: Sequence[str] | None) -> int:
    """Runs the first word as a command; without words, `--help`.

    Args:
        program: the name before error messages.
        run: (command, its words) -> anything.
        argv: the words; None = those of the process.
    Returns: the exit status; an error of whet's is one message on stderr.
    """
    from whet.cli import run_and_report

    words = list(sys.argv[1:] if argv is None else argv)
    command = words.pop(0) if words else "--help"
    return run_and_report(f"{program} {command}".removesuffix(" --help"), lambda: run(command, words))


def run_command(
    peer: str, command: str, commands: Iterable[str], usage: Callable[[], str], work: Callable[[], Any]
) -> Any:
    """Runs one command, or prints the usage.

    Args:
        peer: the library with these commands, for the error.
        command: the word that was typed.
        commands: the known ones.
        usage: makes the text of `--help`.
        work: runs the command.
    Returns: what `work` returned; None after the usage.
    Raises: ConfigError: an unknown command.
    """
    from whet.cli.output import print_text
    from whet.errors import lookup_error

    if command in ("-h", "--help", "help"):
        print_text(usage())
        return None
    if command not in (commands := list(commands)):
        raise lookup_error(f"command of {peer}", command, commands)
    return work()
