"""The implementations that training and scoring use; environment.json records them, so a resume can log changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from whet.models.quantized import quantized_layer_names
from whet.native.build import Unavailable
from whet.native.layers import LayerKernels, layer_kernels
from whet.native.segments import SegmentKernels, kernels_for

if TYPE_CHECKING:
    from whet.models.loaded_model import LoadedModel

__all__ = ["training_backends"]


def training_backends(
    loaded: LoadedModel, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> dict[str, str]:
    """Returns the implementations of attention and of norms, gates and weight gradients. On a CPU it builds the kernels
    first.

    Args: loaded: the model. dtype, device: that it computes in and on; None = those of its parameters.
    Returns: "attention" and "layers", each "native (compiler)", or the implementation used instead and the reason;
        "adapter" if the model has an adapter, "base" if it is in 4 bits.

    >>> from whet.models.load import load_model
    >>> from whet.demo import small_model
    >>> sorted(training_backends(load_model(small_model(seed=0))))
    ['attention', 'layers']
    """
    first = next(loaded.module.parameters())
    dtype, device = dtype or first.dtype, device or first.device
    if not loaded.packable:
        attention = "the model's own: padded rows"
    elif device.type != "cpu" or loaded.attention != "auto":
        attention = loaded.attention
    else:
        attention = _describe(kernels_for(device, dtype))
    has_kernels = device.type == "cpu" and dtype.itemsize in (2, 4)
    backends = {"attention": attention, "layers": _describe(layer_kernels()) if has_kernels else "the module's"}
    if loaded.adapter is not None:
        backends["adapter"] = f"PEFT's layers around {len(loaded.adapter.layers)} frozen ones, which run as without"
    if quantized := quantized_layer_names(loaded.module):
        backends["base"] = f"bitsandbytes, 4 bits in {len(quantized)} layers"
    return backends


def _describe(kernels: SegmentKernels | LayerKernels | Unavailable) -> str:
    return f"torch ({kernels})" if isinstance(kernels, Unavailable) else f"native ({kernels.compiler})"
