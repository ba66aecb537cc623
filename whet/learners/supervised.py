"""SupervisedLearner: the loop of SFT, reward models and preference training.

    stage       what it writes
    batch       batch: the examples end to end, as a TokenBatch
    score       columns of the batch that the loss compares with
    update      metrics: one optimizer step on the whole batch
    after_step  the row of metrics that is logged

Each stage takes an ExampleStep and returns it with more columns. A step is one batch of rows and one update. The
docstring of a stage ends with the columns that it reads and writes, as in base.py; `batch.*` stands for columns that
depend on the rows or on the loss. The rest of a run is in run/run.py, as for reinforcement learning, and
data/supervised.py turns rows into examples.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch

from whet.config import SupervisedConfig, SupervisedDataConfig
from whet.config.base import check_keywords
from whet.config.model import USUAL_LR
from whet.data.encoder import Encoder
from whet.errors import ConfigError
from whet.learners.step import ExampleStep
from whet.learners.supervised_task import SupervisedTask
from whet.metrics import Sum, flat
from whet.run.observer import Observer
from whet.run.run import Run
from whet.train.supervised_models import SupervisedModels
from whet.types import Example, TokenBatch

__all__ = ["SupervisedLearner"]

log = logging.getLogger("whet")

C = TypeVar("C", bound=SupervisedConfig)
ROWS_AT_ONCE = 256
"""An evaluation makes a batch of this many rows at a time."""


class SupervisedLearner(Generic[C]):
    """Trains a model on rows.

    Args:
        models: the model that is trained, and a reference where the loss compares with one.
        algo_config: the objective's.
        data: how rows become examples and steps.
        settings: the whole configuration, or its tree, for the run folder; None = the parts that the learner knows.
        observers: notified of each event of a run (run.observer.Observer).
    """

    paired = False
    """Whether the sequences of a row stay together, as one unit of the loss."""
    usual_lr = USUAL_LR
    """Learning rate where none is given, and no adapter is trained."""

    @check_keywords
    def __init__(
        self,
        models: SupervisedModels,
        algo_config: C,
        *,
        data: SupervisedDataConfig | None = None,
        settings: Any = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.models = models
        self.algo_config = algo_config
        self.data = data or SupervisedDataConfig()
        for name in SupervisedDataConfig.READ_BY:
            if getattr(self.data, name) != getattr(SupervisedDataConfig(), name):
                raise ConfigError(f"data.{name} is for the command line; from Python give train() the rows themselves")
        self.settings = settings
        self.observers = list(observers)
        if (optim := models.trained.optim) is not None and optim.set_default_lr(self.usual_lr):
            log.info("%s: learning rate %g, the default here", models.role.section, self.usual_lr)

    def train(self, train_ds: Any, eval_ds: Any = None) -> Run:
        """Trains until max_steps or the data's end.

        Args:
            train_ds: rows: a data set, a list of dicts, an iterable of them.
            eval_ds: the same. All of it is evaluated; a data set with several splits is evaluated on the one named
                test, validation or the like.
        Returns: the finished run, with its step, rows of metrics, evaluations and folder.
        """
        run = self.new_run(train_ds, eval_ds)
        with run:
            for index, examples in run.steps():
                step = self.batch(ExampleStep(index=index, examples=examples))
                step = self.update(self.score(step))
                self.after_step(run, step)
        return run

    def new_run(self, train_ds: Any, eval_ds: Any = None) -> Run:
        """Returns the run that `train` goes through, not yet open. Args: as those of `train`; train_ds None =
        no steps.
        """
        task = self.new_task(eval_ds)
        stream = None if train_ds is None else task.stream(train_ds)
        return Run(task, stream, self.models, self.models.config, observers=self.observers)

    def new_task(self, eval_ds: Any = None) -> SupervisedTask:
        """Returns the task of a run. Args: eval_ds: its evaluation data."""
        return SupervisedTask(self, eval_ds)

    def evaluate(self, eval_ds: Any, step: int = 0) -> dict[str, float]:
        """Returns the loss and its metrics over a whole data set. Args: eval_ds: rows. Returns: name -> number."""
        return self.new_run(None, eval_ds).evaluate(step)

    def close(self) -> None:
        """Frees the optimizers."""
        self.models.close()

    @property
    def chance_loss(self) -> float | None:
        """The mean loss of a model that guesses; None where the loss has no such value."""
        return None

    # ---- the stages ----------------------------------------------------------------------------------------------

    def encoder(self) -> Encoder[Example]:
        """Returns the encoder that turns rows into examples."""
        raise NotImplementedError

    def batch(self, step: ExampleStep) -> ExampleStep:
        """Lays the examples end to end, with their columns.

        Reads: examples. Writes: batch, batch.*.
        """
        version = self.models.trained.version
        return step.replace(batch=TokenBatch.from_examples(step.examples, paired=self.paired, version=version))

    def score(self, step: ExampleStep) -> ExampleStep:
        """Adds the columns that the loss compares with: none here.

        Reads: nothing. Writes: nothing.
        """
        return step

    def update(self, step: ExampleStep) -> ExampleStep:
        """Takes one optimizer step on the whole batch.

        Reads: batch, batch.*. Writes: metrics.
        """
        with self.models.trace.span("update"):
            metrics = self.models.trainer.update(step.batch)
        self.models.finish_step(self.models.trained)
        return step.log(metrics)

    def measure(self, step: ExampleStep) -> ExampleStep:
        """Computes the loss and its metrics without an update, for an evaluation.

        The loss weights are those of all examples together, which are scored and run ROWS_AT_ONCE at a time.
        Reads: examples, batch, batch.weights. Writes: metrics.
        """
        trainer, examples = self.models.trainer, step.examples
        batch = trainer.add_loss_weights(self.batch(step).batch)
        group_of = batch.group_of.index_select(0, batch.trajectory_of)
        for start in range(0, len(examples), ROWS_AT_ONCE):
            end = start + ROWS_AT_ONCE
            part = batch.select(((group_of >= start) & (group_of < end)).nonzero().flatten())
            scored = self.score(step.replace(examples=examples[start:end], batch=part))
            step = step.log(trainer.evaluate_batch(scored.batch))
        return step

    def after_step(self, run: Run, step: ExampleStep) -> None:
        """Logs the step, then evaluates and saves where they are due.

        Reads: index, batch, metrics. Writes: nothing.
        """
        batch = step.batch
        step = step.log({"tokens/trained": Sum(float(torch.count_nonzero(batch.mask)))})
        run.end_step(step, flat(step.metrics), num_tokens=len(batch.prefixes) + batch.num_tokens)

    # ---- state ---------------------------------------------------------------------------------------------------

    def planned_passes(self, batch_size: int) -> dict[str, str]:
        """Returns the passes of a step besides its update, and the passes that it skips: name -> "runs: reason"."""
        return {}

    def state(self) -> dict[str, Any]:
        """Returns the learner's own state between two steps, for checkpoints: plain numbers, strings, tensors."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state`, before the first step of a resumed run."""
