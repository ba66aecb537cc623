"""The grid of the processes: who shares shards, passes and the tokens of a pass.

Rank = (data · context_parallel_size + context) · tensor_parallel_size + tensor.

    passes       each of the data ranks runs its part of the forward passes
    tokens       the context ranks of one data rank divide the tokens of its passes (parallel/context.py)
    matrices     the tensor ranks of one context rank divide the matrices of the layers (parallel/tensor.py)
    shards       over all data and context ranks, or, with replicas, within each of `data_parallel_replicate_size`
                 groups of neighbouring ranks, which hold the same shards (HSDP)
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["ProcessMesh", "make_mesh"]


@dataclass(frozen=True)
class ProcessMesh:
    """The grid of the processes."""

    fsdp: DeviceMesh
    """(shards) or (replicas, shards): what fully_shard takes."""
    tensor: DeviceMesh | None
    """The ranks that run the same passes on the same tokens, each with a part of the matrices; None = each has all."""
    data_group: dist.ProcessGroup
    """The ranks that run other passes on the same part of the tokens, with the same part of the matrices."""
    context_group: dist.ProcessGroup
    """The ranks that run the same passes on other parts of the tokens, with the same part of the matrices."""

    @property
    def device_type(self) -> str:
        """The kind of device: cpu or cuda."""
        return self.fsdp.device_type

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return torch.device("cuda", torch.cuda.current_device()) if self.device_type == "cuda" else torch.device("cpu")

    @property
    def num_shards(self) -> int:
        """The number of ranks that hold one copy of the model; the first ranks hold the first copy."""
        return self.fsdp.size(-1) * self.tensor_size

    @property
    def row_share(self) -> tuple[int, int]:
        """Which part of a whole parameter's rows this rank keeps, counted from 0, and of how many parts."""
        coordinate = self.fsdp.get_coordinate()
        if self.tensor is not None or coordinate is None:
            return 0, 1
        return coordinate[-1], self.fsdp.size(-1)

    @property
    def context_size(self) -> int:
        """The number of ranks that divide the tokens of a pass."""
        return self.context_group.size()

    @property
    def tensor_size(self) -> int:
        """The number of ranks that divide the matrices of the layers."""
        return 1 if self.tensor is None else self.tensor.size()

    @property
    def pass_size(self) -> int:
        """The number of ranks that run a pass together."""
        return self.context_size * self.tensor_size


def make_mesh(
    device: str,
    size: int,
    context_parallel_size: int,
    data_parallel_replicate_size: int,
    tensor_parallel_size: int = 1,
) -> ProcessMesh:
    """Makes the grid of all processes, which must all call this.

    Args: device: cpu or cuda. The others: see torchrun_env.check_mesh.
    """
    replicas, context, tensor = data_parallel_replicate_size, context_parallel_size, tensor_parallel_size
    sharded = (replicas, size // replicas // tensor) if replicas > 1 else (size // tensor,)
    names = ("replicate", "shard")[-len(sharded) :]
    grid = init_device_mesh(
        device, (size // context // tensor, context, tensor), mesh_dim_names=("data", "context", "tensor")
    )
    groups = grid.get_group("data"), grid.get_group("context")
    if tensor == 1:
        fsdp = init_device_mesh(device, sharded, mesh_dim_names=names)
        return ProcessMesh(fsdp, None, *groups)
    # a checkpoint gathers a divided matrix in two collectives, of which torch warns on every rank
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    whole = init_device_mesh(
        device, (*sharded, tensor), mesh_dim_names=(*names, "tensor")
    )  # FSDP wants one mesh of both
    return ProcessMesh(whole[names], whole["tensor"], *groups)
