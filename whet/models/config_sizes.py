"""Reads the positions and the width of a model from its config, for commands that load no model."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from whet.errors import format_exception
from whet.storage.model_paths import check_hub, model_folder

__all__ = ["MISSING_IS_NONE", "config_positions", "kv_bytes_per_token", "read_config", "read_positions", "read_width"]

logger = logging.getLogger("whet")

T = TypeVar("T")

MISSING_IS_NONE: Any = {
    "_raise_exceptions_for_gated_repo": False,
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_connection_errors": False,
}
"""Options of `cached_file` that give None for a missing file."""


def config_positions(config: Any) -> int | None:
    """Returns the most positions of a model with this config; None = it has no limit (recurrent models)."""
    config = config.get_text_config()
    return config.max_position_embeddings if hasattr(config, "max_position_embeddings") else None


def read_positions(path: str, trust_remote_code: bool = False) -> int | None:
    """Returns the most positions of a model, read from its config.

    Args: path: folder of a model, a run, a checkpoint or an adapter (its base is read), or a hub name.
        trust_remote_code: see read_model.
    Returns: None if there is no limit, or if the config can't be read; loading the model reports the error.
    """
    return read_config(path, trust_remote_code, config_positions)


def read_width(path: str, trust_remote_code: bool = False) -> int | None:
    """Returns the hidden size of a model, read from its config. Args, Returns: see read_positions."""
    return read_config(path, trust_remote_code, lambda config: int(config.get_text_config().hidden_size))


def read_config(path: str, trust_remote_code: bool, function: Callable[[Any], T]) -> T | None:
    """Calls a function with the config of a model, and returns its result; None if the config can't be read."""
    from transformers import AutoConfig
    from transformers.utils.hub import cached_file

    folder = model_folder(path)
    check_hub(folder)
    try:
        base = cached_file(folder, "adapter_config.json", **MISSING_IS_NONE)
        if base is not None and cached_file(folder, "config.json", **MISSING_IS_NONE) is None:
            folder = model_folder(json.loads(Path(base).read_bytes())["base_model_name_or_path"])
        return function(AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code))
    except Exception as error:  # several libraries read it, with many exception classes
        logger.debug("the config of %s can't be read: %s", path, format_exception(error))
        return None


def kv_bytes_per_token(config: Any, itemsize: int) -> int:
    """Returns bytes of the keys and values of one token, over all layers.

    Args: config: of the model. itemsize: bytes of a number.

    >>> from transformers import LlamaConfig
    >>> kv_bytes_per_token(LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=3), 2)
    96
    """
    config = config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * config.num_hidden_layers * kv_heads * size * itemsize
