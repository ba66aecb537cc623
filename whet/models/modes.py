"""Switches the trainer's module to the modes that generation needs, and back.

A trained module is in train mode, because eval mode would switch activation checkpointing off. Generation needs neither
checkpointing nor router noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from whet.models.attention import ATTENTION
from whet.models.config_sizes import config_positions
from whet.models.prompt_tuning import num_virtual_tokens

__all__ = ["eval_mode", "max_positions", "num_ids", "transformers_attention"]


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Switches a module to eval mode inside the context, and restores the mode of every submodule afterwards.

    Args: module: any module.

    >>> m = nn.Dropout()
    >>> with eval_mode(m):
    ...     print(m.training)
    False
    >>> m.training
    True
    """
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for submodule, mode in modes:
            submodule.training = mode


def max_positions(module: nn.Module) -> int | None:
    """Returns the most positions of a model.

    Args: module: a model of transformers.
    Returns: max_position_embeddings of its config, or its equivalent, less the virtual tokens of a learned prompt;
        None = no limit (recurrent models).
    """
    positions = config_positions(module.config)
    return None if positions is None else positions - num_virtual_tokens(module)


def num_ids(module: nn.Module) -> int:
    """Returns the number of token ids that a model can read: the rows of its embedding, padding included."""
    return int(module.get_input_embeddings().weight.shape[0])  # pyright: ignore


@contextmanager
def transformers_attention(module: nn.Module) -> Iterator[None]:
    """Switches a module from whet's attention to one of transformers inside the context.

    Args: module: a model of transformers; a module with another attention than whet's does not change.
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
