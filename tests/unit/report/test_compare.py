"""Runs beside each other: what is a difference, and what a seed makes."""

import json
import math

import pytest

from whet.cli import main
from whet.errors import ConfigError
from whet.report.compare import Comparison, Spread, _spread, _without_run_dir, compare_runs, write_comparison
from whet.report.run_data import completion_files


def make_run(folder, *, seed=0, lr=0.1, rewards=(0.1, 0.3), evaluation=0.5, torch="2.13"):
    folder.mkdir()
    rows = [
        {"step": s + 1, "mode": "train", "version": s, "reward": r, "turns/mean": 2.0, "turns/failed": 3.0}
        for s, r in enumerate(rewards)
    ]
    rows.append({"step": len(rewards), "mode": "eval", "version": 0, "reward": evaluation})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(
        f"actor: {{lr: {lr}, model: {folder}/start}}\ntrainer: {{seed: {seed}, run_dir: {folder.name}}}\nreward: x\n"
    )
    (folder / "environment.json").write_text(json.dumps({"versions": {"torch": torch}, "run": {"name": folder.name}}))
    return folder


def test_runs_that_differ_in_the_seed_are_one_column(tmp_path):
    runs = [
        make_run(tmp_path / "a0", rewards=(0.0, 0.2)),
        make_run(tmp_path / "b", lr=0.2, torch="2.12"),
        make_run(tmp_path / "a1", seed=1, rewards=(0.0, 0.4), evaluation=0.7),
    ]
    found = compare_runs(runs, last=1)
    assert found.groups == (("a0", "a1"), ("b",))
    assert found.settings == {"actor.lr": ["0.1", "0.2"]} and found.environment == {"versions.torch": ["2.13", "2.12"]}
    both, alone = found.metrics["reward"]
    assert both == Spread(pytest.approx(0.3), pytest.approx(math.sqrt(0.02)), 2)
    assert (alone.mean, alone.runs) == (0.3, 1) and math.isnan(alone.deviation)
    assert str(found.metrics["eval reward"][0]) == "0.6 ± 0.141 (2)"
    assert compare_runs(runs, last=10).metrics["reward"][1].mean == pytest.approx(0.2)
    assert list(compare_runs(runs, metrics=["eval reward"]).metrics) == ["eval reward"]
    with pytest.raises(ConfigError, match="no run has the metric 'kl'; training has reward"):
        compare_runs(runs, metrics=["reward", "kl"])


def test_the_command(tmp_path, capsys):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", lr=0.2)
    assert main(["compare", str(a), str(b), "last=2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "settings that differ  a    b",
        "actor.lr              0.1  0.2",
        "",
        "environment: none",
        "",
        "metrics, over the last 2 steps  a    b",
        "eval reward                     0.5  0.5",
        "reward                          0.2  0.2",
        "turns/mean                      2    2",
        "turns/failed                    3    3",
        "",
        f"curves: whet report {a} {b}",
    ]
    page = tmp_path / "pages/c.html"
    assert main(["compare", "--html", str(a), str(b), f"out={page}"]) == 0
    assert capsys.readouterr().out.endswith(f"open it in a browser: {page.as_uri()}\n")
    text = page.read_text()
    assert main(["compare", str(a), str(make_run(tmp_path / "a1", seed=1))]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "a, a1 differ only in the seed: mean ± standard deviation (runs)"
    assert shown[-5].split() == ["reward", "0.2", "±", "0", "(2)"]
    assert "<th>actor.lr</th><td>0.1</td><td>0.2</td>" in text and "<p>no difference</p>" in text
    assert '<td class="n">0.2</td>' in text
    assert main(["compare", str(a), str(b), "--html", f"out={a}"]) == 2
    assert "the page can't be written" in capsys.readouterr().err
    assert main(["compare", str(a)]) == 2 and "needs two runs or more" in capsys.readouterr().err
    assert main(["compare", str(a), str(tmp_path / "none")]) == 2 and "is not a folder" in capsys.readouterr().err


def test_names_and_cells_of_a_page_are_text_and_addresses_stay_as_they_are(tmp_path):
    made = Comparison((("<b>",),), {}, {}, {})
    page = write_comparison(made, {"settings": [["", "a"], ["<u>", "<i>"]]}, str(tmp_path / "page.html")).read_text()
    assert not any(tag in page for tag in ("<b>", "<u>", "<i>")) and "&lt;i&gt;" in page
    assert _without_run_dir({"judge.url": "http://x/v1"}) == {"judge.url": "http://x/v1"}


def test_a_metric_of_evaluations_is_that_of_the_last_one_and_completions_are_listed_by_step(tmp_path):
    columns = {"columns": {"reward": [0.0, 1.0]}}
    runs = [{"metrics": {"eval": columns, "train": columns}}]
    assert (_spread(runs, "eval reward", 10).mean, _spread(runs, "reward", 10).mean) == (1.0, 0.5)
    (tmp_path / "completions").mkdir()
    for name in ("eval-000002", "train-000001", "train-000002"):
        (tmp_path / "completions" / f"{name}.parquet").touch()
    assert [file.key for file in completion_files(tmp_path)] == ["train-000001", "eval-000002", "train-000002"]
