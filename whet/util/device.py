"""The device that a model lies on, as the process sees it: which is the current one, what it holds, what it gives back.

torch's allocator keeps freed blocks of a GPU for itself. It finds most of them again, but no other user of the GPU
can: not another process, not an engine with an allocator of its own, not the next phase of a step where its blocks are
larger. And what a CUDA graph worked in is given back in no other way. On a CPU nothing here does anything; memory.py
is its counterpart.
Left out on purpose: settings of the allocator, which are read once, when the process starts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["empty_cache", "memory_metrics", "on_device"]


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current one for a while, since graphs, streams and new threads begin on the current device.

    Args: device: any; of kinds without a current one, and for "cuda" without a number, nothing changes.

    >>> with on_device(torch.device("cpu")):
    ...     pass
    """
    return torch.cuda.device(device) if device.type == "cuda" and device.index is not None else nullcontext()


def empty_cache(device: torch.device) -> None:
    """Returns freed GPU memory to the driver. It waits for the device: call it after a phase, not after each pass.

    Args: device: any device.

    >>> empty_cache(torch.device("cpu"))
    """
    if device.type == "cuda":
        with on_device(device):
            torch.cuda.empty_cache()


def memory_metrics(device: torch.device) -> dict[str, float]:
    """What torch holds of a GPU, in bytes: allocated to tensors, and reserved for them; now, and at most so far.

    What is reserved beyond what is allocated is cached, or lies between tensors and fits nothing.
    Args: device: any.
    Returns: name to bytes; {} on a CPU.

    >>> memory_metrics(torch.device("cpu"))
    {}
    """
    if device.type != "cuda":
        return {}
    return {
        "memory/allocated": float(torch.cuda.memory_allocated(device)),
        "memory/reserved": float(torch.cuda.memory_reserved(device)),
        "memory/peak_allocated": float(torch.cuda.max_memory_allocated(device)),
        "memory/peak_reserved": float(torch.cuda.max_memory_reserved(device)),
    }
