"""Which implementations training and scoring use. environment.json records it, so a resumed run can log a change.

Left out on purpose: choices that depend on a layer's shapes; the log reports these when the layer runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from whet.models.quantized import quantized_layer_names
from whet.native.build import Unavailable
from whet.native.layers import LayerKernels, layer_kernels
from whet.native.segments import SegmentKernels, kernels_for

if TYPE_CHECKING:
    from whet.models.loaded_model import LoadedModel

__all__ = ["training_backends"]


def training_backends(loaded: LoadedModel) -> dict[str, str]:
    """The implementations of attention, and of norms, gates and weight gradients. On a CPU this builds the kernels.

    Args: loaded: the model, on its device and in its training dtype.
    Returns: "attention" and "layers", each "native (compiler)", or the implementation used instead and the reason;
        "adapter" if the model has an adapter, "base" if it is in 4 bits.

    >>> from whet.models.load import load_model
    >>> from whet.demo import small_model
    >>> sorted(training_backends(load_model(small_model(seed=0))))
    ['attention', 'layers']
    """
    first = next(loaded.module.parameters())
    if not loaded.packable:
        attention = "the model's own: padded rows"
    elif first.device.type != "cpu" or loaded.attention != "auto":
        attention = loaded.attention
    else:
        attention = _describe(kernels_for(first.device, first.dtype))
    known = first.device.type == "cpu" and first.dtype.itemsize in (2, 4)
    found = {"attention": attention, "layers": _describe(layer_kernels()) if known else "the module's"}
    if loaded.adapter is not None:
        found["adapter"] = f"PEFT's layers around {len(loaded.adapter.layers)} frozen ones, which run as without"
    if bits := quantized_layer_names(loaded.module):
        found["base"] = f"bitsandbytes, 4 bits in {len(bits)} layers"
    return found


def _describe(kernels: SegmentKernels | LayerKernels | Unavailable) -> str:
    return f"torch ({kernels})" if isinstance(kernels, Unavailable) else f"native ({kernels.compiler})"
