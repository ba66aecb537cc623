"""`python -m whet.native`: builds all kernels, compares them with torch, and prints what runs on this machine.

Run it when an image is built, or on a login node, so that no first step waits for a compiler. The exit code is 1 if one
of them can't be used.
"""

from __future__ import annotations

import sys

from whet.native.build import Unavailable
from whet.native.decode import decode_kernels
from whet.native.layers import layer_kernels
from whet.native.segments import segment_kernels

__all__ = ["FAMILIES", "main"]

FAMILIES = {
    "decode": ("decode steps of the embedded engine", decode_kernels),
    "segments": ("attention of training and scoring", segment_kernels),
    "layers": ("norms, gates and gradients of weights in training", layer_kernels),
}
"""Each source of kernels/: its purpose, and the function that loads it."""


def main() -> int:
    """Builds the kernels, and prints their status. Returns: 0 = all can be used, else 1."""
    missing = 0
    for name, (purpose, load) in FAMILIES.items():
        kernels = load()
        missing += isinstance(kernels, Unavailable)
        status = f"torch ({kernels.reason})" if isinstance(kernels, Unavailable) else f"native ({kernels.compiler})"
        sys.stdout.write(f"{name:<9} {purpose}: {status}\n")
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main())
