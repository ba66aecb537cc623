"""Optimizers besides whet's own: those that transformers' `optim` names, and one that a user has made already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from whet.errors import ConfigError

__all__ = ["adafactor", "adagrad", "given", "rmsprop"]


def given(optimizer: Any, scheduler: Any, max_grad_norm: float) -> Callable[[Any], torch.optim.Optimizer]:
    """A factory of an optimizer that is there already: it clips before each step, and the schedule moves after it.

    Args: optimizer: over the model's own parameters. scheduler: of it; None = a constant rate. max_grad_norm: 0 = off.
    """

    def make(tensors: Any) -> torch.optim.Optimizer:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if {id(p) for p in params} - {id(t) for t in tensors}:
            raise ConfigError(
                "the optimizer holds tensors that are not the model's fp32 weights; give a model in float32 with "
                "bf16=False, make the optimizer of its parameters, or set optim="
            )

        def clip(*_: Any) -> None:
            torch.nn.utils.clip_grad_norm_(params, max_grad_norm)

        if max_grad_norm:
            optimizer.register_step_pre_hook(clip)
        if scheduler is not None:
            optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer

    return make


def adafactor(groups: Any, lr: float) -> torch.optim.Optimizer:
    """Adafactor of transformers, as its Trainer makes it."""
    from transformers.optimization import Adafactor

    return Adafactor(groups, lr=lr, scale_parameter=False, relative_step=False)


def adagrad(groups: Any, lr: float) -> torch.optim.Optimizer:
    """Adagrad of torch."""
    return torch.optim.Adagrad(groups, lr=lr)


def rmsprop(groups: Any, lr: float) -> torch.optim.Optimizer:
    """RMSprop of torch."""
    return torch.optim.RMSprop(groups, lr=lr)
