"""The logits of a linear head and their gradients, one chunk of rows at a time.

Two autograd functions use it: linear_logprob and linear_divergence. They compute the logits in the forward pass, and
again in the backward pass.
Dim legend: s rows (hidden states with a target), D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whet.models.matmul import linear, weight_grad
from whet.ops.masked import to_fp32

__all__ = ["CHUNK_BYTES", "HeadGrads", "Projection", "chunk_rows"]

CHUNK_BYTES = 100_000_000
"""Size of the logits of one chunk on a CPU."""
GPU_ROWS = 2048
"""Rows of a chunk on a GPU: each adds a product of the size of the weight to the gradient, which 2,048 rows repay."""


def chunk_rows(rows: int, row_bytes: int, device: torch.device, *, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Returns the rows of one chunk of logits.

    On a GPU a pass has four chunks, or more of 2,048 rows: fewer tokens in a micro-batch need less memory here too.

    Args: rows: of the pass. row_bytes: of the logits of one row. device: of the logits. chunk_bytes: of one chunk,
        which a GPU takes for the least.

    >>> chunk_rows(16_384, 600_000, torch.device("cpu")), chunk_rows(16_384, 600_000, torch.device("cuda"))
    (166, 2048)
    >>> chunk_rows(4096, 600_000, torch.device("cuda")), chunk_rows(256, 600_000, torch.device("cuda"))
    (1024, 166)
    """
    fitting = max(1, chunk_bytes // row_bytes)
    return fitting if device.type != "cuda" else max(fitting, min(GPU_ROWS, -(-rows // 4)))


@dataclass(frozen=True)
class Projection:
    """z = cap(scale · (W h + b)) / τ, where cap(x) = c tanh(x / c) with a softcap c, and cap(x) = x without.

    >>> Projection(temperature=2.0).logits(torch.ones(1, 2), torch.ones(3, 2), None)
    tensor([[1., 1., 1.]])
    """

    temperature: float = 1.0
    """τ > 0."""
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the logits [s V], in fp32 or float64: Head.logits / temperature, in one buffer and with fewer
        roundings.
        """
        z = to_fp32(linear(hidden, weight, bias))
        if self.softcap is not None:
            return z.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)
        return z if self.scale == self.temperature else z.mul_(self.scale / self.temperature)

    def backward_(self, d: Tensor, z: Tensor) -> Tensor:
        """Turns the gradient d of z into the gradient of W h + b, in place: [s V]. Args: z: the logits."""
        if self.softcap is not None:
            d *= (z * (self.temperature / self.softcap)).square_().neg_().add_(1)
        d *= self.scale / self.temperature
        return d


class HeadGrads:
    """Sums the gradients of a head's inputs over chunks, from the gradients of W h + b.

    Args: hidden [s D], weight [V D], bias [V]: the inputs. needs: which of the three need a gradient. dtype: the
        gradients of weight and bias are summed in it.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool], dtype: torch.dtype
    ) -> None:
        self._inputs = hidden, weight, bias
        needs_hidden, needs_weight, needs_bias = needs
        self._hidden = torch.empty_like(hidden) if needs_hidden else None
        self._needs_weight, self._dtype = needs_weight, dtype
        self._weight: Tensor | None = None
        self._bias = weight.new_zeros(weight.shape[0], dtype=dtype) if needs_bias else None

    def add(self, rows: slice, d: Tensor) -> None:
        """Adds a chunk. Args: rows: the rows of the chunk. d: [rows V], the gradient of W h + b."""
        hidden, weight, _ = self._inputs
        if self._bias is not None:
            self._bias += d.sum(0)
        d = d.to(hidden.dtype)
        if self._hidden is not None:
            self._hidden[rows] = linear(d, weight.t())
        if not self._needs_weight:
            return
        if self._weight is None:  # the only chunk, mostly: no sum of its own, which is as large as the weight
            self._weight = weight_grad(d, hidden[rows])
        elif d.dtype == self._dtype:
            weight_grad(d, hidden[rows], into=self._weight)  # a separate product would be as large as the weight
        else:
            self._weight = self._weight.to(self._dtype)
            self._weight += weight_grad(d, hidden[rows])

    def sums(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns the gradients of hidden, weight and bias in their dtypes; None for those that are not needed."""
        _, weight, bias = self._inputs
        if self._weight is None and self._needs_weight:
            self._weight = torch.zeros_like(weight)
        d_bias = None if self._bias is None or bias is None else self._bias.to(bias.dtype)
        return self._hidden, None if self._weight is None else self._weight.to(weight.dtype), d_bias
