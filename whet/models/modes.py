"""Switches the trainer's module to the modes that generation needs, and back.

A trained module is in train mode, since eval mode would turn activation checkpointing off. Generation needs neither
checkpointing nor a router's noise. Left out on purpose: anything that changes parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from whet.models.attention import ATTENTION
from whet.models.config_sizes import config_positions

__all__ = ["eval_mode", "max_positions", "transformers_attention"]


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Eval mode inside the context; afterwards every submodule is in its former mode.

    Args: module: any module.

    >>> m = nn.Dropout()
    >>> with eval_mode(m):
    ...     print(m.training)
    False
    >>> m.training
    True
    """
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, mode in modes:
            m.training = mode


def max_positions(module: nn.Module) -> int | None:
    """The most tokens that the model's positions cover.

    Args: module: a model of transformers.
    Returns: its config's max_position_embeddings, under any name; None where it has none (recurrent models).
    """
    return config_positions(module.config)


@contextmanager
def transformers_attention(module: nn.Module) -> Iterator[None]:
    """An attention of transformers inside the context, for a module that was loaded for whet's layouts.

    Args: module: a model of transformers; unchanged where it has its own attention already.
    """
    config = module.config.get_text_config()  # pyright: ignore
    if config._attn_implementation != ATTENTION:
        yield
        return
    module.set_attn_implementation("sdpa" if module._supports_sdpa else "eager")  # pyright: ignore
    try:
        yield
    finally:
        module.set_attn_implementation(ATTENTION)  # pyright: ignore
