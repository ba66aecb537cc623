import json
import logging
import re
import shutil
import sys
import threading
import types

import numpy as np
import pytest

from whet.config import MetricsLoggerOptions
from whet.errors import ConfigError
from whet.observe import Loggers
from whet.observe.loggers import check_loggers


class Recorder:
    def __init__(self):
        self.seen, self.closed = [], False

    def log(self, step, values):
        self.seen.append((step, dict(values)))

    def close(self):
        self.closed = True


MADE = []


class Remembered(Recorder):
    def __init__(self):
        super().__init__()
        MADE.append(self)


def test_objects_classes_functions_and_references_are_loggers(tmp_path, monkeypatch):
    (tmp_path / "my_logger_of_a_test.py").write_text(
        "SEEN = []\ndef fn(step, values): SEEN.append((step, dict(values)))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    own, seen = Recorder(), []
    loggers = Loggers([own, Remembered, lambda s, v: seen.append((s, v)), "my_logger_of_a_test:fn"], prefix="run")
    loggers.log(3, {"reward": 0.5}, "eval")
    loggers.close()
    expected = [(3, {"run/eval/reward": 0.5})]
    assert own.seen == MADE[-1].seen == seen == sys.modules["my_logger_of_a_test"].SEEN == expected
    assert own.closed and MADE[-1].closed


def test_two_loggers_of_one_name_both_log():
    one, two = Recorder(), Recorder()
    Loggers([one, two]).log(1, {"a": 1.0})
    assert one.seen == two.seen == [(1, {"train/a": 1.0})]


def test_a_failing_logger_warns_once_and_is_dropped(caplog):
    good, calls = Recorder(), []

    def bad(step, values):
        calls.append(step)
        raise OSError("no network")

    loggers = Loggers([bad, good])
    with caplog.at_level(logging.WARNING):
        loggers.log(1, {})
        loggers.log(2, {})
        loggers.close()
    assert calls == [1] and [s for s, _ in good.seen] == [1, 2] and good.closed
    assert len(caplog.records) == 1 and "no network" in caplog.text


def test_a_logger_that_wants_to_exit_is_dropped_with_a_warning(caplog):
    def leaves(step, values):
        raise SystemExit(3)

    seen = []
    loggers = Loggers([leaves, lambda step, values: seen.append(step)])
    loggers.log(1, {})
    assert seen == [1] and "SystemExit: 3" in caplog.text


@pytest.mark.parametrize("error", [OSError("no network"), SystemExit("no network")])
def test_a_logger_that_cannot_start_is_an_error_before_the_first_step(error, tmp_path):
    class Broken:
        def __init__(self):
            raise error

    with pytest.raises(ConfigError, match=r"Broken can't start: .*: no network; .*take it out of trainer\.loggers"):
        Loggers([Broken])
    options = MetricsLoggerOptions(backend_kwargs={"jsonl": {"pat": "x"}})
    with pytest.raises(ConfigError, match=r"logger jsonl can't start: .*'pat'.*backend_kwargs\.jsonl"):
        Loggers(["jsonl"], options=options, folder=tmp_path)


@pytest.mark.parametrize("name", ["jsonl", "tensorboard"])
def test_a_folder_that_no_logger_can_write_is_an_error_that_names_its_key(name, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"trainer\.metrics_logging_options\.log_dir=.*file/logs can't be written"):
        Loggers([name], options=MetricsLoggerOptions(log_dir=str(tmp_path / "file" / "logs")))


def test_a_missing_tensorboard_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[tensorboard\]'"):
        Loggers(["tensorboard"], folder=tmp_path)


def test_a_tensorboard_whose_folder_is_gone_is_dropped_and_closing_does_not_hang(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # its writer's own thread says so, too
    seen = []
    options = MetricsLoggerOptions(flush_every_n_steps=1)
    loggers = Loggers(["tensorboard", lambda step, _: seen.append(step)], options=options, folder=tmp_path)
    shutil.rmtree(tmp_path / "tensorboard")
    for step in range(4):
        loggers.log(step, {"reward": 0.5})
    loggers.close()
    assert seen == [0, 1, 2, 3]


def test_unknown_names_and_things_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="unknown logger 'tensorbord'; did you mean tensorboard"):
        Loggers(["tensorbord"], folder=tmp_path)
    with pytest.raises(ConfigError, match="did you mean wandb"):
        Loggers([], options=MetricsLoggerOptions(backend_kwargs={"wandbb": {}}))
    with pytest.raises(ConfigError, match="is not a function either"):
        Loggers([3])
    with pytest.raises(ConfigError, match=r"set trainer.run_dir"):
        Loggers(["jsonl"])


@pytest.mark.parametrize(("name", "module"), [("wandb", "wandb"), ("trackio", "trackio")])
def test_a_missing_package_names_the_extra(name, module, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"pip install .*\[{name}\]'"):
        Loggers([name], folder=tmp_path)


def test_jsonl_takes_its_own_path_and_writes_nan_as_null(tmp_path):
    options = MetricsLoggerOptions(backend_kwargs={"jsonl": {"path": str(tmp_path / "mine.jsonl")}})
    loggers = Loggers(["jsonl"], options=options, folder=tmp_path / "run")
    loggers.log(1, {"a": float("nan"), "b": 2.0})
    loggers.close()
    assert json.loads((tmp_path / "mine.jsonl").read_text()) == {"step": 1, "train/a": None, "train/b": 2.0}


def test_tensorboard_files_read_back(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = Loggers(["tensorboard"], folder=tmp_path)
    for step in (1, 2):
        loggers.log(step, {"reward": step / 4})
    loggers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/reward")] == [(1, 0.25), (2, 0.5)]


def test_tensorboard_shows_completions_as_texts(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    loggers = Loggers(["tensorboard"], folder=tmp_path)
    loggers.log_completions(2, {"prompt": ["a|b"], "completion": ["c\nd"], "reward": [0.5]}, {}, "eval")
    loggers.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (event,) = events.Tensors("eval/completions/text_summary")
    lines = event.tensor_proto.string_val[0].decode().splitlines()
    assert event.step == 2 and lines[0] == "| step | prompt | completion | reward |"
    assert lines[2] == r"| 2 | a\|b | c<br>d | 0.5 |"


@pytest.fixture
def wandb(monkeypatch):
    """A module in the place of wandb, which notes what it is asked for."""
    calls = []

    class Run:
        url = "https://wandb.ai/me/whet/runs/1"

        def log(self, values, step):
            calls.append(("log", values, step))

        def finish(self):
            calls.append(("finish",))

    fake = types.SimpleNamespace(
        init=lambda **kwargs: calls.append(("init", kwargs)) or Run(),
        Table=lambda columns, data: (columns, data),
        login=lambda verify: True,
        calls=calls,
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_SILENT", raising=False)
    return fake


def test_wandb_gets_project_name_config_and_the_users_arguments_and_says_its_address(tmp_path, wandb, caplog):
    caplog.set_level(logging.INFO, "whet")
    options = MetricsLoggerOptions(run_name="mine", backend_kwargs={"wandb": {"mode": "disabled"}})
    loggers = Loggers(["wandb"], options=options, folder=tmp_path, config={"algo": {"beta": 0.0}})
    loggers.log(4, {"kl": 0.5})
    loggers.close()
    (_, given), *rest = wandb.calls
    assert given == {
        "project": "whet",
        "name": "mine",
        "dir": str(tmp_path),
        "config": {"algo": {"beta": 0.0}},
        "id": (tmp_path / "wandb-id.txt").read_text(),
        "resume": "allow",
        "mode": "disabled",
    }
    assert rest == [("log", {"train/kl": 0.5}, 4), ("finish",)]
    assert "wandb: https://wandb.ai/me/whet/runs/1" in caplog.messages


def test_wandb_keeps_its_run_in_a_run_folder_and_the_users_id_goes_before(tmp_path, wandb):
    def asked(folder, **kwargs):
        wandb.calls.clear()
        Loggers(["wandb"], options=MetricsLoggerOptions(**kwargs), folder=folder)
        return wandb.calls[0][1].get("id")

    first = asked(tmp_path / "a")
    assert first.isalnum() and asked(tmp_path / "a") == first != asked(tmp_path / "b")
    assert asked(tmp_path / "a", log_dir=str(tmp_path / "logs")) == first  # it is the run's, wherever the files go
    assert asked(tmp_path / "a", backend_kwargs={"wandb": {"id": "mine"}}) == "mine"
    logs = str(tmp_path / "logs")
    assert asked(None, log_dir=logs) != asked(None, log_dir=logs)  # of no folder: another run each time


def test_a_logger_that_takes_tables_is_given_completions_of_evaluations_and_every_nth_step(tmp_path, wandb):
    columns = {
        "prompt": ["2+2=", [{"role": "user", "content": "hi"}]],
        "completion": ["4", "5"],
        "tokens": [[1], [2]],
        "reward": [1.0, float("nan")],
        "finish_reason": ["stop", "length"],
    }
    rewards = {"exact": np.array([1.0, 0.0])}
    options = MetricsLoggerOptions(completions_every_n_steps=3)
    loggers = Loggers(["wandb", Recorder()], options=options, folder=tmp_path, prefix="p")
    for step in range(1, 7):
        loggers.log_completions(step, columns, rewards, "train")
    loggers.log_completions(4, columns, rewards, "eval")
    logged = [(step, *values) for kind, values, step in wandb.calls[1:] if kind == "log"]
    assert logged == [(s, "p/train/completions") for s in (1, 3, 6)] + [(4, "p/eval/completions")]
    names, table = wandb.calls[-1][1]["p/eval/completions"]
    assert names == ["step", "prompt", "completion", "reward", "finish_reason", "reward/exact"]
    assert table[0] == [4, "2+2=", "4", 1.0, "stop", 1.0] and table[1][1] == '[{"role": "user", "content": "hi"}]'
    loggers.log_completions(5, {name: [] for name in columns}, {"exact": []}, "eval")  # of nothing
    assert [step for *_, step in wandb.calls[1:]][-1] == 4
    Loggers([], options=MetricsLoggerOptions(completions_every_n_steps=0)).log_completions(1, columns, rewards, "eval")


def test_all_that_is_wrong_with_loggers_is_said_at_once_and_those_that_began_are_closed(tmp_path, wandb, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    options = MetricsLoggerOptions(backend_kwargs={"wandbb": {}})
    with pytest.raises(ConfigError) as error:
        check_loggers(["trackio", "nope", "no_such_module_at_all:f", "wandb"], options)
    said = str(error.value).split("\n")
    assert [re.search(r"wandbb|\[trackio\]|'nope'|no_such_module", line)[0] for line in said] == [
        "wandbb",
        "[trackio]",
        "'nope'",
        "no_such_module",
    ]

    class Broken:
        def __init__(self):
            raise OSError("no network")

    with pytest.raises(ConfigError, match=r"Broken can't start: OSError: no network"):
        Loggers(["wandb", Broken], folder=tmp_path)
    assert wandb.calls[-1] == ("finish",)


def test_a_login_that_is_wanting_is_an_error_before_anything_starts_unless_nothing_is_sent(wandb):
    def refused(verify):
        assert verify is False  # no server is asked
        raise RuntimeError("No API key configured. Use `wandb login`")

    wandb.login = refused
    with pytest.raises(ConfigError, match=r"logger wandb can't start: .*No API key configured.*or take it out of"):
        check_loggers(["wandb"])
    check_loggers(["wandb"], MetricsLoggerOptions(backend_kwargs={"wandb": {"mode": "offline"}}))
    assert wandb.calls == []


def test_trackio_gets_the_same(tmp_path, monkeypatch):
    calls = []
    fake = types.SimpleNamespace(
        init=lambda **kwargs: calls.append(kwargs) or types.SimpleNamespace(name="run-a-2"),
        log=lambda values, step: calls.append((values, step)),
        finish=lambda: calls.append("finish"),
    )
    monkeypatch.setitem(sys.modules, "trackio", fake)
    loggers = Loggers(["trackio"], folder=tmp_path / "run-a")
    loggers.log(4, {"kl": 0.5})
    loggers.close()
    assert calls == [{"project": "whet", "name": "run-a", "config": {}}, ({"train/kl": 0.5}, 4), "finish"]
    Loggers(["trackio"], folder=tmp_path / "run-a")
    assert calls[-1] == {"project": "whet", "name": "run-a-2", "config": {}, "resume": "allow"}
