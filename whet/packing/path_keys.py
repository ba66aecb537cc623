"""Path keys: a number for each token of a micro-batch, which depends on the tokens of its path only.

The path of a token is its sequence up to it. So a token has the same key in every micro-batch, whatever is packed
beside it, whether it shares a prefix, and whichever process runs it. Dropout draws by these keys.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from whet.packing.micro_batch import MicroBatch

__all__ = ["path_keys"]

_BASE = 0xD1342543DE82EF95
"""An odd number, so that it has an inverse modulo 2**64."""
_INVERSE = pow(_BASE, -1, 2**64)


def path_keys(micro: MicroBatch) -> Tensor:
    """Returns the key of each token: Σᵢ (tᵢ + 1) b**(n - i) mod 2**64 over its path t₁ ... tₙ.

    Returns: Long [B T], on the CPU; padding has any key.
    """
    if micro.share is not None:
        keys, tokens = path_keys(micro.share.whole), micro.share.tokens
        return F.pad(keys, (0, max(0, tokens.stop - keys.shape[1])))[:, tokens]
    host = micro.on_host
    ids = host.input_ids.numpy().astype(np.uint64) + np.uint64(1)
    if host.layout is None:
        mask = np.ones_like(ids) if host.attention_mask is None else host.attention_mask.numpy().astype(np.uint64)
        keys = _keys_of_rows(ids * mask, np.maximum(mask.cumsum(1).astype(np.int64) - 1, 0))
    else:
        keys, ends = np.empty_like(ids), np.cumsum(host.layout.lengths)
        for end, length, parent in zip(ends, host.layout.lengths, host.layout.parents, strict=True):
            places = np.arange(length)
            own = _keys_of_rows(ids[:, end - length : end], places[None])
            if parent >= 0:
                own = own + keys[:, ends[parent] - 1] * _powers(_BASE, length + 1)[places + 1]
            keys[:, end - length : end] = own
    return torch.from_numpy(keys.view(np.int64))


def _keys_of_rows(ids: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Returns the keys of rows. Args: ids: uint64 [B T], 0 for padding. places: [B T], the tokens of the row before
    each.
    """
    size = ids.shape[1]
    return (ids * _powers(_INVERSE, size)[places]).cumsum(1, dtype=np.uint64) * _powers(_BASE, size)[places]


def _powers(base: int, count: int) -> np.ndarray:
    """1, b, b², ... modulo 2**64."""
    return np.cumprod(np.array([1, *[base] * (count - 1)], np.uint64), dtype=np.uint64)
