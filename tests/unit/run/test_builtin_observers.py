"""keep_best and stop_when: which checkpoint is kept, when a run stops, the same after a resume, and what is refused."""

import json
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from helpers import tiny_model

from whet.config import CheckpointingOptions, OptimConfig, Role, TrainingConfig, dump_tree
from whet.config.monitoring import Band
from whet.data.tokenizer import byte_tokenizer
from whet.errors import ConfigError
from whet.models.load import load_model
from whet.observe.trace import Trace
from whet.parallel.ranks import Ranks
from whet.run.builtin_observers import PushToHub
from whet.run.observer import Observer
from whet.run.run import Run
from whet.run.task import Task
from whet.train.role_checkpoints import Checkpoints
from whet.train.role_trainer import RoleTrainer
from whet.train.worker import ModelWorker

NAN = float("nan")
UPDATED = {"grad_norm": 1.0}
"""What the row of every update has."""


@dataclass(frozen=True)
class Record:
    index: int


class Scripted(Task):
    """Its evaluations are those of a list, by step."""

    def __init__(self, config, values):
        self.config, self.values, self.has_evaluation = config, values, values is not None

    def settings(self):
        return {"trainer": dump_tree(self.config)}

    def inputs(self):
        return {"models": {}, "stop_ids": [], "tokenizer": {}, "evaluation": None, "code": {}}

    def expected_metrics(self):
        return ("accuracy",)

    def evaluate(self, run, step):
        return {"accuracy": self.values[step]}


class Count:
    """A stream of numbers."""

    batch_size, num_epochs, batches_per_epoch = 1, None, None
    digest = columns_digest = 0

    def __init__(self):
        self.batch = self.epoch = 0

    def state(self):
        return {"batch": self.batch}

    def restore(self, state):
        self.batch = state["batch"]

    def __iter__(self):
        while True:
            self.batch += 1
            yield [self.batch]


@pytest.fixture(scope="module")
def worker():
    return ModelWorker(load_model(tiny_model(num_hidden_layers=1)), optim=OptimConfig())


@pytest.fixture
def train(worker, tmp_path, monkeypatch):
    """Runs steps whose `entropy` and evaluations are scripted."""
    monkeypatch.setattr("whet.run.run.check_same_inputs", lambda *_, **__: None)

    def run_of(steps, evals=None, entropy=None, *, learned=None, name="run", keep=1, observers=(), each=1, **fields):
        config = TrainingConfig(
            **{
                "run_dir": str(tmp_path / name),
                "max_steps": steps,
                "eval_every_n_steps": 1,
                "pbar_description": None,
                "checkpointing_options": CheckpointingOptions(save_interval_steps=each, max_to_keep=keep),
                **fields,
            }
        )

        trainers = {Role.ACTOR: RoleTrainer(worker, loss=lambda x: None)}
        models = SimpleNamespace(
            trainers=trainers,
            tokenizer=byte_tokenizer(),
            trace=Trace(),
            ranks=Ranks(),
            checkpoints=Checkpoints(config.checkpoint_root, trainers),
            describe=dict,
        )
        made = Run(Scripted(config, evals), Count(), models, config, observers=observers)
        with made as run:
            for index, _ in run.steps():
                row = {} if entropy is None or entropy[index] is None else {"entropy": entropy[index]}
                row |= {} if learned is None else learned[index]
                run.end_step(Record(index), row, num_tokens=1)
        return made

    return run_of


def kept(run):
    return sorted(int(p.name[5:]) for p in run.checkpoints.root.glob("step-*"))


def named(run, name):
    path = run.checkpoints.root / name
    return path.read_text().strip() if path.exists() else None


@pytest.mark.parametrize(
    ("mode", "values", "best"),
    [
        ("max", [0.1, 0.2, 0.9, 0.3, 0.9, 0.4], 2),  # of equal ones the first
        ("min", [0.5, 0.2, 0.9, 0.1, 0.3, 0.4], 3),
        ("max", [NAN, NAN, 0.1, NAN, 0.05, NAN], 2),  # NaN is never the best
        ("max", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 5),
    ],
)
def test_the_checkpoint_of_the_best_evaluation_stays(train, mode, values, best):
    run = train(5, values, keep_best={"metric": "accuracy", "mode": mode})
    assert named(run, "best") == f"step-{best:06d}"
    assert kept(run) == sorted({best, 5})


def test_the_best_is_saved_where_no_checkpoint_was_due(train):
    run = train(4, [0.1, 0.2, 0.9, 0.3, 0.3], each=1000, keep_best="accuracy")
    assert kept(run) == [2, 4] and named(run, "best") == "step-000002"


def test_the_model_it_began_with_may_be_the_best(train):
    run = train(3, [0.9, 0.2, 0.3, 0.4], keep_best="accuracy")
    assert named(run, "best") is None and kept(run) == [3]


def test_without_keep_best_the_newest_alone_stays(train):
    run = train(3, [0.9, 0.2, 0.3, 0.1])
    assert kept(run) == [3] and named(run, "best") is None


def test_a_resumed_run_keeps_what_the_uninterrupted_one_keeps(train):
    values = [0.1, 0.2, 0.8, 0.3, 0.1, 0.5, 0.4]
    whole = train(6, values, name="whole", keep_best="accuracy")
    train(4, values, name="parts", keep_best="accuracy")
    parts = train(6, values, name="parts", keep_best="accuracy", resume="latest")
    assert kept(whole) == kept(parts) == [2, 6]
    assert named(whole, "best") == named(parts, "best") == "step-000002"


def test_what_a_shorter_run_found_at_its_end_is_not_the_longer_ones(train):
    values = [0.1, 0.2, 0.3, 0.9, 0.4, 0.5]
    short = train(3, values, name="a", keep_best="accuracy", eval_every_n_steps=2)
    assert named(short, "best") == "step-000003"  # by the evaluation after the last step
    long = train(5, values, name="a", keep_best="accuracy", eval_every_n_steps=2, resume="latest")
    assert named(long, "best") == "step-000005" and kept(long) == [4, 5]


def test_another_metric_starts_anew(train, caplog):
    train(2, [0.1, 0.9, 0.2], keep_best="accuracy")
    run = train(4, [0.1, 0.9, 0.2, 0.5, 0.6], keep_best={"metric": "accuracy", "mode": "min"}, resume="latest")
    assert "has changed" in caplog.text and named(run, "best") == "step-000003"


def test_a_run_stops_after_so_many_steps_outside_and_keeps_the_checkpoint_before(train, caplog):
    entropy = [None, 1.0, 0.9, 0.01, 0.5, 0.04, 0.03, 0.02, 0.01]
    run = train(8, entropy=entropy, stop_when={"entropy": {"below": 0.05, "steps": 3}})
    assert run.step == 7 and kept(run) == [4, 7] and named(run, "before_stop") == "step-000004"
    assert "stopped by trainer.stop_when at step 7: entropy was 0.02, below 0.05" in caplog.text
    assert json.loads((run.folder.path / "stopped.json").read_text())["before"] == 4
    again = train(8, entropy=[1.0] * 9, stop_when={"entropy": {"below": 0.05, "steps": 3}}, resume="latest")
    assert again.step == 8 and not (again.folder.path / "stopped.json").exists()
    bands = {"entropy": {"below": 0.05}, "kl": {"above": 1.0}}  # both in one row: the first is the reason
    both = train(2, entropy=[0.01] * 3, learned=[{"kl": 9.0}] * 3, name="both", stop_when=bands)
    assert json.loads((both.folder.path / "stopped.json").read_text())["metric"] == "entropy"


def test_the_end_of_a_run_waits_for_the_checkpoint_that_is_being_sent():
    sent, pushes = [], PushToHub(TrainingConfig())
    pushes._thread = threading.Thread(target=lambda: (time.sleep(0.1), sent.append(1)))
    pushes._thread.start()
    pushes.on_run_end(SimpleNamespace(folder=None), None)
    assert sent


@pytest.mark.parametrize(
    ("entropy", "stops"),
    [([None, 1, NAN, 3, 3], 4), ([None, 3, NAN, 3, 1], 3), ([None, 1, 3, 1, 3], None), ([None, 2, 2, 2, 2], None)],
)
def test_a_row_without_a_number_counts_neither_way_and_a_bound_is_inside(train, entropy, stops):
    run = train(4, entropy=entropy, stop_when={"entropy": {"above": 2.0, "steps": 2}})
    assert run.step == (stops or 4)


def test_an_evaluations_metric_may_stop_a_run(train):
    run = train(5, [0.5, 0.6, 0.1, 0.1, 0.9, 0.9], stop_when={"eval/accuracy": {"below": 0.2, "steps": 2}})
    assert run.step == 3 and named(run, "before_stop") == "step-000001"


def test_a_resumed_run_stops_where_the_uninterrupted_one_does(train):
    entropy = [None, 1.0, 0.01, 0.01, 0.01, 0.01, 1.0]
    band = {"entropy": {"below": 0.05, "steps": 3}}
    whole = train(6, entropy=entropy, name="whole", stop_when=band)
    train(3, entropy=entropy, name="parts", stop_when=band)
    parts = train(6, entropy=entropy, name="parts", stop_when=band, resume="latest")
    assert whole.step == parts.step == 4
    assert kept(whole) == kept(parts) == [1, 4] and named(parts, "before_stop") == "step-000001"
    good = [None, 1.0, 1.0, 0.01]  # what it is resumed from is the checkpoint before
    for steps, resume in ((2, None), (3, "latest")):
        run = train(steps, entropy=good, name="good", stop_when={"entropy": {"below": 0.05, "steps": 1}}, resume=resume)
    assert json.loads((run.folder.path / "stopped.json").read_text())["before"] == 2


@pytest.mark.parametrize(
    ("fields", "evals", "said"),
    [
        (
            {"keep_best": "acuracy"},
            [0.0] * 9,
            "'acuracy' is not a metric of the evaluation; .* there are accuracy",
        ),
        ({"keep_best": "accuracy"}, None, "there is no evaluation data"),
        ({"keep_best": "accuracy", "run_dir": None}, [0.0] * 9, "needs a folder for checkpoints"),
        ({"stop_when": {"entropi": {"below": 0.1}}}, None, "3 rows, and none had that metric; did you mean entropy"),
        ({"stop_when": {"eval/accuracy": {"below": 0.1}}}, None, "there is no evaluation data"),
    ],
)
def test_a_metric_that_never_comes_is_an_error(train, fields, evals, said, caplog):
    with pytest.raises(ConfigError, match=said):
        train(8, evals, entropy=[1.0] * 9, learned=[UPDATED] * 9, **fields)
    assert ("keep_best.metric=acuracy is not among the metrics that are known" in caplog.text) == ("acuracy" in said)


def test_a_metric_that_comes_late_is_no_error(train):
    entropy, updated = [None, None, None, 0.5, *[None] * 6], {"learned": [UPDATED] * 10, "each": 9}
    assert train(9, entropy=entropy, stop_when={"entropy": Band(below=0.1)}, **updated).step == 9
    seen = {"entropy": entropy, "name": "parts", "stop_when": {"entropy": Band(below=0.1)}, **updated}
    train(3, **seen)
    assert train(9, resume="latest", **seen).step == 9
    slow = {"entropy": [None] * 6, "stop_when": {"entropy": Band(below=0.1, steps=5)}, **updated}
    assert train(4, name="slow", **slow).step == 4  # it may take as long as a stop
    with pytest.raises(ConfigError, match="5 rows, and none had that metric"):
        train(5, name="slower", **slow)


def test_steps_that_learn_nothing_have_not_what_an_update_measures(train):
    still = [{}, {}, {}, {**UPDATED, "advantage/nonzero_frac": 0.0}, *[{}] * 3]  # a critic's warm-up, equal rewards
    assert train(6, learned=still, stop_when={"entropy": Band(below=0.1)}).step == 6


def test_a_run_too_short_to_tell_warns(train, caplog):
    train(2, entropy=[None, 1.0, 1.0], learned=[UPDATED] * 3, stop_when={"entropi": Band(below=0.1)})
    assert "no row had that metric; did you mean entropy" in caplog.text


def test_observers_of_ones_own_have_a_state_too(train):
    class Seen(Observer):
        def __init__(self):
            self.steps = []

        def on_step_end(self, run, step):
            self.steps.append(step.index)

        def state(self):
            return {"steps": self.steps}

        def restore(self, state):
            self.steps = list(state["steps"])

    train(2, observers=[Seen(), Seen()])
    again = [Seen(), Seen()]
    train(4, observers=again, resume="latest")
    assert [one.steps for one in again] == [[1, 2, 3, 4]] * 2
