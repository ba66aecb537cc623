"""Schedules of the learning rate: transformers' ones, by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from whet.config import OptimConfig
from whet.errors import ConfigError, format_exception, lookup_error

__all__ = ["check_schedule", "is_endless", "make_schedule"]

_ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt")
"""Schedules that don't depend on the number of updates."""
_TRIAL_UPDATES = 1_000_000
"""The number of updates for the trial of a schedule; it exceeds any warm-up or decay in its arguments."""


def is_endless(c: OptimConfig) -> bool:
    """Returns whether a schedule does not depend on the number of updates."""
    return c.schedule in _ENDLESS and not c.warmup_ratio


def make_schedule(c: OptimConfig, optimizer: torch.optim.Optimizer, total: int | None, warmup: int) -> Any:
    """Makes the schedule that a configuration names, with transformers; a constant one without, to start sooner."""
    if _is_plain_constant(c, warmup):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1)
    from transformers import get_scheduler

    return get_scheduler(
        "constant_with_warmup" if c.schedule == "constant" and warmup else c.schedule,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=total,
        scheduler_specific_kwargs=dict(c.schedule_kwargs),
    )


def _is_plain_constant(c: OptimConfig, warmup: int) -> bool:
    """Returns whether the rate never changes. Args: warmup: the updates of the warm-up."""
    return c.schedule == "constant" and not warmup and not c.schedule_kwargs


def check_schedule(c: OptimConfig) -> None:
    """Raises ConfigError if transformers doesn't know the schedule, or if it fails at its first step.

    The check steps it on a trial optimizer, also without warm-up, since few arguments are used during warm-up.
    """
    if _is_plain_constant(c, c.warmup_steps or int(c.warmup_ratio > 0)):
        return
    from transformers import SchedulerType

    known = [kind.value for kind in SchedulerType]
    if c.schedule not in known:
        raise lookup_error("optim.schedule", c.schedule, known)
    for warmup in sorted({0, c.warmup_steps or int(c.warmup_ratio > 0)}):
        trial = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=c.rate)
        try:
            schedule = make_schedule(c, trial, c.total_steps or _TRIAL_UPDATES, warmup)
            trial.step()
            schedule.step()
        except Exception as error:  # transformers checks few arguments before it uses them
            raise ConfigError(
                f"optim.schedule={c.schedule!r} with optim.schedule_kwargs={dict(c.schedule_kwargs)!r} can't be "
                f"stepped: {format_exception(error)}; fix the arguments, or use another schedule"
            ) from error
