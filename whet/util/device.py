"""The GPU of a model: the current device, its memory metrics, and the release of cached memory.

torch's allocator caches freed blocks of a GPU and reuses most of them. Other users of the GPU can't: another process,
an engine with its own allocator, or the next phase of a step if it needs larger blocks. The memory of a CUDA graph is
released only by `empty_cache`. On a CPU these functions do nothing; memory.py is the counterpart.
Left out on purpose: settings of the allocator, which are read once, when the process starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = [
    "PhaseMemory",
    "available_memory",
    "empty_cache",
    "memory_metrics",
    "on_device",
    "peak_flops",
    "peak_flops_by_name",
    "sum_in_fp32",
]


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Returns a context in which a GPU is the current device, on which graphs, streams and new threads begin.

    Args: device: any device; nothing changes for a CPU, or for "cuda" without a number.

    >>> with on_device(torch.device("cpu")):
    ...     pass
    """
    return torch.cuda.device(device) if device.type == "cuda" and device.index is not None else nullcontext()


def sum_in_fp32(device: torch.device) -> None:
    """Makes half-precision products on a GPU add in fp32 alone, from now on in the whole process.

    Where a product has few rows, as in a decode step, cuBLAS divides its sums. By default torch lets it add the parts
    in half precision, so the sampler's log-probabilities would be further from the trainer's than rounding.
    Args: device: any device; nothing changes for a CPU.
    """
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def empty_cache(device: torch.device) -> None:
    """Returns freed GPU memory to the driver. It waits for the device: call it after a phase, not after each pass.

    Args: device: any device.

    >>> empty_cache(torch.device("cpu"))
    """
    if device.type == "cuda":
        with on_device(device):
            torch.cuda.empty_cache()


def memory_metrics(device: torch.device) -> dict[str, float]:
    """GPU memory of torch's allocator in bytes: allocated to tensors and reserved, now and at the peak.

    The difference of both is cached or fragmented.
    Args: device: any device.
    Returns: name -> bytes; {} on a CPU.

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


def available_memory(device: torch.device) -> int | None:
    """Returns the bytes that may still be allocated on a GPU: what is free, and what torch's allocator has cached; None
    on other devices.

    >>> available_memory(torch.device("cpu")) is None
    True
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


class PhaseMemory:
    """The peaks of torch's allocator on a GPU in each phase, and since the process began; its own peaks are reset.

    Args: device: CUDA. read: the bytes allocated and reserved at most since the last reset. reset: forgets them.

    >>> peaks = iter([(5, 8), (9, 12), (3, 12), (1, 12)])
    >>> memory = PhaseMemory(torch.device("cpu"), read=lambda: next(peaks), reset=lambda: None)
    >>> memory.change([]), memory.change(["rollout"]), memory.change(["update"])
    (None, None, None)
    >>> memory.pop_metrics()  # doctest: +NORMALIZE_WHITESPACE
    {'memory/rollout/peak_allocated': 9.0, 'memory/update/peak_allocated': 3.0,
     'memory/peak_allocated': 9.0, 'memory/peak_reserved': 12.0}
    """

    def __init__(
        self,
        device: torch.device,
        *,
        read: Callable[[], tuple[int, int]] | None = None,
        reset: Callable[[], None] | None = None,
    ) -> None:
        self._read = read or (lambda: (torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)))
        self._reset = reset or (lambda: torch.cuda.reset_peak_memory_stats(device))
        self._phases: dict[str, int] = {}
        self._allocated = self._reserved = 0

    def change(self, phases: Iterable[str]) -> None:
        """Called before a phase begins or ends. Args: phases: those that are open, nested ones too."""
        allocated, reserved = self._read()
        self._reset()
        self._allocated, self._reserved = max(self._allocated, allocated), max(self._reserved, reserved)
        for name in phases:
            self._phases[name] = max(self._phases.get(name, 0), allocated)

    def pop_metrics(self) -> dict[str, float]:
        """Returns the peaks of each phase since the last call, and those since the process began."""
        self.change(())
        phases, self._phases = self._phases, {}
        return {
            **{f"memory/{name}/peak_allocated": float(peak) for name, peak in phases.items()},
            "memory/peak_allocated": float(self._allocated),
            "memory/peak_reserved": float(self._reserved),
        }


PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10": 125.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
}
"""Part of the name of a GPU -> TFLOP/s of its dense bf16 matrix products, from the makers' data sheets. The first one
that fits counts."""


def peak_flops(device: torch.device) -> float | None:
    """Returns the FLOP/s of a device's dense bf16 matrix products; None = unknown.

    >>> peak_flops(torch.device("cpu"))
    """
    return peak_flops_by_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_flops_by_name(name: str) -> float | None:
    """Returns the FLOP/s of the GPU of this name; None = unknown.

    >>> peak_flops_by_name("NVIDIA H100 80GB HBM3"), peak_flops_by_name("NVIDIA A10G"), peak_flops_by_name("Tesla T4")
    (989000000000000.0, None, None)
    """
    words = f" {name} ".replace("-", " ")
    return next((1e12 * peak for part, peak in PEAK_TFLOPS.items() if f" {part} " in words), None)
