"""Which process this is, as torchrun says. Collectives come here with sharding."""

from __future__ import annotations

import os

from whet.errors import ConfigError

__all__ = ["rank", "require_single_process", "world_size"]


def rank() -> int:
    """This process's place among all of the job; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Processes of the job; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def require_single_process() -> None:
    """Raises ConfigError where torchrun started several processes: each would train a copy of its own."""
    if world_size() > 1:
        raise ConfigError(
            f"WORLD_SIZE is {world_size()}, and training over several processes is not part of this release; "
            "start one process (torchrun --nproc_per_node=1, or without torchrun)"
        )
