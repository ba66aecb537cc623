"""A run serves a learner that samples nothing: imitation of prompt + completion, with the same Run, no other loop."""

import json
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from helpers import completion, prompt, same, tiny_model, weights_of

from whet.config import CheckpointingOptions, OptimConfig, Role, TrainingConfig, dump_tree
from whet.data.prompt_stream import PromptStream
from whet.data.tokenizer import byte_tokenizer
from whet.metrics import flat
from whet.models.load import load_model
from whet.observe.trace import Trace
from whet.parallel.ranks import Ranks
from whet.run.provenance import record_inputs
from whet.run.run import Run
from whet.run.task import Task
from whet.train.role_checkpoints import Checkpoints
from whet.train.role_trainer import RoleTrainer
from whet.train.worker import ModelWorker
from whet.types import Group, TokenBatch

ROWS = [{"prompt": f"{i}+1=", "completion": f"{i + 1}"} for i in range(9)]


def nll(x):
    return -x.logprobs, {"accuracy": (x.logprobs.detach() > np.log(0.5)).float()}


class Models:
    """One model, and what a run asks of it."""

    def __init__(self, config):
        self.worker = ModelWorker(load_model(tiny_model()), optim=OptimConfig(lr=1e-2, schedule="linear"))
        self.trainers = {Role.ACTOR: RoleTrainer(self.worker, loss=nll)}
        self.tokenizer, self.trace, self.ranks = byte_tokenizer(), Trace(), Ranks()
        self.checkpoints = Checkpoints(config.checkpoint_root, self.trainers)

    def describe(self):
        return {"compute_dtype": {"actor": str(self.worker.dtype)}}


@dataclass(frozen=True)
class Imitated:
    index: int
    batch: TokenBatch
    metrics: dict = field(default_factory=dict)


class Imitation(Task):
    """Evaluates by the loss, and counts what it has seen."""

    has_evaluation = True

    def __init__(self, roles, config, held_out):
        self.roles, self.config, self.held_out, self.seen = roles, config, held_out, 0

    def settings(self):
        return {"trainer": dump_tree(self.config)}

    def inputs(self):
        return record_inputs({Role.ACTOR: self.roles.worker}, self.roles.tokenizer, functions=[("the loss", nll)])

    def evaluate(self, run, step):
        return flat(run.trainer.evaluate_batch(batch_of(self.held_out)))

    def state(self):
        return {"seen": self.seen}

    def restore(self, state):
        self.seen = state["seen"]


def encode(row, place):
    ids = [*row["completion"].encode(), 256]
    return Group(prompt=prompt(row["prompt"], place), completions=(completion(ids),))


def batch_of(groups):
    return TokenBatch.from_groups(groups)


class SFTLearner:
    """The whole of it: rows of prompt + completion, the mean loss over completion tokens."""

    def __init__(self, config):
        self.config, self.roles = config, Models(config)
        self.task = Imitation(self.roles, config, [encode(row, i) for i, row in enumerate(ROWS[:2])])

    def train(self, rows):
        stream = PromptStream(rows, batch_size=2, seed=self.config.seed, num_epochs=2, encode=encode)
        with Run(self.task, stream, self.roles, self.config) as run:
            for index, groups in run.steps():
                batch = batch_of(groups)
                self.task.seen += len(groups)
                step = Imitated(index, batch, run.trainer.update(batch))
                run.end_step(step, {**flat(step.metrics), "seen": float(self.task.seen)}, num_tokens=batch.num_tokens)
        return run


def config(folder, **fields):
    usual = {
        "checkpointing_options": CheckpointingOptions(save_interval_steps=3, max_to_keep=9),
        "eval_every_n_steps": 4,
        "pbar_description": None,
        "run_dir": str(folder),
    }
    return TrainingConfig(**{**usual, **fields})


def numbers(run):
    rows = [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "memory/"))} for row in run.rows]
    return [json.dumps(row) for row in rows]


def test_imitation_is_a_run_with_order_logs_evaluation_checkpoints_and_a_final_model(tmp_path):
    learner = SFTLearner(config(tmp_path))
    run = learner.train(ROWS)
    train = [row for row in run.rows if row["mode"] == "train"]
    evals = {row["step"]: row["loss"] for row in run.rows if row["mode"] == "eval"}
    assert [row["step"] for row in train] == list(range(1, 9)) and train[-1]["seen"] == 16  # two epochs of 4 batches
    assert [row["epoch"] for row in train] == [n / 4 for n in range(1, 9)]
    assert list(evals) == [0, 4, 8] and evals[8] < evals[4] < evals[0]
    assert [row["optim/updates"] for row in train] == list(range(1, 9))
    assert train[-1]["learning_rate"] == train[0]["learning_rate"] / 8  # of a schedule that knows the run's end
    saved = sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*"))
    assert saved == ["step-000003", "step-000006", "step-000008"]
    from transformers import AutoModelForCausalLM

    final = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert same(weights_of(final), weights_of(learner.roles.worker.module))


def test_imitation_that_is_resumed_equals_the_uninterrupted(tmp_path):
    whole = SFTLearner(config(tmp_path / "whole"))
    expected = whole.train(ROWS)

    class Enough(Exception):
        pass

    def step(batch):
        if broken.task.seen > 10:
            raise Enough
        return update(batch)

    broken = SFTLearner(config(tmp_path / "broken"))
    update = broken.roles.trainers[Role.ACTOR].update
    broken.roles.trainers[Role.ACTOR].update = step
    with pytest.raises(Enough):
        broken.train(ROWS)
    resumed = SFTLearner(config(tmp_path / "broken", resume="latest"))
    torch.rand(3)  # the generators are the checkpoint's, too
    run = resumed.train(ROWS)
    assert resumed.task.seen == 16 and numbers(run) == numbers(expected)
    assert same(weights_of(resumed.roles.worker.module), weights_of(whole.roles.worker.module))


def test_the_skipped_updates_in_a_row_of_a_supervised_run_are_in_its_checkpoint(tmp_path):
    def broken(x):
        return x.logprobs * torch.nan, {}

    def run(**fields):
        learner = SFTLearner(config(tmp_path, **fields))
        learner.roles.trainers[Role.ACTOR].loss = broken
        learner.train(ROWS)
        return learner.roles.trainers[Role.ACTOR].skipped

    assert run(max_steps=6) == 6
    assert run(max_steps=6, resume="latest") == 6  # the tenth would end the run
