"""Trains by whet's own command, after the choices that depend on the data, the folder or the installed loggers."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.cli import commands, supervised
from whet.cli.rows import load_train_and_eval
from whet.config import PPORunConfig, RunConfig
from whet.data.prompt_stream import first_row
from whet.data.sources import load_rows
from whet.envs import load_script
from whet.errors import ConfigError
from whet.parallel.processes import join_processes
from whet.rl2.parsed_args import ParsedArgs
from whet.storage.checkpoint import list_checkpoints

__all__ = ["train", "with_columns", "with_folder", "with_steps"]

log = logging.getLogger("whet")


def train(args: ParsedArgs, config: Any) -> dict[str, Any]:
    """Trains. Args: args: the command. config: its translation. Returns: the run's summary."""
    if args.trainer == "ppo" and config.rollout.env_path is not None:
        load_script(config.rollout.env_path, turns=config.rollout.max_turns)  # raises before the first line of the log
    ranks = join_processes(config.trainer.collective_timeout_s)
    config = _with_loggers(config)
    config = with_columns(ranks.call_on_writer(lambda: with_folder(config, args)), args)
    if args.trainer != "ppo":
        return {"sft": supervised.sft, "rm": supervised.rm, "dpo": supervised.dpo}[args.trainer](config)
    config = with_steps(config)
    return commands.ppo(config) if isinstance(config, PPORunConfig) else commands.grpo(config)


def with_steps(config: RunConfig) -> RunConfig:
    """Returns the configuration with trainer.max_steps, where groups are filtered and the length is a number of epochs.

    The run has as many steps as the epochs have without filtering; further prompts come from the next epoch.
    Raises: ConfigError: the data have no length.
    """
    trainer = config.trainer
    if not config.algo.dynamic_sampling or trainer.max_steps is not None:
        return config
    rows, size = load_train_and_eval(config)[0], config.data.batch_size
    if not hasattr(rows, "__len__"):
        raise ConfigError(
            "the data have no length, so the number of epochs gives no number of steps; write trainer.total_steps=..."
        )
    steps = (trainer.num_epochs or 1) * (len(rows) // size)
    if steps < 1:
        raise ConfigError(f"the data have {len(rows)} rows, fewer than the {size} prompts of a rollout; lower that")
    return dataclasses.replace(config, trainer=dataclasses.replace(trainer, max_steps=steps, num_epochs=None))


def with_folder(config: Any, args: ParsedArgs) -> Any:
    """Returns the configuration with a run folder that holds no other run, unless whet.trainer.run_dir names one.

    Several runs may have the name of one experiment: the folder of the second ends in _2. trainer.load_ckpt_from=latest
    resumes the last of them.
    """
    own, resume = config.trainer.run_dir, config.trainer.resume
    if own is None or "run_dir" in args.whet_keys.get("trainer", {}) or resume not in (None, "latest"):
        return config
    places = itertools.chain([own], (f"{own}_{n}" for n in itertools.count(2)))
    taken = list(itertools.takewhile(_holds_run, places))
    folder = own if not taken else taken[-1] if resume else f"{own}_{len(taken) + 1}"
    if folder != own:
        log.info("%s holds a run, which stays: %s is in %s", own, "its successor" if resume else "this one", folder)
    return dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, run_dir=folder))


def _holds_run(folder: str) -> bool:
    rows = Path(folder) / "metrics.jsonl"
    return (rows.is_file() and rows.stat().st_size > 0) or bool(list_checkpoints(Path(folder) / "checkpoints"))


def with_columns(config: Any, args: ParsedArgs) -> Any:
    """Returns the configuration with columns that the first row has.

    RL2 reads messages with the chat template and a prompt without it, whatever else a row has. A row with both gets a
    line in the log. Where the column that RL2 would read is missing and no key names it, whet's own rule finds another.
    """
    c = config.data
    first = first_row(load_rows(c.path, split=c.split, subset=c.subset, streaming=c.streaming, limit=1))
    if not isinstance(first, Mapping):
        return config
    columns = {name: getattr(c, f"{name}_column", None) for name in ("messages", "prompt", "response")}
    read = [column for column in columns.values() if column is not None]
    if {"messages", "prompt"} <= first.keys() and len({"messages", "prompt"} & {*read}) == 1:
        template = "with" if "messages" in read else "without"
        log.info("rows have messages and a prompt: %s is read, as RL2 reads it %s the chat template", read[0], template)
    keys = [*(key for key in args.values if key.endswith("_key")), *args.whet_keys.get("data", {})]
    missing = {
        name: column
        for name, column in columns.items()
        if column in ("messages", "prompt", "response")
        and column not in first
        and not any(key.endswith((f"{column}_key", f"{name}_column")) for key in keys)
    }
    if not missing:
        return config
    log.info("rows have no column %s, which RL2 reads here: another is looked for", " or ".join(missing.values()))
    return dataclasses.replace(config, data=dataclasses.replace(c, **{f"{name}_column": None for name in missing}))


def _with_loggers(config: Any) -> Any:
    """Returns the configuration without Weights & Biases where that is not installed; RL2 logs there by default."""
    if "wandb" not in config.trainer.loggers:
        return config
    if importlib.util.find_spec("wandb") is not None:
        log.info("metrics go to Weights & Biases too, as RL2's do; trainer.disable_wandb=true leaves that out")
        return config
    log.info("wandb is not installed: metrics go to metrics.jsonl of the run folder (pip install wandb for both)")
    loggers = tuple(name for name in config.trainer.loggers if name != "wandb")
    return dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, loggers=loggers))
