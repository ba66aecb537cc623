"""Optimizers that transformers' `optim` names and whet has no name for: factories (groups, lr=...) -> an optimizer."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["adafactor", "adagrad", "rmsprop"]


def adafactor(groups: Any, lr: float) -> torch.optim.Optimizer:
    """transformers' Adafactor, as its Trainer makes it."""
    from transformers.optimization import Adafactor

    return Adafactor(groups, lr=lr, scale_parameter=False, relative_step=False)


def adagrad(groups: Any, lr: float) -> torch.optim.Optimizer:
    """torch's Adagrad."""
    return torch.optim.Adagrad(groups, lr=lr)


def rmsprop(groups: Any, lr: float) -> torch.optim.Optimizer:
    """torch's RMSprop."""
    return torch.optim.RMSprop(groups, lr=lr)
