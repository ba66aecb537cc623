"""Computes logits from hidden states by a linear head, and their gradients, one chunk of rows at a time.

Autograd functions over a head's logits share it: they compute logits in the forward pass and again in the backward one.
Dim legend: s rows (hidden states with a target), D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whet.models.matmul import linear, weight_grad
from whet.ops.masked import to_fp32

__all__ = ["HeadGrads", "Projection"]


@dataclass(frozen=True)
class Projection:
    """z = cap(scale · (W h + b)) / τ, cap(x) = c tanh(x / c) where softcap c is given.

    >>> Projection(temperature=2.0).logits(torch.ones(1, 2), torch.ones(3, 2), None)
    tensor([[1., 1., 1.]])
    """

    temperature: float = 1.0
    """τ > 0."""
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[s V] in fp32 or float64: Head.logits divided by the temperature, in one buffer and with fewer roundings."""
        z = to_fp32(linear(hidden, weight, bias))
        if self.softcap is not None:
            return z.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)
        return z if self.scale == self.temperature else z.mul_(self.scale / self.temperature)

    def backward_(self, d: Tensor, z: Tensor) -> Tensor:
        """The gradient of z as that of W h + b: [s V], in place of d."""
        if self.softcap is not None:
            d *= 1 - (z * (self.temperature / self.softcap)).square()
        d *= self.scale / self.temperature
        return d


class HeadGrads:
    """The gradients of a head's inputs, from those of W h + b, added up chunk by chunk.

    Args: hidden [s D], weight [V D], bias [V]: of the whole. needs: which of the three have a gradient. dtype: what
        those of weight and bias are summed in.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool], dtype: torch.dtype
    ) -> None:
        self._inputs = hidden, weight, bias
        needs_hidden, needs_weight, needs_bias = needs
        self._hidden = torch.empty_like(hidden) if needs_hidden else None
        self._weight = weight.new_zeros(weight.shape, dtype=dtype) if needs_weight else None
        self._bias = weight.new_zeros(weight.shape[0], dtype=dtype) if needs_bias else None

    def add(self, rows: slice, d: Tensor) -> None:
        """Adds a chunk. Args: rows: of the hidden states. d: [rows V], the gradient of W h + b."""
        hidden, weight, _ = self._inputs
        if self._bias is not None:
            self._bias += d.sum(0)
        d = d.to(hidden.dtype)
        if self._hidden is not None:
            self._hidden[rows] = linear(d, weight.t())
        if self._weight is not None and d.dtype == self._weight.dtype:
            weight_grad(d, hidden[rows], into=self._weight)  # a product of its own would be as large as the weight
        elif self._weight is not None:
            self._weight += weight_grad(d, hidden[rows])

    def sums(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of hidden, weight and bias, in their dtypes; None where none is needed."""
        _, weight, bias = self._inputs
        made = None if self._bias is None or bias is None else self._bias.to(bias.dtype)
        return self._hidden, None if self._weight is None else self._weight.to(weight.dtype), made
