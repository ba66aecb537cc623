"""Chooses the compute dtype of a model: the configured one, or with "auto" by the processor.

A CPU that emulates bf16 is 6 to 9 times slower with it than with fp32. A CPU with bf16 instructions is about twice as
fast for models of width 128 or more; below that width the calls cost as much as the products. (An MLP, forward and
backward, on one thread of an AMD Zen 5 has 0.9 times the speed of fp32 at width 32, 1.3 at 64, 1.9 at 128, 2.2 at 256.)
"auto" depends on the instructions and the width, and never on a timing, so a command always computes the same. A run
records the dtype, and a resumed run uses the recorded one, on another processor too.
"""

from __future__ import annotations

import torch

from whet.errors import lookup_error
from whet.models.loaded_model import LoadedModel
from whet.util.cpu import cpu_info

__all__ = ["DTYPES", "auto_dtype", "compute_dtype"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BF16_FLAGS = {"avx512_bf16", "amx_bf16"}
"""CPU instructions that make bf16 products faster than fp32 products."""
BF16_WIDTH = 128
"""The smallest hidden size for which bf16 is fast enough to be worth its rounding."""


def compute_dtype(name: str, loaded: LoadedModel, device: torch.device | None = None) -> torch.dtype:
    """Returns the compute dtype of a model.

    Args: name: "float32", "bfloat16" or "auto". "auto" is bf16 on a GPU with bf16 hardware, and on a CPU with AVX-512
        BF16 or AMX for a model of width 128 or more; otherwise it is fp32. loaded: the model. device: that it will
            compute on; None = its own.
    Returns: the dtype.
    Raises: ConfigError: an unknown name.
    """
    if name != "auto":
        if name not in DTYPES:
            raise lookup_error("dtype", name, ("auto", *DTYPES))
        return DTYPES[name]
    width = loaded.module.config.get_text_config().hidden_size  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    return auto_dtype(device or next(loaded.module.parameters()).device, int(width))


def auto_dtype(device: torch.device, width: int) -> torch.dtype:
    """Returns the dtype that "auto" chooses. Args: device: the model's device. width: its hidden size."""
    if device.type == "cuda":
        hardware = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)  # private to torch
        hardware = bool(BF16_FLAGS & set(cpu_info()["flags"])) and supported is not None and supported()
        hardware = hardware and width >= BF16_WIDTH
    return torch.bfloat16 if hardware else torch.float32
