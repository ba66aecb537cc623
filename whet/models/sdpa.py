"""Torch's attention operator with a mask, for query heads that share key heads (grouped-query attention).

On a GPU, the kernels that take a mask do not support shared heads (before torch 2.14). The operator then stores all
scores, twice: 4 GB for 8,192 tokens and 16 heads. Repeated keys would need a copy for each query head, until the
backward pass. So there is one call for the first query head of every group, one for the second heads, and so on. No key
is repeated, and no scores are stored.
Dim legend: B rows, H query heads, KV key heads, T queries, K keys, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["masked_attention"]


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    """softmax(scale·q·k + mask) v.

    Args:
        q: [B H T D].
        k, v: [B KV K D] (the head size of v may differ).
        mask: [T K] or [1 or B, 1, T, K], bool (True = visible), or numbers that are added to the scores.
        scale: the scores are multiplied by it.
    Returns: [B H T D of v].

    >>> one = torch.ones(1, 2, 1, 8)
    >>> masked_attention(one, one[:, :1], one[:, :1], torch.zeros(1, 1), scale=1.0).shape
    torch.Size([1, 2, 1, 8])
    """
    groups = k.shape[1]
    if q.shape[1] == groups or not q.is_cuda:
        shared = q.shape[1] != groups
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=shared)
    if mask.dtype == torch.bool:  # once, instead of in every call
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
    heads = q.unflatten(1, (groups, -1)).unbind(2)
    return torch.stack(
        [F.scaled_dot_product_attention(x, k, v, attn_mask=mask, scale=scale) for x in heads], 2
    ).flatten(1, 2)
