"""Copies between the host and a GPU, several tensors at a time.

A copy costs microseconds of the host's time, whatever its size, and one from pageable memory makes the host wait. So
small tensors travel together: to the device through one pinned buffer, without waiting; to the host in one copy.
Left out on purpose: large tensors, which gain nothing from a second copy in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["to_device", "to_host"]

ALIGNMENT = 16
"""Tensors start at multiples of this many bytes in the buffer: as wide as the widest load of a kernel."""


def to_device(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Copies of tensors of the host on a device: one copy for all of them, for which the host does not wait.

    Args: tensors: on the host; those that are on the device already are returned as they are. device: any; to the CPU
        nothing is copied.
    Returns: the tensors, without gradient; the copies are views of one buffer.

    >>> to_device([torch.tensor([1, 2]), torch.tensor([True])], "cpu")
    [tensor([1, 2]), tensor([True])]
    """
    place, out = torch.device(device), list(tensors)
    if place.type == "cpu":
        return [x.to(place) for x in out]
    places = [i for i, x in enumerate(out) if x.device.type == "cpu"]
    if not places:
        return out
    host = [out[i] for i in places]
    with torch.inference_mode(False), torch.no_grad():  # the copies may outlive this pass, and meet one with gradients
        # the allocator keeps the pinned memory until the copy is done
        buffer = _pack(host, pinned=place.type == "cuda").to(place, non_blocking=True)
        for i, x in zip(places, _unpack(buffer, host), strict=True):
            out[i] = x
    return out


def _starts(tensors: Sequence[Tensor]) -> list[int]:
    """Returns where each tensor begins in a buffer of bytes, and the size of the buffer."""
    return list(itertools.accumulate((-(-x.nbytes // ALIGNMENT) * ALIGNMENT for x in tensors), initial=0))


def _pack(tensors: Sequence[Tensor], *, pinned: bool) -> Tensor:
    """Returns a buffer of bytes on the host with the content of tensors of the host."""
    *starts, size = _starts(tensors)
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    for start, x in zip(starts, tensors, strict=True):
        _part(buffer, start, x).copy_(x)
    return buffer


def _unpack(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Returns the parts of a packed buffer, with the shapes and dtypes of the tensors that were packed."""
    *starts, _ = _starts(like)
    return [_part(buffer, start, x) for start, x in zip(starts, like, strict=True)]


def _part(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """Returns the part of a buffer of bytes that holds a tensor of this shape and dtype."""
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors of one device on the host, by one copy, for which the host waits.

    Args: tensors: of one device; those of the host are returned as they are.
    Returns: the tensors, without gradient.

    >>> to_host([torch.tensor([1, 2]), torch.tensor([0.5])])
    [tensor([1, 2]), tensor([0.5000])]
    """
    detached = [x.detach() for x in tensors]
    if len(detached) < 2 or detached[0].device.type == "cpu":
        return [x.cpu() for x in detached]
    parts = []
    for x in detached:
        parts += [x.contiguous().view(-1).view(torch.uint8), x.new_empty(-x.nbytes % ALIGNMENT, dtype=torch.uint8)]
    return _unpack(torch.cat(parts).cpu(), detached)
