"""Chooses the dtype that a model computes in: the configured one, or by the processor.

A CPU that emulates bf16 multiplies in it 6 to 9 times slower than in fp32. One with instructions for it is about twice
as fast from a width of 128 on; below that the calls cost as much as the products (an MLP, forward and backward, one
thread of an AMD Zen 5: 0.9 times the speed of fp32 at width 32, 1.3 at 64, 1.9 at 128, 2.2 at 256). "auto" goes by the
instructions and the width, never by a clock, so that a command computes alike every time. The result decides bits: a
run records it, and a resumed run uses the record, on another processor too.
"""

from __future__ import annotations

import torch

from whet.errors import ConfigError
from whet.models.loaded_model import LoadedModel
from whet.util.cpu import cpu_facts

__all__ = ["DTYPES", "auto_dtype", "compute_dtype"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BF16_FLAGS = {"avx512_bf16", "amx_bf16"}
"""Instructions of a CPU with which products in bf16 are faster than in fp32."""
BF16_WIDTH = 128
"""Hidden size from which on they are so by more than their rounding costs."""


def compute_dtype(name: str, loaded: LoadedModel) -> torch.dtype:
    """The compute dtype of a model.

    Args: name: "float32", "bfloat16", or "auto": bf16 on a GPU that has it in hardware, and on a CPU with AVX-512 BF16
        or AMX for a model of width 128 or more, else fp32. loaded: the model, on its device.
    Returns: the dtype.
    Raises: ConfigError: another name.
    """
    if name != "auto":
        if name not in DTYPES:
            raise ConfigError(f"dtype={name!r} is not one of auto, {', '.join(DTYPES)}")
        return DTYPES[name]
    width = loaded.module.config.get_text_config().hidden_size  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    return auto_dtype(next(loaded.module.parameters()).device, int(width))


def auto_dtype(device: torch.device, width: int) -> torch.dtype:
    """The dtype that "auto" chooses. Args: device: where the model computes. width: its hidden size."""
    if device.type == "cuda":
        hardware = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)  # private to torch
        hardware = bool(BF16_FLAGS & set(cpu_facts()["flags"])) and supported is not None and supported()
        hardware = hardware and width >= BF16_WIDTH
    return torch.bfloat16 if hardware else torch.float32
