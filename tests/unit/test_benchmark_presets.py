"""benchmarks/presets.py and its tasks. What the methods reach is tested nowhere: it is measured."""

import dataclasses
import importlib
import json
import random
import sys
from pathlib import Path

import pytest
from helpers import same
from safetensors.torch import load_file

from whet import demo

FILE = "model.safetensors"
FOLDER = Path(__file__).parents[2] / "benchmarks"
NAMES = ("common", "learning_tasks", "presets", "warm_start")


@pytest.fixture
def scripts(monkeypatch):
    """The scripts as modules, imported as when one of them is run."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield {name: importlib.import_module(name) for name in NAMES}
    for name in NAMES:
        sys.modules.pop(name)


def by_rule(tasks, prompt):
    """The completion of a model that knows the order of operations."""
    expression, steps = tasks.parse_expression(prompt), []
    while expression[1]:
        products = [i for i, o in enumerate(expression[1]) if o == "*"]
        chosen = products[0] if products else 0
        steps.append(tasks.step(expression, chosen))
        expression = tasks.apply_operation(expression, chosen)
    return ";".join(steps)


def test_the_long_task_is_three_to_five_times_the_demos_length_and_rewards_the_right_result_alone(scripts):
    tasks = scripts["learning_tasks"]
    task, rng = tasks.TASKS["steps"], random.Random(0)
    rows = [*task.heldout_rows(), *rng.sample(task.train_rows(), 500)]
    prompts, answers = [r["prompt"] for r in rows], [r["answer"] for r in rows]
    gold = [by_rule(tasks, p) for p in prompts]
    drawn = [tasks.demonstration(p, rng) for p in prompts]
    assert all(tasks.valid_steps(p, said) for said in (gold, drawn) for p, said in zip(prompts, said, strict=True))
    assert {78 <= len(text) + 1 <= min(130, task.max_tokens) for text in gold + drawn} == {True}  # with the end
    assert max(map(len, prompts)) <= task.max_prompt
    assert set(task.reward(prompts, gold, answers)) == {1.0}
    assert 0.1 < sum(task.reward(prompts, drawn, answers)) / len(rows) < 0.4
    for garbage in ("", "garbage", "=", "1+", "9" * 100, "-1"):
        assert set(task.reward(prompts, [garbage] * len(rows), answers)) == {0.0}
    assert not any(tasks.valid_steps(p, said[:-1]) for p, said in zip(prompts, gold, strict=True))


def test_a_warm_start_is_made_once_and_is_the_same_for_a_seed(scripts, tmp_path):
    def weights(folder, seed):
        options = {"steps": 3, "demonstrations": 100, "batch_size": 8}
        return load_file(Path(scripts["warm_start"].warm_start(str(tmp_path / folder), seed, **options), FILE))

    one, two, three = weights("one", 0), weights("two", 0), weights("three", 1)
    assert same(one, two) and not same(one, three)
    assert not same(one, {n: w for n, w in demo.small_model(0).state_dict().items() if n in one})  # it has learned
    stamp = (tmp_path / "one" / FILE).stat().st_mtime_ns
    weights("one", 5)
    assert (tmp_path / "one" / FILE).stat().st_mtime_ns == stamp  # used again, not made anew


@pytest.fixture
def tiny_tasks(scripts, monkeypatch):
    """Both tasks, with few prompts and a warm start of two steps."""
    for name, task in scripts["learning_tasks"].TASKS.items():

        def start(folder, seed, made=task.warm_start):
            return made(folder, seed, steps=2, demonstrations=8, batch_size=4)

        rows = task.train_rows()[:64]
        small = dataclasses.replace(task, train_rows=lambda rows=rows: rows, warm_start=start, max_tokens=6)
        monkeypatch.setitem(scripts["presets"].TASKS, name, small)


@pytest.mark.full
def test_presets_goes_on_where_it_stopped_and_a_method_that_fails_is_a_row(
    scripts, tiny_tasks, tmp_path, monkeypatch, capsys
):
    presets = scripts["presets"]
    chosen = ["remax", "dapo", "ppo", "wrong"]
    monkeypatch.setitem(presets.METHODS, "wrong", presets.Method(preset="gspo", changes={"policy_loss_fn": "qrpo"}))
    argv = ["--out", str(tmp_path), "--seeds", "1", "--steps", "1", "--completions", "32", "--eval-limit", "4"]

    def called(methods, task="order"):
        presets.main([*argv, "--threads", "1", "--tasks", task, "--methods", ",".join(methods)])
        return json.loads(capsys.readouterr().out.splitlines()[-1])["results"][task]

    monkeypatch.setattr(presets, "METHODS", {n: presets.METHODS[n] for n in chosen})
    called(chosen[:1], "steps")
    file = tmp_path / "results.jsonl"
    file.write_text(file.read_text() + '{"task": "order", "met')  # killed while it wrote
    found = called(chosen)
    lines = file.read_text().splitlines()
    assert list(found) == chosen and len(lines) == 6  # one of them cut off
    wrong = found.pop("wrong")
    assert wrong["errors"][0].startswith("ConfigError: ") and "qrpo" in wrong["errors"][0] and "mean" not in wrong
    for row in found.values():
        assert row["seeds"] == [0] and row["mean"] == row["final"][0] and set(row["accuracy_curve"]) == {"0", "1"}
        assert len(row["reward_curve"]) == 1 and row["tokens"][0] > row["completions"][0] > 0
    assert found["remax"]["completions"] == found["ppo"]["completions"] == [32]  # ReMax's greedy ones are among them
    assert found["dapo"]["completions"][0] >= 32
    assert called(chosen[:3]) == found
    assert file.read_text().splitlines() == lines


def test_every_method_is_a_configuration_and_differs_from_the_others(scripts):
    methods = scripts["presets"].METHODS
    made = [
        type(m.configuration()).__name__ + json.dumps(m.chosen, sort_keys=True, default=str) for m in methods.values()
    ]
    assert len(set(made)) == len(methods)
    assert {m.sampled for n, m in methods.items() if n not in ("remax", "ppo", "reinforce_plus_plus")} == {8}
    assert [methods[n].sampled for n in ("remax", "ppo", "reinforce_plus_plus")] == [2, 1, 1]


def test_what_was_run_with_another_setting_or_method_is_not_of_the_result(scripts, tmp_path):
    presets = scripts["presets"]
    args = presets.arguments(["--out", str(tmp_path), "--steps", "3"])
    row = {"task": "order", "method": "dapo", "seed": 0, "setting": presets.setting_of(args)}
    row["algo"] = presets.METHODS["dapo"].chosen
    file = tmp_path / "results.jsonl"
    for other in ({"algo": {}}, {"setting": {**row["setting"], "lr": 1.0}}, {"method": "of an older version"}):
        presets.append(file, {**row, **other})
        assert presets.read_results(file, args) == {}
    presets.append(file, row)
    assert list(presets.read_results(file, args)) == [("order", "dapo", 0)]


def test_every_methods_runs_are_found_again(scripts, tmp_path):
    presets = scripts["presets"]
    args = presets.arguments(["--out", str(tmp_path), "--steps", "3"])
    row, file = {"task": "order", "seed": 0, "setting": presets.setting_of(args)}, tmp_path / "results.jsonl"
    for name, method in presets.METHODS.items():
        presets.append(file, {**row, "method": name, "algo": method.chosen})
    assert [name for _, name, _ in presets.read_results(file, args)] == list(presets.METHODS)
