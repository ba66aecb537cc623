"""Observers: what they are told and when, what they may ask for, and what becomes of one that raises."""

import json

import pytest
import torch
from helpers import cluster, length_reward, rows, same, tiny_model, weights_of

from whet.config import CheckpointingOptions, DataConfig, GRPOConfig
from whet.errors import CheckpointError, ConfigError
from whet.learners.grpo import GRPOLearner
from whet.learners.step import Step
from whet.run.observer import Observer, Observers, TrainerControl
from whet.storage.run_state import check_storable, read_run_state

NEVER = CheckpointingOptions(save_interval_s=1e9, max_to_keep=9)
EVENTS = [name for name in vars(Observer) if name.startswith("on_")]


class Noted(Observer):
    """Notes every event; `asks` is called with (event, run) after each."""

    def __init__(self, asks=lambda event, run: None):
        self.told, self.asks = [], asks


def _noting(event):
    def told(self, run, *args):
        self.told.append((event, run.step, *args))
        self.asks(event, run)

    return told


for name in EVENTS:
    setattr(Noted, name, _noting(name))


def train(*observers, folder=None, eval_ds=None, count=6, **training):
    c = cluster(engine="mock", run_dir=folder and str(folder), **{"checkpointing_options": NEVER, **training})
    data = DataConfig(batch_size=2, shuffle=False)
    made = GRPOLearner(c, GRPOConfig(num_generations=2, beta=0.0), length_reward, data=data, observers=observers)
    return made.train(rows(count), eval_ds)


def saved(folder):
    return sorted(p.name for p in (folder / "checkpoints").glob("step-*"))


def test_an_observer_is_told_of_a_run_in_order_with_its_records(tmp_path):
    mine = Noted()
    run = train(mine, folder=tmp_path, eval_ds=rows(1), count=2, mini_batch_size=1)
    assert [told[0] for told in mine.told] == [
        *("on_run_begin", "on_log", "on_evaluate"),
        *("on_step_begin", "on_update_end", "on_update_end", "on_log", "on_step_end"),
        *("on_save", "on_log", "on_evaluate", "on_run_end"),
    ]
    by_name = {told[0]: told[2:] for told in mine.told}
    (step,) = by_name["on_step_end"]
    assert isinstance(step, Step) and step.index == 1 and step.batch.num_sequences == 4
    assert step.rewards.total.size == 4
    trainer, metrics = by_name["on_update_end"]
    assert trainer is run.trainer and metrics["grad_norm"].value >= 0
    assert by_name["on_save"] == (tmp_path / "checkpoints" / "step-000001",)
    assert by_name["on_evaluate"][0]["mode"] == "eval" and by_name["on_run_end"] == (None,)
    assert not run.trainer.listeners  # a later run of the same models tells nobody of this one
    mine.told.clear()
    each = CheckpointingOptions(save_interval_steps=1)
    train(mine, folder=tmp_path / "each", count=4, checkpointing_options=each)
    assert [told[1] for told in mine.told if told[0] == "on_save"] == [1, 2]


def test_what_is_saved_of_a_finished_step_has_nothing_of_the_next_one(tmp_path, monkeypatch):
    class Begun(Observer):
        def __init__(self):
            self.steps = []

        def on_step_begin(self, run, step):
            self.steps.append(step)

        def state(self):
            return {"steps": self.steps}

    def fails(self, step):
        if step.index == 2:
            raise ValueError("planted")
        return sample(self, step)

    sample = GRPOLearner.sample
    monkeypatch.setattr(GRPOLearner, "sample", fails)
    with pytest.raises(ValueError, match="planted"):
        train(Begun(), folder=tmp_path)
    state = read_run_state(tmp_path / "checkpoints/step-000001/run.pt", ())
    assert "{'steps': [1]}" in str(state["observers"])


def test_an_observer_may_stop_save_evaluate_and_have_logs_written(tmp_path):
    class Held:
        flushed = 0

        def log(self, step, values): ...

        def close(self): ...

        def flush(self):
            Held.flushed += 1

    def asks(event, run):
        if event == "on_update_end" and run.step == 0:
            run.control.save = run.control.log = True
        if event == "on_step_end" and run.step == 2:
            run.control.stop = run.control.evaluate = True

    run = train(Noted(asks), folder=tmp_path, eval_ds=rows(1), loggers=[Held()])
    assert run.step == 2 and saved(tmp_path) == ["step-000001", "step-000002"]  # the second as the run's end
    assert [row["step"] for row in run.rows if row["mode"] == "eval"] == [0, 2] and Held.flushed == 1
    assert (tmp_path / "final").is_dir() and run.control == TrainerControl()


def test_what_cannot_be_done_is_said(caplog):
    def asks(event, run):
        if event == "on_step_begin":
            run.control.save = run.control.evaluate = True

    train(Noted(asks), count=2)
    assert "requests an evaluation, and there is no evaluation data" in caplog.text
    assert "requests a checkpoint, and there is no folder" in caplog.text


def evaluated(*observers, folder, **more):
    """The rows of a run, without what the clock says."""
    found = train(*observers, folder=folder, eval_every_n_steps=2, eval_ds=rows(1), **more)
    return [json.dumps({k: v for k, v in r.items() if not k.startswith(("time/", "perf/"))}) for r in found.rows]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """What nobody has stopped."""
    return evaluated(folder=tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("event", ["on_step_begin", "on_update_end", "on_log", "on_step_end"])
def test_one_that_raises_ends_the_run_after_its_step_with_nothing_lost(tmp_path, event, uninterrupted):
    def breaks(now, run):
        if now == event and run.step >= 1:
            raise ValueError("my own")

    other = Noted()
    with pytest.raises(ValueError, match="my own") as raised:
        evaluated(Noted(breaks), other, folder=tmp_path)
    step = 1 if event in ("on_step_end", "on_log") else 2  # the step that was under way
    assert saved(tmp_path) == [f"step-{step:06d}"] and not (tmp_path / "final").exists()
    notes = "\n".join(raised.value.__notes__)
    assert f"raised by observer Noted.{event}" in notes and f"stopped after step {step}" in notes
    assert other.told[-1][0] == "on_run_end" and other.told[-1][2] is raised.value
    assert evaluated(folder=tmp_path, resume="latest") == uninterrupted


def test_one_that_raises_at_the_beginning_or_the_end_does_not_go_unnoticed(tmp_path, caplog):
    def breaks(at):
        def asks(event, run):
            if event == at:
                raise ValueError(at)

        return Noted(asks)

    other = Noted()
    with pytest.raises(ValueError, match="on_run_begin"):
        train(breaks("on_run_begin"), other)
    assert [told[0] for told in other.told] == ["on_run_begin", "on_run_end"]
    with pytest.raises(ValueError, match="on_run_end"):
        train(breaks("on_run_end"), folder=tmp_path)
    assert (tmp_path / "final").is_dir() and not (tmp_path / ".lock").exists()


def test_what_is_no_observer_is_refused():
    with pytest.raises(ConfigError, match="is not an Observer"):
        Observers([print])


# ---- state -----------------------------------------------------------------------------------------------------------


class Adaptive(GRPOLearner):
    """Scales its advantages by a coefficient that follows the rewards, and draws the reference after the actor."""

    coefficient = 1.0

    def state(self):
        return {"coefficient": self.coefficient}

    def restore(self, state):
        self.coefficient = state["coefficient"]

    def assign_advantages(self, step):
        step = super().assign_advantages(step)
        self.coefficient *= 1.0 + 0.1 * float(step.rewards.total.mean())
        return step.replace(batch=step.batch.replace(advantages=step.batch.advantages * self.coefficient))

    def after_step(self, run, step):
        reference = self.cluster.worker("reference")
        reference.load_weights(self.cluster.actor.named_weights(), mixup_alpha=0.5)
        super().after_step(run, step)


def adapted(folder, *, steps, reference=None, **training):
    c = cluster(
        reference=tiny_model(1) if reference is None else reference,
        run_dir=str(folder),
        max_steps=steps,
        checkpointing_options=CheckpointingOptions(save_interval_steps=1, max_to_keep=9),
        **training,
    )
    made = Adaptive(c, GRPOConfig(num_generations=2, beta=0.1), length_reward, data=DataConfig(batch_size=2))
    made.train(rows(6))
    return made, weights_of(c.actor.module), weights_of(c.worker("reference").module)


def test_a_resumed_run_has_the_learners_state_and_the_reference_where_it_was_moved_to(tmp_path):
    whole, *expected = adapted(tmp_path / "whole", steps=3)
    _, _, early = adapted(tmp_path / "parts", steps=1)
    assert not same(early, expected[1])
    made, *found = adapted(tmp_path / "parts", steps=3, resume="latest", allow_config_change=True)
    assert same(found[0], expected[0]) and same(found[1], expected[1])
    assert made.coefficient == whole.coefficient != 1.0


def test_a_checkpoint_without_a_learners_state_is_refused_and_so_is_what_it_cannot_hold(tmp_path):
    adapted(tmp_path, steps=1)
    path = tmp_path / "checkpoints" / "step-000001" / "run.pt"
    state = torch.load(path, weights_only=True)
    assert state["replaced"] == ["reference"]
    for wrong in ({"learner": 3}, {"replaced": ["nobody"]}):
        torch.save({**state, **wrong}, path)
        with pytest.raises(CheckpointError, match=next(iter(wrong))):
            read_run_state(path)
    torch.save({k: v for k, v in state.items() if k not in ("learner", "replaced")}, path)
    (path.parent / "sums.json").unlink()
    with pytest.raises(CheckpointError, match=r"run\.pt has an unexpected format: no .*replaced"):
        adapted(tmp_path, steps=1, resume="latest")
    with pytest.raises(CheckpointError, match=r"learner\[0\]\['f'\] is builtin_function_or_method"):
        check_storable([{"f": len}], "learner")


def test_a_misspelt_event_is_refused_where_the_class_is_written():
    with pytest.raises(ConfigError, match=r"Mine\.on_steps_end is not an event.*did you mean on_step_end"):

        class Mine(Observer):
            def on_steps_end(self, run, step):
                pass
