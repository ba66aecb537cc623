"""What the tests of native kernels build with."""

import functools
import platform
import stat
import tempfile

import pytest

from whet.native import build

BUILDS = {"whole": (), "no bf16 instructions": ("-mno-avx512bf16",), "256 bits": ("-mno-avx512f", "-mno-avx512bf16")}
"""Flags by which a processor with everything stands for one with less."""


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
