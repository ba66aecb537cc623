"""Two real processes, each with a part of the model, make the update of one."""

import multiprocessing
import os
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import gap

SECONDS = 90
"""After which processes that wait for one another are killed."""

missing = None if dist.is_available() and dist.is_gloo_available() else "this torch has no gloo"


ROUNDING = 8 * 2 * 64**0.5 * torch.finfo(torch.float32).eps
"""Of logprobs of up to 8, sums of 64 numbers: metrics that would be 0 are differences of such."""


def start(folder, size, prompts):
    """The processes, from a server that has imported everything."""
    from two_processes import one_of

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["faults.train"])
    tests = Path(__file__).parents[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(tests), str(tests.parent)]))
        forkserver.ensure_running()
    made = lambda rank: context.Process(target=one_of, args=(rank, size, folder, prompts), daemon=True)
    processes = [made(rank) for rank in range(size)]
    for process in processes:
        process.start()
    return processes


def wait(processes, folder):
    """Until all are done. One that fails, or does not end, ends the others: what they wait for never comes."""
    end = time.monotonic() + SECONDS
    try:
        while any(p.is_alive() for p in processes) and time.monotonic() < end:
            if any(p.exitcode not in (None, 0) for p in processes):
                break
            time.sleep(0.05)
        said = "\n".join(path.read_text() for path in sorted(folder.glob("*.txt")))
        assert [p.exitcode for p in processes] == [0] * len(processes), said
    finally:
        for p in processes:
            p.kill()
            p.join()


@pytest.mark.skipif(missing is not None, reason=str(missing))
@pytest.mark.timeout(200)
def test_two_processes_make_the_update_of_one(tmp_path):
    from two_processes import one_update

    processes = start(tmp_path, 2, prompts=3)
    try:
        one = one_update(prompts=3)
    finally:
        wait(processes, tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    (number, _), *_ = one["passes"]
    assert number % 2 == 1 and number > 1, "a rank has to have a pass less, so that a dummy is run"
    assert [counts for _, counts in ranks[1]["passes"]] == [[True] * (number // 2) + [False]]
    for found in ranks:
        for name, gradient in one["gradients"].items():
            limit = 1e-5 * gradient.abs().max()
            assert (found["gradients"][name] - gradient).abs().max() <= limit > 0, name
        assert gap(found["weights"], one["weights"]) <= 1e-6
        assert found["row"].keys() == one["row"].keys()
        for name, number in one["row"].items():
            assert found["row"][name] == pytest.approx(number, rel=1e-4, abs=ROUNDING), name
    assert ranks[0]["row"] == ranks[1]["row"]
    assert all(0 < len(found["rewarded"]) < 9 for found in ranks)
    assert [ids for found in ranks for ids in found["rewarded"]] == one["rewarded"] and len(one["rewarded"]) == 9
