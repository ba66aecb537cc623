"""The live page: what it serves, to whom, and how it follows a run that goes on or back."""

import ast
import json
import shutil
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from whet.cli import main
from whet.cli.report import find_warnings
from whet.errors import ConfigError
from whet.report.server import LiveRuns, make_server
from whet.storage.completions import write_completions


def write_rows(folder, steps, mode="train", reward=0.5):
    with open(folder / "metrics.jsonl", "a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "mode": mode, "version": step, "reward": reward}) + "\n")


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "a"
    (folder / "completions").mkdir(parents=True)
    write_rows(folder, [1, 2])
    return folder


@pytest.fixture
def served(run):
    """A function that serves the run, and returns its address."""
    servers = []

    def serve(token=None):
        servers.append(make_server(LiveRuns([run], find_warnings), "127.0.0.1", 0, token))
        threading.Thread(target=servers[-1].serve_forever, args=(0.02,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_address[1]}/"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def get(url, **headers):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


def add_completions(run, step):
    columns = {
        "row": [0, 0],
        "generation": [0, 1],
        "prompt": ["1+1="] * 2,
        "completion": ["2", "3"],
        "tokens": [[50], [51]],
        "logprobs": [[-0.1], [-2.0]],
        "reward": [1.0, 0.0],
        "finish_reason": ["stop"] * 2,
        "version": [0] * 2,
    }
    write_completions(run / f"completions/train-{step:06d}.parquet", step=step, columns=columns, rewards={})


def test_the_page_and_its_data(run, served):
    url = served()
    add_completions(run, 2)
    status, text, _ = get(url)
    assert status == 200 and "whet.start(true)" in text
    status, text, headers = get(url + "data/runs.js")
    assert status == 200 and text.startswith('whet.receive("runs",\'[{') and headers["Cache-Control"] == "no-store"
    assert get(url + "data/0-train-000002.js")[1].startswith('whet.receive("0-train-000002",')
    part = get(url + "data/0-train-000002.0.js")[1]
    assert json.loads(ast.literal_eval(part.removeprefix("whet.receive"))[1].split("\n")[1])["t"] == "2"
    for path in (
        "data/0-train-000002.1.js",
        "data/0-train-000009.js",
        "data/1-train-000002.js",
        "data/0-../../config.js",
        "config.yaml",
        "update",
    ):
        assert get(url + path)[0] == 404, path


def test_an_update_has_the_rows_behind_the_cursor(run, served):
    (run / "config.yaml").write_text("trainer: {warn_when: {reward: {below: 0.1, steps: 2}}}")
    url = served()
    update = lambda count, step: json.loads(
        get(f"{url}update?run=0&train={count}&train_step={step}&eval=0&eval_step=-1")[1]
    )
    write_rows(run, [3, 4])
    write_rows(run, [4], "eval", 0.25)
    found = update(2, 2)
    assert found["metrics"]["train"] == {"replace": False, "steps": [3, 4], "columns": {"reward": [0.5, 0.5]}}
    assert found["metrics"]["eval"]["columns"] == {"reward": [0.25]} and found["completions"] == []
    add_completions(run, 4)
    found = update(4, 4)
    assert found["metrics"]["train"]["steps"] == [] and found["completions"][0]["key"] == "0-train-000004"
    (run / "metrics.jsonl").unlink()  # the run was resumed from step 1
    write_rows(run, [1, 2, 3], reward=0.75)
    found = update(4, 4)
    assert found["metrics"]["train"] == {"replace": True, "steps": [1, 2, 3], "columns": {"reward": [0.75] * 3}}
    assert found["warnings"] == []
    write_rows(run, [4, 5], reward=0.0)
    assert [(w["step"], w["metric"]) for w in update(3, 3)["warnings"]] == [(5, "reward")]


def test_a_run_that_is_gone_is_an_answer(run, served):
    url = served()
    shutil.rmtree(run)
    status, text, _ = get(url + "data/runs.js")
    assert status == 503 and "is not a folder" in text


def test_only_a_request_to_loopback_or_with_the_token_is_answered(served):
    assert get(served(), Host="evil.example")[0] == 403
    url = served("secret")
    assert get(url)[0] == 403 and get(url + "?token=wrong")[0] == 403 and get(url + "data/runs.js")[0] == 403
    status, _, headers = get(url + "?token=secret")
    cookie = headers["Set-Cookie"]
    assert status == 200 and "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert get(url + "data/runs.js", Cookie=cookie.partition(";")[0])[0] == 200


def test_nothing_but_get(served):
    with pytest.raises(urllib.error.HTTPError, match="501"):
        urllib.request.urlopen(urllib.request.Request(served(), data=b"x", method="POST"), timeout=10)


def test_the_demo_is_trained_once_and_opened(tmp_path, monkeypatch, capsys):
    trained, shown = [], []

    def train(config):
        trained.append(config)
        folder = Path(config.trainer.run_dir)
        folder.mkdir(parents=True)
        write_rows(folder, [1])
        (folder / "summary.json").write_text("{}")

    @contextmanager
    def serve(live, host, port, token):
        shown.append(live.title)
        yield SimpleNamespace(server_address=(host, 1), serve_forever=lambda: None)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("whet.cli.commands.grpo", train)
    monkeypatch.setattr("whet.cli.report.make_server", serve)
    assert main(["watch", "--demo"]) == main(["watch", "demo=true"]) == 0
    assert shown == ["watch-demo"] * 2 and [config.trainer.max_steps for config in trained] == [40]
    assert main(["watch", "--demo", "runs=a"]) == 2 and "leave out a or --demo" in capsys.readouterr().err


def test_addresses(run):
    live = LiveRuns([run])
    with pytest.raises(
        ConfigError, match=r"host=0\.0\.0\.0: other machines can reach it, so it needs a token; pass one"
    ):
        make_server(live, "0.0.0.0", 0, None)
    with make_server(live, "127.0.0.1", 0, None) as server:
        port = server.server_address[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} can't be bound"):
            make_server(live, "127.0.0.1", port, None)
