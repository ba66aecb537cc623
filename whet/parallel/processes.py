"""Joins the processes that torchrun started into one run.

    torchrun --standalone --nproc_per_node=2 -m whet grpo model=... data=...

Every process runs the same program. `join_processes` reads torchrun's environment, selects the process's device, and
opens two process groups: one for tensors (NCCL between GPUs, gloo on a CPU), and a gloo group for what the processes
agree on, so that pickled objects never pass through a GPU.
"""

from __future__ import annotations

import atexit
import datetime
import logging

import torch
import torch.distributed as dist

from whet.errors import ConfigError, format_exception
from whet.parallel.ranks import ProcessRanks, Ranks
from whet.parallel.torchrun_env import check_torchrun_env, local_rank, world_size

__all__ = ["TIMEOUT_S", "join_processes"]

log = logging.getLogger("whet")

TIMEOUT_S = 1800.0
"""The default of trainer.collective_timeout_s."""
_joined: dict[dist.ProcessGroup, ProcessRanks] = {}
"""The ranks of a default process group: a program joins once, whatever models it makes."""


def join_processes(timeout_s: float = TIMEOUT_S) -> Ranks:
    """The processes of this run: those of torchrun, or of the process group that the program has initialized.

    Args: timeout_s: how long a process waits for another one before the run ends with an error.
    Returns: one process where there is no other.
    Raises: ConfigError: torchrun's environment variables are wrong, or the processes can't reach each other.
    """
    check_torchrun_env()
    timeout = datetime.timedelta(seconds=timeout_s)
    if not (dist.is_available() and dist.is_initialized()):
        if world_size() == 1:
            return Ranks()
        _open_process_group(timeout)
    world = dist.group.WORLD
    assert world is not None
    if dist.get_world_size() == 1:
        return Ranks()
    if world not in _joined:
        control = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(control, dist.ProcessGroup)
        _joined[world] = ProcessRanks(control, timeout)
        log.info("%d processes train together: FSDP over %s", dist.get_world_size(), dist.get_backend())
    return _joined[world]


def _open_process_group(timeout: datetime.timedelta) -> None:
    """Initializes the default process group from torchrun's environment."""
    cuda = torch.cuda.is_available()
    if cuda:
        count = torch.cuda.device_count()
        if local_rank() >= count:
            raise ConfigError(
                f"LOCAL_RANK is {local_rank()} and this host has {count} GPUs; start torchrun with "
                f"--nproc_per_node={count} or less"
            )
        torch.cuda.set_device(local_rank())
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
    except (RuntimeError, ValueError) as error:  # ValueError: MASTER_ADDR is missing
        raise ConfigError(
            f"the {world_size()} processes can't reach each other: {format_exception(error, 300)}; start them with "
            "torchrun, which sets MASTER_ADDR and MASTER_PORT"
        ) from error
    atexit.register(_close_process_group)


def _close_process_group() -> None:
    """Closes the groups at the end of the program; NCCL warns where they are left open."""
    _joined.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
