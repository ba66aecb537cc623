"""Which implementations training and scoring run on: for environment.json, so that a resumed run can log what changed.

Left out on purpose: what depends on a layer's own shapes; the log says that when the layer runs.
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
    """What computes attention, and norms, gates and gradients of weights; on a CPU this builds the kernels.

    Args: loaded: the model, where it is and in the dtype in which it is trained.
    Returns: "attention" and "layers", each "native (compiler)", or what serves in its place and why; "adapter" and
        "base" where the model has an adapter, or is held in 4 bits.

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
