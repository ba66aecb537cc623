"""Several real processes that work together, forked from a server that has imported everything."""

import multiprocessing
import os
import socket
import time
import traceback
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

SECONDS = 90
"""After which processes that wait for one another are killed."""

missing = None if dist.is_available() and dist.is_gloo_available() else "this torch has no gloo"
needs_gloo = pytest.mark.skipif(missing is not None, reason=str(missing))


def start(size, target, folder, *args):
    """Starts `target(rank, size, folder, *args)` in each of several processes. A failure is written to the folder."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["faults.train", "whet.cli.commands", "whet.cli.supervised"])
    tests = Path(__file__).parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(tests), str(tests.parent)]))
        forkserver.ensure_running()
    made = lambda rank: context.Process(target=_one, args=(target, rank, size, folder, *args), daemon=True)
    processes = [made(rank) for rank in range(size)]
    for process in processes:
        process.start()
    return processes


def _one(target, rank, size, folder, *args):
    try:
        torch.set_num_threads(1)
        target(rank, size, folder, *args)
    except BaseException:
        (folder / f"error-{rank}.txt").write_text(traceback.format_exc())
        raise


def wait(processes, folder, seconds=SECONDS):
    """Until all are done. One that fails, or does not end, ends the others: what they wait for never comes."""
    end = time.monotonic() + seconds
    try:
        while any(p.is_alive() for p in processes) and time.monotonic() < end:
            if any(p.exitcode not in (None, 0) for p in processes):
                break
            time.sleep(0.02)
        failures = "\n".join(path.read_text() for path in sorted(folder.glob("error-*.txt")))
        assert [p.exitcode for p in processes] == [0] * len(processes), failures
    finally:
        for p in processes:
            p.kill()
            p.join()


def free_port():
    """A port of this host that nobody uses."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def as_torchrun(rank, size, port):
    """Sets the variables of torchrun in this process."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
