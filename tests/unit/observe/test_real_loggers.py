"""The loggers with their real packages, where those are installed."""

import time
from importlib.util import find_spec

import pytest

from whet.config import MetricsLoggerOptions
from whet.observe import Loggers

DONE = {"prompt": ["a", [{"role": "user", "content": "b"}]], "completion": ["c", "d"], "reward": [None, 0.5]}


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed; the extra wandb")
def test_wandb_writes_an_offline_run_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    options = MetricsLoggerOptions(project_name="p", run_name="r", backend_kwargs={"wandb": {"mode": "offline"}})
    loggers = Loggers(["wandb"], options=options, folder=tmp_path, config={"algo": {"beta": 0.0}})
    loggers.log(1, {"reward": 0.25})
    loggers.log(1, {"reward": 0.5}, "eval")
    loggers.log_completions(1, DONE, {"f": [float("nan"), 0.5]}, "eval")
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
    for step, reward in ((1, 0.25), (2, 0.5)):  # the second as a resumed run
        loggers = Loggers(["trackio"], options=options, folder=tmp_path, config={})
        loggers.log(step, {"reward": reward})
        loggers.log_completions(step, DONE, {"f": [float("nan"), 0.5]}, "eval")
        loggers.close()
    import trackio

    (run,) = trackio.Api().runs("p")
    rows = trackio.SQLiteStorage.get_logs("p", run.name)
    assert [row["train/reward"] for row in rows if "train/reward" in row] == [0.25, 0.5]
    assert sum("eval/completions" in row for row in rows) == 2


@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")
def test_mlflow_goes_on_in_its_run_with_metrics_parameters_and_tables(tmp_path):
    import mlflow

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    options = MetricsLoggerOptions(project_name="p", backend_kwargs={"mlflow": {"tracking_uri": uri}})
    for step, reward in ((1, 0.25), (2, 0.5)):
        loggers = Loggers(["mlflow"], options=options, folder=tmp_path / "run", config={"algo": {"beta": 0.0}})
        loggers.log(step, {"reward": reward, "pass@1": 1.0})
        loggers.close()
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert run.data.params == {"algo.beta": "0.0"} and run.info.status == "FINISHED" and run.info.run_name == "run"
    history = client.get_metric_history(run.info.run_id, "train/reward")
    assert [(m.step, m.value) for m in history] == [(1, 0.25), (2, 0.5)]
    assert run.data.metrics["train/pass_1"] == 1.0


@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed; the extra mlflow")
def test_mlflow_takes_a_run_without_a_configuration_and_its_completions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = MetricsLoggerOptions(backend_kwargs={"mlflow": {"tracking_uri": f"sqlite:///{tmp_path}/mlflow.db"}})
    loggers = Loggers(["mlflow"], options=options, folder=tmp_path / "run", config={})
    loggers.log_completions(1, DONE, {"f": [float("nan"), 0.5]}, "eval")
    loggers.close()
    (table,) = tmp_path.rglob("completions.json")
    assert '"completion"' in table.read_text() and '"d"' in table.read_text()


@pytest.mark.skipif(find_spec("swanlab") is None, reason="swanlab is not installed")
def test_swanlab_keeps_an_offline_run_without_a_network(tmp_path):
    options = MetricsLoggerOptions(project_name="p", backend_kwargs={"swanlab": {"mode": "offline"}})
    loggers = Loggers(["swanlab"], options=options, folder=tmp_path, config={})
    loggers.log(1, {"reward": 0.25})
    loggers.log_completions(1, DONE, {"f": [float("nan"), 0.5]}, "eval")
    loggers.close()
    kept = (tmp_path / "swanlab-id.txt").read_text()
    assert list(tmp_path.glob(f"run-*-{kept}")) and list(tmp_path.glob("run-*/media/text/*"))
