"""Linear layers of one input as one product, with weights packed for the few rows of a decode step.

On a CPU few rows are multiplied fastest by a weight in an order of its own: that of the native kernels, or oneDNN's.
Such a packed weight is derived data: a second copy, made once per version of the weights. Where neither can be had, the
layers' own weights are multiplied, with no copy. Few fp32 weights are not packed for oneDNN, since its call takes
longer than the product does: they are multiplied as they are, layers of one input put together. Dim legend: n rows.
Left out on purpose: quantised weights, and any choice by the clock: a path is taken where it is right.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whet.native.decode import Kernels, ProductTable

__all__ = ["Product", "pack_refusal"]

FEW = 1 << 16
"""Weights of a product up to which, in fp32, it is no slower without packing, at 1 to 64 rows."""


class Product:
    """One or more linear layers of the same input: y = x [W₁; W₂; ...]ᵀ + [b₁; b₂; ...].

    Args: layers: their own parameters are read, and never changed. pack: whether to keep a copy that is faster: packed,
        or put together. norm: an RMSNorm before them; a copy in fp32 takes its weight in, and `gain` says so. few: fp32
        weights up to which a product is not packed; None = FEW. kernels: what packs and multiplies instead of oneDNN.

    >>> layers = [nn.Linear(4, 2), nn.Linear(4, 3)]
    >>> Product(layers, pack=False)(torch.ones(1, 4)).shape
    torch.Size([1, 5])
    """

    def __init__(
        self,
        layers: Sequence[nn.Linear],
        *,
        pack: bool,
        norm: nn.Module | None = None,
        few: int | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self.table: ProductTable | None = None
        """Where the weight lies that the native kernels have packed."""
        self.gain: Tensor | None = None
        """[in]: what the copy's columns were multiplied by, so that x need not be."""
        wide = layers[0].weight.dtype == torch.float32
        self._kernels = kernels
        pack = pack or kernels is not None
        self._norm = norm if pack and wide else None
        few = 0 if kernels else FEW if few is None else few
        self._few = wide and sum(layer.weight.numel() for layer in layers) <= few
        self._pack = pack and not (self._few and norm is None and len(layers) == 1)
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self.refresh()

    def refresh(self) -> None:
        """Copies the weights as they are now."""
        if self._pack:
            self.gain = None if self._norm is None else self._norm._parameters["weight"]
            old = self._weight
            self._weight, self._bias = _joined(self.layers, self.gain)
            if self._kernels is not None:
                outputs, inputs = self._weight.shape
                self._weight = self._kernels.pack(self._weight, old)
                bias = None if self._bias is None else self._bias.data_ptr()
                self.table = ProductTable(self._weight.data_ptr(), bias, inputs, outputs)
            elif not self._few:
                self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, 64)

    def drop(self) -> None:
        """Frees the copy; `refresh` makes it anew."""
        self._weight = self._bias = self.gain = self.table = None

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in] -> [n, sum of out]."""
        if self._weight is not None:
            if self._kernels is not None and self.table is not None:
                if x.dtype != self._weight.dtype:
                    raise TypeError(f"a product of {self._weight.dtype} weights got {x.dtype}; give both one dtype")
                return self._kernels.multiply(self.table, x.contiguous())
            if self._few:
                return F.linear(x, self._weight, self._bias)
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        parts = [F.linear(x, layer.weight, layer.bias) for layer in self.layers]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    @property
    def width(self) -> int:
        """Numbers of a row of the result."""
        return sum(layer.out_features for layer in self.layers)

    @property
    def inputs(self) -> int:
        """Numbers of a row of x."""
        return self.layers[0].in_features

    @property
    def bytes(self) -> int:
        """Memory of the copy."""
        return 0 if self._weight is None else self._weight.nbytes


def pack_refusal(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why weights are not packed: the machine, or a packed product that differs from the plain one.

    Args: dtype, device: of the weights.
    Returns: the reason; None = packed products are right.

    >>> pack_refusal(torch.float64, torch.device("cpu"))
    'weights of torch.float64 are not packed'
    """
    if device.type != "cpu":
        return f"weights on {device.type} are not packed"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"weights of {dtype} are not packed"
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return "oneDNN is not available"
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)
    layers = [nn.Linear(48, out, bias=bias, dtype=dtype) for out, bias in ((40, True), (24, False))]
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    try:
        with torch.no_grad():
            for layer in layers:
                layer.weight.copy_(draw(*layer.weight.shape))
            for part in (layers, layers[1:]):
                packed, plain = Product(part, pack=True, few=0), Product(part, pack=False)
                for rows in (1, 3, 33):
                    x = draw(rows, 48)
                    got, want = packed(x).float(), plain(x).float()
                    if got.shape != want.shape or not (got - want).abs().max() <= limit * want.abs().max():
                        return "packed products differ from plain ones on this machine"
    except (RuntimeError, AttributeError) as error:  # the operators are private: they may be missing or refuse
        return f"packing failed: {str(error).splitlines()[0]}"
    return None


def _joined(layers: Sequence[nn.Linear], gain: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The weight, its columns times the gain, and the bias of layers put together."""
    weights = [layer.weight.detach() for layer in layers]
    weight = weights[0].contiguous() if len(weights) == 1 else torch.cat(weights)
    weight = weight if gain is None else weight * gain.detach()
    if all(layer.bias is None for layer in layers):
        return weight, None
    biases = [w.new_zeros(len(w)) if y.bias is None else y.bias.detach() for y, w in zip(layers, weights, strict=True)]
    return weight, torch.cat(biases)
