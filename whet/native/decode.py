"""A CPU's decode step in C++ (whet/native/kernels/decode.cpp).

In torch a decode step is many kernels, and each costs a call, a tensor and a pass over memory. Here one call of C++
runs all layers. If it can't be built, or its results differ from torch's, `decode_kernels` returns the reason and torch
runs the same step.
Dim legend: n rows, H query heads, K KV heads, D head size, d hidden size.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.profiler import record_function

from whet.native.build import Library, Unavailable, load_functions
from whet.native.self_check import KernelComparison, self_check

__all__ = ["DecodeKernels", "LayerTable", "ProductTable", "StepTable", "decode_kernels", "unsupported_sizes"]

MAX_HEAD_SIZE = 256
"""Largest head size; vectors.h has it too."""

_long, _pointer, _double = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double


class ProductTable(ctypes.Structure):
    """A packed weight and its adapters: `Product` of tables.h."""

    _fields_ = (
        *((name, _pointer) for name in ("weight", "bias")),
        *((name, _long) for name in ("inputs", "outputs", "rank")),
        *((name, _pointer) for name in ("first", "second", "scale", "spans")),
    )


class StepTable(ctypes.Structure):
    """The data of a step, for all layers: `Step` of tables.h."""

    _fields_ = (
        *((name, _long) for name in ("rows", "heads", "kv", "size", "threads")),
        *((name, _pointer) for name in ("position", "num_drawn", "cos", "sin")),
        ("groups", _long),
        *((name, _pointer) for name in ("group_ends", "query_rows", "prompt_tokens", "workspace")),
        *((name, _pointer) for name in ("hidden", "residual", "wide", "narrow")),
    )


class LayerTable(ctypes.Structure):
    """The data of one layer: `Layer` of tables.h."""

    _fields_ = (
        ("keys", _pointer),
        ("values", _pointer),
        ("places", _long),
        *((name, _pointer) for name in ("prompt_keys", "prompt_values", "prompt_places", "norm")),
        *((name, _double) for name in ("query_epsilon", "key_epsilon", "scale")),
        ("window", _long),
        ("before", _pointer),
        ("after", _pointer),
        ("before_epsilon", _double),
        ("after_epsilon", _double),
        *((name, ProductTable) for name in ("qkv", "output", "gate_up", "down")),
    )


class DecodeKernels:
    """The functions of decode.cpp. Args: library: decode.cpp, built. Raises: OSError: it is of another version."""

    def __init__(self, library: Library) -> None:
        handle, self.compiler = library
        handle.whet_constant.restype, handle.whet_constant.argtypes = _long, (_long,)
        sizes = [handle.whet_constant(i) for i in range(2, 5)]
        if handle.whet_constant(1) != MAX_HEAD_SIZE or sizes != [
            ctypes.sizeof(t) for t in (ProductTable, StepTable, LayerTable)
        ]:
            raise OSError("tables.h and decode.py name different fields")
        self.lanes: int = handle.whet_constant(0)
        """Numbers in a SIMD register: widths must be multiples of it."""
        self.panel = 2 * self.lanes
        """Outputs in a panel of a packed weight."""
        self._run, self._attend = handle.whet_run, handle.whet_attend
        self._pack, self._multiply = handle.whet_pack, handle.whet_multiply
        self._norm, self._silu_mul = handle.whet_norm, handle.whet_silu_mul
        self._run.argtypes = (_pointer, _pointer, _long, _long)
        self._attend.argtypes = (*(_pointer,) * 4, _long)
        self._pack.argtypes = (_pointer, _pointer, *(_long,) * 4)
        self._multiply.argtypes = (*(_pointer,) * 3, *(_long,) * 3)
        self._norm.argtypes = (*(_pointer,) * 4, _long, _long, _double, _long, _long)
        self._silu_mul.argtypes = (_pointer, _pointer, *(_long,) * 4)
        for function in (self._run, self._attend, self._pack, self._multiply, self._norm, self._silu_mul):
            function.restype = None

    def run(self, step: StepTable, layers: ctypes.Array[LayerTable], dtype: torch.dtype) -> None:
        """Runs all layers for one token per row. The result is step.hidden + step.residual.

        Args: step, layers: the tables. dtype: of the weights and the KV.
        """
        with record_function("native: decoder layers"):
            self._run(ctypes.addressof(step), ctypes.addressof(layers), len(layers), dtype == torch.bfloat16)

    def attend(self, step: StepTable, layer: LayerTable, qkv: Tensor) -> Tensor:
        """Computes the attention of one token per row: normalizes and rotates q and k, writes k and v to the cache.

        Args:
            step: the rows, and the tokens of the cache that each attends to.
            layer: the layer's norms, and its part of the cache.
            qkv: [n, (H + 2 K) D], contiguous.
        Returns: [n, H D].
        """
        out = qkv.new_empty(qkv.shape[0], step.heads * step.size)
        is_bf16 = qkv.dtype == torch.bfloat16
        self._attend(ctypes.addressof(step), ctypes.addressof(layer), qkv.data_ptr(), out.data_ptr(), is_bf16)
        return out

    def pack(self, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """Packs a weight [out, in] into panels. Args: weight: contiguous. out: an earlier result, reused if it fits."""
        outputs, inputs = weight.shape
        size = -(-outputs // self.panel) * self.panel * inputs
        if out is None or (out.numel(), out.dtype) != (size, weight.dtype):
            out = weight.new_empty(size)
        threads, is_bf16 = torch.get_num_threads(), weight.dtype == torch.bfloat16
        self._pack(weight.data_ptr(), out.data_ptr(), inputs, outputs, threads, is_bf16)
        return out

    def multiply(self, product: ProductTable, x: Tensor) -> Tensor:
        """[n, in] -> [n, out]. Args: product: a packed weight, its bias and adapters. x: contiguous, of its dtype."""
        out = x.new_empty(x.shape[0], product.outputs)
        threads, is_bf16 = torch.get_num_threads(), x.dtype == torch.bfloat16
        with record_function("native: product"):
            self._multiply(ctypes.addressof(product), x.data_ptr(), out.data_ptr(), x.shape[0], threads, is_bf16)
        return out

    def norm(self, h: Tensor, more: Tensor | None, weight: Tensor | None, epsilon: float) -> Tensor:
        """RMSNorm of h + more; h becomes the sum.

        out = h / sqrt(mean(h²) + epsilon) * weight. Args: h, more: [n, d]; more: None = 0. weight: [d]; None = 1.
        Returns: [n, d].
        """
        out = torch.empty_like(h)
        self._norm(
            h.data_ptr(),
            None if more is None else more.data_ptr(),
            None if weight is None else weight.data_ptr(),
            out.data_ptr(),
            *h.shape,
            epsilon,
            torch.get_num_threads(),
            h.dtype == torch.bfloat16,
        )
        return out

    def gated(self, x: Tensor) -> Tensor:
        """silu(gate) * up of x = [gate, up]: [n, 2 m] -> [n, m]."""
        rows, width = x.shape[0], x.shape[1] // 2
        out = x.new_empty(rows, width)
        is_bf16 = x.dtype == torch.bfloat16
        self._silu_mul(x.data_ptr(), out.data_ptr(), rows, width, torch.get_num_threads(), is_bf16)
        return out


@functools.cache
def decode_kernels() -> DecodeKernels | Unavailable:
    """Loads the kernels, and builds them if necessary.

    Returns: the kernels, or why torch is used instead.

    >>> isinstance(decode_kernels(), (DecodeKernels, Unavailable))
    True
    """
    return self_check(load_functions("decode", DecodeKernels), _comparisons)


def unsupported_sizes(kernels: DecodeKernels, head: int, widths: set[int]) -> Unavailable | None:
    """Returns why sizes don't fit the kernels. Args: head: D. widths: of rows. Returns: the reason; None = they fit."""
    wrong = [f"head size {head}"] if head % kernels.lanes or head > MAX_HEAD_SIZE else []
    wrong += [f"width {x}" for x in sorted(widths) if x % kernels.lanes]
    return Unavailable(f"{', '.join(wrong)} is not a multiple of {kernels.lanes}, or too large") if wrong else None


def _comparisons(kernels: DecodeKernels) -> Iterator[KernelComparison]:
    """Yields the results of the kernels and of torch."""
    generator = torch.Generator().manual_seed(0)
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        h, more = (torch.randn(3, 64, generator=generator).to(dtype) for _ in range(2))
        wide = (h.float() + more.float()).to(dtype).float()
        expected = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
        differ = f"in {dtype} differ from torch's"
        yield KernelComparison(f"norms {differ}", kernels.norm(h.clone(), more, None, 1e-6), expected, limit)
        gate, up = h.float().chunk(2, -1)
        yield KernelComparison(f"gates {differ}", kernels.gated(h), torch.nn.functional.silu(gate) * up, limit)
        weight, bias, x = (torch.randn(*n, generator=generator).to(dtype) for n in ((70, 32), (70,), (29, 32)))
        panels = kernels.pack(weight)
        actual = kernels.multiply(ProductTable(panels.data_ptr(), bias.data_ptr(), 32, 70), x)
        yield KernelComparison(f"products {differ}", actual, x.float() @ weight.float().T + bias.float(), limit)
        for size in (16, 64):
            attended = _compare_attention(kernels, dtype, size, generator)
            yield KernelComparison(f"attention in {dtype} differs from torch's", *attended, limit)


def _compare_attention(
    kernels: DecodeKernels, dtype: torch.dtype, size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Attention of two rows, by the kernel and by torch: a prompt of 37 tokens, and 70 and 2 drawn tokens."""
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)
    counts, prompt, places = torch.tensor([70, 2]), 37, 96
    qkv, keys, values = draw(2, 4 * size), draw(2, 1, places, size), draw(2, 1, places, size)
    prompts, position = (draw(1, prompt, size), draw(1, prompt, size)), counts + prompt
    cos, sin = torch.ones(prompt + places, size, dtype=dtype), torch.zeros(prompt + places, size, dtype=dtype)
    longs = [torch.tensor(x) for x in ([0, 2], [0, 1], [prompt], [prompt])]
    addresses = [torch.tensor([x.data_ptr()]) for x in prompts]
    workspace = torch.empty(2, 2, 2 * size + 2)
    tables = [cos, sin, position, counts, *longs, *addresses, workspace]  # kept alive for the call
    ends, query_rows, tokens, lengths = (x.data_ptr() for x in longs)
    step = StepTable(2, 2, 1, size, torch.get_num_threads(), position.data_ptr(), counts.data_ptr(), cos.data_ptr(),
                     sin.data_ptr(), 1, ends, query_rows, tokens, workspace.data_ptr())  # fmt: skip
    layer = LayerTable(keys.data_ptr(), values.data_ptr(), places, addresses[0].data_ptr(), addresses[1].data_ptr(),
                       lengths, None, 0.0, 0.0, size**-0.5, 0)  # fmt: skip
    actual = kernels.attend(step, layer, qkv)
    del tables
    expected = []
    for row, n in enumerate(counts.tolist()):
        new = qkv[row].view(4, size)
        k, v = (torch.cat([p[0], cache[row, 0, :n], new[2 + i : 3 + i]]).float() for i, (p, cache) in
                enumerate(zip(prompts, (keys, values), strict=True)))  # fmt: skip
        expected.append(((new[:2].float() @ k.T) * size**-0.5).softmax(-1) @ v)
    return actual, torch.stack(expected).view(2, -1)
