"""The grid of the processes: who shares shards, passes and the tokens of a pass.

Rank = data · context_parallel_size + context.

    passes       each of the size / context_parallel_size data ranks runs its part of the forward passes
    tokens       the context ranks of one data rank divide the tokens of its passes (parallel/context.py)
    shards       over all ranks, or, with replicas, within each of `data_parallel_replicate_size` groups of
                 neighbouring ranks, which hold the same shards (HSDP)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["ProcessMesh", "make_mesh"]


@dataclass(frozen=True)
class ProcessMesh:
    """The grid of the processes."""

    fsdp: DeviceMesh
    """(size) or (replicas, shards): what fully_shard takes."""
    data_group: dist.ProcessGroup
    """The ranks that run other passes on the same part of the tokens."""
    context_group: dist.ProcessGroup
    """The ranks that run the same passes on other parts of the tokens."""

    @property
    def device_type(self) -> str:
        """The kind of device: cpu or cuda."""
        return self.fsdp.device_type

    @property
    def num_shards(self) -> int:
        """The number of ranks that one copy of the model is sharded over; the first ranks have the first copy."""
        return self.fsdp.size(-1)

    @property
    def context_size(self) -> int:
        """The number of ranks that divide the tokens of a pass."""
        return self.context_group.size()


def make_mesh(device: str, size: int, context_parallel_size: int, data_parallel_replicate_size: int) -> ProcessMesh:
    """Makes the grid of all processes, which must all call this.

    Args: device: cpu or cuda. The others: see torchrun_env.check_mesh.
    """
    replicas, context = data_parallel_replicate_size, context_parallel_size
    fsdp = (replicas, size // replicas) if replicas > 1 else (size,)
    names = ("replicate", "shard")[-len(fsdp) :]
    grid = init_device_mesh(device, (size // context, context), mesh_dim_names=("data", "context"))
    return ProcessMesh(
        init_device_mesh(device, fsdp, mesh_dim_names=names), grid.get_group("data"), grid.get_group("context")
    )
