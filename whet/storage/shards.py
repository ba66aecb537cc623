"""Reads tensors of the shards of a checkpoint, whole or each process its part; whet.parallel.shards writes them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from whet.errors import CheckpointError, format_exception

__all__ = ["read_tensors", "saved_tensors", "shard_errors"]


def saved_tensors(folder: Path, prefix: str = "") -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Returns the saved tensors whose names begin with a prefix: name without it -> shape and dtype of the whole one.

    Raises: CheckpointError: the folder can't be read.
    """
    with shard_errors(folder, "read"):
        entries = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name.removeprefix(prefix): (entry.size, entry.properties.dtype)
        for name, entry in entries.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }


def read_tensors(folder: Path, targets: Mapping[str, Tensor], prefix: str = "", **group: Any) -> None:
    """Fills tensors with the saved values, in place; of a DTensor each process reads its own shard.

    Args: targets: by the saved names without the prefix. group: torch.distributed.checkpoint's arguments for the
        processes that read together; none = this process alone.
    Raises: CheckpointError: a file can't be read; every process raises it.
    """
    named = {f"{prefix}{name}": tensor.detach() for name, tensor in targets.items()}
    with shard_errors(folder, "read"):
        load(named, storage_reader=HuggingFaceStorageReader(str(folder)), **(group or {"no_dist": True}))


@contextmanager
def shard_errors(folder: Path, what: str) -> Iterator[None]:
    """A context that turns torch.distributed.checkpoint's errors, which are no Exceptions, into CheckpointErrors."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*single process")  # that is what no_dist asks for
            yield
    except CheckpointException as error:
        rank, (first, *_) = next(iter(error.failures.items()))
        raise CheckpointError(f"{folder} can't be {what} by rank {rank}: {format_exception(first)}") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{folder} can't be {what}: {format_exception(error)}") from error
