"""The processor: its model, its family, and the vector instructions by which kernels are chosen.

Systems without /proc report only a name.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

__all__ = ["cpu_info"]

_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "bf16", "sve", "i8mm")


def cpu_info() -> dict[str, Any]:
    """Information about the processor.

    Returns: model; family, a string, or None if the system reports none; cores, the number that this process may use;
        flags, the vector instructions that affect a choice of kernels.

    >>> sorted(cpu_info())
    ['cores', 'family', 'flags', 'model']
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.is_file() else []
    fields = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "model": fields.get("model name") or platform.processor(),
        "family": fields.get("cpu family"),
        "cores": usable,
        "flags": [f for f in _FLAGS if f in flags],
    }
