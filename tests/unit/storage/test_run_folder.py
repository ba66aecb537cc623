import fcntl
import json
import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from whet.config import RunConfig, read_yaml
from whet.errors import CheckpointError, ConfigError, DataError
from whet.run.provenance import changed_settings
from whet.storage.files import to_json, write_atomic
from whet.storage.run_folder import RunFolder


def columns(n=2, **other):
    given = {
        "row": [7] * n,
        "generation": list(range(n)),
        "prompt": ["2+2="] * n,
        "completion": ["4"] * n,
        "tokens": [np.array([52, 256], np.int32)] * n,
        "logprobs": [np.array([-0.5, -0.25], np.float32)] * n,
        "reward": np.array([1.0] * n),
        "advantage": [0.5] * n,
        "finish_reason": ["stop"] * n,
        "version": [3] * n,
    }
    return {**given, **other}


def log(folder, *steps, mode="train"):
    for step in steps:
        folder.log(step=step, mode=mode, version=step - 1, values={"reward": step / 10})


# ---- metrics ---------------------------------------------------------------------------------------------------------


def test_a_row_is_on_the_disk_when_log_returns(tmp_path):
    with RunFolder(tmp_path / "a" / "b") as folder:
        folder.log(step=1, mode="train", version=0, values={"reward": 0.5, "kl": math.nan, "n": np.float32(2)})
        line = (tmp_path / "a" / "b" / "metrics.jsonl").read_text()
    assert line == '{"step": 1, "mode": "train", "version": 0, "reward": 0.5, "kl": null, "n": 2.0}\n'


def test_resuming_cuts_torn_foreign_and_later_rows_and_goes_on(tmp_path):
    with RunFolder(tmp_path) as folder:
        log(folder, 1, 2)
        log(folder, 2, mode="eval")
        log(folder, 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('not json\n{"step": 2, "mode": "late"}\n{"step": 1, "torn')
    with RunFolder(tmp_path, resume_step=2) as folder:
        log(folder, 3)
        found = [(r["step"], r["mode"]) for r in folder.rows()]
    assert found == [(1, "train"), (2, "train"), (2, "eval"), (2, "late"), (3, "train")]
    assert len(pd.read_json(tmp_path / "metrics.jsonl", lines=True)) == 5


def test_resuming_removes_completions_of_later_steps_and_half_written_ones(tmp_path):
    with RunFolder(tmp_path) as folder:
        for step in (1, 2, 3):
            folder.write_completions(step=step, mode="train", columns=columns(), rewards={"f": [1.0, 0.0]})
        folder.write_completions(step=3, mode="eval", columns=columns(), rewards={"f": [1.0, 0.0]})
        (tmp_path / "completions" / ".tmp-0123456789abcdef-train-000004.parquet").write_text("half")
    with RunFolder(tmp_path, resume_step=2):
        left = sorted(p.name for p in (tmp_path / "completions").iterdir())
    assert left == ["train-000001.parquet", "train-000002.parquet"]


def test_resuming_from_the_beginning_removes_everything(tmp_path):
    with RunFolder(tmp_path) as folder:
        log(folder, 1)
    with RunFolder(tmp_path, resume_step=0) as folder:
        assert folder.rows() == []


def test_a_new_run_does_not_write_over_an_old_one(tmp_path):
    with RunFolder(tmp_path) as folder:
        log(folder, 1, 2)
    with pytest.raises(ConfigError, match=r"holds a run of 2 steps; set trainer.resume=latest"):
        RunFolder(tmp_path)
    with RunFolder(tmp_path, resume_step=2) as folder:  # the refusal left no lock behind
        assert len(folder.rows()) == 2


@pytest.mark.parametrize("delay_s", [0.02, 0.05, 0.11])
def test_a_kill_leaves_every_acknowledged_row_readable(tmp_path, delay_s):
    code = (
        "import sys; from whet.storage.run_folder import RunFolder\n"
        f"folder = RunFolder({str(tmp_path / 'run')!r})\n"
        "for step in range(100000):\n"
        "    folder.log(step=step, mode='train', version=0, values={'x': 1.0})\n"
        "    print(step, flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "0\n"
    time.sleep(delay_s)
    child.send_signal(signal.SIGKILL)
    said = [0, *(int(line) for line in child.stdout.read().splitlines())]
    child.wait()
    with RunFolder(tmp_path / "run", resume_step=10**6) as folder:  # its lock died with it
        assert [r["step"] for r in folder.rows()][: len(said)] == said


# ---- completions -----------------------------------------------------------------------------------------------------


def test_completions_read_back_with_pandas_and_datasets(tmp_path):
    with RunFolder(tmp_path) as folder:
        rewards = {"exact": np.array([1.0, math.nan]), "length": [0.0, None]}
        chat = [{"role": "user", "content": "é"}]
        given = columns(prompt=["a", chat], completion=["x", "\ud800"], reward=[1.0, math.nan])
        given["info"] = [{"status": "won", "turns": np.int64(3), "path": np.array([1.0, math.nan])}, {}]
        path = folder.write_completions(step=12, mode="eval", columns=given, rewards=rewards)
    assert path == tmp_path / "completions" / "eval-000012.parquet"
    table = pd.read_parquet(path)
    assert list(table) == [
        "step", "row", "generation", "prompt", "prompt_text", "prompt_tokens", "completion",
        "tokens", "logprobs", "trainer_logprobs", "entropy", "advantages", "versions", "turn_starts", "turn_ends",
        "reward/exact", "reward/length",
        "reward", "advantage", "finish_reason", "version",
        "info", "seconds",
    ]  # fmt: skip
    assert table["step"].tolist() == [12, 12] and table["tokens"][0].tolist() == [52, 256]
    assert table["logprobs"][1].tolist() == [-0.5, -0.25] and table["completion"].tolist() == ["x", "?"]
    assert table["reward/exact"].isna().tolist() == [False, True] and table["reward/length"].isna().tolist() == [
        False,
        True,
    ]
    assert json.loads(table["prompt"][1]) == chat
    assert json.loads(table["info"][0]) == {"status": "won", "turns": 3, "path": [1.0, None]}
    assert table["info"].isna().tolist() == [False, True]
    assert pq.read_metadata(path).row_group(0).column(0).compression == "ZSTD"


def test_the_schema_is_the_same_where_a_column_is_all_null(tmp_path):
    with RunFolder(tmp_path) as folder:
        some = folder.write_completions(step=1, mode="train", columns=columns(), rewards={"f": [1.0, 2.0]})
        none = columns(0)
        del none["advantage"]
        nothing = folder.write_completions(step=2, mode="train", columns=none, rewards={"f": []})
        nulls = columns(reward=[None, None], advantage=[math.nan, math.nan])
        null = folder.write_completions(step=3, mode="train", columns=nulls, rewards={"f": [None, None]})
    assert pq.read_schema(some) == pq.read_schema(nothing) == pq.read_schema(null)


def test_a_missing_unknown_or_short_column_is_refused(tmp_path):
    with RunFolder(tmp_path) as folder:
        for change, words in (
            ({"tokens": [[1]]}, "column row has 2 values for 1"),
            ({"toxens": [1, 2]}, "unknown columns toxens"),
        ):
            with pytest.raises(DataError, match=words):
                folder.write_completions(step=1, mode="train", columns=columns(**change), rewards={})
        with pytest.raises(DataError, match="reward/f has 1 values for 2"):
            folder.write_completions(step=1, mode="train", columns=columns(), rewards={"f": [1.0]})
        short = columns()
        del short["prompt"]
        with pytest.raises(DataError, match="lack the columns prompt"):
            folder.write_completions(step=1, mode="train", columns=short, rewards={})
        assert list((tmp_path / "completions").iterdir()) == []


# ---- small files -----------------------------------------------------------------------------------------------------


def test_config_and_json_files_read_back(tmp_path):
    with RunFolder(tmp_path) as folder:
        folder.write_config(RunConfig())
        folder.write_json("summary.json", {"accuracy": 0.5, "loss": math.nan, "path": tmp_path, "n": np.int64(3)})
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found == {"accuracy": 0.5, "loss": None, "path": str(tmp_path), "n": 3}
    assert read_yaml(tmp_path / "config.yaml")["algo"]["num_generations"] == 8


def test_an_atomic_write_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    target = tmp_path / "x.json"
    write_atomic(target, b"old")

    def fail(file):
        file.write(b"half")
        raise OSError("disk full")

    with pytest.raises(CheckpointError, match="disk full"):
        write_atomic(target, fail)
    assert target.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_json_is_what_javascript_reads():
    text = to_json({"a": [math.inf, np.float64("nan"), np.int64(1), np.bool_(True), (1, None)], 3: "é"})
    assert text == '{"a": [null, null, 1, true, [1, null]], "3": "é"}'


def test_changes_of_length_and_loggers_are_no_changes():
    old = RunConfig()
    new = RunConfig(trainer={"max_steps": 3, "loggers": ["wandb"], "run_dir": "x"}, algo={"beta": 0.04})
    assert changed_settings(old, new) == ["algo.beta: 0.0 -> 0.04"]


def test_what_saves_memory_or_looks_on_may_change_on_resume():
    new = RunConfig(
        actor={"gradient_checkpointing": "full"},
        offload_to_cpu=True,
        trainer={"profile": True, "profiler_options": {"profiler_steps": 2}},
    )
    assert changed_settings(RunConfig(), new) == []
    assert changed_settings(RunConfig(), RunConfig(actor={"dtype": "bfloat16"})) == [
        "actor.dtype: 'auto' -> 'bfloat16'"
    ]


def test_a_section_that_one_side_lacks_is_not_compared_and_a_key_is():
    old, new = {"algo": {"beta": 0.0}}, {"algo": {"beta": 0.0, "extra": 1}, "actor": {"optim": {"lr": 1e-3}}}
    assert changed_settings(old, new) == ["algo.extra: (none) -> 1"]
    assert changed_settings(new, old) == ["algo.extra: 1 -> (none)"]


# ---- the lock --------------------------------------------------------------------------------------------------------


def test_two_runs_in_one_folder_are_refused_naming_the_holder(tmp_path):
    with RunFolder(tmp_path), pytest.raises(ConfigError, match=rf"in use by process {os.getpid()} on "):
        RunFolder(tmp_path, resume_step=0)
    assert not (tmp_path / ".lock").exists()
    RunFolder(tmp_path, resume_step=0).close()


def test_a_run_that_never_began_leaves_no_folder_and_takes_nothing_that_it_did_not_make(tmp_path):
    def refused():
        raise ConfigError("the checkpoints are in use")

    new, empty = tmp_path / "new", tmp_path / "empty"
    RunFolder(new).close()
    with pytest.raises(ConfigError, match="in use"):
        RunFolder(new, resume_step=refused)
    assert not new.exists()
    empty.mkdir()
    RunFolder(empty).close()
    assert not list(empty.iterdir())
    (empty / "completions").mkdir()
    (empty / "metrics.jsonl").touch()
    RunFolder(empty).close()
    assert len(list(empty.iterdir())) == 2
    with RunFolder(new) as folder:
        folder.write_json("environment.json", {})
    assert sorted(p.name for p in new.iterdir()) == ["completions", "environment.json", "metrics.jsonl"]


def _hold(path, ready):
    RunFolder(path)
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=False).start()
    ready.send(multiprocessing.active_children()[0].pid)
    os._exit(0)


def test_the_lock_of_a_dead_process_is_taken_over_even_where_its_child_lives_on(tmp_path):
    here, there = multiprocessing.Pipe()
    holder = multiprocessing.get_context("fork").Process(target=_hold, args=(tmp_path, there))
    holder.start()
    orphan = here.recv()
    holder.join()
    try:
        os.kill(orphan, 0)  # it lives, and holds the inherited descriptor
        with RunFolder(tmp_path, resume_step=0):
            assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_a_lock_file_left_by_a_kill_does_not_stop_a_run(tmp_path):
    (tmp_path / ".lock").write_text('{"pid": 1, "host": "elsewhere"}')
    RunFolder(tmp_path).close()


def test_a_lock_of_a_dead_process_is_taken_over_where_another_has_its_number(tmp_path):
    held = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)  # by a child that outlived the run of long ago
    fcntl.flock(held, fcntl.LOCK_EX)
    os.write(held, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": "0"}).encode())
    RunFolder(tmp_path).close()
    os.close(held)


def test_a_lock_on_a_file_that_was_replaced_meanwhile_is_none(tmp_path, monkeypatch):
    lock = fcntl.flock

    def late(fd, how):
        monkeypatch.undo()
        (tmp_path / ".lock").unlink()  # another process took the folder over between open and flock
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with RunFolder(tmp_path), pytest.raises(ConfigError, match="in use by"):
        RunFolder(tmp_path, resume_step=0)


def test_a_closed_folder_leaves_nothing_open(tmp_path):
    RunFolder(tmp_path).close()
    before = len(os.listdir("/proc/self/fd"))
    RunFolder(tmp_path, resume_step=0).close()
    assert len(os.listdir("/proc/self/fd")) == before


# ---- the disk --------------------------------------------------------------------------------------------------------


def synced(monkeypatch):
    """The sizes of the files and folders (by inode) that were synced, as they were then."""
    sizes, sync = {}, os.fsync

    def noted(handle):
        state = os.fstat(handle)
        sizes[state.st_ino] = state.st_size
        sync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    return sizes


def test_a_row_outlives_a_power_cut_once_log_has_returned(tmp_path, monkeypatch):
    with RunFolder(tmp_path) as folder:
        sizes = synced(monkeypatch)
        for step in (1, 2):
            log(folder, step)
            state = (tmp_path / "metrics.jsonl").stat()
            assert sizes[state.st_ino] == state.st_size > 0


def test_an_atomic_write_is_on_the_disk_before_it_takes_its_name_and_so_is_the_name(tmp_path, monkeypatch):
    sizes, replace = synced(monkeypatch), Path.replace

    def checked(old, new):
        assert sizes[old.stat().st_ino] == len(b"new")
        sizes.clear()
        return replace(old, new)

    monkeypatch.setattr(Path, "replace", checked)
    for content in (b"new", lambda file: file.write(b"new")):
        write_atomic(tmp_path / "x.json", content)
        assert tmp_path.stat().st_ino in sizes


def test_damaged_rows_are_kept_on_the_disk_before_the_file_is_written_without_them(tmp_path, monkeypatch):
    with RunFolder(tmp_path) as folder:
        folder.log(step=1, mode="train", version=0, values={})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("not json\n")
    sizes = synced(monkeypatch)
    with RunFolder(tmp_path, resume_step=1):
        (kept,) = tmp_path.glob("metrics.damaged-*.jsonl")
        assert sizes.get(kept.stat().st_ino) == kept.stat().st_size > 0


@pytest.mark.parametrize(("step", "stays"), [(1, False), (2, True), (3, True)])
def test_a_resume_keeps_the_model_and_the_summary_of_its_own_step(tmp_path, step, stays):
    with RunFolder(tmp_path) as folder:
        for n in (1, 2, 3):
            folder.log(step=n, mode="train", version=n, values={})
        folder.write_json("summary.json", {"steps": 2})
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "run.json").write_text('{"step": 2}')
    with RunFolder(tmp_path, resume_step=step):
        assert ((tmp_path / "final").is_dir(), (tmp_path / "summary.json").is_file()) == (stays, stays)


def test_an_old_model_that_a_kill_left_beside_the_new_one_goes(tmp_path):
    with RunFolder(tmp_path) as folder:
        folder.log(step=1, mode="train", version=1, values={})
    for name in ("final", f".tmp-{'0' * 16}-final.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with RunFolder(tmp_path, resume_step=1):
        assert (tmp_path / "final" / "file").read_text() == "final"
        assert not list(tmp_path.glob(".tmp-*"))
