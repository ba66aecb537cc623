"""Tensor parallelism (Megatron-LM, arXiv 1909.08053): processes divide the matrices of each layer.

    q, k, v, gate and up projections    by rows: each process has the outputs of some heads, and of some MLP columns
    o and down projections              by columns: each process adds a part of every output, summed over the processes
    norms of q and k                    whole, though each process norms its own heads only: their gradients are summed
                                        over the processes once per update
    embedding, other norms, head        whole, with the same gradient on each process

transformers' plan of the model (`base_model_tp_plan`) says which is which, and torch's `parallelize_module` divides the
matrices and runs them. fully_shard then shards each part over the other processes. Left out on purpose: plans with other
kinds of parts (experts, packed projections), which are refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from whet.errors import ConfigError

__all__ = ["WholeWeights", "check_tensor_parallel", "divide_layer", "sum_gradients"]

COLWISE, ROWWISE, PARTIAL = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""The parts of a plan that are carried out, by transformers' names."""


class _Colwise(ColwiseParallel):
    """torch's style, which leaves a layer alone while it has its whole weight."""

    @staticmethod
    def _prepare_input_fn(input_layouts: Any, desired: Any, mod: Any, inputs: Any, device_mesh: DeviceMesh) -> Any:
        prepare = ColwiseParallel._prepare_input_fn
        return prepare(input_layouts, desired, mod, inputs, device_mesh) if isinstance(mod.weight, DTensor) else inputs

    @staticmethod
    def _prepare_output_fn(layouts: Any, use_local: bool, mod: Any, outputs: Any, device_mesh: DeviceMesh) -> Any:
        prepare = ColwiseParallel._prepare_output_fn
        return prepare(layouts, use_local, mod, outputs, device_mesh) if isinstance(outputs, DTensor) else outputs


class _Rowwise(RowwiseParallel):
    """torch's style, which leaves a layer alone while it has its whole weight."""

    @staticmethod
    def _prepare_input_fn(input_layouts: Any, desired: Any, mod: Any, inputs: Any, device_mesh: DeviceMesh) -> Any:
        prepare = RowwiseParallel._prepare_input_fn
        return prepare(input_layouts, desired, mod, inputs, device_mesh) if isinstance(mod.weight, DTensor) else inputs

    @staticmethod
    def _prepare_output_fn(layouts: Any, use_local: bool, mod: Any, outputs: Any, device_mesh: DeviceMesh) -> Any:
        prepare = RowwiseParallel._prepare_output_fn
        return prepare(layouts, use_local, mod, outputs, device_mesh) if isinstance(outputs, DTensor) else outputs


_STYLES = {COLWISE: _Colwise, ROWWISE: _Rowwise}


def check_tensor_parallel(module: nn.Module, size: int, name: str) -> None:
    """Checks whether a model's layers can be divided over processes.

    Args: module: the model. size: the number of processes. name: of the model.
    Raises: ConfigError: it has an adapter, transformers has no plan for it or one with other kinds of parts, or heads
        or columns can't be divided.
    """
    setting = f"trainer.tensor_parallel_size={size}"
    backbone: Any = module.get_decoder()  # pyright: ignore[reportCallIssue]
    if not _layer_plan(backbone):
        raise ConfigError(
            f"{setting} divides layers by transformers' tensor-parallel plan, and {name} has none; set it to 1"
        )
    config = backbone.config
    for count, what in (
        (config.num_attention_heads, "attention heads"),
        (getattr(config, "num_key_value_heads", None) or config.num_attention_heads, "KV heads"),
    ):
        if count % size:
            raise ConfigError(
                f"{name} has {count} {what}, which {setting} does not divide: each process computes a part of the "
                f"heads; set it to a divisor of {count} ({_divisors(count)})"
            )
    for i, layer in enumerate(backbone.layers):
        planned = dict(_planned(backbone, layer))
        for path, style in planned.items():
            part = layer.get_submodule(path)
            if style not in (COLWISE, ROWWISE, PARTIAL):
                raise ConfigError(
                    f"{setting} can't divide {name}: layers.{i}.{path} is {style!r} in transformers' plan, and only "
                    f"{COLWISE} and {ROWWISE} linear layers are divided; set it to 1"
                )
            if style in _STYLES and type(part) is not nn.Linear:
                raise ConfigError(
                    f"{setting} can't divide {name}: layers.{i}.{path} is a {type(part).__name__}, and only "
                    "torch.nn.Linear is divided; set it to 1, and train no adapter (lora) with it"
                )
            divided = part.out_features if style == COLWISE else getattr(part, "in_features", size)
            if divided % size:
                raise ConfigError(
                    f"{name} has {divided} {'outputs' if style == COLWISE else 'inputs'} of layers.{i}.{path}, which "
                    f"{setting} does not divide; set it to a divisor of {divided} ({_divisors(divided)})"
                )
        if rest := _unplanned(layer, planned):
            raise ConfigError(
                f"{setting} can't divide {name}: transformers' plan divides the module of layers.{i}.{rest}, and says "
                "nothing about this parameter; set it to 1"
            )


def _unplanned(layer: nn.Module, planned: dict[str, str]) -> str | None:
    """A parameter beside divided ones for which there is no plan; None = there is none."""
    blocks = {path.rpartition(".")[0] for path in planned}
    for name, _ in layer.named_parameters():
        path = name.rpartition(".")[0]
        if path not in planned and any(path == block or path.startswith(f"{block}.") for block in blocks if block):
            return name
    return None


def _divisors(count: int) -> str:
    return ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)


def _layer_plan(backbone: Any) -> dict[str, str]:
    """The plan of a decoder layer: the path in the layer -> transformers' name of what is done with it."""
    plan = getattr(backbone.config, "base_model_tp_plan", None) or {}
    return {key.removeprefix("layers.*."): style for key, style in plan.items() if key.startswith("layers.*.")}


def _planned(backbone: Any, layer: nn.Module) -> Iterator[tuple[str, str]]:
    """The plan of a layer's own parts; layers of a model may differ, and what a layer hasn't is passed over."""
    parts = {name for name, _ in layer.named_modules()}
    return ((path, style) for path, style in _layer_plan(backbone).items() if path in parts)


def divide_layer(backbone: Any, layer: nn.Module, mesh: DeviceMesh) -> list[str]:
    """Leaves each process its part of a layer's matrices, without communication.

    Args: backbone: of a model that `check_tensor_parallel` has checked. layer: whole. mesh: the processes.
    Returns: names of parameters whose gradients are to be summed over the processes.
    """
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # whole tensors take 2 gathers
    planned = dict(_planned(backbone, layer))
    styles = {path: _STYLES[style]() for path, style in planned.items() if style in _STYLES}
    parallelize_module(layer, mesh, styles, src_data_rank=None)  # pyright: ignore[reportArgumentType]
    partial = [path for path, style in planned.items() if style == PARTIAL]
    return [f"{path}.{name}" for path in partial for name, _ in layer.get_submodule(path).named_parameters()]


@torch.no_grad()
def sum_gradients(grads: list[Tensor], group: dist.ProcessGroup) -> None:
    """Sums gradients over the processes, in place, in one call. Args: grads: of the same shapes on each."""
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    if not local:
        return
    flat = torch.cat([g.flatten() for g in local])
    dist.all_reduce(flat, group=group)
    for g, summed in zip(local, flat.split([g.numel() for g in local]), strict=True):
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
                part._parameters[name] = whole.copy_(gathered)  # as FSDP does; it puts its own back as it reshards

    def free(self) -> None:
        """Frees the memory of the whole matrices."""
        for whole in self._whole.values():
            whole.grad = None
            whole.untyped_storage().resize_(0)
