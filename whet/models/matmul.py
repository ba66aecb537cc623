"""Matrix products by the fastest library that computes correct results on this machine.

On a CPU, fp32 products run in oneDNN if torch's default library is slow. In all other cases torch's own product runs.
Dim legend: n rows, I in, O out.
Left out on purpose: gradients (the caller's autograd function computes them), and a choice by timing, because then a
run would depend on the clock.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from whet.native.build import Unavailable
from whet.native.layers import layer_kernels
from whet.util.cpu import cpu_info

__all__ = ["has_full_width_avx512", "linear", "onednn_unsupported_reason", "row_chunks", "weight_grad"]

MIN_MULTIPLICATIONS = 100_000_000
"""The smallest product for which oneDNN's preparation of a new shape pays off."""


@functools.cache
def onednn_unsupported_reason() -> str | None:
    """Returns why fp32 products use torch's default library; None = they use oneDNN.

    oneDNN is faster if the default library is MKL and the processor is AMD's with AVX-512, because MKL has no AVX-512
    kernels for AMD. On Zen 5 (see `has_full_width_avx512`) oneDNN is 2.1 times faster. On earlier processors it is 1.12
    to 1.2 times faster with one thread, and a full update with two threads is no faster. The choice depends on the
    processor and not on a timing, so a repeated run uses the same library. oneDNN's operator is private to torch, so
    its results are compared first.

    >>> onednn_unsupported_reason() is None or isinstance(onednn_unsupported_reason(), str)
    True
    """
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return "torch has no oneDNN, or no MKL to replace"
    model = str(cpu_info()["model"])
    if "AMD" not in model or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return f"on {model} torch's default products are as fast"
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(*shape, generator=generator) for shape in ((33, 48), (40, 48), (40,)))
    try:
        for weight, bias in ((w, b), (w, None), (w.t().contiguous().t(), None)):
            actual, expected = _onednn(x, weight, bias), F.linear(x, weight, bias)
            if actual.shape != expected.shape or not (actual - expected).abs().max() <= 1e-5 * expected.abs().max():
                return "oneDNN's products differ from the default's"
    except (RuntimeError, AttributeError) as error:  # the operator is private: it may be missing or refuse
        return f"oneDNN's product failed: {str(error).splitlines()[0]}"
    return None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear by the fastest library, without a gradient: [n I], [O I], [O] -> [n O]."""
    fits = x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0  # oneDNN fails on empty tensors
    large = fits and x.shape[0] * weight.numel() >= MIN_MULTIPLICATIONS
    return _onednn(x, weight, bias) if large and onednn_unsupported_reason() is None else F.linear(x, weight, bias)


def row_chunks(rows: int, size: int) -> Iterator[slice]:
    """Slices of `size` rows that cover `rows`.

    >>> list(row_chunks(3, 2))
    [slice(0, 2, None), slice(2, 3, None)]
    """
    return (slice(a, min(a + size, rows)) for a in range(0, rows, size))


def weight_grad(grad: Tensor, x: Tensor, into: Tensor | None = None) -> Tensor:
    """gᵀ x, the gradient of a weight, by the fastest library: [n O], [n I] -> [O I]. It is added to `into` if given."""
    wide = has_full_width_avx512() and grad.dtype == x.dtype == torch.float32 and grad.device.type == "cpu"
    kernels = layer_kernels() if wide else Unavailable("torch's product is as fast")
    if not isinstance(kernels, Unavailable):
        return kernels.weight_grad(grad.contiguous(), x.contiguous(), into)
    if into is not None:
        return into.addmm_(grad.t(), x)
    return linear(grad.t(), x.t()) if wide else grad.t() @ x


@functools.cache
def has_full_width_avx512() -> bool:
    """Returns whether the processor computes with full AVX-512 registers; MKL uses half of them.

    AMD's processors do since family 26 (Zen 5). There, oneDNN is twice as fast as MKL at every product, and the native
    kernel is as fast for the gradients of weights, for which oneDNN copies both factors. Earlier processors split a
    register into halves, so MKL is as fast there.

    >>> has_full_width_avx512() in (True, False)
    True
    """
    return onednn_unsupported_reason() is None and int(cpu_info()["family"] or 0) >= 26


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
