"""PackedLinear: linear layers of one input as one product, with weights packed for the few rows of a decode step.

On a CPU, few rows are multiplied fastest by a weight in the native kernels' own order. The packed weight is a second
copy, made once per version of the weights. Without kernels the layers' own weights are used, with no copy; `join` makes
them views of one buffer, so that a GPU multiplies by all of them at once. In fp32 the
effective weight of a layer with an adapter is packed, or copied to a fixed address so that captured graphs stay valid.
In half precision, rounding that weight would lose much of the adapter, so A and B are multiplied separately from W, in
the order and with the roundings of the layer itself.
Dim legend: n rows, O out, R rank of all adapters of a product.
Left out on purpose: quantised weights, and any choice by timing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whet.models.lora_layers import effective_weight, lora_factors, plain_linear
from whet.native.decode import DecodeKernels, ProductTable

__all__ = ["PackedLinear"]


class PackedLinear:
    """One or more linear layers of the same input: y = x [W₁; W₂; ...]ᵀ + [b₁; b₂; ...].

    Args:
        layers: plain linear layers, with or without adapters; their parameters are read, and never changed.
        norm: an RMSNorm before them; a copy in fp32 contains its weight, and `gain` is that weight.
        kernels: pack a copy and multiply by it; None = the layers' own weights, with no copy.

    >>> layers = [nn.Linear(4, 2), nn.Linear(4, 3)]
    >>> PackedLinear(layers)(torch.ones(1, 4)).shape
    torch.Size([1, 5])
    """

    def __init__(
        self, layers: Sequence[nn.Module], *, norm: nn.Module | None = None, kernels: DecodeKernels | None = None
    ) -> None:
        self.layers = tuple(layers)
        self._linears = tuple(_linear(layer) for layer in layers)
        self.table: ProductTable | None = None
        """The addresses of the packed weight."""
        self.gain: Tensor | None = None
        """[in]: the factor that the copy's columns contain, so that x need not be multiplied by it."""
        self._kernels = kernels
        self._norm = norm if kernels is not None and self._linears[0].weight.dtype == torch.float32 else None
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._merges = self._linears[0].weight.dtype.itemsize >= 4
        """Whether adapters are merged into the weights."""
        self._joined_weight: tuple[Tensor, Tensor | None] | None = None
        """The buffer of which the layers' weights are views, and that of their biases."""
        self._joined_first: Tensor | None = None
        """[R, in]: the buffer of which the factors A of adapters are views; None = not all layers have one to join."""
        self._adapter_tensors: list[Tensor] = []
        """Adapters that are not merged: `table` points to these tensors."""
        self._merged: dict[int, Tensor] = {}
        """Without kernels: the effective weights of layers with an adapter, by index."""
        self.refresh()

    def refresh(self) -> None:
        """Copies the current weights, adapters merged where they are."""
        if self._kernels is None:
            if self._joined_weight is not None:
                self.join()
            for i, (layer, base) in enumerate(zip(self.layers, self._linears)):
                if base is not layer and self._merges:
                    weight = effective_weight(layer)
                    self._merged[i] = self._merged[i].copy_(weight) if i in self._merged else weight.clone()
            return
        self.gain = None if self._norm is None else self._norm._parameters["weight"]
        old = self._weight
        weight, self._bias = self._joined()
        outputs, inputs = weight.shape
        self._weight = self._kernels.pack(weight, old)
        bias = None if self._bias is None else self._bias.data_ptr()
        rank, self._adapter_tensors = (0, []) if self._merges else self._adapters(self._kernels, weight)
        adapters = (x.data_ptr() for x in self._adapter_tensors)
        self.table = ProductTable(self._weight.data_ptr(), bias, inputs, outputs, rank, *adapters)

    def join(self) -> None:
        """Makes the layers' weights views of one buffer, and their biases of another, where they are plain tensors; and
        the factors A of adapters that are not merged.

        The parameters stay the same objects with the same numbers. A second call brings back what has left the buffer.
        """
        adapted = any(a is not b for a, b in zip(self.layers, self._linears))
        factors = [x[0] for x in map(lora_factors, self.layers) if x is not None] if adapted else []
        tensors = [layer.weight for layer in self._linears] + factors
        plain = all(map(_is_plain, tensors))
        biased = [layer.bias is not None for layer in self._linears]
        same = len({(x.dtype, x.device) for x in tensors}) == 1
        if not plain or not same or any(biased) != all(biased) or (adapted and self._merges):
            return
        old = self._joined_weight or (None, None)
        weight = _as_views([layer.weight for layer in self._linears], old[0])
        bias = _as_views([layer.bias for layer in self._linears], old[1]) if all(biased) else None
        self._joined_weight = weight, bias
        if len(factors) == len(self.layers):
            self._joined_first = _as_views(factors, self._joined_first)

    def add_to(self, h: Tensor, x: Tensor) -> Tensor:
        """Adds the product of x to h in place, in one kernel where the layer allows it. Returns: h."""
        (layer,), (base,) = self.layers, self._linears
        if layer is base and base.bias is None:  # the part of an adapter alone may be less than the rounding of h
            return h.addmm_(x, base.weight.t())
        return h.add_(self(x))

    def drop(self) -> None:
        """Frees the copy, until `refresh`."""
        self._weight = self._bias = self.gain = self.table = None
        self._adapter_tensors.clear()
        self._merged.clear()

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in] -> [n, sum of out]."""
        if self._kernels is not None and self._weight is not None and self.table is not None:
            if x.dtype != self._weight.dtype:
                raise TypeError(f"a product of {self._weight.dtype} weights got {x.dtype}; give both one dtype")
            return self._kernels.multiply(self.table, x.contiguous())
        if self._joined_weight is not None:
            return self._add_adapters(F.linear(x, *self._joined_weight), x)
        outputs = [self._multiply(i, x) for i in range(len(self.layers))]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def _add_adapters(self, y: Tensor, x: Tensor) -> Tensor:
        """Adds s B A x of each layer's adapter to its part of y, which is rounded once. Returns: y."""
        if all(a is b for a, b in zip(self.layers, self._linears)):
            return y
        factors = [lora_factors(layer) for layer in self.layers]
        ranks = [0 if f is None else len(f[0]) for f in factors]
        if self._joined_first is not None and sum(ranks) == len(self._joined_first):
            inner = F.linear(x, self._joined_first).split(ranks, -1)
        else:
            inner = [None if f is None else F.linear(x, f[0]) for f in factors]
        for part, u, f in zip(y.split([len(layer.weight) for layer in self._linears], -1), inner, factors, strict=True):
            if u is not None and f is not None:
                part.addmm_(u, f[1].t(), alpha=f[2])
        return y

    def _multiply(self, i: int, x: Tensor) -> Tensor:
        """Returns the output of layer i."""
        layer, base = self.layers[i], self._linears[i]
        if base is not layer and i not in self._merged:  # half precision; or dropped, and not renewed yet
            return layer(x)
        weight, sum_parts = self._merged.get(i, base.weight), getattr(base, "sum_parts", None)
        if sum_parts is None or weight.shape[1] == base.in_features:
            return F.linear(x, weight, base.bias)
        y = sum_parts(F.linear(x, weight))  # each process has some columns
        return y if base.bias is None else y.add_(base.bias)

    @property
    def width(self) -> int:
        """Width of the output, or of this process's part of it."""
        return sum(layer.weight.shape[0] for layer in self._linears)

    @property
    def inputs(self) -> int:
        """Width of the input."""
        return self._linears[0].in_features

    @property
    def bytes(self) -> int:
        """Memory of the copy."""
        packed = () if self._weight is None else (self._weight, *self._adapter_tensors)
        return sum(x.nbytes for x in (*packed, *self._merged.values()))

    def _joined(self) -> tuple[Tensor, Tensor | None]:
        """Returns the joined weight (effective or of the base, its columns times the gain) and bias of the layers."""
        layers = self.layers if self._merges else self._linears
        weights = [effective_weight(layer) for layer in layers]
        weight = weights[0].contiguous() if len(weights) == 1 else torch.cat(weights)
        weight = weight if self.gain is None else weight * self.gain.detach()
        biases = [layer.bias for layer in self._linears]
        if all(b is None for b in biases):
            return weight, None
        return weight, torch.cat([w.new_zeros(len(w)) if b is None else b.detach() for b, w in zip(biases, weights)])

    def _adapters(self, kernels: DecodeKernels, weight: Tensor) -> tuple[int, list[Tensor]]:
        """Returns the table's entries of adapters: R; then A and B of all layers, s of each output, the ranks of each
        panel.
        """
        parts = [lora_factors(layer) for layer in self.layers]
        if all(part is None for part in parts):
            return 0, []
        ranks = [0 if part is None else part[0].shape[0] + part[0].shape[0] % 2 for part in parts]  # read in pairs
        first, second = weight.new_zeros(sum(ranks), self.inputs), weight.new_zeros(len(weight), sum(ranks))
        panels = -(-len(weight) // kernels.panel)
        scale = torch.zeros(panels * kernels.panel)
        of = torch.zeros(len(weight), 2, dtype=torch.long)  # which ranks an output has
        row = rank = 0
        for part, layer, r in zip(parts, self._linears, ranks, strict=True):
            rows = slice(row, row + layer.out_features)
            if part is not None:
                a, b, s = part
                first[rank : rank + len(a)] = a
                second[rows, rank : rank + len(a)] = b
                scale[rows] = s
            of[rows] = torch.tensor([rank, rank + r])
            row, rank = row + layer.out_features, rank + r
        spans = torch.tensor([[x[0, 0], x[-1, 1]] for x in of.split(kernels.panel)])
        return rank, [kernels.pack(first), kernels.pack(second), scale, spans]


def _is_plain(tensor: Tensor) -> bool:
    """Returns whether a weight is a parameter of numbers in order, and no subclass."""
    return type(tensor) is nn.Parameter and tensor.is_contiguous()


@torch.inference_mode(False)
@torch.no_grad()
def _as_views(parameters: Sequence[Tensor], buffer: Tensor | None) -> Tensor:
    """Makes parameters views of a buffer, one after the other; one alone is its own buffer.

    Args: buffer: an earlier one; None = a new one.
    """
    if len(parameters) == 1:
        return parameters[0]
    if buffer is None:
        buffer = torch.cat([p.detach() for p in parameters])
    for p, part in zip(parameters, buffer.split([len(p) for p in parameters]), strict=True):
        if p.untyped_storage()._cdata != buffer.untyped_storage()._cdata:
            part.copy_(p)
            p.data = part
    return buffer


def _linear(layer: nn.Module) -> nn.Linear:
    """Returns the linear layer below an adapter, or the layer itself."""
    base = plain_linear(layer)
    if base is None:
        raise TypeError(f"a product of linear layers was given a {type(layer).__name__}")
    return base
