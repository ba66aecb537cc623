"""Low-rank adapters that PEFT has put into a model: find them, switch them off and on, merge them for engines.

    y = W x + b + Σ s B A x        effective weight: W + Σ s B A, over the active adapters

The adapters have the form of PEFT's `inject_adapter_in_model`: the model keeps its class, and some of its linear layers
are wrapped. The engine's fused backbone and the native kernels multiply by a copy of the weights. In fp32 they copy the
effective weight. In half precision the adapter's part is often smaller than the rounding of W, and a rounded sum would
lose it. There the engine multiplies by both, W x and s B A x, as the layer itself does.
Dim legend: O out, I in, r rank.
Left out on purpose: making and saving adapters, and merged models as files (lora.py); other kinds than plain LoRA
(DoRA, biases of an adapter), whose layers run as their own modules.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from whet.errors import ConfigError
from whet.models.quantized import dequantize, is_quantized_layer
from whet.ops.counter_rng import hash_rng_key, keep_mask
from whet.ops.masked import to_fp32
from whet.util.tensor_subclasses import gather_full_tensor, shard_like

__all__ = [
    "BASE_LAYER",
    "Adapter",
    "SeededDropout",
    "base_parameters",
    "effective_weight",
    "is_adapter_layer",
    "lora_factors",
    "merged_weight",
    "merged_weights",
    "plain_linear",
    "sole_adapter",
]

BASE_LAYER = re.compile(r"\.base_layer(?=\.|$)")
"""The part that PEFT adds to the name of a layer that it wraps."""


class SeededDropout(nn.Module):
    """Dropout on an adapter's input. A draw depends on the update, the layer, and the token with the tokens before it.

    So recomputed layers, resumed runs, other micro-batches and other numbers of processes draw the same. It is off
    outside of `Adapter.dropout_on`. Args: p: share of the numbers that are dropped. number: layer index.

    >>> SeededDropout(0.5, 0)(torch.ones(3))
    tensor([1., 1., 1.])
    """

    def __init__(self, p: float, number: int) -> None:
        super().__init__()
        self.p, self.number = p, number
        self.keys: Tensor | None = None
        """Long [n]: the keys of this pass's tokens; None = dropout is off."""

    def forward(self, x: Tensor) -> Tensor:
        """Sets a share p of the numbers of x to 0, and divides the others by 1 - p."""
        if self.keys is None:
            return x
        keys = self.keys.to(x.device)
        if x.shape[:-1].numel() != len(keys):
            raise ConfigError(
                f"lora_dropout={self.p}: a layer with an adapter reads {x.shape[:-1].numel()} of a pass's {len(keys)} "
                "tokens, as expert layers do, and dropout on these is not supported; set actor.lora.lora_dropout=0"
            )
        kept = keep_mask(keys ^ hash_rng_key(self.number, 0, 0, 0), x.shape[-1], self.p)
        return x * kept.view(x.shape) / (1 - self.p)


class Adapter:
    """The adapter layers of a module. Args: layers: the layers by their names in the module.

    Example: `with loaded.adapter.disabled(): ...` runs the base model.
    """

    def __init__(self, layers: dict[str, Any]) -> None:
        self.layers = layers

    @classmethod
    def from_module(cls, module: nn.Module) -> Adapter | None:
        """Returns the adapter of a module; None = it has none.

        >>> Adapter.from_module(nn.Linear(2, 2)) is None
        True
        """
        layers = {name: layer for name, layer in module.named_modules() if is_adapter_layer(layer)}
        return cls(layers) if layers else None

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yields the adapter's own parameters, without those of the base layers."""
        for layer in self.layers.values():
            base = {id(p) for p in layer.get_base_layer().parameters()}
            yield from (p for p in layer.parameters() if id(p) not in base)

    @property
    def name(self) -> str:
        """The adapter's name. Raises ConfigError: the model has several, so the one to train is unknown."""
        names = sorted({name for layer in self._lora() for name in layer.lora_A})
        if len(names) != 1:
            raise ConfigError(
                f"the model has {len(names)} LoRA adapters {names}; it can train and save one: delete others"
            )
        return names[0]

    def _lora(self) -> list[Any]:
        """PEFT's LoRA layers among the adapter layers."""
        from peft.tuners.lora import LoraLayer

        return [layer for layer in self.layers.values() if isinstance(layer, LoraLayer)]

    def is_untrained(self) -> bool:
        """Returns whether the model equals its base: B is 0 in each layer, as in a new adapter."""
        layers = self._lora()
        return len(layers) == len(self.layers) and not any(
            bool(gather_full_tensor(p).any()) for x in layers for p in x.lora_B.parameters()
        )

    @property
    def dropout(self) -> float:
        """The dropout probability in training, the largest of all layers."""
        return max((d.p for d in self._dropouts()), default=0.0)

    @contextmanager
    def dropout_on(self, tokens: Tensor, seed: int, update: int) -> Iterator[None]:
        """Switches dropout on for one training pass, forward and backward.

        Args: tokens: Long [n], a key for each token of the pass. seed: of the run. update: optimizer steps before it.
        """
        dropouts = list(self._dropouts())
        for drop in dropouts:
            drop.keys = tokens ^ hash_rng_key(seed, update, 0, 0)
        try:
            yield
        finally:
            for drop in dropouts:
                drop.keys = None

    def _dropouts(self) -> Iterator[SeededDropout]:
        for layer in self._lora():
            yield from (d for d in layer.lora_dropout.values() if isinstance(d, SeededDropout))

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Runs the base model without its adapter inside the context. `requires_grad` of parameters does not change.

        Raises: ConfigError: an adapter is merged into its base layer, so the two can't be separated.
        """
        if merged := [name for name, layer in self.layers.items() if layer.merged]:
            raise ConfigError(f"the adapter is merged into {merged[0]}, so it can't be switched off; unmerge it first")
        enabled = [layer for layer in self.layers.values() if not layer.disable_adapters]
        self._switch(enabled, on=False)
        try:
            yield
        finally:
            self._switch(enabled, on=True)

    def _switch(self, layers: list[Any], *, on: bool) -> None:
        """Calls PEFT's switch and restores `requires_grad` of the adapter's parameters, which PEFT changes."""
        states = [(p, p.requires_grad) for p in self.parameters()]
        for layer in layers:
            layer.enable_adapters(on)
        for p, requires_grad in states:
            p.requires_grad_(requires_grad)


def is_adapter_layer(layer: nn.Module) -> bool:
    """Returns whether PEFT has wrapped this layer. False if PEFT was never imported.

    >>> is_adapter_layer(nn.Linear(2, 2))
    False
    """
    if "peft" not in sys.modules:
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(layer, BaseTunerLayer)


def plain_linear(layer: nn.Module) -> nn.Linear | None:
    """Returns the linear layer behind a plain or LoRA layer; None = it computes something else.

    Args: layer: any module.
    Returns: the layer itself if it is a plain linear layer, the base layer if it has plain LoRA, else None.

    >>> plain_linear(nn.SiLU()) is None
    True
    """
    if type(layer) is nn.Linear:
        return layer
    if not is_adapter_layer(layer):
        return None
    from peft.tuners.lora.layer import Linear

    if type(layer) is not Linear or type(base := layer.get_base_layer()) is not nn.Linear:
        return None
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    has_bias = any(layer.lora_B[name].bias is not None for name in names)
    has_dropout = any(isinstance(drop := layer.lora_dropout[name], nn.Dropout) and drop.p for name in names)
    return None if has_bias or has_dropout or any(name in layer.lora_variant for name in names) else base


@torch.no_grad()
def effective_weight(layer: nn.Module) -> Tensor:
    """W, or W + Σ s B A where the layer has active adapters: [O I], in W's dtype, without a gradient.

    The sum is computed in fp32 or wider and rounded once. Args: layer: a layer for which `plain_linear` is not None.
    Returns: the layer's own tensor if there is nothing to add.

    >>> effective_weight(layer := nn.Linear(2, 3)).data_ptr() == layer.weight.data_ptr()
    True
    """
    base = plain_linear(layer)
    if base is None:
        raise TypeError(f"a {type(layer).__name__} has no effective weight; run it as a module")
    return base.weight.detach() if base is layer else _add_low_rank(base.weight.detach(), layer)


def _add_low_rank(weight: Tensor, layer: Any) -> Tensor:
    """W + Σ s B A of a layer's active adapters, for this W."""
    total = to_fp32(weight)
    for name in _active_names(layer):
        b, a = (to_fp32(gather_full_tensor(x[name].weight)) for x in (layer.lora_B, layer.lora_A))
        total = total + layer.scaling[name] * shard_like(total, b @ a)
    return total.to(weight.dtype)


def _active_names(layer: Any) -> list[str]:
    """Returns the names of the adapters that a layer adds to its base."""
    if layer.merged or layer.disable_adapters:
        return []
    return [name for name in layer.active_adapters if name in layer.lora_A]  # some are only in other layers


@torch.no_grad()
def lora_factors(layer: nn.Module) -> tuple[Tensor, Tensor, float] | None:
    """Returns the factors A [r I], B [O r] and s that a layer adds to its base; None = it adds nothing.

    Several adapters are concatenated. The B of each is scaled, so that one s is right for all.
    Args: layer: a layer for which `plain_linear` is not None.

    >>> lora_factors(nn.Linear(2, 3)) is None
    True
    """
    if not is_adapter_layer(layer) or not (names := _active_names(layer)):
        return None
    lora: Any = layer
    scale = lora.scaling[names[0]]
    a = [lora.lora_A[name].weight for name in names]
    b = [lora.lora_B[name].weight for name in names]
    b[1:] = [x * (lora.scaling[name] / scale) for name, x in zip(names[1:], b[1:])]
    return (a[0], b[0], scale) if len(names) == 1 else (torch.cat(a), torch.cat(b, 1), scale)


def sole_adapter(layer: Any) -> tuple[nn.Parameter, nn.Parameter, float] | None:
    """Returns the parameters A [r I] and B [O r] and the factor s of a layer's one active adapter.

    Args: layer: with adapters, for which `plain_linear` is not None.
    Returns: None = none is active or there are several, its dropout is on, or hooks want its parts to be called.
    """
    if len(names := _active_names(layer)) != 1:
        return None
    name, dropout = names[0], layer.lora_dropout[names[0]]
    if isinstance(dropout, SeededDropout) and dropout.keys is not None:
        return None
    parts = layer.get_base_layer(), layer.lora_A[name], layer.lora_B[name]
    if any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in parts):
        return None
    return parts[1].weight, parts[2].weight, layer.scaling[name]


# ---- the merged weights, for engines with weights of their own and for other programs --------------------------------


def base_parameters(module: nn.Module) -> dict[str, tuple[nn.Parameter, Any]]:
    """Returns the parameters of a model without its adapters, under the names that they have in the base model.

    Args: module: any model. Returns: name -> (the parameter, the layer that adds an adapter to it, or None). A shared
        parameter is listed under each of its names.

    >>> list(base_parameters(nn.Linear(2, 2)))
    ['weight', 'bias']
    """
    adapter = Adapter.from_module(module)
    parameters = module.named_parameters(remove_duplicate=False)
    if adapter is None:
        return {name: (p, None) for name, p in parameters}
    adapter_ids = {id(p) for p in adapter.parameters()}
    layers = {f"{name}.base_layer.weight": layer for name, layer in adapter.layers.items()}
    return {BASE_LAYER.sub("", name): (p, layers.get(name)) for name, p in parameters if id(p) not in adapter_ids}


@torch.no_grad()
def merged_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a model without adapters, one at a time: adapters are merged and 4-bit weights dequantized.

    Args: module: any model; it is not changed.
    Raises: ConfigError: a layer whose adapter is more than s B A.
    """
    for name, (p, layer) in base_parameters(module).items():
        weight = dequantize(p).detach()
        yield name, weight if layer is None else merged_weight(layer, weight, name)


def merged_weight(layer: Any, weight: Tensor, name: str) -> Tensor:
    """W + Σ s B A of an adapted layer. Args: weight: W, dequantized. name: the layer's name, for messages."""
    if plain_linear(layer) is None and not is_quantized_layer(layer.get_base_layer()):
        raise ConfigError(
            f"the adapter of {name} is more than a product of two matrices, so whet can't merge it; merge it with "
            "PEFT's merge_and_unload, and load the merged model"
        )
    return _add_low_rank(weight, layer)
