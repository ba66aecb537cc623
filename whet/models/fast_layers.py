"""Linear layers, gated MLPs and RMSNorms that train faster and in less memory than those of a Hugging Face module.

Inside `FastLayers(module).enabled()` the layers have other forward functions, for forward and backward passes. The
module and its parameters do not change. Each replacement is compared with the layer's own forward first.
A gated MLP saves its two halves for the backward pass, which computes the activation and the product again, and a norm
saves only its input. On a GPU that is so in half precision, with the bits of the module's own MLP, but for a few where
the gate is one kernel (compiled.py). A norm is torch's there, one kernel in place of six, and a layer with LoRA is
eight products, forward and backward, in place of twelve kernels: as in the engine's decode steps they round once where
the module rounds twice or thrice. Rotary embeddings, which are no layers, are rotary.py's there. On a CPU, products in
fp32 run in oneDNN where torch's default library is slow. On the meta device the layers are those of a GPU, without a
comparison, so that a plan of memory can count them.
Dim legend: n rows, I in, O out, r rank, M width of the MLP.
Left out on purpose: choosing a library by timing, because then a run would depend on the clock; and general products
(matmul.py).
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.activations import SiLUActivation

from whet.models import matmul
from whet.models.compiled import gate_grads, gate_grads_and_product, gated, in_one_kernel
from whet.models.lora_layers import is_adapter_layer, plain_linear, sole_adapter
from whet.models.matmul import linear, onednn_unsupported_reason, row_chunks, weight_grad
from whet.models.rotary import RotaryFunctions
from whet.native.build import Unavailable, log_fallback
from whet.native.layers import LayerKernels, layer_kernels
from whet.ops.masked import to_fp32
from whet.util.tensor_subclasses import is_sharded

__all__ = ["FastLayers"]

Run = Callable[[Any, Tensor], Tensor]
"""A layer's other forward function, of the layer and its input."""

CACHE_BLOCK = 1 << 17
"""Elements per block when several operations process a tensor block by block, so that a block stays in the cache."""
LARGE_GATE = 30.0
"""Size of the gate's values in the second comparison of an MLP, far beyond any clamp."""
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class FastLayers:
    """The layers of a module that have a faster forward with the same outputs and gradients, up to rounding.

    A layer keeps its own forward if its kind is not known, if its outputs differ in the comparison, or if it has hooks
    or sharded parameters when it runs.
    Args: module: the root. Its parameters are not copied, so an optimizer may update them. parts: where processes have
        shards of them, the modules that hold them, each with whole parameters while it is the current one; None = the
        root.

    Example: `fast = FastLayers(model)`, then `with fast.enabled(): loss(model(ids)).backward()`.
    """

    def __init__(self, module: nn.Module, parts: Iterable[nn.Module] | None = None) -> None:
        self._module = module
        self._layers: list[tuple[nn.Module, Run]] = []
        self._rotary: RotaryFunctions | None = None
        for part in [module] if parts is None else parts:
            if (first := next((p for p in part.parameters() if not is_sharded(p)), None)) is None:
                continue
            if first.device.type in ("cuda", "meta") and first.dtype.itemsize == 2:
                if not first.is_meta and self._rotary is None:  # it saves what the module's own saves
                    self._rotary = RotaryFunctions(module, first)
                self._layers += _in_fewer_kernels(part)
            elif first.device.type == "cpu" and first.dtype in (torch.float32, torch.float64, torch.bfloat16):
                self._layers += _on_a_cpu(part, first.dtype)

    def __len__(self) -> int:
        """Returns the number of layers with a faster forward."""
        return len(self._layers)

    def agree(self, all_gather: Callable[[Any], list[Any]]) -> None:
        """Keeps what all processes have found, so that all run the same. Args: all_gather: returns each one's value."""
        names = {layer: name for name, layer in self._module.named_modules()}
        own = {(names[layer], run.__name__): (layer, run) for layer, run in self._layers}
        found = all_gather(([*own], self._rotary is not None and len(self._rotary)))
        common = set(own).intersection(*(layers for layers, _ in found))
        self._layers = [pair for key, pair in own.items() if key in common]
        if len({rotary for _, rotary in found}) > 1:
            self._rotary = None

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Uses the faster forwards inside the context; forward and backward passes go inside."""
        changed = []
        for layer, run in self._layers:
            if _is_unmodified(layer):
                layer.__dict__["forward"] = functools.partial(_run_whole, run, layer)
                changed.append(layer)
        try:
            with nullcontext() if self._rotary is None else self._rotary.enabled():
                yield
        finally:
            for layer in changed:
                del layer.__dict__["forward"]


# ---- the functions ---------------------------------------------------------------------------------------------------


def _rows(x: Tensor) -> Tensor:
    """[..., I] as [n I]; n may be 0, for an expert without tokens."""
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


class _Adapted(torch.autograd.Function):
    """y = x Wᵀ + b + s x Aᵀ Bᵀ, with a frozen W and b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        rows = _rows(x)
        inner = F.linear(rows, a)
        ctx.scale = scale
        ctx.save_for_backward(x if ctx.needs_input_grad[3] else None, weight, a, b, inner)
        y = F.linear(rows, weight, bias).addmm_(inner, b.t(), alpha=scale)
        return y.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, a, b, inner = ctx.saved_tensors
        rows, d_x, d_a, d_b = _rows(grad), None, None, None
        scaled = lambda p, q: torch.addmm(rows.new_empty(()), p, q, beta=0, alpha=ctx.scale)  # beta=0: it is not read
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[3]:
            d_inner = scaled(rows, b)
            if ctx.needs_input_grad[0]:
                d_x = (rows @ weight).addmm_(d_inner, a).view(*grad.shape[:-1], weight.shape[1])
            if ctx.needs_input_grad[3]:
                d_a = d_inner.t() @ _rows(x)
        if ctx.needs_input_grad[4]:
            d_b = scaled(rows.t(), inner)
        return d_x, None, None, d_a, d_b, None


class _Gated(torch.autograd.Function):
    """y = (silu(g) · u) Wᵀ + b; the backward pass computes silu(g) · u again."""

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
    """y = silu(g) · u, before a down projection with an adapter, which saves y itself for the gradient of its A."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gate(_rows(gate), _rows(up)).view_as(gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        g, u, rows = _rows(gate), _rows(up), _rows(grad)
        d_gate, d_up, *_ = in_one_kernel(gate_grads, g, u, rows) or _gate_grads(g, u, rows.clone(), False)
        return d_gate.view_as(gate), d_up.view_as(up)


class _KernelNorm(torch.autograd.Function):
    """The shapes of torch's norm in one kernel, and what it saves; for other devices than a GPU torch saves more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class _Norm(torch.autograd.Function):
    """y = (x r) w, r = (mean(x²) + ε)^-½. ∂/∂x = r (g w) − x r³ mean(g w x).

    In bf16, x r is rounded before the product with w, as in the modules; all else is in fp32.
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
    """Returns the native kernels; None = they can't process these rows."""
    if tensors[0].device.type != "cpu" or tensors[0].dtype not in (torch.float32, torch.bfloat16):
        return None
    kernels = layer_kernels()
    if isinstance(kernels, Unavailable):
        log_fallback("norms, gates and gradients of weights in training", kernels.reason)
        return None
    return kernels if kernels.fit(*tensors) else None


def _cache_blocks(rows: Tensor) -> Iterator[slice]:
    """Slices of the rows [n, d], so small that the results for a slice stay in a processor's cache; one on a GPU."""
    size = CACHE_BLOCK // max(1, rows.shape[1]) if rows.device.type == "cpu" else len(rows)
    return row_chunks(len(rows), max(1, size))


def _gate(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, [n M]."""
    if kernels := _native(gate, up):
        return kernels.gated(gate, up)
    if (product := in_one_kernel(gated, gate, up)) is not None:
        return product
    inner = torch.empty_like(gate)
    for part in _cache_blocks(gate):
        torch.mul(F.silu(gate[part]), up[part], out=inner[part])
    return inner


def _gate_grads(gate: Tensor, up: Tensor, grad: Tensor, product: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the gradients of silu(gate) · up, and the product again if `product`. The gradient of up may overwrite
    `grad`.
    """
    if kernels := _native(gate, up, grad):
        return kernels.gated_grads(gate, up, grad, product=product)
    if grads := in_one_kernel(gate_grads_and_product if product else gate_grads, gate, up, grad):
        return grads if product else (*grads, None)
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
    """Returns the gradients of (x r) w that are needed: [n d], and [d] in fp32 or float64."""
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
            # not a matrix-vector product: the rounding of a row must not depend on the number of rows
            slope = (inner * a).sum(-1, keepdim=True).mul_(c**3).div_(-x.shape[-1])
            d_x[part] = inner.mul_(c).addcmul_(a, slope)
    return d_x, None if terms is None else terms.sum(0)


# ---- which layers ----------------------------------------------------------------------------------------------------


def _on_a_cpu(module: nn.Module, dtype: torch.dtype) -> list[tuple[nn.Module, Run]]:
    """Returns a CPU's layers, each with its function: linear ones by oneDNN, gated MLPs and norms."""
    layers: list[tuple[nn.Module, Run]] = []
    for layer in _whole_layers(module):
        if type(layer) is nn.Linear and dtype == torch.float32 and onednn_unsupported_reason() is None:
            layers.append((layer, _run_linear))
        elif _is_gated(layer) and _matches_module(layer, _run_gated):
            layers.append((layer, _run_gated))
        # in float64 the modules normalise in fp32, and _Norm does not: there they keep their own forward
        elif dtype != torch.float64 and _is_norm(layer) and _matches_module(layer, _run_norm):
            layers.append((layer, _run_norm))
    return layers


def _in_fewer_kernels(module: nn.Module) -> list[tuple[nn.Module, Run]]:
    """Returns a GPU's layers, each with its function: norms by torch's kernel, those with LoRA, and gated MLPs."""
    layers: list[tuple[nn.Module, Run]] = []
    for layer in _whole_layers(module):
        if _is_norm(layer) and _matches_module(layer, _run_norm_in_one):
            layers.append((layer, _run_norm_in_one))
        elif is_adapter_layer(layer) and plain_linear(layer) is not None and _matches_adapter(layer):
            layers.append((layer, _run_adapted))
        elif _is_gated(layer) and _matches_module(layer, _run_gated):
            layers.append((layer, _run_gated))
    return layers


def _whole_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the layers of which this process has all parameters."""
    return (layer for layer in module.modules() if not any(map(is_sharded, layer.parameters())))


def _is_unmodified(layer: nn.Module) -> bool:
    """Returns whether a layer has no hooks and no forward of its own."""
    return not any(vars(layer)[name] for name in HOOKS) and "forward" not in vars(layer)


def _is_plain(layer: nn.Module) -> bool:
    """Returns whether a layer's own parameters are plain tensors."""
    return all(type(p) is nn.Parameter for p in layer.parameters(False))


def _is_replaced(layer: nn.Module) -> bool:
    """Returns whether `enabled` has replaced the forward of a linear layer."""
    forward = vars(layer).get("forward")
    return isinstance(forward, functools.partial) and forward.args[:1] == (_run_linear,)


def _run_whole(run: Run, layer: nn.Module, x: Tensor) -> Tensor:
    """Runs a layer by another function if its parameters are plain now: FSDP's are while it runs the module."""
    return run(layer, x) if _is_plain(layer) else type(layer).forward(layer, x)


def _matches_module(layer: nn.Module, run: Run) -> bool:
    """Returns whether `run` computes the same as the layer's own forward, on random inputs; in bf16 nearly always bit
    for bit.

    A norm is compared with weights other than 1, and an MLP also with numbers so large that a clamp would show. Another
    order of summation changes the last bit of an fp32 number, and so one bf16 number in thousands. Rounding at another
    place changes many of them.
    """
    if len(inspect.signature(type(layer).forward).parameters) != 2:  # self and x: no gate, no mask
        return False
    weight, trial = next(layer.parameters()), layer
    if weight.dim() == 1:
        trial = copy.deepcopy(layer)
        weight = next((trial.to_empty(device="cpu") if weight.is_meta else trial).parameters())
    elif weight.is_meta:
        return isinstance(layer.act_fn, nn.SiLU | SiLUActivation)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, weight.shape[-1], generator=generator, dtype=torch.float64).to(weight)
    with torch.no_grad():
        if weight.dim() == 1:
            weight.copy_(torch.rand(len(weight), generator=generator) + 0.5)
            return _is_close(run(trial, x), trial(x), once=run is _run_norm_in_one)
        size = layer.get_submodule("gate_proj")(x).double().std().clamp(min=1e-3).item()
        return all(_is_close(run(layer, y), layer(y)) for y in (x, x * (LARGE_GATE / size)))


def _matches_adapter(layer: Any) -> bool:
    """Returns whether `_run_adapted` computes the same as a layer with LoRA, with other numbers than the zeros of B."""
    trial, weight = copy.copy(layer), plain_linear(layer).weight  # pyright: ignore[reportOptionalMemberAccess]
    if weight.is_meta:
        return True
    trial._modules = {**layer._modules, "lora_B": copy.deepcopy(layer.lora_B)}
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(weight)
    with torch.no_grad():
        for second in trial.lora_B.values():
            second.weight.copy_(draw(*second.weight.shape))
        x = draw(16, weight.shape[1])
        actual, expected = _run_adapted(trial, x), type(layer).forward(trial, x)
    return bool((actual - expected).abs().max() <= 4 * torch.finfo(x.dtype).eps * expected.abs().max())


def _is_close(actual: Tensor, expected: Tensor, *, once: bool = False) -> bool:
    """Returns whether two results agree; False if all numbers are 0, which would show nothing.

    Args: once: the one is rounded once, and the other more often.
    """
    if once:
        limit = 2 * torch.finfo(expected.dtype).eps
        return bool((expected.abs() > 0).any() and ((actual - expected).abs() <= limit * expected.abs()).all())
    if expected.dtype == torch.bfloat16 and (actual != expected).double().mean() > 0.01:
        return False
    limit = 1e-5 if expected.dtype != torch.bfloat16 else torch.finfo(torch.bfloat16).eps
    largest = expected.abs().max()
    return bool(largest > 0 and (actual - expected).abs().max() <= limit * largest)


def _run_linear(layer: Any, x: Tensor) -> Tensor:
    if x.dtype != torch.float32 or x.numel() * layer.out_features < matmul.MIN_MULTIPLICATIONS:
        return F.linear(x, layer.weight, layer.bias)
    return _Linear.apply(x, layer.weight, layer.bias)  # pyright: ignore[reportReturnType]


def _run_adapted(layer: Any, x: Tensor) -> Tensor:
    base, adapter = layer.get_base_layer(), sole_adapter(layer)
    frozen = not any(p.requires_grad for p in base.parameters())
    if adapter is None or not frozen or not x.dtype == base.weight.dtype == adapter[0].dtype == adapter[1].dtype:
        return type(layer).forward(layer, x)
    return _Adapted.apply(x, base.weight, base.bias, *adapter)  # pyright: ignore[reportReturnType]


def _is_gated(layer: nn.Module) -> bool:
    """Returns whether a layer has the submodules of down(act(gate(x)) * up(x)); each may have an adapter."""
    parts = dict(layer.named_children())
    if set(parts) != MLP_PARTS:
        return False
    down: Any = parts["down_proj"]
    return type(down.get_base_layer() if is_adapter_layer(down) else down) is nn.Linear


def _run_gated(layer: Any, x: Tensor) -> Tensor:
    gate, up, down = layer.gate_proj(x), layer.up_proj(x), layer.down_proj
    if is_adapter_layer(down):
        if not down.disable_adapters:
            return down(_GatedProduct.apply(gate, up))
        down = down.get_base_layer()  # the same as in the base model, bit for bit
    if not _is_plain(down) or not (_is_unmodified(down) or _is_replaced(down)):
        return down(layer.act_fn(gate) * up)
    return _Gated.apply(gate, up, down.weight, down.bias)  # pyright: ignore[reportReturnType]


def _is_norm(layer: nn.Module) -> bool:
    """Returns whether a layer has the weight and the epsilon of an RMSNorm."""
    named = [name for name, _ in layer.named_parameters()]
    return named == ["weight"] and isinstance(vars(layer).get("variance_epsilon"), float)


def _run_norm_in_one(layer: Any, x: Tensor) -> Tensor:
    if x.dtype != layer.weight.dtype:
        return type(layer).forward(layer, x)
    if x.is_meta:
        return _KernelNorm.apply(x, layer.weight)  # pyright: ignore[reportReturnType]
    return F.rms_norm(x, x.shape[-1:], layer.weight, layer.variance_epsilon)


def _run_norm(layer: Any, x: Tensor) -> Tensor:
    if x.dtype != layer.weight.dtype:
        return type(layer).forward(layer, x)
    return _Norm.apply(x, layer.weight, layer.variance_epsilon)  # pyright: ignore[reportReturnType]
