"""The short prompt on which two implementations of a model are compared, and the tolerance of the comparison.

The packed rows of training, the engine's fused trunk and the engine of another package are each compared with the
module itself. Left out on purpose: FlexAttention's comparison, which runs on bare tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["PROBE_LENGTH", "probe_tokens", "tolerance_for"]

PROBE_LENGTH = 24
"""Tokens of the prompt."""


def probe_tokens(vocabulary: int, positions: int | None = None) -> list[int]:
    """The prompt: ids that differ from one to the next.

    Args: vocabulary: ids that the model knows. positions: of the model; one is left for a token after the prompt.

    >>> len(probe_tokens(64)), max(probe_tokens(10, 16)) < 10, len(probe_tokens(10, 16))
    (24, True, 15)
    """
    return [(7 * i + 3) % vocabulary for i in range(min(PROBE_LENGTH, (positions or PROBE_LENGTH + 1) - 1))]


def tolerance_for(dtype: torch.dtype, limits: Mapping[str, float]) -> float:
    """The limit for a dtype, from those of "half" precision and of all that is "wide".

    >>> limits = {"wide": 1e-4, "half": 5e-2}
    >>> tolerance_for(torch.bfloat16, limits), tolerance_for(torch.float64, limits)
    (0.05, 0.0001)
    """
    return limits["half" if dtype.itemsize == 2 else "wide"]
