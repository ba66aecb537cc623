"""Activation checkpointing: saves some activations of a layer for the backward pass, and recomputes the others.

    mode         saved per layer                           recomputed in the backward pass
    none         everything the backward pass reads        nothing
    selective    its input, matrix products, attention     cheap operations: norms, rotary, activations, sums
    full         its input                                 the whole layer, in about a third more time

The gradients equal those of "none" bit for bit: the same operations run on the same numbers, and no dropout draws
random numbers between them.
Left out on purpose: offloading activations to the host, and torch.compile's own choice of what to save.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from whet.errors import ConfigError, lookup_error
from whet.models.matmul import onednn_unsupported_reason
from whet.models.varlen import OPERATORS
from whet.native.segments import OPERATOR

__all__ = ["MODES", "checkpoint_activations"]

MODES = ("none", "selective", "full")

_aten = torch.ops.aten
_SAVED_OPERATORS = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
    OPERATOR,
    *OPERATORS,
]
"""The operators whose results "selective" saves. It does not save bmm: eager attention computes its scores with bmm,
and their size is quadratic in the length."""


def checkpoint_activations(module: PreTrainedModel, mode: str = "full") -> None:
    """Makes a transformers model recompute activations of its layers in the backward pass.

    Args: module: a model in train mode, because transformers does not checkpoint layers in eval mode. The second run of
        a layer gets the same keyword arguments as the first. mode: one of MODES.
    Raises: ConfigError: an unknown mode, or a model with layers that transformers can't checkpoint.
    Source: full: arXiv:1604.06174, a segment per layer; selective: arXiv:2205.05198, which saves the products too.

    Example: `checkpoint_activations(loaded.module, "selective")`, once, before the first forward pass.
    """
    if mode not in MODES:
        raise lookup_error("gradient_checkpointing", mode, MODES)
    if mode == "none":
        return
    # every dropout is 0, so no random state has to be preserved
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if mode == "selective":
        onednn = [torch.ops.mkldnn._linear_pointwise.default] if onednn_unsupported_reason() is None else []
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, [*_SAVED_OPERATORS, *onednn])
    try:
        if hasattr(module, "activation_checkpointing_enable"):  # newer transformers warn about the older name
            module.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        else:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    except ValueError as error:
        raise ConfigError(f"{error} Set gradient_checkpointing=none for {type(module).__name__}") from error
