"""The report: what it takes from a run folder, and what it leaves out."""

import ast
import base64
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from whet.cli import main
from whet.cli.report import find_warnings
from whet.errors import ConfigError
from whet.report.completions import PART, SEGMENT, TokenTexts, step_scripts
from whet.report.report import keep_within, standard_error, write_report
from whet.report.run_data import CompletionFile, metric_columns, run_data
from whet.storage.completions import write_completions


def completions(rewards, tokens, logprobs, **columns):
    n = len(rewards)
    return {
        "row": [i // 2 for i in range(n)],
        "generation": [i % 2 for i in range(n)],
        "prompt": [f"p{i // 2}" for i in range(n)],
        "completion": ["".join(map(chr, ids)) for ids in tokens],
        "tokens": tokens,
        "logprobs": logprobs,
        "reward": rewards,
        "finish_reason": ["stop"] * n,
        "version": [0] * n,
    } | columns


@pytest.fixture
def run(tmp_path):
    """A run folder of three steps and an evaluation."""
    folder = tmp_path / "a"
    (folder / "completions").mkdir(parents=True)
    clipped = [0.9, 0.1, 0.1]
    rows = [
        {"step": s, "mode": "train", "version": s, "reward": r, "completions/clipped_ratio": c, "kl": None}
        for s, r, c in zip((1, 2, 3), (0.25, 0.5, 0.75), clipped, strict=True)
    ]
    rows.append({"step": 3, "mode": "eval", "version": 3, "reward": 0.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "config.yaml").write_text("actor:\n  optim: {lr: 0.1}\nreward: exact\n")
    for name, step in (("train-000001", 1), ("train-000002", 2), ("train-000003", 3), ("eval-000003", 3)):
        found = completions(
            [1.0, 0.0, None, 1.0], [[72, 105], [33], [0xC3, 0xA9], [65]], [[-0.5, math.nan], [-1.0], [-1.0] * 2, [-1.0]]
        )
        write_completions(
            folder / "completions" / f"{name}.parquet", step=step, columns=found, rewards={"exact": found["reward"]}
        )
    return folder


def received(path):
    """The key and the value of a script of the report."""
    text = path.read_text().strip()
    assert text.startswith("whet.receive(") and text.endswith(")")
    key, value = ast.literal_eval(text.removeprefix("whet.receive"))
    return key, [json.loads(line) for line in value.split("\n")] if "." in key else json.loads(value)


def column(text, kind="<f4"):
    """A column of the index; None where there is no number."""
    return [None if math.isnan(value) else value for value in np.frombuffer(base64.b64decode(text), kind).tolist()]


def scripts_of(path, decode=None):
    """The index, and all segments, of a file of completions."""
    found = dict(step_scripts(path, decode and TokenTexts(decode)))
    index = json.loads(found.pop(""))
    found = {key: [json.loads(line) for line in text.split("\n")] for key, text in found.items()}
    starts = [0]
    for part in found.values():
        starts.append(starts[-1] + len(part))
    assert list(found) == [f".{i}" for i in range(len(found))] and index["parts"] == starts[:-1]
    return index, [segment for part in found.values() for segment in part]


def test_a_report_has_the_metrics_settings_and_completions_of_a_run(run, tmp_path):
    page = write_report([run], tmp_path / "out", find_warnings=find_warnings)
    assert page.stat().st_size < 1e6 and "<title>a · whet</title>" in page.read_text()
    key, (data,) = received(tmp_path / "out/data/runs.js")
    assert key == "runs" and data["name"] == "a" and data["config"] == {"actor.optim.lr": 0.1, "reward": "exact"}
    train = data["metrics"]["train"]
    assert (
        train["steps"] == [1, 2, 3] and train["columns"]["reward"] == [0.25, 0.5, 0.75] and "kl" not in train["columns"]
    )
    assert [(w["step"], w["metric"]) for w in data["warnings"]] == [(1, "truncated")]
    assert "rollout.max_tokens_to_generate" in data["warnings"][0]["message"]
    assert [(c["mode"], c["step"], c["n"]) for c in data["completions"]] == [
        ("train", 1, 4),
        ("train", 2, 4),
        ("eval", 3, 4),
        ("train", 3, 4),
    ]
    assert data["completions"][2]["se"] == 0.25  # prompts' means 0.5 and 1.0
    key, found = received(tmp_path / "out/data/0-train-000002.js")
    assert key == "0-train-000002" and found["functions"] == ["exact"]
    assert column(found["r"]) == [1.0, 0.0, None, 1.0] and found["sizes"] == [2, 2] and found["f"] == [found["r"]]
    assert column(found["n"], "<i4") == [2, 1, 2, 1] and column(found["end"], "u1") == [0] * 4
    key, segments = received(tmp_path / "out/data/0-train-000002.0.js")
    assert key == "0-train-000002.0" and [s.get("prompt", s.get("t")) for s in segments][:3] == ["p0", "Hi", "!"]


def test_warnings_have_the_runs_own_bounds_and_name_a_run_without_signal(run):
    data = run_data(run)
    columns = data["metrics"]["train"]["columns"] = {"kl": [0.6, 0.6, 0.6], "frac_reward_zero_std": [0.9, 1.0, 1.0]}
    assert [(w["step"], w["metric"]) for w in find_warnings(data)] == [(3, "kl")]
    data["config"] = {"trainer.warn_when.kl.above": 0.7, "trainer.warn_when.kl.steps": "many"}
    columns["frac_reward_zero_std"] = [1.0, 1.0, 1.0]
    (found,) = find_warnings(data)
    assert found["metric"] == "no_signal" and "raise algo.num_generations" in found["message"]


def test_the_commands_load_no_torch(run, tmp_path):
    code = f"""
import sys
from whet.cli import main
assert main(["report", {str(run)!r}]) == main(["compare", {str(run)!r}, {str(run)!r}]) == 0
found = sorted({{"torch", "transformers"}} & {{*sys.modules}})
assert not found, found
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_tokens_have_their_text_and_logprob(run):
    decode = lambda ids: bytes(ids).decode("utf-8", "replace")
    _, (_, first, _, _, second, _) = scripts_of(run / "completions/train-000001.parquet", decode)
    assert first["len"] == [1, 1] and first["lp"] == [50, None] and "k" not in first  # the tokens' text is the text
    assert second["k"] == "é" and second["t"] == "Ã©" and second["len"] == [1, 0]


def test_tokens_have_the_values_of_the_trainer_where_the_run_has_them(tmp_path):
    columns = completions(
        [1.0, 0.0], [[65, 66, 67], [65]], [[-0.5, 0.0, -1.0], [-1.0]],
        trainer_logprobs=[[-0.25, math.nan, -1.5], None], entropy=[[2.0, math.nan, 0.125], None],
        advantages=[[0.5, math.nan, -0.5], [1.0]], versions=[[3, -1, 4], [3]], version=[4, 3],
        seconds=[{"engine": 1.5, "tools": 0.25}, {}],
    )  # fmt: skip
    write_completions(tmp_path / "train-000001.parquet", step=1, columns=columns, rewards={})
    _, (_, first, second) = scripts_of(tmp_path / "train-000001.parquet", lambda ids: bytes(ids).decode())
    assert first["lp"] == [50, None, 100] and first["ratio"] == [25, None, -50] and first["ent"] == [200, None, 12]
    assert first["adv"] == [0.5, None, -0.5] and first["vs"] == [3, -1, 4] and first["s"]["tools"] == 0.25
    assert not {"ratio", "ent", "adv", "vs", "s"} & second.keys()


def test_a_long_completion_is_cut_between_tokens_and_its_parts_add_up(tmp_path):
    long = [65, 66, 0xC3, 0xA9] * (PART // 3) + [67]
    tokens = [[65], long, [66], []]
    columns = completions([1.0] * 4, tokens, [[-0.01 * (k % 9) for k in range(len(ids))] for ids in tokens])
    columns["completion"] = [bytes(ids).decode() for ids in tokens]
    path = tmp_path / "train-000001.parquet"
    write_completions(path, step=1, columns=columns, rewards={})
    for decode in (None, lambda ids: bytes(ids).decode("utf-8", "replace")):
        index, segments = scripts_of(path, decode)
        count = index["segments"][1]
        assert index["segments"] == [1, count, 1, 1] and count >= len(columns["completion"][1]) / (SEGMENT + 1)
        own = segments[2 : 2 + count]
        assert len(index["parts"]) > 1 and "".join(s["t"] for s in own) == columns["completion"][1]
        assert max(len(s["t"]) for s in own) <= SEGMENT + 1 and column(index["n"], "<i4") == [1, len(long), 1, 0]
        if decode is not None:
            assert all(sum(s["len"]) == len(s["t"]) and len(s["len"]) == len(s["lp"]) for s in own)
            assert [p for s in own for p in s["lp"]] == [k % 9 for k in range(len(long))]
        assert segments[-2]["t"] == "B" and segments[-1]["t"] == "" and segments[3 + count - 1]["prompt"] == "p1"


def test_a_prompt_that_comes_twice_in_a_step_is_two_groups(tmp_path):
    columns = completions([1.0] * 4, [[65]] * 4, [[0.0]] * 4, row=[7] * 4)
    write_completions(tmp_path / "train-000001.parquet", step=1, columns=columns, rewards={})
    index, segments = scripts_of(tmp_path / "train-000001.parquet")
    assert index["sizes"] == [2, 2] and index["segments"] is None and "lp" not in segments[1]
    assert standard_error(tmp_path / "train-000001.parquet") == 0.0


def test_large_runs_leave_out_steps_and_say_so(run, tmp_path):
    write_report([run], tmp_path / "out")
    write_report([run], tmp_path / "out", max_mb=1e-3)
    names = {path.name for path in (tmp_path / "out/data").iterdir()}
    assert names == {
        "runs.js",
        *(f"0-{step}{part}.js" for step in ("train-000003", "eval-000003") for part in ("", ".0")),
    }
    (data,) = received(tmp_path / "out/data/runs.js")[1]
    assert data["left_out"] == 2 and [(c["mode"], c["step"]) for c in data["completions"]] == [
        ("eval", 3),
        ("train", 3),
    ]


def test_evaluations_are_kept_before_steps_of_training():
    files = [CompletionFile(Path(f"{mode}-{i}.parquet"), mode, i) for i in range(1, 9) for mode in ("train", "eval")]
    sizes = [20 if f.mode == "train" else 1 for f in files]

    def kept(limit, mode):
        return [f.step for f in keep_within(files, sizes, limit) if f.mode == mode]

    assert kept(168, "train") == kept(168, "eval") == kept(90, "eval") == [*range(1, 9)]
    assert kept(90, "train") == kept(8, "eval") == [2, 4, 6, 8] and kept(8, "train") == [8]


def test_damaged_completions_are_left_out_with_a_warning(run, tmp_path, caplog):
    (run / "completions/train-000002.parquet").write_bytes(b"PAR1")
    write_report([run], tmp_path / "out")
    (data,) = received(tmp_path / "out/data/runs.js")[1]
    assert [c["step"] for c in data["completions"]] == [1, 3, 3] and "the report leaves it out" in caplog.text


def test_numbers_keep_six_digits():
    rows = [{"step": 1, "mode": "train", "a": 123456789.0, "b": 1e-30, "c": float("nan"), "d": 0.0, "e": True}]
    assert metric_columns(rows)["columns"] == {"a": [123457000], "b": [1e-30], "d": [0.0], "e": [1]}


def test_the_command(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report", "a"]) == 0
    assert capsys.readouterr().out.startswith("a/report/index.html\n  open it in a browser: file:///")
    assert main(["report", "a", str(run)]) == 2 and "named twice" in capsys.readouterr().err
    for words, message in (
        ([], "no run; write whet report runs/a"),
        (["b"], "b is not a folder"),
        (["a/completions"], "no metrics.jsonl with rows"),
        (["a", "max_mb=0"], "max_mb=0: expected megabytes above 0"),
        (["a", "runs=b"], "both name runs"),
        (["a", "out=a/config.yaml"], "the report can't be written"),
    ):
        assert main(["report", *words]) == 2
        assert message in capsys.readouterr().err


def test_a_missing_run_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="is not a folder"):
        run_data(tmp_path / "none")
