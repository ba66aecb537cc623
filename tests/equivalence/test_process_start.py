"""Processes that torchrun starts again find one another, though its store has the addresses of those before."""

import os
import time

import pytest
import torch.distributed as dist
from processes import as_torchrun, needs_gloo, start, wait

from whet.errors import ConfigError
from whet.parallel.processes import join_processes


def join_late(rank, size, folder, port, late):
    """Joins the others, one rank later than they."""
    as_torchrun(rank, size, port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    time.sleep(0.5 * (rank == late))
    ranks = join_processes(20)
    assert ranks.all_gather((rank, str(folder))) == [(r, str(folder)) for r in range(size)]
    dist.barrier()


@needs_gloo
@pytest.mark.timeout(200)
def test_a_restarted_rank_that_is_late_is_not_looked_for_where_it_was(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # of the agent, over restarts
    for number, late in enumerate((0, 1)):
        folder = tmp_path / str(number)
        folder.mkdir()
        wait(start(2, join_late, folder, store.port, late), folder)


def test_ranks_that_never_come_are_named(monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    as_torchrun = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    for name, value in (as_torchrun | {"TORCHELASTIC_USE_AGENT_STORE": True}).items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ConfigError, match="can't reach each other: TimeoutError: rank 1, 2 did not come within 1 s"):
        join_processes(1)
