"""The peak of memory, and freed memory that goes back to the system."""

import re
import sys
from pathlib import Path

import pytest

from whet.util import memory as heap
from whet.util.memory import peak_memory, release_freed_memory

glibc = pytest.mark.skipif(heap._malloc_trim() is None, reason="malloc is not glibc's")


def resident():
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def test_the_peak_grows_by_what_is_held_at_once():
    before = resident()
    block = bytearray(b"x" * (peak_memory() - before + 50_000_000))
    grown, size = peak_memory(), len(block)
    del block
    assert grown >= before + size - 10_000_000 and peak_memory() == grown


@glibc
def test_blocks_freed_below_one_that_lives_on_are_given_back():
    release_freed_memory()
    blocks = [bytearray(100_000) for _ in range(1000)]
    kept, full = blocks.pop(), resident()
    blocks.clear()
    assert release_freed_memory()
    assert full - resident() > 80_000_000
    assert len(kept) == 100_000


def test_another_malloc_is_left_alone(monkeypatch):
    for patch in (lambda m: m.setattr(sys, "platform", "darwin"), lambda m: m.setattr(heap.ctypes, "CDLL", without)):
        heap._malloc_trim.cache_clear()
        with monkeypatch.context() as m:
            patch(m)
            assert release_freed_memory() is False
    heap._malloc_trim.cache_clear()


def without(name):
    return object()
