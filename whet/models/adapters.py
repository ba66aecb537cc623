"""Low-rank adapters that PEFT has put into a model: which layers have one, off and on, and a layer's effective weight.

    y = W x + b + Σ s B A x        effective weight: W + Σ s B A, over the active adapters

The form is PEFT's `inject_adapter_in_model`: the model keeps its class, some of its linear layers are wrapped. What
multiplies few rows by a copy of the weights (the engine's fused trunk, the native kernels) copies the effective weight.
Dim legend: O out, I in, r rank.
Left out on purpose: making, saving and merging adapters; other kinds than plain LoRA (DoRA, biases of an adapter),
whose layers run as their own modules.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from whet.errors import ConfigError
from whet.ops.masked import to_fp32

__all__ = ["Adapter", "adapter_layer", "effective_weight", "plain_linear"]


class Adapter:
    """The adapter layers of a module. Args: layers: they, by their names in the module.

    Example: `with loaded.adapter.off(): ...` runs the base model.
    """

    def __init__(self, layers: dict[str, Any]) -> None:
        self.layers = layers

    @classmethod
    def of(cls, module: nn.Module) -> Adapter | None:
        """The adapter of a module; None = it has none.

        >>> Adapter.of(nn.Linear(2, 2)) is None
        True
        """
        layers = {name: layer for name, layer in module.named_modules() if adapter_layer(layer)}
        return cls(layers) if layers else None

    def parameters(self) -> Iterator[nn.Parameter]:
        """The adapter's own, without those of the base layers."""
        for layer in self.layers.values():
            base = {id(p) for p in layer.get_base_layer().parameters()}
            yield from (p for p in layer.parameters() if id(p) not in base)

    @contextmanager
    def off(self) -> Iterator[None]:
        """The base model alone, for a while; which parameters take a gradient is as before, inside and after.

        Raises: ConfigError: an adapter is merged into its base layer, which can't be told from it any more.
        """
        if merged := [name for name, layer in self.layers.items() if layer.merged]:
            raise ConfigError(f"the adapter is merged into {merged[0]}, so it can't be switched off; unmerge it first")
        found = [layer for layer in self.layers.values() if not layer.disable_adapters]
        self._switch(found, on=False)
        try:
            yield
        finally:
            self._switch(found, on=True)

    def _switch(self, layers: list[Any], *, on: bool) -> None:
        """PEFT's switch, which would also set whether the adapter's parameters take a gradient."""
        takes = [(p, p.requires_grad) for p in self.parameters()]
        for layer in layers:
            layer.enable_adapters(on)
        for p, gradient in takes:
            p.requires_grad_(gradient)


def adapter_layer(layer: nn.Module) -> bool:
    """Whether PEFT has wrapped this layer. Where its package was never imported, none is.

    >>> adapter_layer(nn.Linear(2, 2))
    False
    """
    if "peft" not in sys.modules:
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(layer, BaseTunerLayer)


def plain_linear(layer: nn.Module) -> nn.Linear | None:
    """The linear layer whose weight, or effective weight, is all that a layer does; None = it does something else.

    Args: layer: any module.
    Returns: itself where it is a plain linear layer, the base layer of one with plain LoRA, else None.

    >>> plain_linear(nn.SiLU()) is None
    True
    """
    if type(layer) is nn.Linear:
        return layer
    if not adapter_layer(layer):
        return None
    from peft.tuners.lora.layer import Linear

    if type(layer) is not Linear or type(base := layer.get_base_layer()) is not nn.Linear:
        return None
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    biased = any(layer.lora_B[name].bias is not None for name in names)
    noisy = any(isinstance(drop := layer.lora_dropout[name], nn.Dropout) and drop.p for name in names)
    return None if biased or noisy or any(name in layer.lora_variant for name in names) else base


@torch.no_grad()
def effective_weight(layer: nn.Module) -> Tensor:
    """W, or W + Σ s B A where the layer has active adapters: [O I], in W's dtype, without a gradient.

    The sum is made in fp32 or wider and rounded once. Args: layer: one that `plain_linear` knows.
    Returns: the layer's own tensor where there is nothing to add.

    >>> effective_weight(layer := nn.Linear(2, 3)).data_ptr() == layer.weight.data_ptr()
    True
    """
    base = plain_linear(layer)
    if base is None:
        raise TypeError(f"a {type(layer).__name__} has no effective weight; run it as a module")
    weight = base.weight.detach()
    if base is layer:
        return weight
    adapted: Any = layer
    if adapted.merged or adapted.disable_adapters:
        return weight
    total = to_fp32(weight)
    for name in adapted.active_adapters:
        if name in adapted.lora_A:  # another layer may have an adapter of this name
            b, a = to_fp32(adapted.lora_B[name].weight), to_fp32(adapted.lora_A[name].weight)
            total = total + adapted.scaling[name] * (b @ a)
    return total.to(weight.dtype)
