"""Borrowing the trainer's module for generation, and giving it back as it was.

A trained module stands in train mode, since eval mode would turn activation checkpointing off; generation wants
neither checkpointing nor a router's noise. Left out on purpose: anything that touches parameters.
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
    """Eval mode for a while; afterwards every submodule is in the mode it was in.

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
    """Tokens that the model's positions reach.

    Args: module: a model of transformers.
    Returns: its config's max_position_embeddings, under whatever name; None where it has none (recurrent models).
    """
    return config_positions(module.config)


@contextmanager
def transformers_attention(module: nn.Module) -> Iterator[None]:
    """One of transformers' attentions for a while, for a module that was loaded for whet's layouts.

    Args: module: a model of transformers; untouched where it has its own attention already.
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
