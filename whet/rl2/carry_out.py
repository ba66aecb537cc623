"""Runs a translated configuration by whet's own command, once what needs the data or the machine is known."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from typing import Any

from whet.cli import commands, supervised
from whet.config import PPORunConfig, RunConfig
from whet.errors import ConfigError

__all__ = ["carried_out", "with_steps"]

log = logging.getLogger("whet")


def carried_out(verb: str, config: Any) -> dict[str, Any]:
    """Trains. Args: verb: RL2's trainer. Returns: the summary."""
    config = _with_loggers(config)
    if verb != "ppo":
        return {"sft": supervised.sft, "rm": supervised.rm, "dpo": supervised.dpo}[verb](config)
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
