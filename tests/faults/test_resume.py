"""A killed run, resumed until it is done, is the uninterrupted run bit for bit."""

import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pyarrow.parquet
import pytest

STEPS = 12


def numbers(folder):
    """Every metric that does not depend on the clock, as text: NaN is equal to itself there."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # an environment's answer may come a decode step later
    engine = ("rollout/mean_batch_size", "rollout/prefilled_tokens", "rollout/reused_tokens")
    of_the_clock = ("time/", "perf/", *engine)
    return [json.dumps({k: v for k, v in r.items() if not k.startswith(of_the_clock)}) for r in rows]


def assert_same_run(folder, reference):
    assert numbers(folder) == numbers(reference)
    files = sorted(p.name for p in (reference / "completions").iterdir())
    assert len(files) in (0, STEPS + 4)  # evaluated before, after 4 and 8, and at the end; none in supervised training
    assert files == sorted(p.name for p in (folder / "completions").iterdir())
    for name in files:
        tables = (pyarrow.parquet.read_table(f / "completions" / name) for f in (folder, reference))
        ours, theirs = (table.drop_columns("seconds") for table in tables)  # of the clock
        assert repr(ours.to_pydict()) == repr(theirs.to_pydict()), name  # NaN is equal to itself there
    for part in ("final", f"checkpoints/step-{STEPS:06d}/actor"):
        ours, theirs = ((f / part / "model.safetensors").read_bytes() for f in (folder, reference))
        assert ours == theirs, part
    assert (folder / "checkpoints" / "latest").read_text() == f"step-{STEPS:06d}\n"
    assert not list((folder / "checkpoints").glob(".tmp-*"))


def rows_written(folder):
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def wait_for(condition, alive):
    """Waits until the condition holds; fails where the process ends first. A run that hangs meets the test's limit."""
    while not condition():
        assert alive(), "the run ended before it could be killed"
        time.sleep(0.001)


def moments(rng, folder, kills):
    """When to kill: once while a checkpoint is being written, else some way into the work that is left."""
    for kill in range(kills):
        if kill == 1:
            yield True, lambda: list((folder / "checkpoints").glob(".tmp-*/actor/*"))
            continue
        rows = rows_written(folder) + rng.randint(1, 3)
        yield False, lambda rows=rows: rows_written(folder) >= rows


@pytest.fixture(scope="module")
def fork():
    """Starts runs from one process that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["faults.train"])
    tests = Path(__file__).parents[1]
    with pytest.MonkeyPatch.context() as patch:  # Python 3.11's server is told no sys.path, and skips what it misses
        patch.setenv("PYTHONPATH", os.pathsep.join([str(tests), str(tests.parent)]))
        forkserver.ensure_running()

    def start(*args, kind="train"):
        from faults import train

        process = context.Process(target=getattr(train, kind), args=args)
        process.start()
        return process

    return start


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["train", "train_sft", pytest.param("train_environment", marks=pytest.mark.full)])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(fork, tmp_path, kind):
    reference, folder = tmp_path / "reference", tmp_path / "killed"
    rng = random.Random(0)
    for slow, now in moments(rng, folder, kills=2):
        process = fork(folder, 1, slow, kind=kind)
        wait_for(now, process.is_alive)
        if not slow:
            time.sleep(rng.random() * 0.05)
        process.kill()
        process.join()
        assert process.exitcode == -9, "the run ended before it could be killed"
        if slow:
            assert list((folder / "checkpoints").glob(".tmp-*"))  # it was caught in the act
    for where in (folder, reference, folder):  # the reference has the recorded answers of the killed run
        last = fork(where, kind=kind)
        last.join()
        assert last.exitcode == 0
    assert_same_run(folder, reference)  # a run that is done stays done


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_cold_run_on_two_threads_survives_five_kills(tmp_path):
    reference, folder = tmp_path / "reference", tmp_path / "killed"
    script = Path(__file__).with_name("train.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    start = lambda where: subprocess.Popen([sys.executable, script, where], env=environment)
    assert start(reference).wait() == 0
    rng = random.Random()
    for slow, now in moments(rng, folder, kills=5):
        process = start(folder)
        wait_for(now, lambda p=process: p.poll() is None)
        time.sleep(0 if slow else rng.random() * 0.1)
        process.kill()
        assert process.wait() == -9, "the run ended before it could be killed"
    assert start(folder).wait() == 0
    assert_same_run(folder, reference)
