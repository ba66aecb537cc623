"""RMSNorms, gates and gradients of weights in training, in C++ (kernels/layers.cpp).

Norms and gates need one pass over memory, forward and backward. In torch they are several operations (in bf16 twice
as many), and each of them reads and writes the whole tensor. If the kernels
can't be built, or differ from torch in a self-check, `layer_kernels` returns the reason.
Dim legend: n rows, d numbers of a row, I in, O out.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

from whet.native.build import Library, Unavailable, load_functions, unsupported_cpu
from whet.native.self_check import KernelComparison, self_check

__all__ = ["LayerKernels", "layer_kernels"]

_long, _pointer = ctypes.c_int64, ctypes.c_void_p


class LayerKernels:
    """The functions of layers.cpp, for contiguous tensors of one dtype. Args: library: layers.cpp, built."""

    def __init__(self, library: Library) -> None:
        handle, self.compiler = library
        handle.whet_constant.restype, handle.whet_constant.argtypes = _long, (_long,)
        self.lanes: int = handle.whet_constant(0)
        """Numbers side by side in a register: rows must be multiples of it."""
        self._part, self._workspace_size = handle.whet_constant(1), handle.whet_constant(2)
        self._weight_grad = handle.whet_weight_grad
        self._weight_grad.argtypes = (*(_pointer,) * 3, *(_long,) * 5, _pointer)
        self._norm, self._norm_back = handle.whet_norm, handle.whet_norm_back
        self._silu_mul, self._silu_mul_back = handle.whet_silu_mul, handle.whet_silu_mul_back
        self._norm.argtypes = (*(_pointer,) * 4, _long, _long, ctypes.c_double, _long, _long)
        self._norm_back.argtypes = (*(_pointer,) * 6, *(_long,) * 4)
        self._silu_mul.argtypes = (*(_pointer,) * 3, *(_long,) * 3)
        self._silu_mul_back.argtypes = (*(_pointer,) * 5, *(_long,) * 3)
        for function in (self._norm, self._norm_back, self._silu_mul, self._silu_mul_back, self._weight_grad):
            function.restype = None

    def fit(self, *tensors: Tensor) -> bool:
        """Returns whether the kernels can process tensors: on a CPU, contiguous, all fp32 or all bf16, with rows of
        full registers, and of one shape (a weight has the shape of one row).
        """
        first = tensors[0]
        fits = first.shape[-1] % self.lanes == 0 and first.dtype in (torch.float32, torch.bfloat16)
        return fits and all(
            x.dtype == first.dtype
            and x.device.type == "cpu"
            and x.shape in (first.shape, first.shape[-1:])
            and x.is_contiguous()
            for x in tensors
        )

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """RMSNorm: y = (x r) w, r = (mean(x²) + ε)^-½. Args: x: [n d]. weight: [d]. Returns: y [n d], r [n] in fp32."""
        y, r = torch.empty_like(x), x.new_empty(len(x), dtype=torch.float32)
        pointers = (z.data_ptr() for z in (x, weight, y, r))
        self._norm(*pointers, *x.shape, epsilon, torch.get_num_threads(), x.dtype == torch.bfloat16)
        return y, r

    def norm_grads(
        self, x: Tensor, weight: Tensor, r: Tensor, grad: Tensor, *, of_x: bool, of_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """∂/∂x = r (g w) − x r³ mean(g w x), ∂/∂w = Σ g x r.

        Args: as for norm. grad: g. of_x, of_weight: whether to compute these gradients.
        Returns: [n d], and [d] in fp32; None for one that is not computed.
        """
        d_x = torch.empty_like(x) if of_x else None
        parts = x.new_empty(-(-len(x) // self._part), x.shape[1], dtype=torch.float32) if of_weight else None
        pointers = (None if z is None else z.data_ptr() for z in (x, weight, r, grad, d_x, parts))
        self._norm_back(*pointers, *x.shape, torch.get_num_threads(), x.dtype == torch.bfloat16)
        return d_x, None if parts is None else parts.sum(0)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) · up, [n d]."""
        y = torch.empty_like(gate)
        pointers = (z.data_ptr() for z in (gate, up, y))
        self._silu_mul(*pointers, gate.numel(), torch.get_num_threads(), gate.dtype == torch.bfloat16)
        return y

    def gated_grads(
        self, gate: Tensor, up: Tensor, grad: Tensor, *, product: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of silu(gate) · up.

        Args: grad: its gradient, overwritten by ∂/∂up. product: also return silu(gate) · up.
        Returns: ∂/∂gate, ∂/∂up, the product.
        """
        d_gate, y = torch.empty_like(gate), torch.empty_like(gate) if product else None
        pointers = (None if z is None else z.data_ptr() for z in (gate, up, grad, y, d_gate))
        self._silu_mul_back(*pointers, gate.numel(), torch.get_num_threads(), gate.dtype == torch.bfloat16)
        return d_gate, grad, y

    def weight_grad(self, grad: Tensor, x: Tensor, into: Tensor | None = None) -> Tensor:
        """Returns the gradient of a weight, gᵀ x, all contiguous and fp32.

        Args: grad: [n O]. x: [n I]. into: [O I], to which the gradient is added; None = a new tensor. Returns: [O I].
        """
        if not x.dtype == grad.dtype == torch.float32 or len(x) != len(grad):
            shapes = f"{len(grad)} rows of {grad.dtype} and {len(x)} of {x.dtype}"
            raise ValueError(f"got {shapes}; both must have the same number of rows, in float32")
        out, threads = x.new_empty(grad.shape[1], x.shape[1]) if into is None else into, torch.get_num_threads()
        if out.shape != (grad.shape[1], x.shape[1]) or out.dtype != torch.float32 or not out.is_contiguous():
            raise ValueError(f"the sum is {list(out.shape)} in {out.dtype}; it must be [O, I], contiguous, float32")
        if not (len(x) and out.numel()):
            return out.zero_() if into is None else out
        workspace = torch.empty(threads * self._workspace_size, dtype=torch.float32, device="cpu")
        pointers = (z.data_ptr() for z in (grad, x, out))
        with record_function("native: gradient of a weight"):
            self._weight_grad(*pointers, len(x), *out.shape, into is not None, threads, workspace.data_ptr())
        return out


@functools.cache
def layer_kernels() -> LayerKernels | Unavailable:
    """Loads the kernels, and builds them if necessary. Returns: the kernels, or why torch's operations are used.

    >>> isinstance(layer_kernels(), (LayerKernels, Unavailable))
    True
    """
    return unsupported_cpu() or self_check(load_functions("layers", LayerKernels), _comparisons)


def _comparisons(kernels: LayerKernels) -> Iterator[KernelComparison]:
    """Results and gradients of the kernels, and torch's."""
    generator = torch.Generator().manual_seed(0)
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        x, up, grad, w = (torch.randn(*n, generator=generator).to(dtype) for n in (*[(300, 48)] * 3, (48,)))
        a, b, weight = (z.detach().float().requires_grad_() for z in (x, up, w))
        with torch.enable_grad():
            norm = a * (a.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
            norm_grads = torch.autograd.grad(norm, (a, weight), grad.float())
            product = F.silu(a) * b
            product_grads = torch.autograd.grad(product, (a, b), grad.float())
        y, r = kernels.norm(x, w, 1e-6)
        actual = (y, *kernels.norm_grads(x, w, r, grad, of_x=True, of_weight=True), kernels.gated(x, up))
        actual += kernels.gated_grads(x, up, grad.clone(), product=True)
        for result, expected in zip(actual, (norm, *norm_grads, product, *product_grads, product), strict=True):
            assert result is not None, "all gradients were requested"
            yield KernelComparison(f"norms or gates in {dtype} differ from torch's", result, expected, limit)
    # sizes with several chunks and blocks, and incomplete last ones
    grad, x = (torch.randn(300, n, generator=generator).to(torch.float32) for n in (500, 600))
    yield KernelComparison("gradients of weights differ from torch's", kernels.weight_grad(grad, x), grad.t() @ x, 1e-5)
