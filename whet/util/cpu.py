"""The processor: its model, its family, and the vector instructions that kernels are chosen by.

Left out on purpose: its speed, which nothing is chosen by, and systems without /proc, which give a name alone.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

__all__ = ["cpu_info"]

_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "bf16", "sve", "i8mm")


def cpu_info() -> dict[str, Any]:
    """What is known of the processor.

    Returns: model; family, a string, or None where the system names none; cores, the number usable by this process;
        flags, the vector instructions that matter.

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
