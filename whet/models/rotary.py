"""Rotary embeddings in training on a GPU: one kernel a tensor forward and one backward, in place of five and nine.

    y = x cos + h(x) sin, where h(x) = [-x₂, x₁] of the halves of x;  as here, y = x cos + r(x) s,
    where r(x) = [x₂, x₁] and s = [-sin₁, sin₂];                      ∂/∂x = g cos + r(g s) = g cos + r(g) r(s)

transformers has a function for it in each model's file, which `RotaryFunctions.enabled` replaces for a while. It has
the formula of the engine's decode steps, with one rounding less than that function, so sampler and trainer round alike.
Where it can't be compiled (compiled.py), it takes three kernels each way.
Dim legend: B rows, H heads, T tokens, D head size.
Left out on purpose: rotary embeddings of a part of a head, and of neighbouring numbers: their own functions run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from whet.models.compiled import in_one_kernel, rotated

__all__ = ["RotaryFunctions", "rotate"]

NAME = "apply_rotary_pos_emb"
"""Of the function in transformers' files."""


class RotaryFunctions:
    """The functions of a module's files that `rotate` computes.

    Args: module: a model. like: a tensor of its dtype, on the device of its passes; None = its first parameter.

    Example: `with RotaryFunctions(model).enabled(): loss(model(ids)).backward()`.
    """

    def __init__(self, module: nn.Module, like: Tensor | None = None) -> None:
        first = next(module.parameters()) if like is None else like
        files = {sys.modules[type(m).__module__] for m in module.modules() if type(m).__module__ in sys.modules}
        own = [(f, getattr(f, NAME)) for f in files if hasattr(f, NAME)]
        own = [(f, getattr(function, "own", function)) for f, function in own]
        self._found = [(f, _replacement(x, first.device.type)) for f, x in own if _matches(x, first)]

    def __len__(self) -> int:
        return len(self._found)

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Replaces the functions inside the context, for tensors on the model's kind of device."""
        try:
            for file, function in self._found:
                setattr(file, NAME, function)
            yield
        finally:
            for file, function in self._found:
                setattr(file, NAME, function.own)


class _Rotated(torch.autograd.Function):
    """y = x cos + r(x) s. Args: x: [B H T D]. cos, signed, back: [B 1 T D], s and r(s)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, signed: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(cos, back)
        return _rotated(x, cos, signed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, back = ctx.saved_tensors
        return _rotated(grad, cos, back), None, None, None


def _rotated(x: Tensor, cos: Tensor, signed: Tensor) -> Tensor:
    """Returns x cos + r(x) s, of [B H T D] and [B 1 T D]."""
    rows = x.transpose(1, 2)  # as models have them in memory
    if rows.is_contiguous() and len(cos) == len(x):
        y = in_one_kernel(rotated, rows.flatten(0, 1), cos.flatten(0, 2), signed.flatten(0, 2))
        if y is not None:
            return y.view_as(rows).transpose(1, 2)
    return (x * cos).addcmul_(_swapped(x), signed)


def _swapped(x: Tensor) -> Tensor:
    """The halves of [B H T D] exchanged; its numbers lie in the order of [B T H D], which `roll` would copy."""
    return x.transpose(1, 2).roll(x.shape[-1] // 2, -1).transpose(1, 2)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys. Args: q, k: [B H T D]. cos, sin: [B T D], without gradient. Returns: both, rotated.

    >>> cos, sin = torch.zeros(1, 1, 2), torch.ones(1, 1, 2)  # a quarter of a turn
    >>> x = torch.tensor([3.0, 4.0]).view(1, 1, 1, 2)
    >>> rotate(x, x, cos, sin)[0].flatten()
    tensor([-4.,  3.])
    """
    if (tables := getattr(sin, "_whet_tables", None)) is None:  # all layers get the same tensor
        low, high = sin.chunk(2, -1)
        signed = torch.cat([-low, high], -1).unsqueeze(1)
        tables = sin._whet_tables = signed, signed.roll(signed.shape[-1] // 2, -1)  # type: ignore[attr-defined]
    return tuple(_Rotated.apply(x, cos.unsqueeze(1), *tables) for x in (q, k))  # type: ignore[return-value]


def _replacement(own: Callable[..., Any], device: str) -> Any:
    """Returns `rotate`, which leaves other calls to a file's own function."""

    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **options: Any) -> Any:
        fits = q.device.type == device and q.dtype == k.dtype == cos.dtype and q.shape[-1] == cos.shape[-1]
        if args or options or not fits or cos.dim() != 3 or cos.requires_grad:
            return own(q, k, cos, sin, *args, **options)
        return rotate(q, k, cos, sin)

    function.own = own  # type: ignore[attr-defined]
    return function


def _matches(own: Callable[..., Any], like: Tensor) -> bool:
    """Returns whether `rotate` computes the same as a file's own function, but for one rounding less."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.rand(shape, generator=generator).to(like)
    q, k, cos, sin = draw(1, 3, 5, 16), draw(1, 2, 5, 16), draw(1, 5, 16), draw(1, 5, 16)
    try:
        with torch.no_grad():
            expected, found = own(q, k, cos, sin), rotate(q, k, cos, sin)
    except (IndexError, RuntimeError, TypeError, ValueError):  # it takes other arguments
        return False
    limit = 2 * torch.finfo(like.dtype).eps
    return all(a.shape == b.shape and bool(((a - b).abs() <= limit * 2).all()) for a, b in zip(found, expected))
