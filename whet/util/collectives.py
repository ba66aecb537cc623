"""Sums over processes within a forward and a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["add_results", "change_gradient", "summed"]


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the sum of a tensor over the processes; it is a new tensor, without a gradient."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def add_results(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the sum over the processes, each of which computes the same with it: its gradient is the same on each."""
    return _Sum.apply(x, group)


def change_gradient(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns the same tensor with another gradient. Args: change: the gradient of the result -> that of x.

    >>> x = torch.ones(1, requires_grad=True)
    >>> change_gradient(x, lambda grad: 2 * grad).sum().backward()
    >>> x.grad
    tensor([2.])
    """
    return _ForBackward.apply(x, change)


class _Sum(torch.autograd.Function):
    """See add_results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0], None


class _ForBackward(torch.autograd.Function):
    """See change_gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Any) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.change(grads[0]), None
