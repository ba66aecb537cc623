"""Tensor parallelism (Megatron-LM, arXiv 1909.08053): processes divide the matrices of each layer.

    q, k, v, gate and up projections    by rows: each process has the outputs of some heads, and of some MLP columns
    k and v projections of fewer KV     whole; each process computes the head that its query heads read, so their
    heads than processes                gradients are summed over the processes once per update
    o and down projections              by columns: each process adds a part of every output, summed over the processes
    norms of q and k                    whole, though each process norms its own heads only: their gradients are summed
                                        over the processes once per update
    other norms, score head             whole, with the same gradient on each process
    embedding                           by rows, which are token ids: each process adds the embeddings of its ids
    head                                by rows: each process has the logits of its ids (models/vocabulary.py)

Rows and columns are those of torch's weight [out, in]. Megatron and transformers name the transpose: by rows is their
colwise, by columns their rowwise. Of an adapter B A, B is divided beside a layer that is divided by rows, A beside one
that is divided by columns. transformers' plan of the model (`base_model_tp_plan`) says which is which. Divided matrices
are DTensors, and fully_shard then shards each part over the other processes.

A layer has two sums forward and two backward, in the compute dtype: of the results of attention and of the MLP, and of
the gradients of what both read. The layers' own forwards make them, in place of torch's parallelize_module: that sums
the gradients of q, k and v apart, and its layers can't run with plain weights, as an engine needs them. The gradients
that are summed once per update are, in fp32, as the placement enters "step" (parallel/fsdp.py).

While the embedded engine samples, each process has its part of each layer (rollout/tensor_parallel.py); for other
engines, and to score alone, the whole model. Embedding and head are whole there. Left out on purpose: plans
with other kinds of parts (experts, packed projections), which are refused by name; sequence parallelism (arXiv
2205.05198), since context parallelism divides the hidden states between the layers already; sums that overlap with
products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from whet.errors import ConfigError
from whet.models.heads import score_layer
from whet.models.lora_layers import is_adapter_layer, plain_linear
from whet.models.vocabulary import VocabularyPart
from whet.util.collectives import add_results, change_gradient, summed
from whet.util.tensor_subclasses import local_part

__all__ = [
    "EngineWeights",
    "check_tensor_parallel",
    "divide_layer",
    "divide_vocabulary",
    "sum_gradients",
]

COLWISE, ROWWISE, PARTIAL = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""The parts of a plan that are carried out, by transformers' names."""
INSTEAD = (
    "set it to 1: FSDP shards these layers all the same, and trainer.context_parallel_size divides the tokens of a pass"
)
"""What to do where matrices can't be divided."""
KV_PROJECTIONS = ("k_proj", "v_proj")
"""The layers whose outputs are KV heads, by transformers' names."""


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
            f"{setting} divides layers by transformers' tensor-parallel plan, and {name} has none; {INSTEAD}"
        )
    heads = backbone.config.num_attention_heads
    _check_divides(f"{name} has {heads} attention heads", heads, size)
    for i, layer in enumerate(backbone.layers):
        plan = _plan_of(backbone, layer)
        for path, style in plan.items():
            where = f"layers.{i}.{path}"
            if reason := _unsupported_reason(layer.get_submodule(path), style):
                raise ConfigError(f"{setting} can't divide {name}: {where} {reason}; {INSTEAD}")
            if style != PARTIAL:
                linear = plain_linear(layer.get_submodule(path))
                assert linear is not None, "other layers are refused above"
                if kv_heads := _kv_heads(layer, path):
                    _check_kv_heads(f"{name} has {kv_heads} KV heads", heads, kv_heads, size)
                    continue
                count, what = (linear.out_features, "outputs") if style == COLWISE else (linear.in_features, "inputs")
                _check_divides(f"{where} of {name} has {count} {what}", count, size)
        if rest := _unplanned(layer, plan):
            raise ConfigError(
                f"{setting} can't divide {name}: transformers' plan divides its neighbours and leaves out "
                f"layers.{i}.{rest}; {INSTEAD}"
            )


def _check_divides(fact: str, count: int, size: int) -> None:
    if count % size:
        divisors = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise ConfigError(
            f"{fact}, which trainer.tensor_parallel_size={size} does not divide; set it to a divisor of {count} "
            f"({divisors})"
        )


def _check_kv_heads(fact: str, heads: int, kv_heads: int, size: int) -> None:
    fits = lambda n: kv_heads % n == 0 or n % kv_heads == 0
    if not fits(size):
        sizes = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0 and fits(n))
        raise ConfigError(
            f"{fact}, and trainer.tensor_parallel_size={size} is neither a divisor nor a multiple of that; set it to "
            f"one of {sizes}"
        )


def _kv_heads(layer: nn.Module, path: str) -> int | None:
    """Returns the KV heads that a part of a decoder layer computes; None = it computes something else."""
    parent, _, name = path.rpartition(".")
    linear = plain_linear(layer.get_submodule(path)) if name in KV_PROJECTIONS else None
    return linear and linear.out_features // cast(Any, layer.get_submodule(parent)).head_dim


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


def _matrices(layer: nn.Module, path: str, style: str) -> Iterator[str]:
    """Yields the linear layers to divide for a part of a plan; of an adapter B A the matrix on the divided side."""
    part: Any = layer.get_submodule(path)
    if not is_adapter_layer(part):
        yield path
        return
    yield f"{path}.base_layer"
    side = "lora_B" if style == COLWISE else "lora_A"
    yield from (f"{path}.{side}.{name}" for name in getattr(part, side))


def divide_layer(backbone: Any, layer: nn.Module, mesh: DeviceMesh) -> list[str]:
    """Leaves each process its part of a layer's matrices, without communication.

    Args: backbone: of a model that `check_tensor_parallel` has checked. layer: whole. mesh: the processes.
    Returns: names of parameters whose gradients are to be summed over the processes.
    """
    plan, group = _plan_of(backbone, layer), mesh.get_group()
    read, summed = _Inputs(group), [path for path, style in plan.items() if style == PARTIAL]
    for planned, style in plan.items():
        kv_heads = _kv_heads(layer, planned) or 0
        copies = group.size() // kv_heads if 0 < kv_heads < group.size() else None
        for path in _matrices(layer, planned, style) if style != PARTIAL else ():
            part: Any = layer.get_submodule(path)
            placement = Shard(1) if style == ROWWISE else Shard(0) if copies is None else Replicate()
            for name in ["weight", "bias"] if style == COLWISE and part.bias is not None else ["weight"]:
                whole = getattr(part, name)
                shard = distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=None)
                part.register_parameter(name, nn.Parameter(shard, whole.requires_grad))
            if style == ROWWISE:
                part.forward = _row_forward(part, group)
                part.sum_parts = lambda y: add_results(y, group)
                continue
            part.rows = slice(None)
            if copies is not None:
                width, head = part.out_features // kv_heads, group.rank() // copies
                part.rows = slice(head * width, (head + 1) * width)
                summed.append(path)
            part.forward = _column_forward(part, read, part.rows)
    layer.register_forward_hook(lambda *_: read.forget())
    return [f"{path}.{name}" for path in summed for name, _ in layer.get_submodule(path).named_parameters()]


def divide_vocabulary(module: nn.Module, mesh: DeviceMesh) -> None:
    """Leaves each process its token ids of the embedding and of the LM head, without communication.

    Both stay whole on each process if the head is more than one linear layer, or a process would have no token.

    Args: module: whole. mesh: the processes.
    """
    embedding, head = (cast(Any, x)() for x in (module.get_input_embeddings, module.get_output_embeddings))
    head = None if head is score_layer(module) else head
    part = VocabularyPart(len(embedding.weight), mesh.get_group())
    is_plain = isinstance(embedding, nn.Embedding) and (head is None or type(head) is nn.Linear)
    if not is_plain or part.most * (part.group.size() - 1) >= part.size:
        return
    made: dict[int, nn.Parameter] = {}  # the head may be the embedding too
    layers: list[Any] = [embedding] if head is None else [embedding, head]
    for layer in layers:
        for name, whole in list(layer.named_parameters(recurse=False)):
            if id(whole) not in made:
                shard = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
                made[id(whole)] = nn.Parameter(shard, whole.requires_grad)
            layer.register_parameter(name, made[id(whole)])
        layer.sampled_whole = True
    padding = embedding.padding_idx  # whose embedding has no gradient
    embedding.padding_idx = padding - part.ids.start if padding in range(part.ids.start, part.ids.stop) else None
    for layer, forward in zip(layers, (_embedding_forward, _head_forward), strict=False):
        layer.forward = forward(layer)


def _embedding_forward(layer: nn.Embedding) -> Callable[[Tensor], Tensor]:
    """Returns the forward of a divided embedding: each process adds those of its token ids."""
    embed = layer.forward  # of the class, which may scale

    def forward(ids: Tensor) -> Tensor:
        weight: Any = layer.weight
        part = VocabularyPart.of(weight)
        if part is None:  # while the process samples
            return embed(ids)
        rows, own = part.find(ids)
        layer._parameters["weight"] = weight.to_local()
        try:
            found = embed(rows)
        finally:
            layer._parameters["weight"] = weight
        return add_results(found.masked_fill(~own[..., None], 0.0), part.group)

    return forward


def _head_forward(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """Returns the forward of a divided head for what needs all logits at once: they are gathered."""

    def forward(x: Tensor) -> Tensor:
        part = VocabularyPart.of(layer.weight)
        if part is None:  # while the process samples
            return F.linear(x, layer.weight, layer.bias)
        weight, bias = (None if w is None else cast(Any, w).to_local() for w in (layer.weight, layer.bias))
        return part.gather_logits(F.linear(part.read(x), cast(Tensor, weight), bias))

    return forward


class _Inputs:
    """What layers divided by rows read. Several read the same tensor: its gradient is summed once."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._read: dict[int, tuple[Tensor, Tensor]] = {}

    def read(self, x: Tensor) -> Tensor:
        """Returns the same tensor, whose gradient is summed over the processes."""
        if id(x) not in self._read:
            self._read[id(x)] = x, change_gradient(x, self._sum)
        return self._read[id(x)][1]

    def _sum(self, grad: Tensor) -> Tensor:
        self.forget()  # a checkpointed layer runs again in the backward pass, and then not to its end
        return summed(grad, self._group)

    def forget(self) -> None:
        """Drops what was read: called after the decoder layer, so nothing is kept longer than autograd keeps it."""
        self._read.clear()


def _column_forward(layer: nn.Linear, inputs: _Inputs, rows: slice) -> Callable[[Tensor], Tensor]:
    """Returns the forward of a layer divided by rows: each process has some of the outputs.

    Args: rows: that this process computes of its part.
    """

    def forward(x: Tensor) -> Tensor:
        if not isinstance(layer.weight, DTensor):  # while the process samples
            return F.linear(x, layer.weight, layer.bias)
        bias = layer.bias.to_local()[rows] if isinstance(layer.bias, DTensor) else None
        return F.linear(inputs.read(x), layer.weight.to_local()[rows], bias)

    return forward


def _row_forward(layer: nn.Linear, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Returns the forward of a layer divided by columns: each process adds a part of every output."""

    def forward(x: Tensor) -> Tensor:
        weight = local_part(layer.weight)
        if weight.shape[1] == layer.in_features:  # whole, while the process samples alone
            return F.linear(x, weight, layer.bias)
        y = add_results(F.linear(x, weight), group)
        return y if layer.bias is None else y + layer.bias

    return forward


@torch.no_grad()
def sum_gradients(grads: list[Tensor], mesh: DeviceMesh) -> None:
    """Sums gradients over the processes, in place. Args: grads: of the same shapes on each; they may lie on the host.

    mesh: the processes, on whose devices they are summed.
    """
    local = [local_part(g) for g in grads]
    large = [g for g in local if g.numel() >= 2**20]  # without a copy
    small = [g for g in local if g.numel() < 2**20]
    for g in large:
        on_device = g.to(mesh.device_type)
        dist.all_reduce(on_device, group=mesh.get_group())
        if on_device is not g:
            g.copy_(on_device)
    if not small:
        return
    flat = torch.cat([g.flatten() for g in small]).to(mesh.device_type)
    dist.all_reduce(flat, group=mesh.get_group())
    for g, total in zip(small, flat.split([g.numel() for g in small]), strict=True):
        g.copy_(total.view_as(g))


class EngineWeights:
    """The matrices of a divided model as plain parameters, for engines: whole, or the part that this process computes.

    They are always the same parameters, since engines refer to them. Their memory is there between `put` and
    `free`, or, that of the parts, which is FSDP's own, as long as FSDP has gathered them.
    """

    def __init__(self) -> None:
        self._whole: dict[tuple[nn.Module, str], nn.Parameter] = {}
        self._parts: dict[tuple[nn.Module, str], nn.Parameter] = {}

    @torch.no_grad()
    def put(self, module: nn.Module, *, parts: bool) -> None:
        """Puts plain matrices in place of the divided ones.

        Args: module: unsharded by FSDP, on every process. parts: those of this process, without a copy, but whole ones
            of embedding and head.
        """
        placed: dict[int, nn.Parameter] = {}  # the head may be the embedding too
        for part, name, p in _divided(module):
            if id(p) not in placed:
                own = parts and not getattr(part, "sampled_whole", False)
                placed[id(p)] = (self._put_part if own else self._put_whole)(part, name, p)
            part._parameters[name] = placed[id(p)]  # as FSDP does; it puts its own back as it reshards

    def _put_whole(self, part: nn.Module, name: str, p: DTensor) -> nn.Parameter:
        gathered = p.full_tensor()
        whole = self._whole.setdefault((part, name), nn.Parameter(torch.empty_like(gathered), p.requires_grad))
        whole.untyped_storage().resize_(gathered.nbytes)
        whole.copy_(gathered)
        return whole

    def _put_part(self, part: nn.Module, name: str, p: DTensor) -> nn.Parameter:
        own = p.to_local()[getattr(part, "rows", slice(None))]
        plain = self._parts.setdefault((part, name), nn.Parameter(own, p.requires_grad))
        plain.data = own
        return plain

    def free(self) -> None:
        """Frees the memory of the whole matrices."""
        for whole in self._whole.values():
            whole.untyped_storage().resize_(0)


def _divided(module: nn.Module) -> Iterator[tuple[nn.Module, str, DTensor]]:
    """Yields the divided matrices and biases of a model that FSDP has gathered: layer, name, parameter."""
    for part in module.modules():
        for name, p in list(part.named_parameters(recurse=False)):
            if isinstance(p, DTensor):
                yield part, name, p
