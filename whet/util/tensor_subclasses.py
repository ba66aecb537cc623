"""Tensor subclasses: quantised tensors, and DTensors, which are sharded over processes."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor

__all__ = ["copy_full_tensor", "gather_full_tensor", "is_sharded", "is_wrapper_subclass", "local_part", "shard_like"]


def is_wrapper_subclass(tensor: Any) -> TypeGuard[Any]:
    """Returns whether a tensor is a wrapper subclass, with `__tensor_flatten__` and `__tensor_unflatten__`.

    torch's own function for this is private.

    >>> is_wrapper_subclass(torch.ones(2))
    False
    """
    return type(tensor) is not torch.Tensor and all(
        hasattr(tensor, name) for name in ("__tensor_flatten__", "__tensor_unflatten__")
    )


def is_sharded(tensor: Tensor) -> bool:
    """Returns whether a tensor is a DTensor.

    >>> is_sharded(torch.ones(2))
    False
    """
    return hasattr(tensor, "full_tensor")


def local_part(tensor: Tensor) -> Tensor:
    """Returns this process's part of a DTensor; any other tensor unchanged.

    >>> local_part(torch.ones(2))
    tensor([1., 1.])
    """
    sharded: Any = tensor
    return sharded.to_local() if is_sharded(tensor) else tensor


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """Gathers a DTensor from all processes, which must all call this; returns any other tensor unchanged.

    It is gathered on the device of its mesh, also where its shards lie on the host. Quantised shards become plain ones
    before: their blocks are not those of the whole tensor, and a shard that blocks do not fit is plain already.

    >>> gather_full_tensor(torch.ones(2))
    tensor([1., 1.])
    """
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    kind = sharded.device_mesh.device_type
    if is_wrapper_subclass(local := getattr(sharded, "_local_tensor", None)):
        mesh, whole = sharded.device_mesh, {"shape": sharded.shape, "stride": sharded.stride()}
        sharded = type(sharded).from_local(local.dequantize(), mesh, sharded.placements, run_check=False, **whole)
    return (sharded if sharded.device.type == kind else sharded.to(kind)).full_tensor()


@torch.no_grad()
def copy_full_tensor(target: Tensor, source: Tensor) -> None:
    """Copies a full tensor into another tensor, in place; for a DTensor each process copies its shard.

    >>> copy_full_tensor(target := torch.zeros(2), torch.ones(2))
    >>> target
    tensor([1., 1.])
    """
    target.copy_(shard_like(target, source))


def shard_like(target: Tensor, source: Tensor) -> Tensor:
    """Shards a full tensor as `target` is sharded. If `target` is not a DTensor, returns the tensor unchanged."""
    if not is_sharded(target):
        return source
    from torch.distributed.tensor import distribute_tensor  # imported only where processes share a model

    like: Any = target
    source = source.to(device=like.device, dtype=like.dtype)
    made = distribute_tensor(source, like.device_mesh, like.placements, src_data_rank=None)  # no communication
    return made.to(like.device)  # it is on the mesh's device, and target's shards may lie on the host
