"""Attention of training over a row of segments, in C++ (kernels/segments.cpp): forward, backward, and their tables.

Torch's operator takes one sequence per row, so segments that share prefixes need buckets of gathered and padded keys
under masks, and its products are MKL's. Here a block of queries reads its ancestors' keys in place. If the kernels
can't be built, or differ from the formula in a self-check, `segment_kernels` returns the reason.
Dim legend: T tokens, H query heads, K KV heads, g = H / K, D head size, E of values, b blocks.
Left out on purpose: soft-capped scores, sinks and float64, which stay with torch.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from whet.native.build import Library, Unavailable, load_functions, unsupported_cpu
from whet.native.self_check import KernelComparison, self_check
from whet.util.cpu import cpu_info

__all__ = [
    "OPERATOR",
    "SegmentKernels",
    "SegmentTables",
    "attend_segments",
    "kernels_for",
    "segment_kernels",
    "segments_unsupported_reason",
]

MAX_STRIPES = 8
"""The most partial sums of a key's gradient."""
MAX_STRIPE_BYTES = 1 << 28
"""The most memory of all partial sums."""
_long, _pointer, _double = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double


class _Tensor(ctypes.Structure):
    _fields_ = (("data", _pointer), ("token", _long), ("head", _long))


class _Call(ctypes.Structure):
    """`Call` of segments.cpp."""

    _fields_ = (
        *((name, _long) for name in ("heads", "kv", "size", "value_size", "threads", "stripes", "window")),
        ("scale", _double),
        *((name, _long) for name in ("key_blocks", "query_blocks", "padded_keys")),
        *((name, _pointer) for name in ("segments", "keys", "queries", "stripe_ends")),
        *((name, _Tensor) for name in ("q", "k", "v", "out", "grad", "d_q", "d_k", "d_v")),
        *((name, _pointer) for name in ("sums", "workspace")),
    )


class SegmentKernels:
    """The functions of segments.cpp. Args: library: segments.cpp, built. Raises: OSError: it is of another version."""

    def __init__(self, library: Library) -> None:
        handle, self.compiler = library
        handle.whet_constant.restype, handle.whet_constant.argtypes = _long, (_long,)
        self.queries, self.keys, self.wide, self.max_head_size, *sizes = (handle.whet_constant(i) for i in range(7))
        if sizes != [ctypes.sizeof(_Call), 3 * 8, 5 * 8]:
            raise OSError("segments.cpp and segments.py name different fields")
        self.workspace_size, self.forward, self.backward = (
            handle.whet_workspace,
            handle.whet_forward,
            handle.whet_backward,
        )
        self.workspace_size.restype, self.workspace_size.argtypes = _long, (_pointer, _long, _long)
        for function in (self.forward, self.backward):
            function.restype, function.argtypes = None, (_pointer, _long)


class SegmentTables:
    """Segments of a row in blocks of queries and keys.

    Args: lengths, parents: as SegmentLayout has them. group: g.
    """

    def __init__(self, lengths: Sequence[int], parents: Sequence[int], group: int) -> None:
        kernels = _kernels()
        starts = list(itertools.accumulate(lengths, initial=0))
        above: list[int] = []
        segments, keys, queries, padded_keys = [], [], [], 0
        for i, (n, parent) in enumerate(zip(lengths, parents, strict=True)):
            above.append(above[parent] + lengths[parent] if parent >= 0 else 0)
            segments.append((parent, above[i], len(keys)))
            for a in range(0, n, kernels.keys):
                count = min(kernels.keys, n - a)
                keys.append((i, starts[i] + a, above[i] + a, count, padded_keys))
                padded_keys += -(-count // kernels.wide) * kernels.wide
            blocks = -(-n // (kernels.queries // group))
            cuts = [n * j // blocks for j in range(blocks + 1)]  # of nearly equal lengths
            queries += [(i, starts[i] + a, above[i] + a, b - a, 0) for a, b in itertools.pairwise(cuts)]
        with torch.inference_mode(False):  # they are used after this pass
            self.segments, self.keys, self.queries = (torch.tensor(x, device="cpu") for x in (segments, keys, queries))
        self.padded_keys, self.group, self.tokens = padded_keys, group, starts[-1]
        self._blocks = [(place, n) for _, _, place, n, _ in queries]

    def stripe_ends(self, kv: int, threads: int, *, window: int, sizes: int) -> Tensor:
        """Splits the blocks of queries into stripes of similar work, for more threads: the end of each stripe.

        Args:
            kv: K.
            threads: of torch; more than MAX_STRIPES times K of them can't all be used.
            window: attention window in tokens; 0 = no window.
            sizes: D + E; limits the number of stripes, since each has sums of gradients (MAX_STRIPE_BYTES).
        """
        count = 1 if kv % threads == 0 else min(MAX_STRIPES, -(-2 * threads // kv), len(self._blocks))
        count = max(1, min(count, MAX_STRIPE_BYTES // (4 * kv * sizes * self.padded_keys)))
        seen = lambda place, n: min(place + n, window + n) if window else place + n
        work = list(itertools.accumulate(n * seen(place, n) for place, n in self._blocks))
        ends = [bisect.bisect_left(work, work[-1] * i // count) + 1 for i in range(1, count + 1)]
        return torch.tensor(ends, device="cpu")


@functools.cache
def segment_kernels() -> SegmentKernels | Unavailable:
    """Loads the kernels, and builds them if necessary. Returns: the kernels, or why torch's operator is used.

    >>> isinstance(segment_kernels(), (SegmentKernels, Unavailable))
    True
    """
    return unsupported_cpu() or self_check(_load_kernels(), _comparisons)


@functools.cache
def _load_kernels() -> SegmentKernels | Unavailable:
    """Returns the kernels before their self-check."""
    return load_functions("segments", SegmentKernels)


def _kernels() -> SegmentKernels:
    """Returns the kernels; callers have checked that they are available."""
    kernels = _load_kernels()
    assert not isinstance(kernels, Unavailable), kernels
    return kernels


def kernels_for(device: torch.device, dtype: torch.dtype) -> SegmentKernels | Unavailable:
    """Returns the kernels for tensors of a device and dtype, or why torch's operator is used instead.

    >>> kernels_for(torch.device("cpu"), torch.float64)
    Unavailable(reason='there are none for float64 on cpu')
    """
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return Unavailable(f"there are none for {str(dtype).removeprefix('torch.')} on {device.type}")
    if dtype == torch.bfloat16 and _matrix_instructions():
        return Unavailable("the processor has matrix instructions for bf16, which torch's operator uses")
    return segment_kernels()


@functools.cache
def _matrix_instructions() -> bool:
    """Returns whether the processor has AMX, which torch uses for products in bf16; torch's own function is private."""
    return "amx_bf16" in cpu_info()["flags"]


def segments_unsupported_reason(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Returns why the kernels can't run a call. Args: q: [1 H T D]. k: [1 K T D]. v: [1 K T E]. Returns: None = they
    can.
    """
    if not q.dtype == k.dtype == v.dtype:
        return f"queries, keys and values are {q.dtype}, {k.dtype} and {v.dtype}"
    kernels = kernels_for(q.device, q.dtype)
    if isinstance(kernels, Unavailable):
        return kernels.reason
    if max(q.shape[-1], v.shape[-1]) > kernels.max_head_size:
        return f"head size {max(q.shape[-1], v.shape[-1])} is over {kernels.max_head_size}"
    group = q.shape[1] // k.shape[1]
    if k.shape != (1, k.shape[1], *q.shape[2:]) or v.shape[:3] != k.shape[:3] or group * k.shape[1] != q.shape[1]:
        return f"queries {list(q.shape)}, keys {list(k.shape)} and values {list(v.shape)} don't fit each other"
    return None if group <= kernels.queries else f"{group} heads share a KV head, over {kernels.queries}"


def attend_segments(
    q: Tensor, k: Tensor, v: Tensor, tables: SegmentTables, *, scale: float, window: int | None
) -> Tensor:
    """softmax(scale q kᵀ) v over the keys of the ancestors, and causally over the own segment; differentiable.

    Args:
        q: [1 H T D].
        k: [1 K T D].
        v: [1 K T E].
        tables: for g = H / K.
        scale: factor of the scores.
        window: attention window in tokens; None = no window.
    Returns: [1 H T E].
    """
    if (q.shape[1] // k.shape[1], q.shape[2]) != (tables.group, tables.tokens):
        raise ValueError(f"tables of {tables.tokens} tokens and groups of {tables.group} were given {list(q.shape)}")
    return _Attention.apply(q, k, v, tables, scale, window or 0)  # pyright: ignore[reportReturnType]


class _Attention(torch.autograd.Function):
    """Attention of one layer; saves its inputs, its output and the log-sum-exp of each row."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tables: SegmentTables, scale: float, window: int) -> Tensor:
        q, k, v = (_rows(x) for x in (q, k, v))
        out, sums = OPERATOR(q, k, v, tables.segments, tables.keys, tables.queries, tables.padded_keys, scale, window)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.tables, ctx.scale, ctx.window = tables, scale, window
        return out.transpose(0, 1)[None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, sums = ctx.saved_tensors
        tables, threads = ctx.tables, torch.get_num_threads()
        d_q, d_k, d_v = grads = [x.new_empty(x.shape) for x in (q, k, v)]
        call = _call(
            q, k, v, out, tables.segments, tables.keys, tables.queries, tables.padded_keys, ctx.scale, ctx.window
        )
        ends = tables.stripe_ends(k.shape[1], threads, window=ctx.window, sizes=q.shape[2] + v.shape[2])
        grad = _rows(grad)  # the variable keeps it alive during the call
        call.stripes, call.stripe_ends = len(ends), ends.data_ptr()
        call.grad, call.d_q, call.d_k, call.d_v = (_view(x) for x in (grad, d_q, d_k, d_v))
        with record_function("native: attention's gradient"):
            _run(call, sums, back=True, half=q.dtype == torch.bfloat16)
        return *(x.transpose(0, 1)[None] for x in grads), None, None, None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor,
    keys: Tensor,
    queries: Tensor,
    padded_keys: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """[T H D], [T K D], [T K E] -> [T H E], and the log of the sum of exponentials [T H]."""
    out = v.new_empty(q.shape[0], q.shape[1], v.shape[2])
    sums = q.new_empty(q.shape[:2], dtype=torch.float32)
    call = _call(q, k, v, out, segments, keys, queries, padded_keys, scale, window)
    _run(call, sums, back=False, half=q.dtype == torch.bfloat16)
    return out, sums


# An operator of torch's dispatcher, so that checkpoints may hold its result and profiles name it.
_library = torch.library.Library("whet", "FRAGMENT")
_library.define(
    "attend_segments(Tensor q, Tensor k, Tensor v, Tensor segments, Tensor keys, Tensor queries, int padded_keys,"
    " float scale, int window) -> (Tensor, Tensor)"
)
_library.impl("attend_segments", _attend, "CPU")
OPERATOR = torch.ops.whet.attend_segments.default
"""The forward pass, in torch's dispatcher."""


def _rows(x: Tensor) -> Tensor:
    """[1 H T D] -> [T H D], with contiguous heads."""
    x = x[0].transpose(0, 1)
    return x if x.stride(2) == 1 else x.contiguous()


def _view(x: Tensor) -> _Tensor:
    return _Tensor(x.data_ptr(), x.stride(0), x.stride(1))


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    segments: Tensor,
    keys: Tensor,
    queries: Tensor,
    padded_keys: int,
    scale: float,
    window: int,
) -> _Call:
    """Returns the arguments of both forward and backward; the tensors must stay alive during the call."""
    call = _Call(q.shape[1], k.shape[1], q.shape[2], v.shape[2], torch.get_num_threads(), 1, window, scale)
    call.key_blocks, call.query_blocks, call.padded_keys = len(keys), len(queries), padded_keys
    call.segments, call.keys, call.queries = (x.data_ptr() for x in (segments, keys, queries))
    call.q, call.k, call.v, call.out = (_view(x) for x in (q, k, v, out))
    return call


def _run(call: _Call, sums: Tensor, *, back: bool, half: bool) -> None:
    """Runs the library with temporary memory."""
    kernels = _kernels()
    workspace = torch.empty(
        kernels.workspace_size(ctypes.addressof(call), back, half), dtype=torch.float32, device="cpu"
    )
    call.sums, call.workspace = sums.data_ptr(), workspace.data_ptr()
    (kernels.backward if back else kernels.forward)(ctypes.addressof(call), half)


def _comparisons(_: SegmentKernels) -> Iterator[KernelComparison]:
    """Yields the kernels' output and gradients, and those of the formula."""
    generator = torch.Generator().manual_seed(0)
    lengths, parents, window = [37, 100, 5], [-1, 0, 1], 90
    tables = SegmentTables(lengths, parents, 2)
    place = torch.arange(sum(lengths))  # each segment is the only child of the one before: one causal chain
    seen = (place <= place[:, None]) & (place > place[:, None] - window)
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        q, k, v, grad = (
            torch.randn(1, n, len(place), size, generator=generator).to(dtype)
            for n, size in ((4, 24), (2, 24), (2, 40), (4, 40))
        )
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            actual = attend_segments(leaves[0], leaves[1], leaves[2], tables, scale=0.3, window=window)
            keys, values = (x.repeat_interleave(2, 1) for x in wide[1:])
            expected = (wide[0] @ keys.mT * 0.3).masked_fill(~seen, -torch.inf).softmax(-1) @ values
            actual_grads = torch.autograd.grad(actual, leaves, grad)
            expected_grads = torch.autograd.grad(expected, wide, grad.float())
        for x, y in zip((actual, *actual_grads), (expected, *expected_grads), strict=True):
            yield KernelComparison(f"attention in {dtype} differs from the formula", x, y, limit)
