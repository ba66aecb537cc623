"""Which dtype a model computes in: asked for, or found by a measured probe.

A CPU without bf16 instructions runs bf16 products 6 to 9 times slower than fp32, one with them up to 2.5 times
faster: so "auto" times both on this machine, at the model's own width. The result decides bits, so a run records it
and a resumed run uses the record instead of the clock.
"""

from __future__ import annotations

import functools
import time

import torch
from torch import nn

from whet.errors import ConfigError
from whet.models.types import LoadedModel

__all__ = ["DTYPES", "compute_dtype", "probe_bf16", "probe_threads"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def compute_dtype(name: str, loaded: LoadedModel) -> torch.dtype:
    """The compute dtype of a model.

    Args: name: "float32", "bfloat16", or "auto": bf16 on a GPU that has it in hardware, on a CPU that has instructions
        for it where the probe finds it 1.3 times faster at the model's hidden size, else fp32. loaded: the model, on
        its device.
    Returns: the dtype.
    Raises: ConfigError: another name.
    """
    if name != "auto":
        if name not in DTYPES:
            raise ConfigError(f"dtype={name!r} is not one of auto, {', '.join(DTYPES)}")
        return DTYPES[name]
    device = next(loaded.module.parameters()).device
    if device.type == "cuda":
        hardware = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if hardware else torch.float32
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)  # private to torch
    if supported is None or not supported():
        return torch.float32
    width = int(loaded.module.config.get_text_config().hidden_size)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    return torch.bfloat16 if probe_bf16(width) >= 1.3 else torch.float32


@functools.cache
def probe_bf16(width: int, rows: int = 512) -> float:
    """How many times faster bf16 is than fp32 here, forward and backward through an MLP of a width.

    Timed once in a process: an actor and its reference of the same width compute alike, whatever the clock says.
    """
    return min(_mlp_seconds(width, rows, torch.float32, 5)) / min(_mlp_seconds(width, rows, torch.bfloat16, 5))


def probe_threads(width: int = 128, rows: int = 1024) -> int:
    """How many threads torch should use on this CPU now: all that it has, or one.

    A parallel region ends when its slowest thread does, so where another process has the other cores, two threads can
    be ten times slower than one. Times an MLP of a small model both ways, twice in turn, and keeps all threads only
    where their usual time (the median, not the best) is lower.

    Returns: the number of threads; torch's setting is as it was.
    """
    available = torch.get_num_threads()
    seconds: dict[int, list[float]] = {1: [], available: []}
    for _ in range(2):
        for threads in seconds:
            torch.set_num_threads(threads)
            seconds[threads] += _mlp_seconds(width, rows, torch.float32, 15)[3:]
    torch.set_num_threads(available)
    return min(seconds, key=lambda threads: sorted(seconds[threads])[len(seconds[threads]) * 3 // 4])


def _mlp_seconds(width: int, rows: int, dtype: torch.dtype, trials: int) -> list[float]:
    """Seconds of forward and backward passes through an MLP."""
    mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.SiLU(), nn.Linear(3 * width, width)).to(dtype)
    x = torch.ones(rows, width, dtype=dtype)
    times = []
    for _ in range(trials):
        start = time.perf_counter()
        mlp(x).sum().backward()
        times.append(time.perf_counter() - start)
    return times
