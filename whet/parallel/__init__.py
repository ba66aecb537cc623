"""What spans processes and disks: ranks and checkpoints; meshes, sharding and context parallelism come here later."""

from whet.parallel.comm import rank, world_size
from whet.storage.checkpoint import (
    checkpoints,
    find_checkpoint,
    load_state,
    publish,
    read_state,
    save_state,
    write_state,
)

__all__ = [
    "checkpoints",
    "find_checkpoint",
    "load_state",
    "publish",
    "rank",
    "read_state",
    "save_state",
    "world_size",
    "write_state",
]
