"""The command line: `whet <command> key=value ...`. It imports only the standard library until the command is known.

An error of whet (ConfigError, DataError, ...) is printed as one message, with exit status 2; WHET_DEBUG=1 prints its
traceback. Under torchrun only rank 0 prints.
"""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any

from whet.cli.help import command_help, find_help_topic
from whet.cli.output import print_text, rank, write_torchrun_error
from whet.cli.registry import (
    COMMANDS,
    FLAGS,
    INFO_COMMANDS,
    OTHER_NAMES,
    RUN_COMMANDS,
    SUPERVISED_COMMANDS,
    TRAINING_COMMANDS,
    check_command_config,
    config_class,
    load_command_config,
)
from whet.util.garbage import pause_collector
from whet.util.streams import flush_or_discard, has_no_reader, ignore_write_errors, open_descriptors
from whet.util.text_lines import wrap_columns, wrap_text

__all__ = ["main", "run_and_report"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args: argv: the words after the program's name; None = the process's own.
    Returns: the exit status: 0; 2 after an error of whet; 130 after Ctrl-C, or a run that a signal has stopped.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command = words.pop(0) if words else "--help"
    return run_and_report(f"whet {command}" if command in COMMANDS else "whet", lambda: _dispatch(command, words))


def run_and_report(program: str, work: Callable[[], Any]) -> int:
    """Runs a command, and prints an error of whet as one message.

    Args: program: the name that the message begins with. work: runs the command.
    Returns: the exit status.
    """
    open_descriptors()
    with ignore_write_errors("stderr"):
        try:
            work()
        except KeyboardInterrupt as stop:
            _print_error(f"\n{stop}" if str(stop) else "\nstopped")
            write_torchrun_error(str(stop) or "stopped by Ctrl-C (SIGINT)")
            return _ends_with(130)
        except Exception as error:
            if isinstance(error, BrokenPipeError) and has_no_reader(sys.stdout):
                return 0  # the reader of a pipe has seen enough
            if not _report_error(program, error):
                write_torchrun_error("".join(traceback.format_exception(error)))
                raise
            return _ends_with(2)
        finally:
            flush_or_discard(sys.stdout)
    return 0


def _ends_with(code: int) -> int:
    """Returns the exit status of a process that ends by an error, which closes what it shares with others by it."""
    if (processes := sys.modules.get("whet.parallel.processes")) is not None:
        processes.end_with(code)
    return code


def _dispatch(command: str, words: list[str]) -> None:
    if command in ("-h", "--help", "help"):
        _print_help(_help())
    elif command in ("--version", "-V"):
        _dispatch("version", words)
    elif command not in COMMANDS:
        from whet.errors import ConfigError, lookup_error

        if command in OTHER_NAMES:
            mean = OTHER_NAMES[command]
            raise ConfigError(f"unknown command {command!r}; did you mean {mean}? `whet --help` lists all commands")
        if "=" in command or command.endswith((".yaml", ".yml")):
            example = " ".join(["whet grpo", command, *words])
            raise ConfigError(f"{command!r} is not a command; write the command first, e.g. {example}")
        raise lookup_error("command", command, COMMANDS)
    elif (topic := find_help_topic(words)) is not None:
        _print_help(_command_help(command, words, topic))
    elif command == "env" and words[:1] == ["check"]:
        _env_check(words[1:])
    elif command in INFO_COMMANDS:
        from whet.cli.info import info_text

        print_text(info_text(command, words))
    elif command == "data":
        _data(words)
    elif command == "plan":
        _plan(words)
    else:
        _run(command, words)


def _report_error(program: str, error: Exception) -> bool:
    """Prints an error of whet, or of missing rights on a file, as one message.

    Returns: false for any other error, which is a bug.
    """
    from whet.errors import ConfigError, OtherRankError, WhetError, lost_process

    if os.environ.get("WHET_DEBUG", "0") not in ("", "0"):
        return False
    if lost := lost_process(error):  # where no step runs; a run's own message names the step
        error = OtherRankError(lost)
    if isinstance(error, PermissionError) and error.filename is not None:
        name = os.fsdecode(error.filename)
        text = f"{name}: {error.strerror}; give this user access to it and to its folders, or another path"
    elif isinstance(error, WhetError):
        text = ": ".join([*getattr(error, "__notes__", ()), str(error)]).replace("\n", "\n  ")
    else:
        return False
    text = f"{program}:\n  {text}" if "\n" in text else f"{program}: {text}"
    write_torchrun_error(text, is_own=not isinstance(error, OtherRankError))
    if sys.stderr.isatty():
        text = wrap_text(text, shutil.get_terminal_size().columns)
    _print_error(text, every_rank=not isinstance(error, ConfigError))
    return True


def _run(command: str, words: list[str]) -> None:
    from whet.errors import ConfigError

    _check_flags(command, words)
    if command in TRAINING_COMMANDS:
        words = ["trainer.profile=true" if w == "--profile" else w for w in words]
    print_flags = [w for w in words if w in ("--print_config", "--print-config")]
    settings = [w for w in words if w not in print_flags]
    try:
        config = load_command_config(command, settings)
    except ConfigError as error:
        if command in RUN_COMMANDS and not print_flags:
            _check_all(command, settings, error)
        raise
    if print_flags and command != "demo":
        from whet.config import dump

        print_text(dump(config), end="")
        return
    check_command_config(command, config)
    from whet.observe.progress import setup_logging

    with (
        ignore_write_errors("stdout") if command in TRAINING_COMMANDS else nullcontext()
    ):  # a run continues, whether or not its output can be written
        setup_logging()
        _log_inputs(command, config, words)
        _run_command(command, words, config)


def _data(words: list[str]) -> None:
    """`whet data [COMMAND] [rows=N] key=value ...`; its keys are those of the command that would train on the rows."""
    from whet.errors import ConfigError

    kind, words = (words[0], words[1:]) if words and words[0] in RUN_COMMANDS else ("grpo", words)
    row_counts = [w.removeprefix("--").removeprefix("rows=") for w in words if w.removeprefix("--").startswith("rows=")]
    words = [w for w in words if not w.removeprefix("--").startswith("rows=")]
    _check_flags(kind, words)
    if row_counts and not row_counts[-1].isdecimal():
        raise ConfigError(f"rows={row_counts[-1]}: expected how many rows to show, 0 or more")
    config = load_command_config(kind, words)
    from whet.observe.progress import setup_logging

    setup_logging()
    _log_inputs("data", config, words)
    from whet.cli.data import show_data

    show_data(config, rows=int(row_counts[-1]) if row_counts else 3, say=print_text)


def _env_check(words: list[str]) -> None:
    """`whet env check [rows=N] [gold=COLUMN] key=value ...`; its keys are those of the command that would train."""
    from whet.errors import ConfigError

    kind, words = (words[0], words[1:]) if words and words[0] in ("grpo", "ppo") else ("grpo", words)
    own = {"rows": "3", "gold": "answer"}
    rest = []
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if equals and name in own:
            own[name] = value
        else:
            rest.append(word)
    if not own["rows"].isdecimal() or not int(own["rows"]):
        raise ConfigError(f"rows={own['rows']}: expected how many rows to play, 1 or more")
    _check_flags(kind, rest)
    config = load_command_config(kind, rest)
    from whet.observe.progress import setup_logging

    setup_logging()
    from whet.cli.env_check import env_check

    env_check(config, rows=int(own["rows"]), gold=own["gold"], say=print_text)


def _plan(words: list[str]) -> None:
    """`whet plan [COMMAND] [memory_gb=N] [num_processes=N] key=value ...`; its keys are the training command's."""
    from whet.errors import ConfigError

    kind, words = (words[0], words[1:]) if words and words[0] in RUN_COMMANDS else ("grpo", words)
    own: dict[str, list[str]] = {"memory_gb": [], "num_processes": []}
    rest = []
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if equals and name in own:
            own[name].append(value)
        else:
            rest.append(word)
    sizes, counts, words = own["memory_gb"], own["num_processes"], rest
    _check_flags(kind, words)
    try:
        memory = float(sizes[-1]) if sizes else None
    except ValueError:
        memory = -1.0
    if memory is not None and not 0 < memory < 1e6:
        raise ConfigError(f"memory_gb={sizes[-1]}: expected the gigabytes of a GPU, such as 24")
    count = counts[-1] if counts else "1"
    if not (count.isascii() and count.isdigit() and 0 < int(count) < 1e6):
        raise ConfigError(f"num_processes={count}: expected a number of processes, each with a GPU, such as 8")
    config = load_command_config(kind, words)
    from whet.cli.plan import plan

    plan(config, memory, int(count))


def _log_inputs(command: str, config: Any, words: list[str]) -> None:
    """Logs which model and data are loaded, which takes seconds to minutes, and what a resumed run keeps."""
    import logging

    from whet.config.data import source_paths

    log = logging.getLogger("whet")
    if command == "data":
        if config.data.path is not None:  # else an error follows
            log.info("reading the data %s", ", ".join(source_paths(config.data.path)))
    elif command in RUN_COMMANDS or command == "eval":
        model = config.model if command == "eval" else getattr(config, config.TRAINED).model
        log.info("loading the model %s and the data %s", model, ", ".join(source_paths(config.data.path)) or None)
    if command in RUN_COMMANDS:
        from whet.config.resume import non_default_run_values

        kind, short = config_class(command)
        if kept := non_default_run_values(kind, words, short):
            settings = "\n  ".join(f"{key}={value!r} (default {usual!r})" for key, (value, usual) in kept.items())
            log.info("resume: settings of the run that the command does not set again:\n  %s", settings)


def _run_command(command: str, words: list[str], config: Any) -> None:
    name = "evaluate" if command == "eval" else command
    module = {**dict.fromkeys(TRAINING_COMMANDS, "commands"), **dict.fromkeys(SUPERVISED_COMMANDS, "supervised")}
    module |= {"compare": "report", "watch": "report"}
    with pause_collector():
        function = getattr(import_module(f"whet.cli.{module.get(command, name)}"), name)
    function(words if command == "demo" else config)


def _check_flags(command: str, words: list[str]) -> None:
    """Raises ConfigError for an unknown flag, or that of another command: it would take the next word as its value."""
    import difflib

    from whet.errors import ConfigError

    for word in words:
        name = word.removeprefix("--").replace("-", "_")
        if not word.startswith("--") or "=" in word or "." in word or name == "config":
            continue
        if name in FLAGS:
            if command not in FLAGS[name]:
                owners = ", whet ".join(FLAGS[name])
                raise ConfigError(f"{word} is not a flag of whet {command}, only of whet {owners}")
            continue
        command_flags = [flag for flag, commands in FLAGS.items() if command in commands]
        flags, keys = ["config", "help", *command_flags], _keys(command)
        near = difflib.get_close_matches(name, [*flags, *keys], 1)
        if name not in keys and near and near[0] in flags:
            raise ConfigError(f"unknown flag {word}; did you mean --{near[0]}?")


def _keys(command: str) -> list[str]:
    """Returns the keys of a command that have no dot."""
    import dataclasses

    kind, short = config_class(command)
    return [*(f.name for f in dataclasses.fields(kind)), *short, *(["seed"] if command in TRAINING_COMMANDS else [])]


def _check_all(command: str, words: list[str], error: Exception) -> None:
    """Raises ConfigError with all that is wrong with a run, where some of its keys can't be read."""
    from functools import partial

    from whet.config.resume import load_partial
    from whet.errors import ConfigError, raise_all

    kind, short = config_class(command)
    try:
        config, unread_sections = load_partial(kind, words, short)
    except ConfigError:  # the words themselves are wrong
        return
    if config is None:
        return
    from whet.cli.preflight import check_run

    def keys() -> None:
        raise error

    raise_all([keys, partial(check_run, config, unread_sections)])


def _help() -> str:
    commands = "\n".join(f"  {command:12}{text}" for command, text in COMMANDS.items())
    keys = "`whet grpo --help` prints the keys that are set most often, `whet grpo --help all` every key."
    return f"usage: whet COMMAND [--config FILE] [key=value ...]\n\n{commands}\n\n{keys}"


def _command_help(command: str, words: list[str], topic: str) -> str:
    if command in INFO_COMMANDS:
        return f"usage: {f'whet {command} {INFO_COMMANDS[command]}'.rstrip()}\n\n{COMMANDS[command]}"
    of = {"data": words[0] if words[0] in RUN_COMMANDS else "grpo", "demo": "grpo", "plan": "grpo"}.get(
        command, command
    )
    flags = "".join(f"[--{name}] " for name, takers in FLAGS.items() if command in takers)
    return command_help(command, COMMANDS[command], topic, *config_class(of), flags)


def _print_help(text: str) -> None:
    """Prints a page of help, wrapped to the width of the terminal."""
    print_text(wrap_columns(text, shutil.get_terminal_size().columns) if sys.stdout.isatty() else text)


def _print_error(text: str, every_rank: bool = False) -> None:
    """Writes to stderr. A wrong configuration is printed by rank 0 only; other errors may be those of one rank."""
    own_rank = rank()
    if own_rank == 0 or every_rank:
        sys.stderr.write(f"[rank {own_rank}] {text}\n" if own_rank else f"{text}\n")


if __name__ == "__main__":
    raise SystemExit(main())
