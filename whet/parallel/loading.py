"""Loads a model once for all processes: each reads its shards from the files, or rank 0 reads all and sends them.

    load_sharded    rank 0 has the model, the others have its modules without weights, on the meta device. Weights that
                    stay in their files (models/weight_files.py) are there on no rank
    receive         gives parameters their values on every rank, just before they are sharded: from the files the rows
                    that a rank keeps, else one whole tensor at a time from rank 0

So a rank never holds more than its shards and the part of the model that is being sharded, and rank 0 holds the whole
model only where transformers must read it, or where another rank can't read the same files.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn

from whet.errors import ConfigError, format_exception
from whet.models.pretrained import log_whole
from whet.models.weight_files import InFile, check_finite, in_file, without_weights
from whet.parallel.ranks import Ranks
from whet.util.memory import release_freed_memory

__all__ = ["load_sharded", "receive"]

SAMPLES, SAMPLE_BYTES = 64, 4096
"""Parts of a file that tell it from another version of the same model. Each tensor of it differs in most numbers."""


def load_sharded(ranks: Ranks, load: Callable[..., Any]) -> Any:
    """Loads a model on rank 0, with its weights left in files where all ranks can read them.

    Args: ranks: the processes; all must call this. load: returns a LoadedModel; it takes in_files, as load_model does.
    Returns: what it returned on rank 0; on the others a copy whose parameters are on the meta device. Parameters whose
        values are in files are there on rank 0 too.
    Raises: the error of `load`, on every rank; see Ranks.call_on_writer.
    """
    loaded = _load_on_writer(ranks, functools.partial(load, in_files=True))
    files = sorted({stored.file for p in loaded.module.parameters() if (stored := in_file(p))})
    digests = ranks.all_gather([_digest(file) for file in files]) if files else []
    different = [rank for rank, own in enumerate(digests) if own != digests[0]]
    if not different:
        return loaded
    if ranks.is_writer:
        log_whole(loaded.name, f"rank {different[0]} does not find the same files")
    return _load_on_writer(ranks, load)


def _load_on_writer(ranks: Ranks, load: Callable[[], Any]) -> Any:
    read: list[Any] = []

    def read_once() -> Any:
        loaded = load()
        read.append(without_weights(loaded, loaded.module, in_files_only=True))
        return without_weights(loaded, loaded.module)

    shell = ranks.call_on_writer(read_once)
    return read[0] if read else shell


def _digest(file: str) -> str | None:
    """Returns a digest of a file's size and of some of its bytes; None = this process can't read it."""
    try:
        with Path(file).open("rb") as f:
            size = f.seek(0, 2)
            digest = hashlib.sha256(str(size).encode())
            for i in range(SAMPLES):
                f.seek(i * size // SAMPLES)
                digest.update(f.read(SAMPLE_BYTES))
    except OSError:
        return None
    return digest.hexdigest()


def receive(
    parameters: Iterable[nn.Parameter], device: torch.device, ranks: Ranks, share: tuple[int, int] = (0, 1)
) -> None:
    """Gives each parameter its values on every rank, in place, on the device that computes.

    Args: parameters: the same on every rank. Where their values are not in files, they are real on rank 0, and on the
        meta device on the others. ranks: the processes; all must call this. share: which part of the rows of each
        parameter this rank keeps, and of how many, as torch.chunk cuts them; rows read from files are only those.
    Raises: ConfigError: a file can't be read, or holds NaN; OtherRankError on the other ranks.
    """
    release_freed_memory()  # of the part before, whose holes would take as much as the shards
    parameters = list(parameters)
    stored = {id(p): (p, found) for p in parameters if (found := in_file(p))}
    if stored:
        ranks.scatter_gather(lambda _: _read(stored.values(), device, *share), range(ranks.size))
    for p in parameters:
        if id(p) in stored:
            continue
        whole = torch.empty_like(p, device=device) if p.is_meta else p.detach().to(device)
        dist.broadcast(whole, src=0)
        if p.is_meta:
            torch.utils.swap_tensors(p, nn.Parameter(whole, p.requires_grad))  # tied weights remain one object
        else:
            p.data = whole


def _read(stored: Iterable[tuple[nn.Parameter, InFile]], device: torch.device, index: int, count: int) -> None:
    """Reads a part of the rows of parameters; the memory of the other rows stays uninitialised."""
    for file, group in itertools.groupby(sorted(stored, key=lambda x: x[1][:2]), key=lambda x: x[1].file):
        try:
            with safe_open(file, "pt") as f:
                for p, (_, key, dtype) in group:
                    size = -(-len(p) // count)
                    rows = slice(min(index * size, len(p)), min((index + 1) * size, len(p)))
                    whole = torch.empty_like(p, device=device)
                    whole[rows] = f.get_slice(key)[rows].to(dtype)
                    check_finite(whole[rows], file, key)
                    torch.utils.swap_tensors(p, nn.Parameter(whole, p.requires_grad))
        except ConfigError:
            raise
        except Exception as error:  # of safetensors, or OSError
            raise ConfigError(f"can't read the weights in {file}: {format_exception(error)}; copy it again") from error
