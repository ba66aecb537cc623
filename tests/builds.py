"""What the tests of native kernels build with."""

import functools
import os
import platform
import stat
import tempfile

import pytest

from whet.native import build
from whet.util.cpu import cpu_info


def builds(has, full):
    """Flags by which a processor stands for those with less; none that takes away what it lacks anyway.

    Args: has: the processor's flags. full: all, in place of the two that differ most.
    """
    lesser = {"no bf16 instructions": ("-mno-avx512bf16",), "256 bits": ("-mno-avx512f", "-mno-avx512bf16")}
    kept = {}
    if "avx512_bf16" in has and full:
        kept["no bf16 instructions"] = lesser["no bf16 instructions"]
    if "avx512f" in has:
        kept["256 bits"] = lesser["256 bits"]
    return {"whole": ()} | kept


BUILDS = builds(cpu_info()["flags"], full=bool(os.environ.get("WHET_CHECK_FULL")))


@functools.cache
def built(name, make):
    """Kernels as a processor has them. Args: name: of BUILDS. make: builds and loads them."""
    if not BUILDS[name]:
        return make()
    if platform.machine() != "x86_64":
        pytest.skip("flags of x86-64")
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv("XDG_CACHE_HOME", folder)
        patch.setattr(build, "FLAGS", (*build.FLAGS, *BUILDS[name]))
        made = make()
    assert not isinstance(made, build.Unavailable), made
    return made


def compiler(folder, body):
    """A program that stands for a compiler."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)
