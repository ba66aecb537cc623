"""Linear layers, gated MLPs and RMSNorms that train in less memory, in place of a Hugging Face module's own.

`FastLayers(module).enabled()` gives the layers other forwards while it lasts, around forward and backward; the module
and its parameters stay as they are. Each layer has been compared with its own forward before. On a CPU alone: in fp32
products run in oneDNN where torch's default library takes a slow path; in bf16 too a gated MLP keeps its two halves for
the backward pass and not their product, and a norm keeps its input, not the normalised one and no copy in fp32.
Dim legend: n rows, I in, O out, M width of the MLP. Left out on purpose: a choice of products by a timing, which would
make a run depend on the clock; rotary embeddings, which are not a module; and general products (matmul.py).
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from whet.models import matmul
from whet.models.adapters import is_adapter_layer
from whet.models.matmul import linear, onednn_unsupported_reason, row_chunks, weight_grad
from whet.native.build import Unavailable, log_fallback
from whet.native.layers import LayerKernels, layer_kernels
from whet.ops.masked import to_fp32

__all__ = ["FastLayers"]

CACHE_BLOCK = 1 << 17
"""Numbers of a tensor that several operations go through one after the other."""
LARGE_GATE = 30.0
"""Size of what the gate of an MLP is tried with: far beyond any clamp."""
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class FastLayers:
    """The layers of a module that can have another forward: the same numbers to rounding, gradients as well.

    A layer of a kind that isn't known, or whose numbers differ on a trial, keeps its own forward; so does one that has
    hooks by the time it runs.
    Args: module: the root; its parameters are read where they lie, so an optimizer may change them in between.

    Example: `fast = FastLayers(model)`, then `with fast.enabled(): loss(model(ids)).backward()`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers: list[tuple[nn.Module, Callable[[Any, Tensor], Tensor]]] = []
        first = next(module.parameters())
        if first.device.type != "cpu" or first.dtype not in (torch.float32, torch.float64, torch.bfloat16):
            return
        for layer in module.modules():
            if type(layer) is nn.Linear and first.dtype == torch.float32 and onednn_unsupported_reason() is None:
                self._layers.append((layer, _run_linear))
            elif _is_gated(layer) and _matches_module(layer, _run_gated):
                self._layers.append((layer, _run_gated))
            elif first.dtype != torch.float64 and _is_norm(layer) and _matches_module(layer, _run_norm):
                self._layers.append((layer, _run_norm))

    def __len__(self) -> int:
        """How many layers there are."""
        return len(self._layers)

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """The other forwards, around forward and backward passes."""
        changed = []
        for layer, run in self._layers:
            if _is_unmodified(layer):
                layer.__dict__["forward"] = functools.partial(run, layer)
                changed.append(layer)
        try:
            yield
        finally:
            for layer in changed:
                del layer.__dict__["forward"]


# ---- the functions ---------------------------------------------------------------------------------------------------


def _rows(x: Tensor) -> Tensor:
    """[n I] of [..., I], where n may be 0: an expert that no token goes to."""
    return x.reshape(-1, x.shape[-1])


class _Linear(torch.autograd.Function):
    """y = x Wᵀ + b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return linear(_rows(x), weight, bias).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = _rows(grad)
        return (
            linear(rows, weight.t()).view(*grad.shape[:-1], weight.shape[1]) if needs_x else None,
            weight_grad(rows, _rows(x)) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


class _Gated(torch.autograd.Function):
    """y = (silu(g) · u) Wᵀ + b; silu(g) · u is made again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return linear(_gate(_rows(gate), _rows(up)), weight, bias).view(*gate.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up, weight = ctx.saved_tensors
        needs_gate, needs_up, needs_weight, needs_bias = ctx.needs_input_grad
        rows, g, u = _rows(grad), _rows(gate), _rows(up)
        if needs_gate or needs_up:
            d_gate, d_up, inner = _gate_grads(g, u, linear(rows, weight.t()), needs_weight)
        else:
            d_gate, d_up, inner = None, None, _gate(g, u) if needs_weight else None
        like = lambda x, other: None if x is None else x.view_as(other)
        d_weight = None if inner is None else weight_grad(rows, inner)
        return like(d_gate, gate), like(d_up, up), d_weight, rows.sum(0) if needs_bias else None


class _GatedProduct(torch.autograd.Function):
    """y = silu(g) · u, in front of a down projection that has an adapter: what its A is trained with is kept."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gate(_rows(gate), _rows(up)).view_as(gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        own = _rows(grad).clone()  # the gradient of up is written in its place
        d_gate, d_up, _ = _gate_grads(_rows(gate), _rows(up), own, False)
        return d_gate.view_as(gate), d_up.view_as(up)


class _Norm(torch.autograd.Function):
    """y = (x r) w, r = (mean(x²) + ε)^-½. ∂/∂x = r (g w) − x r³ mean(g w x).

    In bf16 x r is rounded before it meets w, as modules do it; all else is in fp32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        rows = _rows(x)
        y, r = _norm(rows, weight, epsilon)
        ctx.save_for_backward(x, weight, r)
        return y.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, r = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        d_x, d_weight = _norm_grads(_rows(x), weight, r, _rows(grad), needs_x, needs_weight)
        return None if d_x is None else d_x.view_as(grad), None if d_weight is None else d_weight.to(weight.dtype), None


# ---- element by element: in one pass of C++, or by torch in parts that stay in the cache -----------------------------


def _native(*tensors: Tensor) -> LayerKernels | None:
    """The kernels, if they can take these rows."""
    if tensors[0].dtype not in (torch.float32, torch.bfloat16):
        return None
    kernels = layer_kernels()
    if isinstance(kernels, Unavailable):
        log_fallback("norms, gates and gradients of weights in training", kernels.reason)
        return None
    return kernels if kernels.fit(*tensors) else None


def _cache_blocks(rows: Tensor) -> Iterator[slice]:
    """Rows [n, d] a few at a time, so that what is made of them stays in the cache."""
    return row_chunks(len(rows), max(1, CACHE_BLOCK // max(1, rows.shape[1])))


def _gate(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, [n M]."""
    if kernels := _native(gate, up):
        return kernels.gated(gate, up)
    inner = torch.empty_like(gate)
    for part in _cache_blocks(gate):
        torch.mul(F.silu(gate[part]), up[part], out=inner[part])
    return inner


def _gate_grads(gate: Tensor, up: Tensor, grad: Tensor, product: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of silu(gate) · up, that of up in the place of `grad`, and, where wanted, the product again."""
    if kernels := _native(gate, up, grad):
        return kernels.gated_grads(gate, up, grad, product=product)
    inner, d_gate = torch.empty_like(gate) if product else None, torch.empty_like(grad)
    for part in _cache_blocks(gate):
        act = F.silu(gate[part])
        if inner is not None:
            torch.mul(act, up[part], out=inner[part])
        torch.ops.aten.silu_backward.grad_input(grad[part] * up[part], gate[part], grad_input=d_gate[part])
        grad[part].mul_(act)
    return d_gate, grad, inner


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(x r) w, [n d], and r, [n], in fp32 or float64."""
    if kernels := _native(x, weight):
        return kernels.norm(x, weight, epsilon)
    wide = to_fp32(x)
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    r = length.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
    return (wide * r).to(x.dtype).mul_(weight), r[:, 0]


def _norm_grads(
    x: Tensor, weight: Tensor, r: Tensor, grad: Tensor, of_x: bool, of_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of (x r) w, those wanted: [n d], and [d] in fp32 or float64."""
    if kernels := _native(x, weight, grad):
        return kernels.norm_grads(x, weight, r, grad, of_x=of_x, of_weight=of_weight)
    w = to_fp32(weight)
    d_x = torch.empty_like(grad) if of_x else None
    terms = grad.new_empty(grad.shape, dtype=w.dtype) if of_weight else None
    for part in _cache_blocks(grad):
        a, b, c = to_fp32(x[part]), to_fp32(grad[part]), r[part, None]
        if terms is not None:
            torch.mul(b, a, out=terms[part]).mul_(c)
        if d_x is not None:
            inner = b * w
            # no product of a matrix and a vector: a row's rounding must not depend on how many rows there are
            slope = (inner * a).sum(-1, keepdim=True).mul_(c**3).div_(-x.shape[-1])
            d_x[part] = inner.mul_(c).addcmul_(a, slope)
    return d_x, None if terms is None else terms.sum(0)


# ---- which layers ----------------------------------------------------------------------------------------------------


def _is_unmodified(layer: nn.Module) -> bool:
    """Whether nothing but its class says what a layer does, and its parameters are plain ones."""
    hooked = any(vars(layer)[name] for name in HOOKS)
    return not hooked and "forward" not in vars(layer) and all(type(p) is nn.Parameter for p in layer.parameters(False))


def _is_replaced(layer: nn.Module) -> bool:
    """Whether its forward is the one that `enabled` gave to it."""
    found = vars(layer).get("forward")
    return isinstance(found, functools.partial) and found.func is _run_linear


def _matches_module(layer: nn.Module, run: Callable[[Any, Tensor], Tensor]) -> bool:
    """Whether `run` gives what the layer's own forward gives, on trials; in bf16 nearly always bit for bit.

    A norm is tried with weights that are not all 1, an MLP with numbers so large that a clamp would show. A sum in
    another order moves a number of fp32 in its last place, and so one in thousands of bf16 by one of its own; a
    rounding at another place moves many.
    """
    if len(inspect.signature(type(layer).forward).parameters) != 2:  # itself and x: no gate, no mask
        return False
    weight = next(layer.parameters())
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, weight.shape[-1], generator=generator, dtype=torch.float64).to(weight)
    with torch.no_grad():
        if weight.dim() == 1:
            trial = copy.deepcopy(layer)
            next(trial.parameters()).uniform_(0.5, 1.5, generator=generator)
            return _is_close(run(trial, x), trial(x))
        size = layer.get_submodule("gate_proj")(x).double().std().clamp(min=1e-3).item()
        return all(_is_close(run(layer, y), layer(y)) for y in (x, x * (LARGE_GATE / size)))


def _is_close(got: Tensor, want: Tensor) -> bool:
    """Whether two results agree; zeros say nothing."""
    if want.dtype == torch.bfloat16 and (got != want).double().mean() > 0.01:
        return False
    limit = 1e-5 if want.dtype != torch.bfloat16 else torch.finfo(torch.bfloat16).eps
    return bool(want.abs().max() > 0 and (got - want).abs().max() <= limit * want.abs().max())


def _run_linear(layer: Any, x: Tensor) -> Tensor:
    if x.dtype != torch.float32 or x.numel() * layer.out_features < matmul.MIN_MULTIPLICATIONS:
        return F.linear(x, layer.weight, layer.bias)
    return _Linear.apply(x, layer.weight, layer.bias)  # pyright: ignore[reportReturnType]


def _is_gated(layer: nn.Module) -> bool:
    """Whether a layer has the parts of down(act(gate(x)) * up(x)); each may have an adapter."""
    parts = dict(layer.named_children())
    return set(parts) == MLP_PARTS and type(_base_layer(parts["down_proj"])) is nn.Linear


def _base_layer(layer: Any) -> nn.Module:
    """A layer without its adapter."""
    return layer.get_base_layer() if is_adapter_layer(layer) else layer


def _run_gated(layer: Any, x: Tensor) -> Tensor:
    gate, up, down = layer.gate_proj(x), layer.up_proj(x), layer.down_proj
    if is_adapter_layer(down):
        if not down.disable_adapters:
            return down(_GatedProduct.apply(gate, up))
        down = down.get_base_layer()  # as the bare model, bit for bit
    if not _is_unmodified(down) and not _is_replaced(down):
        return down(layer.act_fn(gate) * up)
    return _Gated.apply(gate, up, down.weight, down.bias)  # pyright: ignore[reportReturnType]


def _is_norm(layer: nn.Module) -> bool:
    """Whether a layer has the parts of an RMSNorm times its weight."""
    # in float64 too the modules norm in fp32: there they keep their own
    named = [name for name, _ in layer.named_parameters()]
    return named == ["weight"] and isinstance(vars(layer).get("variance_epsilon"), float)


def _run_norm(layer: Any, x: Tensor) -> Tensor:
    if x.dtype != layer.weight.dtype:
        return type(layer).forward(layer, x)
    return _Norm.apply(x, layer.weight, layer.variance_epsilon)  # pyright: ignore[reportReturnType]
