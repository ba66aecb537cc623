"""The process's heap: gives what was freed back to the system.

glibc keeps freed blocks below 32 MB for itself, and a phase of a step can seldom use what another left: tensors that
live on lie between them. So the peak of a run becomes the sum of its phases', where it should be their maximum.
Left out on purpose: other limits and thresholds of malloc, which cost page faults in every operation.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

__all__ = ["release_freed_memory"]


def release_freed_memory() -> bool:
    """Gives freed memory back to the system: some milliseconds, and as much again when it is next needed.

    Returns: whether anything was given back; False too where malloc is not glibc's.
    Source: malloc_trim(3).

    >>> release_freed_memory() in (True, False)
    True
    """
    trim = _malloc_trim()
    return trim is not None and bool(trim(0))


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """The malloc_trim of glibc; None where there is none."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # musl, or a process that is linked statically
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim
