"""What somebody else has put into a run folder: links under names that whet writes, files that are not whet's."""

import errno
import json
import math
import os
import threading

import pytest

from whet.config import MetricsLoggerOptions
from whet.errors import CheckpointError, ConfigError
from whet.observe import Trace, collect_environment, plot_curves
from whet.observe.environment import read_environment
from whet.observe.loggers import Jsonl
from whet.observe.plots import metric_series
from whet.storage.files import create_file, is_temporary, read_json, temporary_path, write_atomic
from whet.storage.folder_lock import FolderLock
from whet.storage.run_folder import RunFolder

HUGE, DEEP = "9" * 5000, "[" * 200_000
STRANGE = [b"[1, 2]", b"3", b"null", b"{half",
           b"\xff\xfe", b"", HUGE.encode(), DEEP.encode(), b'{"a": NaN}', b'"\\ud800"']  # fmt: skip


COLUMNS = {"row": [7], "generation": [0], "prompt": ["a"], "completion": ["b"], "tokens": [[1]], "logprobs": [[-0.5]],
           "reward": [1.0], "finish_reason": ["stop"], "version": [3]}  # fmt: skip


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def log(folder, *steps):
    for step in steps:
        folder.log(step=step, mode="train", version=0, values={"reward": 0.5})


# ---- links -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def victim(tmp_path):
    """A file that nothing may write to."""
    path = tmp_path / "victim"
    path.write_text("mine")
    yield path
    assert path.read_text() == "mine"


def test_no_link_under_the_name_of_a_temporary_is_followed(tmp_path, victim, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("config.yaml", "metrics.jsonl", "latest", "x.json"):
        (folder / f".tmp-{'1' * 16}-{name}").symlink_to(victim)
    with RunFolder(folder, resume_step=0) as run:
        run.write_json("x.json", {"a": 1})
        run.write_config({})
        monkeypatch.setattr("secrets.token_hex", lambda n: "0" * 2 * n)  # even where the name is foreseen
        (folder / f".tmp-{'0' * 16}-y.json").symlink_to(victim)
        with pytest.raises(CheckpointError, match=r"y\.json can't be written: .*File exists"):
            run.write_json("y.json", {})


def test_rows_are_written_to_no_file_elsewhere(tmp_path, victim):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to(victim)
    for resume in (None, 0):
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl can't be read: it is a symbolic link.*; remove it"):
            RunFolder(tmp_path / "run", resume_step=resume)
    assert not (tmp_path / "run" / ".lock").exists()


@pytest.mark.parametrize("kind", ["symlink", "hard link", "folder", "pipe"])
def test_a_lock_that_is_no_file_of_its_own_is_refused(tmp_path, victim, kind):
    folder = tmp_path / "run"
    folder.mkdir()
    path = folder / ".lock"
    make = {"symlink": path.symlink_to, "hard link": path.hardlink_to, "folder": lambda _: path.mkdir()}
    make.get(kind, lambda _: os.mkfifo(path))(victim)
    with pytest.raises(ConfigError, match=r"run/\.lock is a link or not a regular file.*; remove it, or set another"):
        RunFolder(folder)


def test_a_lock_says_who_holds_it_and_believes_no_nonsense(tmp_path):
    held = FolderLock(tmp_path, "trainer.x")
    for text in (*STRANGE, b'{"pid": "1", "host": "a"}', b'{"pid": true, "host": 3}', b'{"pid": -1, "host": "a"}'):
        (tmp_path / ".lock").write_bytes(text)
        with pytest.raises(ConfigError, match=r"in use by another process; end it, or set another trainer\.x"):
            FolderLock(tmp_path, "trainer.x")
    held.release()
    assert names(tmp_path) == []


def test_a_lock_that_the_disk_does_not_take_locks_nobody_out(tmp_path, monkeypatch):
    def full(handle, data, place):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ConfigError, match=r"can't be written: .*No space left"):
        RunFolder(tmp_path)
    monkeypatch.undo()
    RunFolder(tmp_path).close()


def test_a_lock_that_was_taken_over_is_left_to_who_took_it(tmp_path):
    held = FolderLock(tmp_path, "x")
    (tmp_path / ".lock").unlink()
    other = FolderLock(tmp_path, "x")
    held.release()
    held.release()
    assert (tmp_path / ".lock").exists()
    other.release()


# ---- temporaries -----------------------------------------------------------------------------------------------------


def test_what_a_killed_run_has_left_goes_and_nothing_else(tmp_path):
    (tmp_path / "completions").mkdir()
    for path in (tmp_path / "config.yaml", tmp_path / "completions" / "train-000004.parquet"):
        create_file(temporary_path(path)).close()
    (temporary_path(tmp_path / "final") / "part").mkdir(parents=True)
    kept = [".tmp-mine", ".x.tmp", "completions", "tmp"]
    for name in kept:
        (tmp_path / name).mkdir(exist_ok=True)
    RunFolder(tmp_path).close()
    assert names(tmp_path) == sorted([*kept, "metrics.jsonl"]) and names(tmp_path / "completions") == []


def test_the_last_model_comes_back_where_a_kill_came_before_the_new_one(tmp_path):
    old = tmp_path / f"{temporary_path(tmp_path / 'final').name}.old"
    (old / "weights").mkdir(parents=True)
    RunFolder(tmp_path).close()
    assert names(tmp_path / "final") == ["weights"] and not old.exists()


def test_a_file_is_as_readable_as_any(tmp_path):
    write_atomic(tmp_path / "a", b"")
    (tmp_path / "b").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode
    assert not is_temporary("a") and is_temporary(temporary_path(tmp_path / "a").name)


# ---- rows ------------------------------------------------------------------------------------------------------------


BAD = [b"no row", f'{{"step": {HUGE}}}'.encode(), b'{"step": 1, "a": ' + DEEP.encode(),
       b'{"step": "1", "mode": "train"}',
       b'{"step": true, "mode": "train"}', b'{"step": 1}', b'{"step": -1, "mode": "train"}', b'{"step": NaN}', b"\xff",
       b'{"step": ' + b"9" * 30 + b', "mode": "train"}', b'{"step": 1, "mode": ["train"]}', b"[]"]  # fmt: skip


def test_damaged_rows_are_counted_and_the_file_as_it_was_is_kept(tmp_path, caplog):
    with RunFolder(tmp_path) as folder:
        log(folder, 1, 2)
    path = tmp_path / "metrics.jsonl"
    good = path.read_bytes()
    odd = b'{"step": 2, "mode": "train", "\\ud800": 1e999, "n": ' + b"9" * 4000 + b"}\n"
    for n in (1, 2):
        damaged = good + b"\n".join(BAD) + b"\n\n" + odd + b'{"step": 2, "torn'
        path.write_bytes(damaged)
        caplog.clear()
        with RunFolder(tmp_path, resume_step=2) as folder:
            assert [r["step"] for r in folder.rows()] == [1, 2, 2]
        assert path.read_bytes() == good + odd
        assert (tmp_path / f"metrics.damaged-{n}.jsonl").read_bytes() == damaged
        assert f"{len(BAD)} lines are damaged" in caplog.text and f"metrics.damaged-{n}.jsonl" in caplog.text
    with path.open("ab") as file:
        file.write(b'{"step": 2, "torn')  # by a kill: no damage
    RunFolder(tmp_path, resume_step=2).close()
    assert not (tmp_path / "metrics.damaged-3.jsonl").exists()


def test_a_damaged_file_that_cannot_be_kept_is_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text("what is left\n")

    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("whet.storage.run_folder.create_file", full)
    with pytest.raises(CheckpointError, match=r"can't be written: .*No space left.*resume=latest"):
        RunFolder(tmp_path, resume_step=1)
    assert (tmp_path / "metrics.jsonl").read_text() == "what is left\n"


def test_a_new_run_is_refused_where_no_row_can_be_read_and_begins_after_a_torn_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("damaged\n")
    with pytest.raises(ConfigError, match=r"holds a metrics\.jsonl that can't be read; set trainer\.resume=latest"):
        RunFolder(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "mo')
    with RunFolder(tmp_path) as folder:
        log(folder, 1)
        assert [r["step"] for r in folder.rows()] == [1]


def test_curves_are_drawn_of_what_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [{"step": s, "mode": "train", "reward": r} for s, r in enumerate([10**4000, "1", None, math.inf, 0.5])]
    rows += [{"mode": "train", "reward": 1.0}, {"step": 10**400, "mode": "train", "reward": 1.0}]
    assert metric_series(rows, ["reward"], "train") == ([4], [0.5])
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "curves.png").symlink_to(tmp_path / "victim")
    assert plot_curves(rows, tmp_path / "curves.png") is not None
    assert (tmp_path / "victim").read_text() == "mine" and names(tmp_path) == ["curves.png", "victim"]
    with pytest.raises(CheckpointError, match=r"nowhere/curves\.png can't be written"):
        plot_curves(rows, tmp_path / "nowhere" / "curves.png")


# ---- small files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", STRANGE, ids=range(len(STRANGE)))
def test_an_environment_that_is_none_counts_as_absent_and_is_said(tmp_path, caplog, text):
    (tmp_path / "environment.json").write_bytes(text)
    assert read_environment(tmp_path) == {}
    assert "environment.json can't be read and is ignored: " in caplog.text
    (tmp_path / "summary.json").write_bytes(text)
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "run.json").write_bytes(text)
    (tmp_path / "completions").mkdir()
    (tmp_path / "completions" / "train-².parquet").touch()  # a digit to isdigit, and none to int
    RunFolder(tmp_path, resume_step=1).close()
    assert (tmp_path / "final").exists() and (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("threads", ['"2"', "0", "-1", "true", "2.5", "null", "[1]"])
def test_a_number_of_threads_that_is_none_counts_as_absent(tmp_path, caplog, threads):
    (tmp_path / "environment.json").write_text(f'{{"threads": {threads}, "cpu": 3}}')
    assert read_environment(tmp_path) == {"cpu": 3} and "is not a number of threads" in caplog.text


def test_what_the_environment_holds_can_be_written_whatever_its_bytes(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_ODD", os.fsdecode(b"\xff"))
    with RunFolder(tmp_path) as folder:
        folder.write_json("environment.json", collect_environment())
    assert read_json(tmp_path / "environment.json")["variables"]["OMP_ODD"] == "?"


def test_a_final_model_of_a_later_step_goes_and_what_a_link_points_to_stays(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "run.json").write_text('{"step": 9}')
    run = tmp_path / "run"
    run.mkdir()
    (run / "final").symlink_to(tmp_path / "elsewhere")
    RunFolder(run, resume_step=1).close()
    assert not os.path.lexists(run / "final") and (tmp_path / "elsewhere" / "run.json").exists()


def test_an_empty_name_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("", "  "):
        with pytest.raises(ConfigError, match=r"run folder's name is empty, .*; give trainer\.run_dir="):
            RunFolder(name)
    assert names(tmp_path) == []


def test_a_timeline_makes_its_folder_or_says_why_not(tmp_path, caplog):
    Trace().write(tmp_path / "a" / "trace.json")
    events = json.loads((tmp_path / "a" / "trace.json").read_text())["traceEvents"]
    assert {e["ph"] for e in events} == {"M"}  # names of process and thread, and no span
    (tmp_path / "file").touch()
    Trace().write(tmp_path / "file" / "trace.json")
    assert "could not write the timeline" in caplog.text and "file/trace.json: " in caplog.text


def test_a_full_disk_under_completions_leaves_the_others(tmp_path, monkeypatch):
    class Full:
        """A file on a disk that takes 100 bytes more."""

        def __init__(self, file):
            self.file, self.left = file, 100

        def write(self, data):
            self.left -= len(data)
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.file.write(data)

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

    with RunFolder(tmp_path) as folder:
        given = {"mode": "train", "columns": COLUMNS, "rewards": {"f": [1.0]}}
        first = folder.write_completions(step=1, **given)
        monkeypatch.setattr("whet.storage.files.create_file", lambda path: Full(create_file(path)))
        with pytest.raises(CheckpointError, match=r"train-000002\.parquet can't be written: .*No space left.*latest"):
            folder.write_completions(step=2, **given)
    assert names(tmp_path / "completions") == [first.name]


def test_one_of_many_that_begin_at_once_gets_the_folder(tmp_path):
    got, go = [], threading.Barrier(8)

    def begin():
        go.wait()
        try:
            got.append(FolderLock(tmp_path, "x"))
        except ConfigError as error:
            got.append(error)

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sum(isinstance(x, FolderLock) for x in got) == 1 and len(got) == 8


def test_the_lines_of_a_logger_go_to_no_file_elsewhere_unless_it_is_named(tmp_path, victim):
    options = MetricsLoggerOptions()
    (tmp_path / "log.jsonl").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        Jsonl(tmp_path, options, {})
    (tmp_path / "named").symlink_to(tmp_path / "wanted")
    logger = Jsonl(tmp_path, options, {}, path=str(tmp_path / "named"))
    logger.log(1, {"a": 0.5})
    logger.close()
    assert (tmp_path / "wanted").read_text() == '{"step": 1, "a": 0.5}\n'
