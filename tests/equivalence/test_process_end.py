"""Processes that have worked together end: without an error, and after one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import full
from processes import needs_gloo

END = """
import os, time
from pathlib import Path

import torch.distributed as dist

from whet.parallel.processes import join_processes

class Late:
    def __del__(self, sleep=time.sleep):
        sleep(0.3)

late = Late()
ranks = join_processes(60)
ranks.all_gather(1)
world = dist.group.WORLD  # models hold it too, so that it outlives destroy_process_group
cpu = sorted(os.sched_getaffinity(0))[:1]
for thread in Path("/proc/self/task").glob("*"):
    os.sched_setaffinity(int(thread.name), cpu)
    if "gloo" in (thread / "comm").read_text():
        os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
ranks.all_gather(2)
"""
"""gloo's threads get no time before Python ends, and `late` gives them some while it ends."""


@needs_gloo
@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="this system can't hold up a single thread")
@pytest.mark.timeout(200)
@pytest.mark.full
def test_python_ends_after_gloos_threads_have_released_the_last_tensors(tmp_path):
    (tmp_path / "end.py").write_text(END)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "end.py"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


FAIL = """
import sys, time

import torch.distributed as dist

from whet.cli import main
from whet.parallel.processes import join_processes

ranks = join_processes(60)
dist.get_backend = lambda *_: "cpu:gloo,cuda:nccl"
dist.destroy_process_group = lambda: time.sleep(120)
if ranks.rank == 1:
    {fault}
time.sleep(120)
"""
"""With NCCL a rank that closes its groups waits for the others, which wait here in a collective for rank 1."""
RAISES, EXITS = "raise ValueError('no answer')", "sys.exit(main(['grpo', 'nonsense=1']))"


@needs_gloo
@pytest.mark.timeout(200)
@pytest.mark.parametrize("fault, said", [(RAISES, "no answer"), full(EXITS, "nonsense")], ids=["program", "command"])
def test_a_process_that_fails_does_not_wait_for_the_others_to_close_their_nccl_groups(tmp_path, fault, said):
    (tmp_path / "fail.py").write_text(FAIL.format(fault=fault))
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "fail.py"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and said in done.stderr, done.stderr
