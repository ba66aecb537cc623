"""Runs a translated configuration by whet's own command, once what needs the data or the machine is known."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.cli import commands, supervised
from whet.config import PPORunConfig, RunConfig
from whet.data.prompt_stream import first_of
from whet.data.sources import load_rows
from whet.envs import load_script
from whet.errors import ConfigError
from whet.rl2.parsed_args import Given
from whet.storage.checkpoint import list_checkpoints

__all__ = ["carried_out", "with_columns", "with_folder", "with_steps"]

log = logging.getLogger("whet")


def carried_out(given: Given, config: Any) -> dict[str, Any]:
    """Trains. Args: given: the command. config: what it is translated to. Returns: the summary."""
    if given.verb == "ppo" and config.rollout.env_path is not None:
        load_script(config.rollout.env_path, turns=config.rollout.max_turns)  # refused before anything else is said
    config = with_columns(with_folder(_with_loggers(config), given), given)
    if given.verb != "ppo":
        return {"sft": supervised.sft, "rm": supervised.rm, "dpo": supervised.dpo}[given.verb](config)
    config = with_steps(config)
    return commands.ppo(config) if isinstance(config, PPORunConfig) else commands.grpo(config)


def with_steps(config: RunConfig) -> RunConfig:
    """The configuration with trainer.max_steps, where groups are filtered and the length is given in epochs.

    As many steps as the epochs have without filtering: further prompts come from the next epoch.
    Raises: ConfigError: the data have no length.
    """
    trainer = config.trainer
    if not config.algo.dynamic_sampling or trainer.max_steps is not None:
        return config
    rows, size = commands.data(config)[0], config.data.batch_size
    if not hasattr(rows, "__len__"):
        raise ConfigError("the data have no length, so epochs say nothing of the steps; write trainer.total_steps=...")
    steps = (trainer.num_epochs or 1) * (len(rows) // size)
    if steps < 1:
        raise ConfigError(f"the data have {len(rows)} rows, fewer than the {size} prompts of a rollout; lower that")
    return dataclasses.replace(config, trainer=dataclasses.replace(trainer, max_steps=steps, num_epochs=None))


def with_folder(config: Any, given: Given) -> Any:
    """The configuration with a run folder that holds no other run, unless whet.trainer.run_dir names one.

    Several runs may have the name of one experiment: the folder of the second ends in _2. With trainer.load_ckpt_from
    "latest" the last of them goes on.
    """
    own, resume = config.trainer.run_dir, config.trainer.resume
    if own is None or "run_dir" in given.own.get("trainer", {}) or resume not in (None, "latest"):
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


def with_columns(config: Any, given: Given) -> Any:
    """The configuration with columns that the first row has.

    RL2 reads messages with the chat template and a prompt without it, whatever else a row has. Where a row has both, a
    line says which is read. Where it has not the one that RL2 would read, and no key names it, whet's own rule finds
    another.
    """
    c = config.data
    first = first_of(load_rows(c.path, split=c.split, subset=c.subset, streaming=c.streaming, limit=1))
    if not isinstance(first, Mapping):
        return config
    columns = {name: getattr(c, f"{name}_column", None) for name in ("messages", "prompt", "response")}
    read = [column for column in columns.values() if column is not None]
    if {"messages", "prompt"} <= first.keys() and len({"messages", "prompt"} & {*read}) == 1:
        template = "with" if "messages" in read else "without"
        log.info("rows have messages and a prompt: %s is read, as RL2 reads it %s the chat template", read[0], template)
    keys = [*(key for key in given.values if key.endswith("_key")), *given.own.get("data", {})]
    gone = {
        name: column
        for name, column in columns.items()
        if column in ("messages", "prompt", "response")
        and column not in first
        and not any(key.endswith((f"{column}_key", f"{name}_column")) for key in keys)
    }
    if not gone:
        return config
    log.info("rows have no column %s, which RL2 reads here: another is looked for", " or ".join(gone.values()))
    return dataclasses.replace(config, data=dataclasses.replace(c, **{f"{name}_column": None for name in gone}))


def _with_loggers(config: Any) -> Any:
    """The configuration without Weights & Biases where that is not installed: RL2 logs there by default."""
    if "wandb" not in config.trainer.loggers:
        return config
    if importlib.util.find_spec("wandb") is not None:
        log.info("metrics go to Weights & Biases too, as RL2's do; trainer.disable_wandb=true leaves that out")
        return config
    log.info("wandb is not installed: metrics go to metrics.jsonl of the run folder (pip install wandb for both)")
    loggers = tuple(name for name in config.trainer.loggers if name != "wandb")
    return dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, loggers=loggers))
