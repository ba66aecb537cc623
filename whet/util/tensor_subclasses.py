"""Tensors that wrap others, as quantised ones do: what torch asks of them, by the names that its documentation has."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch

__all__ = ["is_wrapper"]


def is_wrapper(tensor: Any) -> TypeGuard[Any]:
    """Whether a tensor is made of others, which `__tensor_flatten__` names and `__tensor_unflatten__` joins again.

    torch has a function for it, which is private.

    >>> is_wrapper(torch.ones(2))
    False
    """
    return type(tensor) is not torch.Tensor and all(
        hasattr(tensor, name) for name in ("__tensor_flatten__", "__tensor_unflatten__")
    )
