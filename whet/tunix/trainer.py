"""The trainer of one role with Tunix's methods, and the hooks that Tunix's programs define."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from whet.config import TrainingConfig
from whet.errors import ConfigError, DataError
from whet.metrics import merge
from whet.train.metric_reduction import REDUCTIONS, Metrics
from whet.train.role_trainer import RoleTrainer, check_token_ids, per_update
from whet.train.worker import Loss
from whet.tunix.padded import example_to_batch
from whet.types import TokenBatch

__all__ = ["DataHooks", "Trainer", "TrainingHooks"]

_NUMPY_REDUCTIONS = {
    "amax": "max",
    "amin": "min",
    "average": "mean",
    "global_weighted_mean": "weighted",
    "max": "max",
    "mean": "mean",
    "mean_of_means": "mean",
    "min": "min",
    "nanmean": "mean",
}
"""Name of a function by which Tunix's programs reduce a metric -> the name of whet's reduction."""


class TrainingHooks:
    """Called around training; override what you need. `train_ctx` is the Trainer, losses are numbers.

    In reinforcement learning on_train_start and on_train_end are called once a run, and the evaluation hooks once an
    evaluation, with the loss of what it sampled.

    >>> class Print(TrainingHooks):
    ...     def on_train_step_end(self, train_ctx, train_step, train_loss):
    ...         print(train_step, round(train_loss, 3))
    """

    def on_train_start(self, train_ctx: Trainer) -> None:
        """Before the first update."""

    def on_train_end(self, train_ctx: Trainer) -> None:
        """After the last update."""

    def on_train_step_start(self, train_ctx: Trainer) -> None:
        """Before each update."""

    def on_train_step_end(self, train_ctx: Trainer, train_step: int, train_loss: float) -> None:
        """After each update; steps count from 1."""

    def on_eval_step_start(self, train_ctx: Trainer) -> None:
        """Before each evaluation batch."""

    def on_eval_step_end(self, train_ctx: Trainer, eval_loss: float) -> None:
        """After each evaluation batch."""


class DataHooks:
    """Gives `Trainer.train` its batches, in place of the data sets; None ends them.

    A learner makes its batches from rollouts, and refuses a trainer that has data hooks.
    """

    def load_next_train_batch(self, train_ctx: Trainer) -> Any:
        """Returns the next TrainExample or TokenBatch."""
        raise NotImplementedError

    def load_next_eval_batch(self, train_ctx: Trainer) -> Any:
        """Returns the next one to evaluate on."""
        raise NotImplementedError


class Trainer(RoleTrainer):
    """Updates one model: whet's RoleTrainer with Tunix's methods.

    Args: config: the intervals and the end of `train`. restored: returns the step of the newest checkpoint, 0 = none.
        accumulate: `update_all` makes one optimizer step of this many batches. options: RoleTrainer's.
    """

    def __init__(
        self, worker: Any, *, config: TrainingConfig, restored: Callable[[], int], accumulate: int, **options: Any
    ) -> None:
        super().__init__(worker, **options)
        self.config = config
        self.accumulate = accumulate
        self.training_hooks: Any = None
        """The training hooks that were set: an object with the methods of TrainingHooks."""
        self.data_hooks: Any = None
        """The data hooks that were set."""
        self.is_managed_externally = False
        self._restored = restored
        self._input_fn: Callable[[Any], Any] = lambda item: item

    # ---- hooks and metrics ---------------------------------------------------------------------------------------

    def with_training_hooks(self, hooks: Any) -> Trainer:
        """Sets the training hooks. Args: hooks: an object with the methods of TrainingHooks."""
        self.training_hooks = hooks
        return self

    def call_hook(self, name: str, *args: Any) -> None:
        """Calls a method of the training hooks, if any are set. Args: name: of the method. args: after train_ctx."""
        if self.training_hooks is not None:
            getattr(self.training_hooks, name)(self, *args)

    def with_data_hooks(self, hooks: Any) -> Trainer:
        """Sets the hooks that provide the batches of `train`."""
        self.data_hooks = hooks
        return self

    def with_gen_model_input_fn(self, fn: Callable[[Any], Any]) -> Trainer:
        """Sets the function that turns an item of a data set into a TrainExample or TokenBatch."""
        self._input_fn = fn
        return self

    def _check_batch(self, item: Any) -> TokenBatch:
        """Returns an item of a data set as a batch. Raises DataError: its arrays or its ids don't fit."""
        item = self._input_fn(item)
        batch = item if isinstance(item, TokenBatch) else example_to_batch(item, version=self.worker.version)
        return check_token_ids(batch, self.worker.loaded.num_ids, self.worker.loaded.name)

    def with_rl_metrics_to_log(
        self,
        metrics: Mapping[str, Any],
        *,
        on_policy: Collection[str] = (),
    ) -> Trainer:
        """Sets the names and reductions of the loss's metrics as RoleTrainer does; np.mean, np.max and np.min work too.

        Raises: ConfigError: another function, or an unknown reduction.
        """
        self.set_metric_reductions({n: _reduction_name(n, how) for n, how in metrics.items()}, on_policy=on_policy)
        return self

    def with_tqdm_metrics_to_display(self, names: Iterable[str | Callable[[], str | None]]) -> Trainer:
        """Sets which metrics the progress bar shows: names, or functions that return a name or None."""
        resolved = (name() if callable(name) else name for name in names)
        self.displayed = tuple(name for name in resolved if name)
        return self

    def with_loss_fn(self, loss: Loss, has_aux: bool = True, **options: Any) -> Trainer:
        """Sets the loss as RoleTrainer does.

        Args: has_aux: the loss returns (per token [s], {name: [s]}); without it, only the first. options: see
            RoleTrainer.set_loss.
        """
        self.set_loss(loss if has_aux else lambda x: (loss(x), {}), **options)  # pyright: ignore
        return self

    # ---- training ------------------------------------------------------------------------------------------------

    def update(self, batch: TokenBatch, **options: Any) -> Metrics:
        """Returns one optimizer step on one mini-batch, as RoleTrainer's, between the hooks."""
        self.call_hook("on_train_step_start")
        metrics = super().update(batch, **options)
        self.call_hook("on_train_step_end", self.train_steps, metrics[f"{self.prefix}loss"].value)
        return metrics

    def update_all(self, batches: Iterable[Any]) -> Metrics:
        """Takes one optimizer step for every `accumulate` batches of a data set, and a last one for the remainder.

        Raises: DataError: there is no batch.
        """
        metrics: Metrics = {}
        for part in _chunks(self.accumulate, _check_batches(batches)):
            metrics = merge(metrics, self.update(TokenBatch.cat([self._check_batch(item) for item in part])))
        if not metrics:
            raise DataError("the data set has no batch, so nothing would be updated; give at least one")
        return metrics

    def evaluate_batch(self, batch: TokenBatch) -> Metrics:
        """Returns the loss and its metrics on a batch, as RoleTrainer's, between the hooks."""
        self.call_hook("on_eval_step_start")
        metrics = super().evaluate_batch(batch)
        self.call_hook("on_eval_step_end", metrics[f"{self.prefix}loss"].value)
        return metrics

    @property
    def model(self) -> nn.Module:
        """The module that is trained."""
        return self.worker.loaded.module

    @property
    def iter_steps(self) -> int:
        """The number of micro-batches of train_micro_batch_size in the updates so far."""
        return self.train_steps * self.accumulate

    def restored_global_step(self) -> int:
        """Returns the step of the checkpoint from which a run continues; 0 = none."""
        return self._restored()

    def train(
        self, train_ds: Iterable[Any] | None, eval_ds: Iterable[Any] | None = None, skip_jit: bool = False
    ) -> Metrics:
        """Updates on every batch of a data set, or of the data hooks, up to max_steps updates.

        Evaluates on eval_ds before the first update, and after every eval_every_n_steps of them.

        Args: train_ds, eval_ds: TrainExamples or TokenBatches. skip_jit: no effect.
        Returns: the metrics over all updates.
        """
        every, most = self.config.eval_every_n_steps, self.config.max_steps
        if eval_ds is not None:
            self.evaluate(eval_ds)
        self.call_hook("on_train_start")
        metrics: Metrics = {}
        for batches in _chunks(self.accumulate, self._source(train_ds, "load_next_train_batch")):
            if most is not None and not self.is_managed_externally and self.train_steps >= most:
                break
            metrics = merge(metrics, self.update_all(batches))
            if eval_ds is not None and every and self.train_steps % every == 0:
                self.evaluate(eval_ds)
        self.call_hook("on_train_end")
        return metrics

    def evaluate(self, batches: Iterable[Any]) -> Metrics:
        """Returns the loss and its metrics over a data set, or over the data hooks' batches, without an update."""
        items = _check_batches(self._source(batches, "load_next_eval_batch"))
        return merge(*(per_update(self.evaluate_batch(self._check_batch(item))) for item in items))

    def _source(self, batches: Iterable[Any] | None, method: str) -> Iterable[Any]:
        if self.data_hooks is None:
            return () if batches is None else batches
        load = getattr(self.data_hooks, method)
        return iter(lambda: load(self), None)

    def close(self) -> None:
        """Does nothing: the trainer holds no open files."""


def _check_batches(batches: Any) -> Iterable[Any]:
    """Returns a data set of batches. Raises DataError for a single batch, or a mapping of its arrays."""
    if isinstance(batches, Mapping | TokenBatch) or not isinstance(batches, Iterable):
        raise DataError(
            f"expected batches, one for each mini-batch, got {type(batches).__name__}; give a list, e.g. [batch]"
        )
    return batches


def _chunks(size: int, batches: Iterable[Any]) -> Iterator[list[Any]]:
    """Yields lists of `size` batches; the last may be shorter."""
    chunk: list[Any] = []
    for item in batches:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _reduction_name(metric: str, how: Any) -> str | Sequence[str] | Mapping[str, str]:
    """Returns the name of the reduction that a function of numpy computes. Raises ConfigError: another function."""
    if not callable(how):
        return how
    function = getattr(how, "__name__", "")
    if function not in _NUMPY_REDUCTIONS:
        raise ConfigError(
            f"metric {metric} can't be reduced by {function or how!r}: it is reduced over the tokens of an update as "
            f"they are computed; give np.mean, np.max or np.min, or one of {', '.join(REDUCTIONS)}"
        )
    return _NUMPY_REDUCTIONS[function]
