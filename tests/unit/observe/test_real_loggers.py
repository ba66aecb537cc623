"""The loggers with their real packages, where those are installed."""

import time
from importlib.util import find_spec

import pytest

from whet.config import MetricsLoggerOptions
from whet.observe import Loggers


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed; the extra wandb")
def test_wandb_writes_an_offline_run_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    options = MetricsLoggerOptions(project_name="p", run_name="r", backend_kwargs={"wandb": {"mode": "offline"}})
    loggers = Loggers(["wandb"], options=options, folder=tmp_path, config={"algo": {"beta": 0.0}})
    loggers.log(1, {"reward": 0.25})
    loggers.log(1, {"reward": 0.5}, "eval")
    done = {"prompt": ["a", [{"role": "user", "content": "b"}]], "completion": ["c", "d"], "reward": [None, 0.5]}
    loggers.log_completions(1, done, {"f": [float("nan"), 0.5]}, "eval")
    loggers.log(2, {"reward": 0.75})
    loggers.close()
    assert list(tmp_path.glob("wandb/offline-run-*/files/media/table/eval/completions_*.table.json"))
    files = list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 1
    wanted = (b"train/reward", b"eval/reward", b"0.75")
    until = time.monotonic() + 30  # wandb's own process writes the file
    while not all(w in files[0].read_bytes() for w in wanted) and time.monotonic() < until:
        time.sleep(0.2)
    assert all(w in files[0].read_bytes() for w in wanted)


@pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed; the extra trackio")
def test_trackio_keeps_a_run_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    options = MetricsLoggerOptions(project_name="p", run_name="r")
    loggers = Loggers(["trackio"], options=options, folder=tmp_path, config={})
    loggers.log(1, {"reward": 0.25})
    loggers.close()
    assert any(p.suffix == ".db" for p in (tmp_path / "store").rglob("*"))
