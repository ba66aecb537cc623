"""Attention over a row of segments by torch's varlen_attn: one call a layer, on a GPU, in half precision.

The queries are the tokens of the row. The keys of a segment are those of its ancestors and its own, gathered in this
order. The kernel aligns its causal mask at the last key, so a token sees all ancestors, and its own segment up to
itself; a window counts back from there. Nothing is compiled and no mask is made, for any tree and any window.
Dim legend: T tokens, S keys, H query heads, KV key heads, D head size.
The kernel of torch 2.11 takes grouped heads without being told, and has no lengths of keys: see `takes`.
Left out on purpose: soft-caps, sinks and fp32, which the kernel does not have, and rows whose keys would be gathered
many times over (MAX_KEYS): flex.py runs those.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from whet.errors import format_exception
from whet.models.buckets import token_places
from whet.models.flex import FlexCase, compare_with_plain, describe_case, run_in_thread
from whet.ops.masked import fp32_or_wider

try:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn
except ImportError:
    AuxRequest = varlen_attn = None

__all__ = ["OPERATORS", "VarlenRow", "attend_sequences", "head_options", "takes", "varlen_unsupported_reason"]

log = logging.getLogger("whet")

OPERATORS = [] if varlen_attn is None else [torch.ops.torch_attn._varlen_attn.default]
"""The operator behind varlen_attn."""
MAX_KEYS = 2
"""The most gathered keys for each token of a row: they are held for the backward pass."""


class VarlenRow:
    """The tables of one row. Args: lengths, parents, device: see SegmentLayout.

    >>> row = VarlenRow([2, 1, 2], [-1, 0, 0], "cpu")     # a prompt of 2 and two completions
    >>> row.keys.tolist(), row.query_ends.tolist(), row.key_ends.tolist()
    ([0, 1, 0, 1, 2, 0, 1, 3, 4], [0, 2, 3, 5], [0, 2, 5, 9])
    """

    def __init__(self, lengths: Sequence[int], parents: Sequence[int], device: torch.device | str = "cpu") -> None:
        places, above = token_places(lengths, parents)
        keys = [np.concatenate([a, p]) for a, p in zip(above, places, strict=True)]
        counts = [len(x) for x in keys]
        self.longest = max(lengths), max(counts)
        """Tokens of the longest segment, and keys of the one that has the most."""
        self.fits = sum(counts) <= MAX_KEYS * sum(lengths)
        with torch.inference_mode(False):  # the row may be scored first, and trained on later
            ends = [torch.from_numpy(np.cumsum([0, *x]).astype(np.int32)).to(device) for x in (lengths, counts)]
            self.query_ends, self.key_ends = ends
            shared = any(len(a) for a in above)
            self.keys = torch.from_numpy(np.concatenate(keys)).to(device) if shared else None
            """Long [S]: the tokens of the row that are keys; None = each token once, in order."""

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> VarlenRow:
        """Returns the same with fn(x) for each table x. Args: fn: moves a tensor to a device."""
        mapped = copy.copy(self)
        mapped.query_ends, mapped.key_ends = fn(self.query_ends), fn(self.key_ends)
        mapped.keys = None if self.keys is None else fn(self.keys)
        return mapped

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None, **unsupported: Any
    ) -> Tensor:
        """Computes attention over the row.

        Args: q: [1 H T D]. k, v: [1 KV T D]. scale, window: see Layout.attend. unsupported: softcap and sinks, as None.
        Returns: [1 H T D].
        """
        assert all(x is None for x in unsupported.values())
        queries, keys, values = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))  # [T heads D]
        if self.keys is not None:
            keys, values = (_Gather.apply(x, self.keys) for x in (keys, values))
        ends = self.query_ends, self.key_ends
        return attend_sequences(queries, keys, values, ends, self.longest, scale=scale, window=window)


def attend_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """Computes causal attention of sequences that lie end to end; the last query of each is at its last key.

    Args:
        q: [T H D].
        k, v: [S KV D].
        ends: int32, of the queries and of the keys of each sequence, after a 0.
        longest: the most queries and keys of a sequence.
        scale, window: see Layout.attend.
    Returns: [1 H T D].
    """
    assert varlen_attn is not None
    back = -1 if window is None else window - 1
    out: Any = varlen_attn(q, k, v, *ends, *longest, scale=scale, window_size=(back, 0), **head_options(q, k))
    return out.transpose(0, 1)[None]


def head_options(q: Tensor, k: Tensor) -> dict[str, Any]:
    """Returns what tells varlen_attn of grouped heads, which torch 2.11 takes without being told. Args: [_ heads D]."""
    return {"enable_gqa": True} if q.shape[1] != k.shape[1] and takes("enable_gqa") else {}


def takes(option: str) -> bool:
    """Returns whether this torch's varlen_attn has an option: enable_gqa and seqused_k came after torch 2.11.

    >>> takes("no_such_option")
    False
    """
    return varlen_attn is not None and _has_parameter(varlen_attn, option)


@functools.lru_cache(maxsize=8)
def _has_parameter(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)


class _Gather(torch.autograd.Function):
    """x[index]: [T KV D] -> [S KV D]. The gradients of a token that is taken several times are summed in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.tokens = len(x)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (index,) = ctx.saved_tensors
        total = torch.zeros(ctx.tokens, *grad.shape[1:], dtype=fp32_or_wider(grad.dtype), device=grad.device)
        return total.index_add_(0, index, grad.to(total.dtype)).to(grad.dtype), None


@functools.cache
def varlen_unsupported_reason(case: FlexCase) -> str | None:
    """Says why varlen_attn can't run a case; None = it can. Each is compared with torch's operator once, and logged.

    Args: case: the properties of the call.

    >>> varlen_unsupported_reason(FlexCase(torch.device("cpu"), torch.bfloat16, 4, 2, 16, 16, False, False))
    'varlen_attn runs on CUDA devices only, not on cpu'
    """
    if case.device.type != "cuda":
        return f"varlen_attn runs on CUDA devices only, not on {case.device.type}"
    if varlen_attn is None:
        return f"torch {torch.__version__} has no varlen_attn"
    if case.softcap or case.sinks or case.dtype.itemsize != 2 or case.size != case.value_size:
        return "varlen_attn has no soft-caps, sinks, wide dtypes and other sizes of values"
    make = lambda lengths, parents: VarlenRow(lengths, parents, case.device).attend
    try:
        reason = run_in_thread(case.device, lambda: compare_with_plain(case, make))
    except torch.OutOfMemoryError:  # no fault of the kernel: it is tried again
        raise
    except Exception as error:  # an older torch, and GPUs, head sizes and options that the kernel does not take
        reason = f"it fails: {format_exception(error, 200)}"
    if reason is None:
        log.info("packed attention (%s): using varlen_attn", describe_case(case))
    else:
        log.warning("packed attention (%s): not using varlen_attn, because %s", describe_case(case), reason)
    return reason
