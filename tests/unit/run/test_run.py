"""The stages of a run, each by itself: opening, steps, what a step leaves behind, evaluation, checkpoints, the end."""

import dataclasses
import json
import logging
import os
import signal

import numpy as np
import pytest
import torch
import yaml
from helpers import cluster, length_reward, rows, tiny_model

from whet.config import (
    CheckpointingOptions,
    DataConfig,
    GRPOConfig,
    MetricsLoggerOptions,
    PerfMetricsOptions,
    ProfilerOptions,
)
from whet.errors import CheckpointError, ConfigError, DataError, RewardError
from whet.learners.grpo import GRPOLearner
from whet.learners.step import Step
from whet.run import run as run_module
from whet.run.observer import Observer
from whet.run.signals import Stopped
from whet.run.start_messages import write_environment
from whet.storage.run_folder import RunFolder
from whet.train.role_checkpoints import Checkpoints

EACH_STEP = CheckpointingOptions(save_interval_steps=1)
NEVER = CheckpointingOptions(save_interval_s=1e9)


def Run(made, train_ds, eval_ds=None):
    return made.new_run(train_ds, eval_ds)


@pytest.fixture(scope="module")
def model():
    """One cluster for all of these runs: what they look at is not what it learns."""
    return cluster(tiny_model(num_hidden_layers=1), engine="mock", rollout={"max_tokens_to_generate": 4})


@pytest.fixture
def make(model, monkeypatch):
    """A learner whose runs are configured by fields of RLTrainingConfig."""
    usual = model.training_config

    def made(reward=length_reward, *, batch_size=2, generations=2, **training):
        config = dataclasses.replace(usual, **{"checkpointing_options": NEVER, **training})
        found = GRPOLearner(model, GRPOConfig(num_generations=generations, beta=0.0), reward)
        found.data = DataConfig(batch_size=batch_size, shuffle=False)
        found.config = config
        monkeypatch.setattr(model, "training_config", config)
        monkeypatch.setattr(model, "checkpoints", Checkpoints(config.checkpoint_root, model.trainers, model.workers))
        model.actor.optim.updates = 0
        return found

    return made


def evals_of(run):
    return [row["step"] for row in run.evaluations]


def saved(folder):
    return sorted(p.name for p in (folder / "checkpoints").glob("step-*"))


# ---- opening ---------------------------------------------------------------------------------------------------------


def test_the_length_of_a_run_is_the_shorter_of_steps_asked_for_and_data(make):
    def total(count, data=rows, **training):
        return Run(make(**training), data(count)).total_steps

    assert [total(9), total(9, num_epochs=3), total(9, max_steps=3), total(9, max_steps=30)] == [4, 12, 3, 30]
    assert total(9, max_steps=30, num_epochs=2) == 8
    assert total(9, last_batch="keep") == 5
    stream = lambda count: iter(rows(count))
    assert [total(9, stream), total(9, stream, max_steps=7)] == [None, 7]


def test_data_that_end_before_max_steps_are_said_at_the_start_where_that_is_known_and_else_at_the_end(make, caplog):
    for data, epochs, said in (
        (
            rows(4),
            1,
            ["the data end after 2 steps, before trainer.max_steps=3: 2 steps per epoch, trainer.num_epochs=1"],
        ),
        (iter(rows(4)), None, ["the data ended after 2 steps, before trainer.max_steps=3"]),
        (rows(4), None, []),
    ):
        with Run(make(max_steps=3, num_epochs=epochs), data) as run:
            assert [m[:82] for m in caplog.messages if "before trainer.max_steps" in m] == (
                [m[:82] for m in said] if epochs else []
            )
            for number, prompts in run.steps():
                run.step = number
            assert [m[:50] for m in caplog.messages if "before trainer.max_steps" in m] == [m[:50] for m in said]
        caplog.clear()


def test_a_resume_with_nothing_to_do_says_so(make, tmp_path, caplog):
    def train(name, data, **training):
        with Run(make(run_dir=str(tmp_path / name), **training), data) as run:
            step(run)
        return [m for m in caplog.messages if m.startswith("nothing ")]

    for name, data, training, said in (
        ("known", rows, {"max_steps": 2}, "is left to do: step 2 is done, and trainer.max_steps=2 allows no more"),
        ("stream", lambda n: iter(rows(n)), {}, "was left to do: the data end after 2 steps, which are done"),
    ):
        assert train(name, data(4), **training) == []
        (text,) = train(name, data(4), **training, resume="latest")
        assert text.startswith(f"nothing {said}")
        caplog.clear()
    (text,) = train("known", rows(4), max_steps=1, resume="latest")
    assert text == "nothing is left to do: step 2 is done, and trainer.max_steps=1 allows no more; raise it to train on"


def test_the_order_is_drawn_from_its_own_seed_or_the_runs(make):
    seeds = [Run(make(**given), rows(4)).stream.seed for given in ({"seed": 5}, {"seed": 5, "data_shuffle_seed": 0})]
    assert seeds == [5, 0]


def test_rewards_that_lack_a_column_and_sizes_that_do_not_divide_are_found_before_the_run_opens(make):
    def needs(completions, answer):
        return [0.0] * len(completions)

    with pytest.raises(ConfigError, match="answer"):
        Run(make(needs), rows(4))
    with pytest.raises(ConfigError, match="must be a multiple of mini_batch_size=3"):
        Run(make(mini_batch_size=3), rows(4))


def test_schedule_profiler_and_observers_are_told_of_the_steps_to_come(make, model, monkeypatch):
    told = {}

    class Noted(Observer):
        def on_run_begin(self, run):
            told["started"] = run.roles is model

    made = make(mini_batch_size=1)
    made.observers.append(Noted())
    monkeypatch.setattr(model.actor, "plan", lambda total: told.update(updates=total))
    for done, total in ((0, rows(8)), (3, rows(8)), (0, iter(rows(8)))):
        run = Run(made, total)
        run.step = done
        monkeypatch.setattr(run.profiler, "set_num_steps", lambda steps: told.update(steps=steps))
        with pytest.raises(ZeroDivisionError), run:
            assert told["started"] and run.progress is not None and run.loggers is not None
            raise ZeroDivisionError
        expected = {"started": True, "updates": 8, "steps": 4 - done} if isinstance(total, list) else None
        assert told == (expected or {"started": True, "updates": None, "steps": None})
        told.clear()


def test_an_evaluation_stands_before_the_first_step_and_not_before_a_later_one(make):
    for step, found in ((0, [0]), (2, [])):
        run = Run(make(), rows(8), rows(2))
        run.step = step
        run._open()
        run._close()
        assert evals_of(run) == found


def test_an_open_run_has_its_configuration_on_the_disk_its_loggers_and_what_a_step_leaves_out(make, tmp_path, caplog):
    caplog.set_level(logging.INFO, "whet")
    with Run(make(run_dir=str(tmp_path), loggers=["jsonl"], metrics_prefix="mine", max_steps=1), rows(4)) as run:
        assert yaml.safe_load((tmp_path / "config.yaml").read_text())["trainer"]["metrics_prefix"] == "mine"
        (left_out,) = (line for line in caplog.messages if line.startswith("skipped, since not needed: "))
        for name, what in run.task.learner.planned_passes(2).items():
            assert name in left_out if what.startswith("skipped: ") else f"{name}: {what}" in caplog.messages
        step(run)
    logged = json.loads((tmp_path / "log.jsonl").read_text())
    assert logged["mine/train/reward"] == run.rows[0]["reward"]


def test_a_log_dir_alone_turns_tensorboard_on_and_completions_reach_a_logger_that_takes_them(make, tmp_path):
    pytest.importorskip("tensorboard")
    with Run(make(metrics_logging_options=MetricsLoggerOptions(log_dir=str(tmp_path)), max_steps=1), rows(4)) as run:
        step(run)
    assert list((tmp_path / "tensorboard").glob("events.*"))
    tables = []

    class Tables:
        log = lambda self, step, values: None
        close = lambda self: None
        log_completions = lambda self, step, name, rows: tables.append((step, name, len(rows), rows[0].keys()))

    with Run(make(loggers=[Tables()], max_steps=1), rows(4), rows(2)) as run:
        step(run)
    columns = ["step", "prompt", "completion", "reward", "finish_reason", "reward/length_reward"]
    assert [(s, name, count) for s, name, count, _ in tables] == [
        (0, "eval/completions", 4),
        (1, "train/completions", 4),
        (1, "eval/completions", 4),
    ]
    assert list(tables[0][3]) == columns and "advantage" in tables[1][3]


def test_a_run_without_a_folder_goes_on_from_a_checkpoint_all_the_same(make, tmp_path):
    options = {"checkpoint_root_directory": str(tmp_path / "checkpoints"), "checkpointing_options": EACH_STEP}
    with Run(make(max_steps=1, **options), rows(8)) as run:
        step(run)
    with Run(make(max_steps=2, resume="latest", **options), rows(8)) as run:
        assert (run.step, run.folder) == (1, None)
        step(run)
    assert run.step == 2 and saved(tmp_path) == ["step-000001", "step-000002"]


def test_what_the_environment_was_is_compared_on_a_resume_alone(make, tmp_path, caplog):
    with Run(make(run_dir=str(tmp_path), max_steps=1), rows(2)) as run:
        step(run)
    path = tmp_path / "environment.json"
    noted = json.loads(path.read_text())
    assert noted["passes"] == run.task.learner.planned_passes(2) and {"rollout", "training", "versions"} <= noted.keys()
    for resumed in (False, True):
        path.write_text(json.dumps({**noted, "threads": 999, "variables": {"CXX": "other"}}))
        again = Run(make(run_dir=str(tmp_path), resume="latest"), rows(2))
        with RunFolder(tmp_path, resume_step=1) as again.folder:
            write_environment(again.folder, again.roles, again.task.planned_passes(2), resumed=resumed)
        assert ("{'threads': 999}, now {'threads': " in caplog.text) is resumed
        written = json.loads(path.read_text())
        assert written.pop("run") == again.checkpoints.run
        assert written == {name: value for name, value in noted.items() if name != "run"}
    path.unlink()  # as where a checkpoint is resumed from in another folder
    caplog.clear()
    with RunFolder(tmp_path, resume_step=1) as again.folder:
        write_environment(again.folder, again.roles, {}, resumed=True)
    assert "environment changed" not in caplog.text and path.is_file()


def test_a_run_that_cannot_open_closes_what_it_has_opened(make, tmp_path, monkeypatch):
    class Logger:
        closed = 0

        def log(self, step, values):
            raise AssertionError

        def close(self):
            self.closed += 1

    mine = Logger()
    run, closed = Run(make(run_dir=str(tmp_path), loggers=[mine]), rows(4)), []
    with pytest.raises(ZeroDivisionError), monkeypatch.context() as patch:
        patch.setattr(run._signals, "install", lambda: 1 / 0)
        run.__enter__()
    assert mine.closed == 1 and not (tmp_path / ".lock").exists()
    broken = Run(make(run_dir=str(tmp_path / "new"), loggers=[lambda: 1 / 0, mine, type(mine.log)]), rows(4))
    with pytest.raises(ConfigError, match="logger method can't start"):
        broken.__enter__()
    assert not (tmp_path / "new").exists()  # nothing is left of a run that never began
    run = Run(run.task.learner, rows(4))
    with pytest.raises(RewardError), run:
        monkeypatch.setattr(run.progress, "__exit__", lambda *a: closed.append("bar"), raising=False)
        uninstall = run._signals.uninstall
        monkeypatch.setattr(run._signals, "uninstall", lambda **how: (closed.append("signals"), uninstall(**how)))
        raise RewardError
    assert closed == ["signals", "bar"]


# ---- steps -----------------------------------------------------------------------------------------------------------


def step(run, upto=None):
    """Takes the steps of an open run as a learner does, without an update."""
    made = run.task.learner
    for number, prompts in run.steps():
        step = made.reward(made.sample(Step(index=number, prompts=prompts)))
        made.after_step(run, made.assign_advantages(made.score(made.batch(step))))
        if number == upto:
            return


def test_steps_count_from_where_the_run_stands_to_max_steps(make, model):
    run = Run(make(max_steps=3), rows(8))
    seen = []
    for number, prompts in run.steps():
        seen.append((number, [p.row for p in prompts]))
        run.step = number
    assert seen == [(1, [0, 1]), (2, [2, 3]), (3, [4, 5])]
    assert list(run.steps()) == []  # it is done


def test_a_run_that_is_asked_to_stop_saves_its_step_and_says_where(make, tmp_path):
    for root, said in ((tmp_path, f"checkpoint: {tmp_path}/checkpoints/step-000001\n.* resume=\"latest\""),
                       (None, "nothing is saved: trainer.run_dir is not set$")):  # fmt: skip
        run = Run(make(run_dir=root and str(root)), rows(8))
        assert ("nothing is saved" if root is None else "with a checkpoint") in run._signals.effect
        with pytest.raises(KeyboardInterrupt, match=f"^stopped after step 1; {said}"), run:
            run._signals.stop_requested = True
            step(run)
    assert saved(tmp_path) == ["step-000001"] and not (tmp_path / "final").exists()


def test_a_signal_in_the_first_evaluation_ends_the_run_there(make, tmp_path, monkeypatch):
    said = "^stopped before the end of the first step; nothing was trained$"
    run, handler = Run(make(run_dir=str(tmp_path)), rows(4), rows(4)), signal.getsignal(signal.SIGTERM)

    def evaluated(run, step):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the evaluation goes on")

    monkeypatch.setattr(run.task, "evaluate", evaluated)
    with pytest.raises(Stopped, match=said), run:
        raise AssertionError("the run goes on")
    assert saved(tmp_path) == [] and signal.getsignal(signal.SIGTERM) == handler


def test_a_row_counts_tokens_epochs_and_updates_of_the_whole_run(make, model):
    run = Run(make(num_epochs=2), rows(5))
    with run:
        run.tokens = 100
        for number, prompts in run.steps():
            model.actor.optim.updates += 3
            made = run.task.learner
            step = made.reward(made.sample(Step(index=number, prompts=prompts)))
            made.metric_fns = [lambda number=number, **_: {"mine": (number * 10, np.mean)}]
            made.after_step(run, made.assign_advantages(made.batch(step)))
    first, second, third, _ = run.rows
    tokens = [row["completions/tokens"] for row in run.rows]
    assert [row["num_tokens"] for row in run.rows] == [100 + sum(tokens[: n + 1]) for n in range(4)]
    assert [row["epoch"] for row in run.rows] == [0.5, 1.0, 1.5, 2.0]
    assert [row["optim/updates"] for row in run.rows] == [3, 6, 9, 12]
    assert [row["mine"] for row in run.rows] == [10, 20, 30, 40]
    assert (first["step"], first["mode"], third["step"]) == (1, "train", 3)
    for row in run.rows:
        assert row["perf/tokens_per_second"] == pytest.approx(row["completions/tokens"] / row["time/step"])
        assert row["time/step"] == row["perf/global_step_time"] >= row["time/rollout"] > 0
    assert second["time/rollout"] != first["time/rollout"]  # each step its own


def test_the_time_of_a_step_has_nothing_of_what_came_before_it(make, model):
    run = Run(make(max_steps=1), rows(4))
    with run:
        with model.trace.span("other"):
            pass
        step(run)
    assert "time/other" not in run.rows[0] and "time/rollout" in run.rows[0]


def test_an_epoch_of_unknown_length_is_nan(make):
    run = Run(make(), iter(rows(4)))
    assert np.isnan(run._epoch())


def test_three_steps_without_signal_are_said_once_with_an_example(make, caplog):
    worth = [[1.0] * 4] * 2 + [[0.0, 1.0, 1.0, 1.0]] + [[2.0] * 4] * 4

    def reward(completions, **_):
        return worth[calls.pop(0)]

    def said():
        return [r.getMessage() for r in caplog.records if "nothing is learned" in r.getMessage()]

    calls, counts = list(range(7)), []
    run = Run(make(reward), rows(14))
    with run:
        for number, prompts in run.steps():
            made = run.task.learner
            step = made.reward(made.sample(Step(index=number, prompts=prompts)))
            made.after_step(run, made.assign_advantages(made.batch(step)))
            counts.append(len(said()))
    assert counts == [0, 0, 0, 0, 0, 1, 1]  # two in a row, one with signal, and then three
    assert "10+1=" in said()[0] and "2.0" in said()[0]


def test_evaluations_and_checkpoints_come_where_they_are_due(make, tmp_path):
    every_other = CheckpointingOptions(save_interval_steps=2, max_to_keep=9)
    options = {"eval_every_n_steps": 3, "checkpointing_options": every_other, "run_dir": str(tmp_path)}
    with Run(make(**options), rows(14), rows(1)) as run:
        step(run)
    assert evals_of(run) == [0, 3, 6, 7]
    assert saved(tmp_path) == ["step-000002", "step-000004", "step-000006", "step-000007"]
    stored = [f"eval-{n:06d}.parquet" for n in (0, 3, 6, 7)] + [f"train-{n:06d}.parquet" for n in range(1, 8)]
    assert sorted(p.name for p in (tmp_path / "completions").iterdir()) == stored
    with Run(make(), rows(4), rows(1)) as run:  # eval_every_n_steps=0: before and after alone
        step(run)
    assert evals_of(run) == [0, 2]


def test_saves_by_time_are_due_when_the_time_has_passed_since_the_last(make, tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(run_module.time, "monotonic", lambda: now[0])
    run = Run(make(checkpointing_options=CheckpointingOptions(save_interval_s=60), run_dir=str(tmp_path)), rows(8))
    run.saved_at = 1000.0
    due = []
    for seconds in (59.0, 60.0):
        now[0] = 1000.0 + seconds
        due.append(run._is_save_due(1))
    assert due == [False, True]
    run.step, run.settings = 1, run.task.settings()
    run.save()
    assert run.saved_at == 1060.0 and not run._is_save_due(2)


# ---- evaluation ------------------------------------------------------------------------------------------------------


def test_an_evaluation_of_right_and_wrong_has_an_accuracy_and_the_best_of_each_group(make, monkeypatch):
    worth = [1.0, 0.0, 0.0, 0.0, None, 1.0]
    run = Run(make(lambda completions, **_: worth), None, rows(3))
    row = run.evaluate(7)
    assert "accuracy" not in row  # one has no say
    assert (row["rewards/best_of_2/mean"], row["rewards/best_of_2/min"]) == (pytest.approx(2 / 3), 0.0)
    worth[4] = 1.0
    row = run.evaluate(7)
    assert row["accuracy"] == 0.5 and row["time/eval"] > 0 and row["prompts/count"] == 3
    worth[4] = 0.5
    assert "accuracy" not in run.evaluate(7)
    assert [(r["step"], r["mode"]) for r in run.rows] == [(7, "eval")] * 3
    evaluation = dataclasses.replace(run.roles.rollout_for(), num_generations_eval=1)
    monkeypatch.setattr(run.roles, "rollout_for", lambda mode: evaluation)
    worth[:] = [1.0, 0.0, 0.0]
    assert not any("best_of" in name for name in run.evaluate(8))


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_holds_where_the_run_stands(make, model, tmp_path):
    with Run(make(run_dir=str(tmp_path), max_steps=2, checkpointing_options=EACH_STEP), rows(8)) as run:
        step(run)
    state = Checkpoints.state(tmp_path / "checkpoints" / "step-000002")
    assert (state["format"], state["step"], state["tokens"]) == (1, 2, run.tokens)
    assert (state["stream"]["batch"], state["stream"]["used"]) == (2, 4)
    assert state["cluster"]["next_id"] == model.state()["next_id"]
    assert state["settings"]["algo"]["num_generations"] == 2
    assert state["inputs"]["models"].keys() == {"actor"} and torch.equal(
        state["random"]["torch"], torch.get_rng_state()
    )


def test_only_the_last_checkpoints_are_kept_and_none_without_a_folder(make, tmp_path):
    options = CheckpointingOptions(save_interval_steps=1, max_to_keep=2)
    with Run(make(run_dir=str(tmp_path), checkpointing_options=options), rows(8)) as run:
        step(run)
    assert saved(tmp_path) == ["step-000003", "step-000004"]
    with Run(make(checkpointing_options=options), rows(8)) as run:
        step(run)
    assert run.inputs is None and saved(tmp_path) == ["step-000003", "step-000004"]


def test_a_resumed_run_stands_where_the_checkpoint_was_and_later_ones_go(make, model, tmp_path):
    with Run(make(run_dir=str(tmp_path), checkpointing_options=EACH_STEP), rows(8)) as run:
        step(run, upto=3)
    weights = {n: p.detach().clone() for n, p in model.actor.module.named_parameters()}
    with torch.no_grad():
        next(model.actor.module.parameters()).zero_()
    early = tmp_path / "checkpoints" / "step-000002"
    drawn = torch.rand(3)
    again = Run(make(run_dir=str(tmp_path), resume=str(early)), rows(8))
    again._open()
    again._close()
    assert (again.step, again.stream.used, again.progress.start) == (2, 4, 2)
    assert again.tokens == run.rows[1]["num_tokens"] and [row["step"] for row in again.rows] == [1, 2]
    assert saved(tmp_path) == ["step-000001", "step-000002"]
    assert all(torch.equal(p, weights[n]) for n, p in model.actor.module.named_parameters())
    assert torch.equal(torch.rand(3), drawn)  # the generators are where they were


def test_a_checkpoint_is_compared_with_its_sums_before_anything_of_it_is_taken(make, model, tmp_path):
    with Run(make(run_dir=str(tmp_path), max_steps=1, checkpointing_options=EACH_STEP), rows(8)) as run:
        step(run)
    path = tmp_path / "checkpoints" / "step-000001" / "actor" / "config.json"  # which nothing else reads
    path.write_text(path.read_text() + " ")
    again = Run(make(run_dir=str(tmp_path), resume="latest"), rows(8))
    with pytest.raises(CheckpointError, match=r"config\.json has changed since it was written"):
        again._open()
    assert again.step == 0


def test_a_new_run_leaves_anothers_checkpoints_alone_and_a_resumed_one_its_folder(make, tmp_path):
    for name in "ab":
        with Run(make(run_dir=str(tmp_path / name), max_steps=1, checkpointing_options=EACH_STEP), rows(8)) as run:
            step(run)
    (tmp_path / "a" / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"holds the checkpoints of a run; set trainer\.resume=latest"):
        Run(make(run_dir=str(tmp_path / "a")), rows(8)).__enter__()
    other = str(tmp_path / "a" / "checkpoints" / "step-000001")
    with pytest.raises(CheckpointError, match="b holds steps of its own"):
        Run(make(run_dir=str(tmp_path / "b"), resume=other), rows(8)).__enter__()
    run = Run(make(run_dir=str(tmp_path / "c"), resume=other), rows(8))
    run._open()
    run._close()
    assert run.step == 1  # which has no steps yet


def test_latest_finds_nothing_in_a_new_folder_and_says_so(make, tmp_path, caplog):
    caplog.set_level(logging.INFO, "whet")
    run = Run(make(run_dir=str(tmp_path), resume="latest"), rows(8))
    assert run._resume() == -1 and "no checkpoint in" in caplog.text
    run.checkpoints.close()
    half = tmp_path / "checkpoints" / ".tmp-0123456789abcdef-step-000009"
    half.mkdir(parents=True)
    run.checkpoints.open()
    run.checkpoints.close()
    assert not half.exists()  # what a kill left half written


def test_a_changed_configuration_is_refused_or_said(make, tmp_path, caplog):
    with Run(make(run_dir=str(tmp_path), max_steps=1, checkpointing_options=EACH_STEP), rows(8)) as run:
        step(run)
    with pytest.raises(CheckpointError, match="evaluation data: none -> 2 prompts"):
        Run(make(run_dir=str(tmp_path), resume="latest"), rows(8), rows(2)).__enter__()
    changed = {"run_dir": str(tmp_path), "resume": "latest", "reward_timeout_s": 7.0, "max_steps": 2}
    with (
        pytest.raises(CheckpointError, match=r"trainer\.reward_timeout_s: 60\.0 -> 7\.0\nresume with the same one"),
        Run(make(**changed), rows(8)),
    ):
        pass
    run = Run(make(**changed, allow_config_change=True), rows(8))
    run._open()
    run._close()
    assert run.step == 1 and "resuming with a changed configuration:\n  trainer.reward_timeout_s" in caplog.text


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_an_end_that_comes_by_itself_saves_exports_and_evaluates_in_this_order(make, model, tmp_path, monkeypatch):
    told = []

    run = Run(make(run_dir=str(tmp_path), max_steps=1), rows(4), rows(1))
    with run:
        step(run)
        for name, owner in (("save", run), ("evaluate", run), ("export", run.checkpoints), ("close", run.profiler)):
            now = getattr(owner, name)
            monkeypatch.setattr(owner, name, lambda *a, n=name, f=now, **k: (told.append(n), f(*a, **k)))
    assert told == ["close", "save", "export", "evaluate"]
    assert json.loads((tmp_path / "final" / "run.json").read_text()) == {"step": 1}
    assert not (tmp_path / ".lock").exists() and run.progress is not None


def test_a_step_that_was_evaluated_is_not_evaluated_again_at_the_end(make):
    with Run(make(eval_every_n_steps=2), rows(4), rows(1)) as run:
        step(run)
    assert evals_of(run) == [0, 2]


def test_an_error_ends_a_run_without_a_checkpoint_and_closes_it(make, tmp_path):
    with pytest.raises(RewardError), Run(make(run_dir=str(tmp_path)), rows(4)):
        raise RewardError
    assert not list((tmp_path / "checkpoints").glob("step-*")) and not (tmp_path / ".lock").exists()
    assert not (tmp_path / "final").exists()


def test_a_run_without_a_single_step_is_an_error(make):
    with pytest.raises(DataError, match="without a single step"), Run(make(), rows(4)):
        pass


@pytest.mark.parametrize("own", [True, False])
def test_the_trace_goes_to_its_own_folder_or_the_runs(make, tmp_path, own):
    perf = PerfMetricsOptions(trace_dir=str(tmp_path / "traces" / "a") if own else None)
    with Run(make(run_dir=str(tmp_path / "run"), max_steps=1, perf_metrics_options=perf), rows(4)) as run:
        step(run)
    places = [p.parent for p in tmp_path.rglob("trace.json")]
    assert places == [tmp_path / "traces" / "a" if own else tmp_path / "run"]
    assert "rollout" in next(tmp_path.rglob("trace.json")).read_text()


@pytest.mark.parametrize("failing", ["step", "last evaluation"])
def test_a_run_that_ends_by_an_error_leaves_its_trace(make, tmp_path, failing):
    made = make(run_dir=str(tmp_path), max_steps=1, perf_metrics_options=PerfMetricsOptions())
    with pytest.raises(ValueError, match="broken"), Run(made, rows(4)) as run:
        step(run)
        if failing == "step":
            with run.roles.trace.span("odd"):
                raise ValueError("broken")
        run._write_timeline = lambda: (_ for _ in ()).throw(ValueError("broken"))
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"data", "rollout", "odd" if failing == "step" else "checkpoint"} <= names


def test_no_trace_is_written_without_options_without_a_place_or_where_it_is_off(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    off = PerfMetricsOptions(enable_trace_writer=False)
    for root, perf in ((tmp_path / "a", None), (None, PerfMetricsOptions()), (tmp_path / "b", off)):
        with Run(make(run_dir=root and str(root), max_steps=1, perf_metrics_options=perf), rows(4)) as run:
            step(run)
    assert not list(tmp_path.rglob("trace.json"))


def test_a_profiled_step_leaves_its_files_in_the_run_folder(make, tmp_path):
    made = make(run_dir=str(tmp_path), max_steps=1, profiler_options=ProfilerOptions(skip_first_n_steps=0))
    with Run(made, rows(4)) as run:
        step(run)
    assert (tmp_path / "profile-step-000001.txt").is_file()


def test_settings_from_python_name_what_has_no_section(make):
    made = make()
    made.data_shuffle_seed = 9
    run = Run(made, rows(4))
    run.settings = run.task.settings()
    found = run._compared_settings()
    assert found["from Python"] == {"data_shuffle_seed": 9, "rollout_config[Mode.EVAL]": {}}
    assert {"algo", "data", "rollout", "trainer"} <= found.keys() and found["rollout_engine"] == "mock"
    made.settings = {"trainer": {"seed": object}}
    run.settings = run.task.settings()
    assert run._compared_settings()["trainer"] == {"seed": "builtins:object"}  # what a checkpoint can hold
