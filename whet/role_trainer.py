"""RoleTrainer: one role's update, its loss, hooks and the metrics it reports. Learners and Tunix's verbs share it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from whet.errors import ConfigError, lookup_error
from whet.metrics import Mean, Sum, merge
from whet.ops import token_weights
from whet.ops.weighting import Weighting
from whet.types import TokenBatch, TrainExample
from whet.worker import Loss, Metrics, ModelWorker

__all__ = ["DataHooks", "RoleTrainer", "TrainingHooks"]

log = logging.getLogger("whet")

MOST_SKIPPED = 10
"""Updates in a row that may be skipped before the run ends: nothing is learned from then on."""


class TrainingHooks:
    """Called around training; override what you need. `trainer` is the RoleTrainer, whose `worker` is the model.

    >>> class Print(TrainingHooks):
    ...     def on_train_step_end(self, trainer, step, metrics):
    ...         print(step, metrics["loss"].value)
    """

    def on_train_start(self, trainer: RoleTrainer) -> None:
        """Before the first update."""

    def on_train_end(self, trainer: RoleTrainer) -> None:
        """After the last update."""

    def on_train_step_start(self, trainer: RoleTrainer) -> None:
        """Before each update."""

    def on_train_step_end(self, trainer: RoleTrainer, step: int, metrics: Metrics) -> None:
        """After each update; step counts updates from 1."""

    def on_eval_step_start(self, trainer: RoleTrainer) -> None:
        """Before each evaluation batch."""

    def on_eval_step_end(self, trainer: RoleTrainer, metrics: Metrics) -> None:
        """After each evaluation batch."""


class DataHooks:
    """Give batches in place of the data set's; return None to take the data set's."""

    def load_next_train_batch(self, trainer: RoleTrainer) -> TrainExample | TokenBatch | None:
        """The batch of the next update."""

    def load_next_eval_batch(self, trainer: RoleTrainer) -> TrainExample | TokenBatch | None:
        """The next evaluation batch."""


class RoleTrainer:
    """Updates one model: loss, token weights, hooks, metrics.

    Args: worker: the model. loss: per token. loss_agg_mode, loss_agg_norm: how token losses become one number where a
        batch comes without weights. accumulate: batches of `update_all` that make one optimizer step.
    """

    def __init__(
        self,
        worker: ModelWorker,
        *,
        loss: Loss,
        loss_agg_mode: str | Weighting = "token-mean",
        loss_agg_norm: float | None = None,
        accumulate: int = 1,
    ) -> None:
        self.worker = worker
        self.loss = loss
        self.loss_agg_mode = loss_agg_mode
        self.loss_agg_norm = loss_agg_norm
        self.accumulate = accumulate
        self.entropy = False
        self.reductions: dict[str, dict[str, str]] = {}
        self.displayed: tuple[str, ...] = ()
        self.train_steps = 0
        self._skipped = 0
        self._hooks = TrainingHooks()
        self._data_hooks = DataHooks()
        self._input_fn: Callable[[Any], Any] = lambda x: x

    def with_loss_fn(
        self,
        loss: Loss,
        has_aux: bool = True,
        *,
        loss_agg_mode: str | Weighting | None = None,
        loss_agg_norm: float | None = None,
        entropy: bool | None = None,
    ) -> RoleTrainer:
        """Sets the loss: `loss(x: LossInputs) -> (per token [s], {name: [s]})`, or the first alone if not has_aux.

        Args: loss_agg_mode, loss_agg_norm: with it, how token losses become one number. entropy: x.entropy is needed.
        """
        self.loss = loss if has_aux else lambda x: (loss(x), {})  # pyright: ignore[reportAttributeAccessIssue]
        self.loss_agg_mode = loss_agg_mode or self.loss_agg_mode
        if loss_agg_mode is not None or loss_agg_norm is not None:
            self.loss_agg_norm = loss_agg_norm
        self.entropy = self.entropy if entropy is None else entropy
        return self

    def with_gen_model_input_fn(self, fn: Callable[[Any], TrainExample | TokenBatch]) -> RoleTrainer:
        """Sets what turns an item of a data set into a TrainExample or TokenBatch."""
        self._input_fn = fn
        return self

    def with_rl_metrics_to_log(self, metrics: Mapping[str, str | Sequence[str] | Mapping[str, str]]) -> RoleTrainer:
        """Sets what becomes of the loss's metrics; one that isn't named is logged as its mean.

        Args: metrics: name -> "mean", "max", "min" or "weighted" (the sum under the token weights); several of them,
            logged as name/how; or {label: how}.
        Raises: ConfigError: another word.
        """
        for name, how in metrics.items():
            labels = {name: how} if isinstance(how, str) else how
            if not isinstance(labels, Mapping):
                labels = {f"{name}/{h}": h for h in labels}
            for h in labels.values():
                if h not in ("mean", "max", "min", "weighted"):
                    raise lookup_error(f"reduction of metric {name}", h, ("mean", "max", "min", "weighted"))
            self.reductions[name] = dict(labels)
        return self

    def with_tqdm_metrics_to_display(self, names: Iterable[str]) -> RoleTrainer:
        """Sets which metrics the progress bar shows beside the reward."""
        self.displayed = tuple(names)
        return self

    def with_training_hooks(self, hooks: TrainingHooks) -> RoleTrainer:
        """Sets the training hooks."""
        self._hooks = hooks
        return self

    def with_data_hooks(self, hooks: DataHooks) -> RoleTrainer:
        """Sets the data hooks."""
        self._data_hooks = hooks
        return self

    @property
    def hooks(self) -> TrainingHooks:
        """The training hooks."""
        return self._hooks

    def weighted(self, batch: TokenBatch) -> TokenBatch:
        """The batch with its token weights: made from all of it, once per optimizer step."""
        if batch.weights is not None:
            return batch
        weights = token_weights(batch.mask, batch.trajectory, self.loss_agg_mode, norm=self.loss_agg_norm)
        return batch.replace(weights=weights)

    def update(self, batch: TokenBatch) -> Metrics:
        """One optimizer step on one mini-batch.

        Args: batch: with `weights`, or they are made here from the whole of it.
        Returns: the loss's metrics, grad_norm, learning_rate.
        Raises: ConfigError: the tenth update in a row whose gradient is not finite.
        """
        self._hooks.on_train_step_start(self)
        metrics = self.worker.forward_backward(
            self.weighted(batch), self.loss, entropy=self.entropy, reductions=self.reductions
        )
        metrics = merge(_per_update(metrics), self.worker.optim_step())
        if metrics["optim/skipped"].value:
            self._note_skipped()
        else:
            self.train_steps, self._skipped = self.train_steps + 1, 0
        self._hooks.on_train_step_end(self, self.train_steps, metrics)
        return metrics

    def _note_skipped(self) -> None:
        """Says that an update was skipped; ends a run in which all are."""
        self._skipped += 1
        number = self.train_steps + 1
        log.warning("update %d skipped: its gradient is not finite; optim/skipped counts them", number)
        if self._skipped == MOST_SKIPPED:
            raise ConfigError(
                f"{MOST_SKIPPED} updates in a row had a gradient that is not finite, the last one update {number}; "
                "resume from an earlier checkpoint with a lower optim.lr, and check the rewards and the loss for "
                "huge values"
            )

    def update_all(self, batches: Iterable[Any]) -> Metrics:
        """One optimizer step for every `accumulate` batches of a data set; a rest makes a last, smaller one."""
        metrics: Metrics = {}
        held: list[TokenBatch] = []
        for item in batches:
            held.append(self._batch(self._data_hooks.load_next_train_batch(self) or item))
            if len(held) == self.accumulate:
                metrics = merge(metrics, self.update(TokenBatch.cat(held)))
                held = []
        return merge(metrics, self.update(TokenBatch.cat(held))) if held else metrics

    def evaluate(self, batches: Iterable[Any]) -> Metrics:
        """The loss and its metrics over a data set, without an update."""
        metrics: Metrics = {}
        for item in batches:
            self._hooks.on_eval_step_start(self)
            batch = self.weighted(self._batch(self._data_hooks.load_next_eval_batch(self) or item))
            found = self.worker.evaluate(batch, self.loss, entropy=self.entropy, reductions=self.reductions)
            self._hooks.on_eval_step_end(self, found)
            metrics = merge(metrics, _per_update(found))
        return metrics

    def _batch(self, item: Any) -> TokenBatch:
        item = self._input_fn(item)
        return item if isinstance(item, TokenBatch) else TokenBatch.from_padded(item, version=self.worker.version)


def _per_update(metrics: Metrics) -> Metrics:
    """Sums over one mini-batch (the loss, and what is weighted like it) as means over mini-batches."""
    return {n: Mean(m.value) if isinstance(m, Sum) else m for n, m in metrics.items()}
