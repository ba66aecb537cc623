"""The memory of the process: its peak, and the return of freed memory of its heap to the system.

glibc keeps freed blocks below 32 MB. The next phase of a step can seldom reuse them, because live tensors lie between
them. Without a release, the peak memory of a run would be the sum of its phases instead of their maximum.
Left out on purpose: malloc's limits and thresholds, which would cause page faults in every operation.
"""

from __future__ import annotations

import ctypes
import functools
import resource
import sys
from collections.abc import Callable

__all__ = ["peak_memory", "release_freed_memory"]


def peak_memory() -> int:
    """Returns the most memory that this process has had since it began, in bytes: of the machine, not of a GPU.

    Source: getrusage(2), ru_maxrss.

    >>> peak_memory() > 1e6
    True
    """
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def release_freed_memory() -> bool:
    """Returns freed memory to the system: takes some milliseconds, and as much again when the memory is next needed.

    Returns: whether any memory was released; False if malloc is not glibc's.
    Source: malloc_trim(3).

    >>> release_freed_memory() in (True, False)
    True
    """
    trim = _malloc_trim()
    return trim is not None and bool(trim(0))


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Returns the function malloc_trim of glibc; None on other systems."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # musl, or a process that is linked statically
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim
