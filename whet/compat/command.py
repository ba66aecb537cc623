"""Command lines of the compatibility layers, such as `python -m whet.trl sft --flag value`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

__all__ = ["run_command", "run_main"]


def run_main(program: str, run: Callable[[str, Sequence[str]], Any], argv: Sequence[str] | None) -> int:
    """Runs the first word as a command; without words, runs `--help`.

    Args:
        program: the name before error messages.
        run: (command, the further words) -> any result.
        argv: the words; None = the process's arguments.
    Returns: the exit status. Whet's errors are printed as one message on stderr.
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
        command: the user's command.
        commands: the known commands.
        usage: returns the text of `--help`.
        work: runs the command.
    Returns: the result of `work`; None after the usage.
    Raises: ConfigError: an unknown command.
    """
    from whet.cli.output import print_text, rank
    from whet.errors import lookup_error

    if command in ("-h", "--help", "help"):
        print_text(usage())
        return None
    if command not in (commands := list(commands)):
        raise lookup_error(f"command of {peer}", command, commands)
    if rank() == 0:  # the imports take seconds
        sys.stderr.write(f"{command}: importing torch and transformers\n")
        sys.stderr.flush()
    return work()
