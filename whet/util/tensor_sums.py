"""A digest of a tensor that is cheap on every device."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BLOCK", "tensor_sums"]

BLOCK = 2**16
"""8-byte words in one sum; a block fits a processor's cache."""
BLOCKS_AT_ONCE = 256
"""Blocks in one operation on a GPU."""
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
"""The golden ratio as an int64, whose multiples are spread evenly."""


def tensor_sums(tensor: Tensor) -> bytes:
    """Returns the sums of a tensor's blocks, and the bytes after its last full word; equal on every device.

    For each block x of 2**16 words of 8 bytes it has Σ_i x_i w_i mod 2**64 with odd w_i, so a changed word always
    changes it. Its speed is limited by memory bandwidth. It does not protect against values that were constructed to
    have the same sums.

    >>> one = tensor_sums(torch.ones(2))
    >>> one == tensor_sums(torch.ones(2)), one == tensor_sums(-torch.ones(2))
    (True, False)
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()  # words begin at multiples of their size
    end = len(raw) // 8 * 8
    words, rest = raw[:end].view(torch.int64), bytes(raw[end:].tolist())
    weights = (torch.arange(BLOCK, device=raw.device) * _GAMMA) | 1
    full = len(words) // BLOCK * BLOCK
    blocks = words[:full].view(-1, BLOCK).split(1 if raw.device.type == "cpu" else BLOCKS_AT_ONCE)
    sums = [(b * weights).sum(1) for b in blocks]
    sums.append((words[full:] * weights[: len(words) - full]).sum()[None])
    return torch.cat(sums).cpu().numpy().tobytes() + rest
