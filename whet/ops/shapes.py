"""The check of tensors that belong together: torch would broadcast a wrong shape, and the numbers would be wrong."""

from __future__ import annotations

from torch import Size, Tensor

from whet.errors import DataError

__all__ = ["check_shapes"]


def check_shapes(shape: str, **tensors: Tensor | Size | None) -> None:
    """Raises DataError where tensors differ in shape, or have another number of dimensions.

    Args: shape: what all must have, as docstrings write it: "[S]" is one dimension, "[n, V]" are two, "[...]" are any.
        tensors: tensors, or shapes, by the names that the message shows; None is left out.

    >>> import torch
    >>> check_shapes("[S]", logprobs=torch.zeros(3), mask=torch.zeros(1))
    Traceback (most recent call last):
    whet.errors.DataError: logprobs is [3] and mask is [1]; all must have the one shape [S]
    """
    shapes = [t if isinstance(t, Size) else t.shape for t in tensors.values() if t is not None]
    first = shapes[0]
    dims = len(first) if "..." in shape else shape.count(",") + 1
    if len(first) == dims and all(other == first for other in shapes):
        return
    shown = " and ".join(
        f"{name} is {list(t if isinstance(t, Size) else t.shape)}" for name, t in tensors.items() if t is not None
    )
    raise DataError(f"{shown}; all must have the one shape {shape}")
