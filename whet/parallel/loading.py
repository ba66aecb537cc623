"""Loads a model once for all processes: rank 0 reads it on the CPU, and the others receive their shards.

    load_on_writer     rank 0 has the model, the others have its modules without weights, on the meta device
    receive            gives parameters their values on every rank, one tensor at a time, just before they are sharded

So a rank other than 0 never holds more than its shards and the part of the model that is being sharded. Left out on
purpose: models that exceed the memory of rank 0's host.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from whet.parallel.ranks import Ranks

__all__ = ["load_on_writer", "receive", "without_weights"]

Holder = TypeVar("Holder")


def without_weights(holder: Holder, module: nn.Module) -> Holder:
    """Returns a copy of a module, or of an object that holds it, whose parameters are on the meta device.

    >>> without_weights(layer := nn.Linear(2, 2), layer).weight.device
    device(type='meta')
    """
    empty = lambda p: nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
    return copy.deepcopy(holder, {id(p): empty(p) for p in module.parameters()})


def load_on_writer(ranks: Ranks, load: Callable[[], Any]) -> Any:
    """Loads a model on rank 0.

    Args: ranks: the processes; all must call this. load: returns a LoadedModel.
    Returns: what it returned on rank 0; on the others a copy whose parameters are on the meta device.
    Raises: the error of `load`, on every rank; see Ranks.call_on_writer.
    """
    read: list[Any] = []

    def read_once() -> Any:
        read.append(load())
        return without_weights(read[0], read[0].module)

    shell = ranks.call_on_writer(read_once)
    return read[0] if read else shell


def receive(parameters: Iterable[nn.Parameter], device: torch.device) -> None:
    """Gives each parameter rank 0's values on every rank, in place, on the device that computes.

    Args: parameters: the same on every rank; real on rank 0, and on the meta device on the others.
    """
    for p in parameters:
        whole = torch.empty_like(p, device=device) if p.is_meta else p.detach().to(device)
        dist.broadcast(whole, src=0)
        if p.is_meta:
            torch.utils.swap_tensors(p, nn.Parameter(whole, p.requires_grad))  # tied weights remain one object
        else:
            p.data = whole
