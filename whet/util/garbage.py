"""Pauses Python's garbage collector of reference cycles while many objects are made that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["pause_collector"]


@contextmanager
def pause_collector() -> Iterator[None]:
    """Pauses the collector of reference cycles, around imports and the loading of models.

    Importing torch and transformers makes several hundred thousand objects, which all stay. The collector would walk
    through them again and again: a fifth of the time of the imports. At the end they count as old, so the next
    collections of young objects leave them out.

    >>> with pause_collector():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # moves all objects out of the young generations,
        gc.unfreeze()  # and into the oldest
        gc.enable()
