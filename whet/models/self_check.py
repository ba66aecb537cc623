"""A short prompt for comparing two implementations of a model, and the tolerance of the comparison.

Packed rows, the engine's fused backbone and the engines of other packages are each compared with the module itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["PROBE_LENGTH", "probe_tokens", "tolerance_for"]

PROBE_LENGTH = 24
"""Length of the prompt in tokens."""


def probe_tokens(vocabulary: int, positions: int | None = None) -> list[int]:
    """Returns the ids of the prompt; neighbours differ.

    Args: vocabulary: size of the vocabulary. positions: the model's limit; the prompt leaves room for one more token.

    >>> len(probe_tokens(64)), max(probe_tokens(10, 16)) < 10, len(probe_tokens(10, 16))
    (24, True, 15)
    """
    return [(7 * i + 3) % vocabulary for i in range(min(PROBE_LENGTH, (positions or PROBE_LENGTH + 1) - 1))]


def tolerance_for(dtype: torch.dtype, limits: Mapping[str, float]) -> float:
    """Returns the limit for a dtype: limits["half"] for 16 bits, limits["wide"] for more.

    >>> limits = {"wide": 1e-4, "half": 5e-2}
    >>> tolerance_for(torch.bfloat16, limits), tolerance_for(torch.float64, limits)
    (0.05, 0.0001)
    """
    return limits["half" if dtype.itemsize == 2 else "wide"]
