"""Reads the positions and the width of a model from its config, for commands that load no model."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from whet.errors import format_exception
from whet.util.model_paths import check_hub, model_folder

__all__ = ["MISSING_IS_NONE", "config_positions", "read_config", "read_positions", "read_width"]

logger = logging.getLogger("whet")

T = TypeVar("T")

MISSING_IS_NONE: Any = {
    "_raise_exceptions_for_gated_repo": False,
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_connection_errors": False,
}
"""Options of `cached_file` that give None for a missing file."""


def config_positions(config: Any) -> int | None:
    """The most tokens that the positions of this config cover; None where it has no bound (recurrent models)."""
    config = config.get_text_config()
    return config.max_position_embeddings if hasattr(config, "max_position_embeddings") else None


def read_positions(path: str, trust_remote_code: bool = False) -> int | None:
    """The most tokens that a model's positions cover, read from its config.

    Args: path: of a model, a run, a checkpoint or an adapter (its base is read), or a hub name. trust_remote_code: as
        for read_model.
    Returns: None where there is no bound, or where the config can't be read: loading the model reports that.
    """
    return read_config(path, trust_remote_code, config_positions)


def read_width(path: str, trust_remote_code: bool = False) -> int | None:
    """The hidden size of a model, read from its config. Args, Returns: as read_positions."""
    return read_config(path, trust_remote_code, lambda config: int(config.get_text_config().hidden_size))


def read_config(path: str, trust_remote_code: bool, ask: Callable[[Any], T]) -> T | None:
    """Calls `ask` with a model's config; None where the config can't be read."""
    from transformers import AutoConfig
    from transformers.utils.hub import cached_file

    place = model_folder(path)
    check_hub(place)
    try:
        base = cached_file(place, "adapter_config.json", **MISSING_IS_NONE)
        if base is not None and cached_file(place, "config.json", **MISSING_IS_NONE) is None:
            place = model_folder(json.loads(Path(base).read_bytes())["base_model_name_or_path"])
        return ask(AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code))
    except Exception as error:  # of any of the libraries that read it
        logger.debug("the config of %s can't be read: %s", path, format_exception(error))
        return None
