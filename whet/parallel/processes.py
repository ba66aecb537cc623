"""Joins the processes that torchrun started into one run.

    torchrun --standalone --nproc_per_node=2 -m whet grpo model=... data=...

Every process runs the same program. `join_processes` reads torchrun's environment, selects the process's device, and
opens two process groups: one for tensors (NCCL between GPUs, gloo on a CPU), and a gloo group for what the processes
agree on, so that pickled objects never pass through a GPU.

torchrun has a store in which processes find each other's addresses. It keeps it when it starts them again
(`--max-restarts`), and torch would read addresses of the processes before (pytorch/pytorch#135712), so the processes of
each start agree on a part of the store of their own. TORCHELASTIC_RESTART_COUNT can't name it: hosts count apart.
"""

from __future__ import annotations

import atexit
import datetime
import logging
import os
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from whet.errors import ConfigError, format_exception
from whet.parallel.ranks import ProcessRanks, Ranks
from whet.parallel.torchrun_env import check_torchrun_env, local_rank, world_size

__all__ = ["TIMEOUT_S", "end_with", "join_processes"]

log = logging.getLogger("whet")

TIMEOUT_S = 1800.0
"""The default of trainer.collective_timeout_s."""
_joined: dict[dist.ProcessGroup, ProcessRanks] = {}
"""The ranks of a default process group: a program joins once, whatever models it makes."""
_exit_codes: list[int] = []
"""The last one is the exit status of this process after an error; empty = there was none."""


def join_processes(timeout_s: float = TIMEOUT_S) -> Ranks:
    """Returns the processes of this run: those of torchrun, or of the process group that the program has initialized.

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
        atexit.register(_wait_for_gloo_threads)
        log.info("%d processes train together: FSDP over %s", dist.get_world_size(), dist.get_backend())
    return _joined[world]


def _open_process_group(timeout: datetime.timedelta) -> None:
    """Initializes the default process group from torchrun's environment."""
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage] # torch documents it
    from torch.distributed.rendezvous import rendezvous

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
        store, own, size = next(rendezvous("env://", timeout=timeout))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = PrefixStore(_name_of_start(store, own, size, timeout), store)
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=store, rank=own, world_size=size, timeout=timeout)
    except (RuntimeError, TimeoutError, ValueError) as error:  # ValueError: MASTER_ADDR is missing
        raise ConfigError(
            f"the {world_size()} processes can't reach each other: {format_exception(error, 300)}; start them with "
            "torchrun, which sets MASTER_ADDR and MASTER_PORT"
        ) from error
    atexit.register(_close_process_group)
    show = sys.excepthook

    def show_and_note(*error: Any) -> None:
        show(*error)
        end_with(1)

    sys.excepthook = show_and_note


def end_with(code: int) -> None:
    """Notes that this process ends by an error, with an exit status: see `_close_process_group`."""
    _exit_codes.append(code)


def _name_of_start(store: Any, own: int, size: int, timeout: datetime.timedelta) -> str:
    """Returns a name on which the processes of this start agree, whatever earlier ones have left in the store.

    Each process writes a name for itself. Rank 0 answers under that name, which nobody had before, and a process that
    was answered confirms it under the name of the start. Nobody reads an answer to a name of an earlier start.

    Args: store: torch.distributed's. own: this rank. size: the number of processes. timeout: for the others to come.
    Raises: TimeoutError: a rank has not come.
    """
    name, others = uuid.uuid4().hex, range(1, size)
    if own:
        store.set(f"whet/{own}", name)
        store.wait([f"whet/start of {name}"], timeout)
        start = store.get(f"whet/start of {name}").decode()
        store.set(f"whet/{start}/{own}", "")
        return start
    end = time.monotonic() + timeout.total_seconds()
    while missing := [r for r in others if not store.check([f"whet/{name}/{r}"])]:
        if time.monotonic() > end:
            raise TimeoutError(f"rank {', '.join(map(str, missing))} did not come within {timeout.total_seconds():g} s")
        for r in missing:
            if store.check([f"whet/{r}"]):
                store.set(f"whet/start of {store.get(f'whet/{r}').decode()}", name)
        time.sleep(0.01)
    return name


def _close_process_group() -> None:
    """Closes the groups at the end of the program; NCCL warns where they are left open.

    NCCL closes a group only when all ranks do. After an error the others may wait in a collective for this process, so
    it would wait for them in turn, and torchrun ends them only once this process has ended.
    """
    _joined.clear()
    if not dist.is_initialized():
        return
    if _exit_codes and "nccl" in dist.get_backend():
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # there is none, it has no reader, it is closed
                stream.flush()
        os._exit(_exit_codes[-1])
    dist.destroy_process_group()


def _wait_for_gloo_threads(limit_s: float = 10.0) -> None:
    """Waits at the end of the program until gloo's threads have released the tensors of the last collective.

    A collective returns shortly before its thread releases them, and to release a tensor the thread needs Python's
    lock. If Python ends first, it ends the thread within a destructor, and the process aborts with "terminate called
    without an active exception" (https://github.com/pytorch/pytorch/issues/190489). The groups can't be relied upon to
    join their threads, since models and meshes refer to them.
    """
    end, idle = time.monotonic() + limit_s, 0
    while idle < 2 and time.monotonic() < end:  # twice: at first a thread may sleep since it waits for this one
        time.sleep(0.005)  # without Python's lock
        idle = idle + 1 if all(state == "S" for state in _gloo_thread_states()) else 0


def _gloo_thread_states() -> list[str]:
    """Returns the state of each of gloo's threads that run collectives: S = it sleeps. Empty on systems without
    /proc.
    """
    states: list[str] = []
    for place in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # the thread has ended
            name, _, rest = (place / "stat").read_text().partition("(")[2].rpartition(")")
            if "gloo" in name:
                states.append(rest.split()[0])
    return states
