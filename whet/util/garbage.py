"""Pauses Python's cyclic garbage collector while many long-lived objects are created."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["pause_collector"]


@contextmanager
def pause_collector() -> Iterator[None]:
    """Pauses the cyclic garbage collector, for imports and the loading of models.

    Importing torch and transformers creates several hundred thousand objects that live on. The collector would visit
    them many times, which takes a fifth of the import time. At the end they belong to the oldest generation, so the
    next collections of young objects skip them.

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
