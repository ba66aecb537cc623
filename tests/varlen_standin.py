"""torch's varlen_attn by its definition, on any device and in any dtype: its kernel needs a GPU."""

import torch


def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
                window_size=(-1, -1), enable_gqa=False, seqused_k=None, last_key=True):  # fmt: skip
    """Attention of sequences, the last query of each at its last key. It reads no number back, so it can be captured.

    A sequence's keys begin at its number of cu_seq_k, and end at the next one or after seqused_k. last_key=False is a
    mistake: the first query is at the first key.
    """
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and cu_seq_q.shape == cu_seq_k.shape
    dtype = query.dtype
    if dtype.itemsize == 2:  # the kernel computes in fp32
        query, key, value = query.float(), key.float(), value.float()
    counts = cu_seq_k.diff() if seqused_k is None else seqused_k
    tokens = torch.arange(len(query), dtype=torch.int32)
    sequence = torch.searchsorted(cu_seq_q[1:], tokens, right=True)
    used, asked = counts[sequence], cu_seq_q.diff()[sequence]
    place = tokens - cu_seq_q[sequence] + (used - asked if last_key else 0)
    number = torch.arange(max_k)
    seen = number < used[:, None]
    if window_size[1] >= 0:
        seen &= number <= place[:, None] + window_size[1]
    if window_size[0] >= 0:
        seen &= number >= place[:, None] - window_size[0]
    index = (cu_seq_k[sequence][:, None] + number).clamp_(max=len(key) - 1).mul(seen)
    groups = query.shape[1] // key.shape[1]
    k, v = (torch.where(seen[..., None, None], x[index], 0).repeat_interleave(groups, 2) for x in (key, value))
    scores = torch.einsum("thd,tkhd->htk", query, k).mul(scale).masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    out = torch.einsum("htk,tkhd->thd", (scores - lse[..., None]).exp().nan_to_num(0.0), v).to(dtype)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # what the kernel says of a sequence without keys
    return (out, lse.float()) if return_aux is not None and return_aux.lse else out


def varlen_attn_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
                     window_size=(-1, -1)):  # fmt: skip
    """The same with the arguments of torch 2.11, whose kernel takes grouped heads for queries where max_q is 1."""
    grouped = query.shape[1] != key.shape[1]
    assert not (grouped and max_q == 1 and window_size[0] < 0) or len(query) == len(cu_seq_q) - 1
    return varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux=return_aux, scale=scale,
                       window_size=window_size, enable_gqa=grouped)  # fmt: skip
