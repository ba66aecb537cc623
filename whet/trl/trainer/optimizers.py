"""Optimizers other than whet's own: named by transformers' `optim`, an object, or a class.

Also schedules that follow an evaluation's metric, such as ReduceLROnPlateau.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import GreedyLR, get_scheduler

from whet.errors import ConfigError
from whet.trl.config.translate import BY_EVALUATION

__all__ = [
    "LRView",
    "adafactor",
    "adagrad",
    "begin_schedule",
    "existing_optimizer",
    "optimizer_from_class",
    "restore_schedule",
    "rmsprop",
    "serializable_state",
    "step_schedule",
]

_BY_METRIC = (ReduceLROnPlateau, GreedyLR)
"""Schedules that step on a metric."""


class LRView:
    """The lr_scheduler that callbacks see: the current rates, and the state of whet's own schedule.

    Args: trainer: the trainer. Its optimizer makes the schedule at the first step, and steps it.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def get_last_lr(self) -> list[float]:
        """Returns the next update's learning rate of each parameter group."""
        return [float(group["lr"]) for group in self._trainer.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Returns the schedule's state; empty before the first update."""
        schedule = self._trainer.worker.optim.schedule
        return {} if schedule is None else schedule.state_dict()


def existing_optimizer(optimizer: Any, scheduler: Any, max_grad_norm: float) -> Callable[[Any], torch.optim.Optimizer]:
    """Returns a factory that returns the user's optimizer. It clips before each step and steps its schedule after it.

    Args: optimizer: over the model's own parameters. scheduler: the optimizer's; None = a constant rate. max_grad_norm:
        0 = no clipping.
    """

    def make(tensors: Any) -> torch.optim.Optimizer:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if {id(p) for p in params} - {id(t) for t in tensors}:
            raise ConfigError(
                "the optimizer holds tensors that are not the model's fp32 weights; give a model in float32 with "
                "bf16=False, make the optimizer of its parameters, or set optim="
            )
        return _add_step_hooks(optimizer, scheduler, max_grad_norm)

    return make


def optimizer_from_class(
    kind: Callable[..., Any], kwargs: Mapping[str, Any], args: Any, total: int, set_scheduler: Callable[[Any], None]
) -> Callable[[Any], torch.optim.Optimizer]:
    """Returns a factory of an optimizer of a class, with the schedule of the arguments and the learning rate of the
    keywords.

    Args: kind, kwargs: optimizer_cls_and_kwargs. args: has weight_decay (of matrices), the schedule and max_grad_norm.
        total: the run's updates. set_scheduler: receives the schedule.
    """

    def make(tensors: Any) -> torch.optim.Optimizer:
        groups = [
            {"params": [t for t in tensors if t.dim() >= 2], "weight_decay": args.weight_decay},
            {"params": [t for t in tensors if t.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = kind([g for g in groups if g["params"]], **kwargs)
        warmup = args.get_warmup_steps(total)
        scheduler = get_scheduler(
            args.lr_scheduler_type, optimizer, warmup, total, scheduler_specific_kwargs=args.lr_scheduler_kwargs
        )
        set_scheduler(scheduler)
        return _add_step_hooks(optimizer, scheduler, args.max_grad_norm)

    return make


def _add_step_hooks(optimizer: Any, scheduler: Any, max_grad_norm: float) -> torch.optim.Optimizer:
    """Adds hooks that clip before each step and step the schedule after it. Returns: the optimizer."""
    params = [p for group in optimizer.param_groups for p in group["params"]]

    def clip(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(params, max_grad_norm)

    if max_grad_norm:
        optimizer.register_step_pre_hook(clip)
    if scheduler is not None and not isinstance(scheduler, _BY_METRIC):
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


def begin_schedule(trainer: Any) -> None:
    """Makes the schedule of the next run if it follows an evaluation and the optimizer is whet's own.

    Without this schedule the optimizer's rate is constant.
    """
    optim = trainer.worker.optim
    if optim is None or optim.config is None:
        return
    trainer.scheduler = None
    if trainer.args.lr_scheduler_type in BY_EVALUATION:
        trainer.scheduler = get_scheduler(
            trainer.args.lr_scheduler_type,
            optim.optimizer,
            scheduler_specific_kwargs=trainer.args.lr_scheduler_kwargs,
        )
    trainer.callback_handler.lr_scheduler = trainer.scheduler or LRView(trainer)


def step_schedule(trainer: Any, value: float) -> None:
    """Steps a schedule that follows a metric. Args: value: the metric in an evaluation."""
    if isinstance(trainer.scheduler, _BY_METRIC):
        trainer.scheduler.step(value)
        _keep_rates(trainer.worker.optim)


def restore_schedule(trainer: Any, state: Mapping[str, Any]) -> None:
    """Restores a schedule from `serializable_state`; other values of its state stay."""
    trainer.scheduler.load_state_dict({**trainer.scheduler.state_dict(), **state})
    if isinstance(trainer.scheduler, _BY_METRIC):
        optim = trainer.worker.optim
        for group, rate in zip(optim.optimizer.param_groups, trainer.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
        _keep_rates(optim)


def _keep_rates(optim: Any) -> None:
    """Makes the current rates the base of the optimizer's own schedule, which is constant."""
    if optim.schedule is not None:
        optim.schedule.base_lrs = [group["lr"] for group in optim.optimizer.param_groups]


def serializable_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a schedule's state that can be stored: numbers, texts and lists of them."""

    def is_simple(value: Any) -> bool:
        return value is None or isinstance(value, int | float | str)

    lists = {n: list(v) for n, v in state.items() if isinstance(v, list) and all(map(is_simple, v))}
    return {**{n: v for n, v in state.items() if is_simple(v)}, **lists}


def adafactor(groups: Any, lr: float) -> torch.optim.Optimizer:
    """Adafactor from transformers, with the settings of its Trainer."""
    from transformers.optimization import Adafactor

    return Adafactor(groups, lr=lr, scale_parameter=False, relative_step=False)


def adagrad(groups: Any, lr: float) -> torch.optim.Optimizer:
    """Adagrad from torch."""
    return torch.optim.Adagrad(groups, lr=lr)


def rmsprop(groups: Any, lr: float) -> torch.optim.Optimizer:
    """RMSprop from torch."""
    return torch.optim.RMSprop(groups, lr=lr)
