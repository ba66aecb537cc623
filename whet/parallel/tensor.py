"""Tensor parallelism (Megatron-LM, arXiv 1909.08053): processes divide the matrices of each layer.

    q, k, v, gate and up projections    by rows: each process has the outputs of some heads, and of some MLP columns
    o and down projections              by columns: each process adds a part of every output, summed over the processes
    norms of q and k                    whole, though each process norms its own heads only: their gradients are summed
                                        over the processes once per update
    embedding, other norms              whole, with the same gradient on each process
    head                                whole; each process computes the logits of some targets, so the gradients of the
                                        head and of the last hidden states are summed over the processes

Of an adapter B A, B is divided beside a layer that is divided by rows, A beside one that is divided by columns.
transformers' plan of the model (`base_model_tp_plan`) says which is which. Divided matrices are DTensors, and
fully_shard then shards each part over the other processes. A layer has two sums forward and two backward: of the
results of attention and of the MLP, and of the gradients of what both read. Left out on purpose: plans with other kinds
of parts (experts, packed projections), which are refused by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from whet.errors import ConfigError
from whet.models.heads import score_layer
from whet.models.lora_layers import is_adapter_layer, plain_linear
from whet.packing.micro_batch import MicroBatch, Share

__all__ = ["WholeWeights", "check_tensor_parallel", "divide_head", "divide_layer", "sum_gradients", "take_targets"]

COLWISE, ROWWISE, PARTIAL = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""The parts of a plan that are carried out, by transformers' names."""


def check_tensor_parallel(module: nn.Module, size: int, name: str) -> None:
    """Checks whether a model's layers can be divided over processes.

    Args: module: the model. size: the number of processes. name: of the model.
    Raises: ConfigError: transformers has no plan for it or one with other kinds of parts, an adapter is more than
        LoRA's two matrices, or heads or columns can't be divided.
    """
    backbone: Any = module.get_decoder()  # pyright: ignore[reportCallIssue]
    setting = f"trainer.tensor_parallel_size={size}"
    if not _plan_of(backbone):
        raise ConfigError(
            f"{setting} divides layers by transformers' tensor-parallel plan, and {name} has none; set it to 1"
        )
    heads = backbone.config.num_attention_heads
    kv_heads = getattr(backbone.config, "num_key_value_heads", None) or heads
    for count, what in ((heads, "attention heads"), (kv_heads, "KV heads")):
        _check_divides(f"{name} has {count} {what}", count, size)
    for i, layer in enumerate(backbone.layers):
        plan = _plan_of(backbone, layer)
        for path, style in plan.items():
            where = f"layers.{i}.{path}"
            if reason := _unsupported_reason(layer.get_submodule(path), style):
                raise ConfigError(f"{setting} can't divide {name}: {where} {reason}; set it to 1")
            if style != PARTIAL:
                linear = plain_linear(layer.get_submodule(path))
                assert linear is not None, "other layers are refused above"
                count, what = (linear.out_features, "outputs") if style == COLWISE else (linear.in_features, "inputs")
                _check_divides(f"{where} of {name} has {count} {what}", count, size)
        if rest := _unplanned(layer, plan):
            raise ConfigError(
                f"{setting} can't divide {name}: transformers' plan divides its neighbours and leaves out "
                f"layers.{i}.{rest}; set it to 1"
            )


def _check_divides(fact: str, count: int, size: int) -> None:
    if count % size:
        divisors = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise ConfigError(
            f"{fact}, which trainer.tensor_parallel_size={size} does not divide; set it to a divisor of {count} "
            f"({divisors})"
        )


def _unsupported_reason(part: nn.Module, style: str) -> str | None:
    """Returns why a part of a plan can't be carried out; None = it can."""
    if style == PARTIAL:
        return None
    if style not in (COLWISE, ROWWISE):
        return f"is {style!r} in transformers' plan, and only {COLWISE} and {ROWWISE} layers are divided"
    if is_adapter_layer(part):
        if plain_linear(part) is None:
            return "has an adapter that is more than LoRA's two matrices"
        if style == ROWWISE and any(getattr(drop, "p", 0) for drop in cast(Any, part).lora_dropout.values()):
            return "reads a part of its inputs, of which lora_dropout draws as of all; or set lora_dropout=0"
        return None
    if type(part) is not nn.Linear:
        return f"is a {type(part).__name__}, and only torch.nn.Linear is divided"
    return None


def _unplanned(layer: nn.Module, plan: dict[str, str]) -> str | None:
    """Returns a parameter beside divided ones for which there is no plan; None = there is none."""
    blocks = tuple(f"{path.rpartition('.')[0]}." for path in plan)
    handled = tuple(f"{path}." for path in plan)
    names = (name for name, _ in layer.named_parameters())
    return next((name for name in names if name.startswith(blocks) and not name.startswith(handled)), None)


def _plan_of(backbone: Any, layer: nn.Module | None = None) -> dict[str, str]:
    """Returns the plan of a decoder layer: the path in the layer -> transformers' name of what is done with it.

    Args: layer: layers of a model may differ, and what this one hasn't is left out; None = of any layer.
    """
    whole = getattr(backbone.config, "base_model_tp_plan", None) or {}
    plan = {key.removeprefix("layers.*."): style for key, style in whole.items() if key.startswith("layers.*.")}
    parts = plan if layer is None else {name for name, _ in layer.named_modules()}
    return {path: style for path, style in plan.items() if path in parts}


def _matrices(layer: nn.Module, path: str, style: str) -> Iterator[tuple[str, str]]:
    """Yields the linear layers to divide for a part of a plan, and how; of an adapter B A the matrix on the divided
    side.
    """
    part: Any = layer.get_submodule(path)
    if not is_adapter_layer(part):
        yield path, style
        return
    yield f"{path}.base_layer", style
    side = "lora_B" if style == COLWISE else "lora_A"
    yield from ((f"{path}.{side}.{name}", style) for name in getattr(part, side))


def divide_layer(backbone: Any, layer: nn.Module, mesh: DeviceMesh) -> list[str]:
    """Leaves each process its part of a layer's matrices, without communication.

    Args: backbone: of a model that `check_tensor_parallel` has checked. layer: whole. mesh: the processes.
    Returns: names of parameters whose gradients are to be summed over the processes.
    """
    plan, group = _plan_of(backbone, layer), mesh.get_group()
    divided = [x for path, style in plan.items() if style != PARTIAL for x in _matrices(layer, path, style)]
    read = _Inputs(group)
    for path, style in divided:
        part: Any = layer.get_submodule(path)
        names = ["weight", "bias"] if style == COLWISE and part.bias is not None else ["weight"]
        for name in names:
            whole, dim = getattr(part, name), 0 if style == COLWISE else 1
            shard = distribute_tensor(whole.detach(), mesh, [Shard(dim)], src_data_rank=None)
            part.register_parameter(name, nn.Parameter(shard, whole.requires_grad))
        part.forward = _column_forward(part, read) if style == COLWISE else _row_forward(part, group)
    layer.register_forward_hook(lambda *_: read.forget())
    partial = [path for path, style in plan.items() if style == PARTIAL]
    return [f"{path}.{name}" for path in partial for name, _ in layer.get_submodule(path).named_parameters()]


def divide_head(module: nn.Module, group: dist.ProcessGroup) -> list[str]:
    """Makes the gradients right of a model whose processes each compute the logits of their own targets.

    The gradient of the last hidden states is summed over the processes in each pass, those of the heads once per
    update. Where the head is the embedding too, its gradient as an embedding, which is whole on each process, is
    divided by their number before that sum.

    Args: module: whole; its passes take a micro-batch of `take_targets`. group: the processes.
    Returns: names of parameters whose gradients are to be summed over the processes.
    """
    size = group.size()
    backbone: Any = module.get_decoder()  # pyright: ignore[reportCallIssue]
    embedding: Any = module.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    layers = [module.get_output_embeddings(), score_layer(module)]  # pyright: ignore[reportCallIssue]
    heads = {id(p) for layer in layers if isinstance(layer, nn.Module) for p in layer.parameters()}

    def sum_of_states(layer: nn.Module, inputs: Any, output: Any) -> None:
        output.last_hidden_state = _ForBackward.apply(output.last_hidden_state, lambda grad: _summed(grad, group))

    backbone.register_forward_hook(sum_of_states)
    if id(embedding.weight) in heads and embedding.weight.requires_grad:
        embedding.register_forward_hook(lambda _, inputs, output: _ForBackward.apply(output, lambda grad: grad / size))
    return [name for name, p in module.named_parameters() if id(p) in heads]


class _ForBackward(torch.autograd.Function):
    """The identity, with another gradient. Args: change: the gradient of the result -> that of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Any) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.change(grads[0]), None


def _summed(grad: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = grad.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def take_targets(micro: MicroBatch, group: dist.ProcessGroup) -> MicroBatch:
    """Returns a process's part of a pass: all of its tokens, and the targets whose logits this process computes.

    Args: micro: the pass, or the part of it that context parallelism has made. group: the processes.
    """
    places = lambda index: torch.arange(0 if index is None else len(index), device=micro.input_ids.device)
    own, ends = (places(x).tensor_split(group.size())[group.rank()] for x in (micro.targets, micro.last_index))
    whole = slice(0, micro.input_ids.shape[1])
    share = micro.share or Share(micro, whole, places(micro.targets), places(micro.last_index))
    columns = ("hidden_index", "targets", "token_index", "sequence", "position")
    return dataclasses.replace(
        micro,
        last_index=None if micro.last_index is None else micro.last_index.index_select(0, ends),
        **{name: vars(micro)[name].index_select(0, own) for name in columns},
        share=dataclasses.replace(
            share, targets=share.targets.index_select(0, own), sequences=share.sequences.index_select(0, ends)
        ),
    )


class _Inputs:
    """What layers divided by rows read. Several read the same tensor: its gradient is summed once."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._read: dict[int, tuple[Tensor, Tensor]] = {}

    def read(self, x: Tensor) -> Tensor:
        """Returns the same tensor, whose gradient is summed over the processes."""
        if id(x) not in self._read:
            self._read[id(x)] = x, _ForBackward.apply(x, self._sum)
        return self._read[id(x)][1]

    def _sum(self, grad: Tensor) -> Tensor:
        self.forget()  # a checkpointed layer runs again in the backward pass, and then not to its end
        return _summed(grad, self._group)

    def forget(self) -> None:
        """Drops what was read: called after the decoder layer, so nothing is kept longer than autograd keeps it."""
        self._read.clear()


def _column_forward(layer: nn.Linear, inputs: _Inputs) -> Callable[[Tensor], Tensor]:
    """Returns the forward of a layer divided by rows: each process has some of the outputs."""

    def forward(x: Tensor) -> Tensor:
        if not isinstance(layer.weight, DTensor):  # whole, while the process samples
            return F.linear(x, layer.weight, layer.bias)
        bias = layer.bias.to_local() if isinstance(layer.bias, DTensor) else None
        return F.linear(inputs.read(x), layer.weight.to_local(), bias)

    return forward


def _row_forward(layer: nn.Linear, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Returns the forward of a layer divided by columns: each process adds a part of every output."""

    def forward(x: Tensor) -> Tensor:
        if not isinstance(layer.weight, DTensor):
            return F.linear(x, layer.weight, layer.bias)
        y = _Sum.apply(F.linear(x, layer.weight.to_local()), group)
        return y if layer.bias is None else y + layer.bias

    return forward


class _Sum(torch.autograd.Function):
    """The sum over the processes. Its gradient is the same on each of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0], None


@torch.no_grad()
def sum_gradients(grads: list[Tensor], group: dist.ProcessGroup) -> None:
    """Sums gradients over the processes, in place. Args: grads: of the same shapes on each."""
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    large = [g for g in local if g.numel() >= 2**20]  # without a copy
    small = [g for g in local if g.numel() < 2**20]
    for g in large:
        dist.all_reduce(g, group=group)
    if not small:
        return
    flat = torch.cat([g.flatten() for g in small])
    dist.all_reduce(flat, group=group)
    for g, summed in zip(small, flat.split([g.numel() for g in small]), strict=True):
        g.copy_(summed.view_as(g))


class WholeWeights:
    """The whole matrices of a divided model, while each process runs all of it.

    They are always the same parameters, whose memory is there between `put` and `free` only: engines refer to them.
    """

    def __init__(self) -> None:
        self._whole: dict[tuple[nn.Module, str], nn.Parameter] = {}

    @torch.no_grad()
    def put(self, module: nn.Module) -> None:
        """Puts whole matrices in place of the divided ones. Args: module: unsharded by FSDP, on every process."""
        for part in module.modules():
            for name, p in list(part.named_parameters(recurse=False)):
                if not isinstance(p, DTensor):
                    continue
                gathered = p.full_tensor()
                whole = self._whole.setdefault((part, name), nn.Parameter(torch.empty_like(gathered), p.requires_grad))
                whole.untyped_storage().resize_(gathered.nbytes)
                whole.copy_(gathered)
                part._parameters[name] = whole  # as FSDP does; it puts its own back as it reshards

    def free(self) -> None:
        """Frees the memory of the whole matrices."""
        for whole in self._whole.values():
            whole.grad = None
            whole.untyped_storage().resize_(0)
