"""Sharded checkpoints as models: their weights are put together once, in a folder in the user's cache."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from whet.errors import ConfigError, format_exception
from whet.util.conversion_cache import convert_once

__all__ = ["assemble_shards"]

PEFT_PREFIX = "base_model.model."
"""How PEFT's files begin the names of an adapter's tensors."""


def assemble_shards(place: Path) -> str:
    """Puts the weights of a model or an adapter in a sharded checkpoint together, if the cache lacks them.

    Args: place: the model's folder in the checkpoint, with its config and tokenizer; the weights are in `shards` beside
        it.
    Returns: the folder in the user's cache. It holds the fp32 master weights, as a whole checkpoint does.
    Raises: ConfigError: the shards can't be read, or the cache can't be written.

    Example: assemble_shards(Path("runs/sums/checkpoints/step-000010/actor")).
    """
    sums = place.parent / "sums.json"
    digest = hashlib.blake2b(sums.read_bytes() if sums.is_file() else str(place.resolve()).encode(), digest_size=8)
    name = f"checkpoints/{place.parent.name}-{place.name}-{digest.hexdigest()}"
    try:
        return convert_once(place, name, lambda folder: _write(place, folder))
    except ConfigError:
        raise
    except Exception as error:
        shards = place.parent / "shards"
        raise ConfigError(
            f"can't read the weights in {shards}: {format_exception(error)}; take another checkpoint, or final/ of the "
            "finished run"
        ) from error


def _write(place: Path, folder: Path) -> None:
    """Writes the weights, and copies the other files of the model, to an empty folder."""
    import torch
    from safetensors.torch import save_file

    from whet.util.shard_files import read_tensors, saved_tensors

    shards, prefix = place.parent / "shards", f"{place.name}.model."
    weights = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in saved_tensors(shards, prefix).items()}
    read_tensors(shards, weights, prefix)
    is_adapter = (place / "adapter_config.json").is_file()
    name, start = ("adapter_model.safetensors", PEFT_PREFIX) if is_adapter else ("model.safetensors", "")
    save_file({f"{start}{key}": tensor for key, tensor in weights.items()}, folder / name, metadata={"format": "pt"})
    for file in place.iterdir():
        if file.name != "state.pt":
            shutil.copy(file, folder)
