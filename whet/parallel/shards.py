"""Tensors in a folder of shards: every process writes what it holds, and any number of processes reads it again.

    shards/shard-00001-model-00001-of-00001.safetensors     what rank 0 holds, with the place of each part in its tensor

torch.distributed.checkpoint plans, writes and reads them; a tensor that all ranks have whole is written by one of them.
Left out on purpose: its own file format, whose metadata is a pickle.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import save

from whet.parallel.ranks import ProcessRanks, Ranks
from whet.storage.checkpoint import file_sum
from whet.storage.shards import read_tensors, saved_tensors, shard_errors

__all__ = ["SHARDS", "ShardReader", "Stager", "write_shards"]

SHARDS = "shards"
"""The folder of the shards in a checkpoint."""


def write_shards(tensors: Mapping[str, Tensor], folder: Path, ranks: Ranks) -> dict[str, str]:
    """Writes tensors into a folder. Every rank must call it, with the same names.

    Args: tensors: DTensors, of which each rank writes its own shards, and tensors that all ranks have. folder: the same
        one on every rank, in a file system that all see. ranks: the processes.
    Returns: file name -> SHA-256, of all ranks' files.
    Raises: CheckpointError: a rank could not write; every rank raises it.
    """
    with shard_errors(folder, "written"):
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        save(dict(tensors), storage_writer=writer, **_group(ranks))
    own = {p.name: file_sum(p) for p in folder.glob(f"shard-{ranks.rank + 1:05d}-*")}
    return {name: digest for sums in ranks.all_gather(own) for name, digest in sums.items()}


class ShardReader:
    """Reads the tensors of some names from a folder that `write_shards` wrote.

    Args: folder: the folder. ranks: the processes, which must all read. prefix: of the names, which it leaves out.

    Raises: CheckpointError: the folder can't be read.
    """

    def __init__(self, folder: Path, ranks: Ranks, prefix: str = "") -> None:
        self.folder, self.ranks, self.prefix = folder, ranks, prefix
        self.tensors = saved_tensors(folder, prefix)
        """Name -> shape and dtype of the whole tensor."""

    def with_prefix(self, prefix: str) -> ShardReader:
        """Returns a reader of the names that begin with a prefix.

        Raises: CheckpointError: the folder can't be read.
        """
        return ShardReader(self.folder, self.ranks, self.prefix + prefix)

    def read(self, targets: Mapping[str, Tensor]) -> None:
        """Fills tensors with the saved values, in place; of a DTensor each rank reads its own shard.

        Raises: CheckpointError: a file can't be read; every rank raises it.
        """
        read_tensors(self.folder, targets, self.prefix, **_group(self.ranks))


class Stager:
    """Copies tensors to the host, into the same memory each time; torch 2.11 takes new memory."""

    def __init__(self) -> None:
        cuda = torch.cuda.is_available()
        self._options = StagingOptions(
            use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=cuda
        )
        self._stager = DefaultStager(self._options)

    def stage(self, tensors: dict[str, Any]) -> Any:
        """Returns the copies."""
        try:
            return self._stager.stage(tensors)
        except KeyError:  # torch 2.11 closes its stager after the first copy
            self._stager = DefaultStager(self._options)
            return self._stager.stage(tensors)


def _group(ranks: Ranks) -> dict[str, Any]:
    """Returns the arguments of torch.distributed.checkpoint for these processes."""
    return {"process_group": ranks.group} if isinstance(ranks, ProcessRanks) else {"no_dist": True}
