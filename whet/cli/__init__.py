"""The command line: `whet <command> key=value ...`. Imports the standard library alone until a command is known.

A ConfigError, DataError or another error of whet is one message and exit status 2; WHET_DEBUG=1 shows where it came
from. Under torchrun only rank 0 prints.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from whet.cli.help import command_help, topic_of
from whet.cli.output import print_text, rank
from whet.util.streams import bury, open_descriptors, unfailing, unread
from whet.util.text_lines import columned, fitted

__all__ = ["explained", "main"]

COMMANDS = {
    "demo": "a small model learns by GRPO before your eyes: no GPU, no network, a minute or two",
    "grpo": "train a policy by GRPO: --config run.yaml, key=value",
    "ppo": "train a policy by PPO, and a critic with it: --config run.yaml, key=value",
    "sft": "teach a model what the assistant says in conversations: --config run.yaml, key=value",
    "rm": "train a reward model on pairs of answers: --config run.yaml, key=value",
    "dpo": "train a policy on preferences (DPO, SimPO, KTO, ...): --config run.yaml, key=value",
    "data": "look at rows as a model is given them: whet data [sft] key=value",
    "generate": "complete prompts: model=FOLDER prompt=TEXT",
    "chat": "talk with a model: model=FOLDER",
    "eval": "measure a model on a data set: model=FOLDER data=FILE reward=NAME",
    "push": "give a run's model away on the Hugging Face hub: whet push RUN repo=NAME",
    "recipes": "list the recipes; whet recipes copy NAME puts one into this folder",
    "docs": "list the pages of the documentation; whet docs NAME prints one",
    "schema": "print the JSON schema of a YAML file, for editors: whet schema grpo",
    "completion": "print a shell's completion: whet completion bash, zsh or fish",
    "env": "print what a bug report needs",
    "version": "print the version",
}

_MEANT = {
    "evaluate": "whet eval",
    "finetune": "whet sft",
    "infer": "whet generate",
    "reward": "whet rm",
    "rl": "whet grpo",
    "train": "whet grpo, ppo, sft, rm or dpo",
}
"""Names that commands have elsewhere."""
_SUPERVISED = ("sft", "rm", "dpo")
"""The commands that train on rows alone."""
_RUNS = ("grpo", "ppo", *_SUPERVISED)
"""The commands that train what a configuration says."""
_SHOWN = {
    "recipes": "[copy NAME [FOLDER]]",
    "docs": "[NAME]",
    "schema": "[COMMAND]",
    "completion": "bash|zsh|fish",
    "env": "",
    "version": "",
}
"""The commands that print what is known, and the words that they take."""
_TRAIN = ("demo", *_RUNS)
"""The commands that train."""
_FLAGS = {"print_config": ("chat", "eval", "generate", "push", *_RUNS), "profile": _TRAIN}
"""Flags (words without a value), besides --help, and the commands that take them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args: argv: the words after the program's name; None = the process's own.
    Returns: the exit status: 0, 2 for an error that whet explains, 130 for Ctrl-C and a run
        that a signal has stopped.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command = words.pop(0) if words else "--help"
    return explained(f"whet {command}" if command in COMMANDS else "whet", lambda: _dispatch(command, words))


def explained(who: str, work: Callable[[], Any]) -> int:
    """Does the work of a command; an error of whet's is one message. Args: who: says it. Returns: the exit status."""
    open_descriptors()
    with unfailing("stderr"):
        try:
            work()
        except KeyboardInterrupt as stop:
            _say(f"\n{stop}" if str(stop) else "\nstopped")
            return 130
        except Exception as error:
            if isinstance(error, BrokenPipeError) and unread(sys.stdout):
                return 0  # the reader of a pipe has seen enough
            if not _told(who, error):
                raise
            return 2
        finally:
            bury(sys.stdout)
    return 0


def _dispatch(command: str, words: list[str]) -> None:
    if command in ("-h", "--help", "help"):
        _print_help(_help())
    elif command in ("--version", "-V"):
        _dispatch("version", words)
    elif command not in COMMANDS:
        from whet.errors import ConfigError, lookup_error

        if command in _MEANT:
            mean = _MEANT[command]
            raise ConfigError(f"unknown command {command!r}; did you mean {mean}? `whet --help` lists them all")
        if "=" in command or command.endswith((".yaml", ".yml")):
            whole = " ".join(["whet grpo", command, *words])
            raise ConfigError(f"{command!r} is no command; name one first, e.g. {whole}")
        raise lookup_error("command", command, COMMANDS)
    elif (topic := topic_of(words)) is not None:
        _print_help(_command_help(command, words, topic))
    elif command in _SHOWN:
        from whet.cli.info import shown_by

        print_text(shown_by(command, words))
    elif command == "data":
        _data(words)
    else:
        _run(command, words)


def _told(who: str, error: Exception) -> bool:
    """Prints an error of whet, or that this user may not do something with a file, in one message; False for any other,
    which is a bug.
    """
    from whet.errors import ConfigError, WhetError

    if os.environ.get("WHET_DEBUG", "0") not in ("", "0"):
        return False
    if isinstance(error, PermissionError) and error.filename is not None:
        name = os.fsdecode(error.filename)
        text = f"{name}: {error.strerror}; give this user access to it and to its folders, or another path"
    elif isinstance(error, WhetError):
        text = str(error).replace("\n", "\n  ")
    else:
        return False
    text = f"{who}:\n  {text}" if "\n" in text else f"{who}: {text}"
    if sys.stderr.isatty():
        text = fitted(text, shutil.get_terminal_size().columns)
    _say(text, every_rank=not isinstance(error, ConfigError))
    return True


def _run(command: str, words: list[str]) -> None:
    from whet.errors import ConfigError

    _check_flags(command, words)
    if command in _TRAIN:
        words = ["trainer.profile=true" if w == "--profile" else w for w in words]
    printing = [w for w in words if w in ("--print_config", "--print-config")]
    given = [w for w in words if w not in printing]
    try:
        config = _config(command, given)
    except ConfigError as error:
        if command in _RUNS and not printing:
            _check_rest(command, given, error)
        raise
    if printing and command != "demo":
        from whet.config import dump

        print_text(dump(config), end="")
        return
    _check(command, config)
    from whet.observe.progress import setup_logging

    with (
        unfailing("stdout") if command in _TRAIN else nullcontext()
    ):  # a run continues, whether or not its output can be written
        setup_logging()
        _say_what_loads(command, config, words)
        _work(command, words, config)


def _data(words: list[str]) -> None:
    """`whet data [COMMAND] [rows=N] key=value ...`, with the keys of the command that would train on the rows."""
    from whet.errors import ConfigError

    kind, words = (words[0], words[1:]) if words and words[0] in _RUNS else ("grpo", words)
    given = [w.removeprefix("--").removeprefix("rows=") for w in words if w.removeprefix("--").startswith("rows=")]
    words = [w for w in words if not w.removeprefix("--").startswith("rows=")]
    _check_flags(kind, words)
    if given and not given[-1].isdecimal():
        raise ConfigError(f"rows={given[-1]}: expected how many rows to show, 0 or more")
    config = _config(kind, words)
    from whet.observe.progress import setup_logging

    setup_logging()
    _say_what_loads("data", config, words)
    from whet.cli.data import show_data

    show_data(config, rows=int(given[-1]) if given else 3, say=print_text)


def _say_what_loads(command: str, config: Any, words: list[str]) -> None:
    """A line before torch is imported and models are read, which takes seconds to minutes; and what a resumed run has
    that was not given again.
    """
    import logging

    from whet.config.data import source_paths

    log = logging.getLogger("whet")
    if command == "data":
        if config.data.path is not None:  # else it is about to be said
            log.info("reading %s", ", ".join(source_paths(config.data.path)))
    elif command in _RUNS or command == "eval":
        model = config.model if command == "eval" else getattr(config, config.TRAINED).model
        log.info("loading %s and %s", model, ", ".join(source_paths(config.data.path)) or None)
    if command in _RUNS:
        from whet.config.resume import kept_from_run

        kind, short = _kind(command)
        if kept := kept_from_run(kind, words, short):
            told = ", ".join(f"{key}={value!r} (default {usual!r})" for key, (value, usual) in kept.items())
            log.info("resume: kept as the run has them, since not given: %s", told)


def _work(command: str, words: list[str], config: Any) -> None:
    if command == "generate":
        from whet.cli.generate import generate

        generate(config)
    elif command == "chat":
        from whet.cli.chat import chat

        chat(config)
    elif command == "eval":
        from whet.cli.evaluate import evaluate

        evaluate(config)
    elif command == "push":
        from whet.cli.push import push

        push(config)
    elif command == "demo":
        from whet.cli.commands import demo

        demo(words)
    elif command in _SUPERVISED:
        from whet.cli import supervised

        getattr(supervised, command)(config)
    else:
        from whet.cli import commands

        getattr(commands, command)(config)


def _kind(command: str) -> tuple[Any, Any]:
    """The configuration class of a command, and its shorthands."""
    from whet import config

    if command == "eval":
        from whet.config.evaluate import EVAL_SHORTHANDS, EvalRunConfig

        return EvalRunConfig, EVAL_SHORTHANDS
    if command == "push":
        from whet.config.push import PushConfig

        return PushConfig, {}
    if command in ("chat", "generate"):
        from whet.config.generate import ChatConfig, GenerateConfig, sampling_shorthands

        kind = GenerateConfig if command == "generate" else ChatConfig
        return kind, sampling_shorthands(kind)
    if command in _SUPERVISED:
        kind = {"sft": config.SFTRunConfig, "rm": config.RMRunConfig, "dpo": config.DPORunConfig}[command]
        return kind, config.shorthands(kind)
    return (config.PPORunConfig if command == "ppo" else config.RunConfig), config.SHORTHANDS


def _check_flags(command: str, words: list[str]) -> None:
    """Raises ConfigError for a flag misspelt, or another command's: it would take the next word as its value."""
    import difflib

    from whet.errors import ConfigError

    for word in words:
        name = word.removeprefix("--").replace("-", "_")
        if not word.startswith("--") or "=" in word or "." in word or name == "config":
            continue
        if name in _FLAGS:
            if command not in _FLAGS[name]:
                theirs = ", whet ".join(_FLAGS[name])
                raise ConfigError(f"{word} is not an option of whet {command}; only of whet {theirs}")
            continue
        own = [flag for flag, commands in _FLAGS.items() if command in commands]
        flags, keys = ["config", "help", *own], _keys(command)
        near = difflib.get_close_matches(name, [*flags, *keys], 1)
        if name not in keys and near and near[0] in flags:
            raise ConfigError(f"unknown flag {word}; did you mean --{near[0]}?")


def _keys(command: str) -> list[str]:
    """The keys of a command that have no dot."""
    import dataclasses

    kind, short = _kind(command)
    return [*(f.name for f in dataclasses.fields(kind)), *short, *(["seed"] if command in _TRAIN else [])]


def _config(command: str, words: list[str]) -> Any:
    """The configuration of a command; None where it takes words."""
    if command == "demo":
        return None
    kind, short = _kind(command)
    if command in _TRAIN:
        from whet.config.resume import load_resumable

        return load_resumable(kind, words, short)
    if command == "eval":
        from whet.config.evaluate import load_eval

        return load_eval(words)
    if command == "push":
        from whet.config.push import load_push

        return load_push(words)
    from whet.config.generate import load_sampling

    return load_sampling(kind, words)


def _check(command: str, config: Any) -> None:
    """Raises ConfigError for what is missing before anything heavy is imported; of a run for all else that is wrong."""
    if command in _RUNS:
        from whet.config import check_complete, check_supervised
        from whet.errors import ConfigError

        try:
            (check_supervised if command in _SUPERVISED else check_complete)(config)
        except ConfigError:
            from whet.cli.preflight import check_run

            check_run(config)
            raise
    elif command == "eval":
        from whet.config.evaluate import check_eval

        check_eval(config)
    elif command == "push":
        from whet.config.push import check_push

        check_push(config)
    elif command != "demo":
        from whet.config.generate import check_sampling

        check_sampling(config)


def _check_rest(command: str, words: list[str], error: Exception) -> None:
    """Raises ConfigError for what is wrong with the keys of a run together with what else is, if that can be told."""
    from functools import partial

    from whet.config.resume import load_partial
    from whet.errors import ConfigError, raise_all

    kind, short = _kind(command)
    try:
        config, unread = load_partial(kind, words, short)
    except ConfigError:  # of the words, before any key is looked at
        return
    if config is None:
        return
    from whet.cli.preflight import check_run

    def keys() -> None:
        raise error

    raise_all([keys, partial(check_run, config, unread)])


def _help() -> str:
    commands = "\n".join(f"  {command:12}{text}" for command, text in COMMANDS.items())
    keys = "`whet grpo --help` and so on show the keys that are set first, `whet grpo --help all` every one."
    return f"usage: whet COMMAND [--config FILE] [key=value ...]\n\n{commands}\n\n{keys}"


def _command_help(command: str, words: list[str], topic: str) -> str:
    if command in _SHOWN:
        return f"usage: {f'whet {command} {_SHOWN[command]}'.rstrip()}\n\n{COMMANDS[command]}"
    of = {"data": words[0] if words[0] in _RUNS else "grpo", "demo": "grpo"}.get(command, command)
    flags = "".join(f"[--{name}] " for name, takers in _FLAGS.items() if command in takers)
    return command_help(command, COMMANDS[command], topic, *_kind(of), flags)


def _print_help(text: str) -> None:
    """Writes a page of help, broken to a terminal's width."""
    print_text(columned(text, shutil.get_terminal_size().columns) if sys.stdout.isatty() else text)


def _say(text: str, every_rank: bool = False) -> None:
    """Writes to stderr; a configuration is wrong on every rank alike, other errors may be one rank's own."""
    own = rank()
    if own == 0:
        sys.stderr.write(text + "\n")
    elif every_rank:
        sys.stderr.write(f"[rank {own}] {text}\n")


if __name__ == "__main__":
    raise SystemExit(main())
