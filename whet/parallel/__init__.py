"""What spans processes and disks: ranks and checkpoints; meshes, sharding and context parallelism come here later."""

from whet.parallel.comm import rank, world_size
from whet.storage.checkpoint import (
    find_checkpoint,
    load_weights,
    read_state,
    save_weights,
    step_folders,
    write_checkpoint,
    write_state,
)

__all__ = [
    "find_checkpoint",
    "load_weights",
    "rank",
    "read_state",
    "save_weights",
    "step_folders",
    "world_size",
    "write_checkpoint",
    "write_state",
]
