"""Linear layers with 4-bit weights (bitsandbytes): detect, dequantize and cast them.

Such a layer dequantizes its weights for each product. The weights are frozen, and a low-rank adapter is trained on
them. bitsandbytes is imported only where quantization is configured.
Left out on purpose: 8 bits, other packages, and 4-bit products of whet's own.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from whet.errors import ConfigError, format_exception
from whet.util.install import install_hint

__all__ = ["cast_parameters", "dequantize", "is_quantized_layer", "quantization_config", "quantized_layer_names"]

PACKAGE = "bitsandbytes"


def quantization_config(kind: str, device: torch.device) -> Any:
    """Transformers' configuration of a base model in 4 bits. Args: kind: nf4 or fp4. device: the model's device.

    Raises: ConfigError: bitsandbytes is not installed, or does not support the device.
    """
    try:
        import bitsandbytes  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
    except Exception as error:  # the import loads a native library, with many exception classes
        raise ConfigError(
            f"quantization={kind} needs bitsandbytes ({format_exception(error, 200)}); "
            f"{install_hint('qlora')}, or leave quantization out: lora then trains an adapter on unquantised weights"
        ) from error
    if device.type not in ("cuda", "cpu", "xpu"):
        raise ConfigError(f"quantization={kind} does not run on {device.type}: bitsandbytes supports cuda, xpu and cpu")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=True)


def is_quantized_layer(layer: nn.Module) -> bool:
    """Returns whether a layer has a 4-bit weight. False if bitsandbytes was never imported.

    >>> is_quantized_layer(nn.Linear(2, 2))
    False
    """
    package = sys.modules.get(PACKAGE)
    return package is not None and isinstance(layer, package.nn.Linear4bit)


def quantized_layer_names(module: nn.Module) -> list[str]:
    """Returns the names of the layers with 4-bit weights."""
    return [name for name, layer in module.named_modules() if is_quantized_layer(layer)]


def dequantize(p: Tensor) -> Tensor:
    """Returns a parameter as a plain tensor: itself, or its dequantized 4-bit weight.

    >>> dequantize(weight := torch.ones(2)) is weight
    True
    """
    package = sys.modules.get(PACKAGE)
    if package is None or not isinstance(p, package.nn.Params4bit):
        return p
    return package.functional.dequantize_4bit(p.data, p.quant_state)  # pyright: ignore


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Makes a module compute in a dtype. 4-bit weights do not change, but their layers compute in it.

    Args: module: changed in place. dtype: dtype of the other parameters.
    """
    for p in module.parameters():
        if p.is_floating_point():
            p.data = p.data.to(dtype)
    for layer in module.modules():
        if is_quantized_layer(layer):
            layer.compute_dtype, layer.compute_type_is_set = dtype, True  # pyright: ignore
