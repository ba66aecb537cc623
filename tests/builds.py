"""What the tests of native kernels build with."""

import stat

BUILDS = {"whole": (), "no bf16 instructions": ("-mno-avx512bf16",), "256 bits": ("-mno-avx512f", "-mno-avx512bf16")}
"""Flags by which a processor with everything stands for one with less."""


def compiler(folder, body):
    """A program that stands for a compiler."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)
