"""RoleTrainer: the update of one role, with its loss and the metrics that it reports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from torch import Tensor

from whet.config import Role
from whet.errors import DataError, TrainingError, lookup_error
from whet.metrics import Mean, Sum, merge
from whet.ops import token_weights, unit_weights
from whet.ops.loss_aggregation import Weighting
from whet.train.metric_reduction import REDUCTIONS, Metrics, Reductions
from whet.train.worker import Loss, LossNeeds, ModelWorker
from whet.types import TokenBatch

if TYPE_CHECKING:
    from whet.parallel.shards import ShardReader

__all__ = ["MetricsAdjuster", "RoleTrainer", "SequenceSelector", "check_token_ids", "lower_lr_advice"]

log = logging.getLogger("whet")

SequenceSelector = Callable[[TokenBatch], Tensor]
MetricsAdjuster = Callable[[Metrics, TokenBatch, TokenBatch], Metrics]

MAX_SKIPPED = 10
"""The run ends after this many skipped updates in a row, since nothing is learned any more."""


class RoleTrainer:
    """Updates one model: loss, token weights, metrics.

    Args:
        worker: the model.
        loss: per token.
        loss_agg_mode, loss_agg_norm: how token losses become one number, for batches without weights.
        role: the model's. The actor's metrics have plain names; those of another role begin with it: critic/loss.
    """

    def __init__(
        self,
        worker: ModelWorker,
        *,
        loss: Loss,
        loss_agg_mode: str | Weighting = "token-mean",
        loss_agg_norm: float | None = None,
        role: Role | str = Role.ACTOR,
    ) -> None:
        self.worker = worker
        self.role = Role(role)
        self.prefix = "" if self.role is Role.ACTOR else f"{self.role.value}/"
        self.loss = loss
        self.loss_agg_mode = loss_agg_mode
        self.loss_agg_norm = loss_agg_norm
        self.loss_agg_units: Literal["trained", "all"] = "trained"
        self.needs: LossNeeds = {}
        self.loss_per: Literal["token", "unit"] = "token"
        self.reductions: dict[str, dict[str, str]] = {}
        self.displayed: tuple[str, ...] = ()
        """Metrics that the progress bar shows next to the reward."""
        self.skipped = 0
        """Updates in a row, up to now, whose gradient was not finite."""
        self.on_policy_metrics: frozenset[str] = frozenset()
        """Metrics of the loss that are logged only for updates on policy."""
        self.listeners: list[Callable[[RoleTrainer, Metrics], Any]] = []
        """Called after each update, with its metrics."""
        self._updated_version: int | None = None

    def set_loss(
        self,
        loss: Loss,
        *,
        loss_agg_mode: str | Weighting | None = None,
        loss_agg_norm: float | None = None,
        loss_agg_units: Literal["trained", "all"] | None = None,
        loss_per: Literal["token", "unit"] | None = None,
        **needs: Unpack[LossNeeds],
    ) -> None:
        """Sets the loss: `loss(x: LossInputs) -> (per token [s], {name: [s]})`.

        A loss per unit returns [u] in place of [s]. All units with a trained token have the same weight.

        Args:
            loss: of every token.
            loss_agg_mode, loss_agg_norm: how token losses become one number.
            loss_agg_units: a mean over trajectories (units) counts those with a trained token, or all.
            loss_per: the loss returns a number for each token, or for each unit of TokenBatch.unit_of.
            needs: what the loss reads besides the log-probabilities: entropy=True, for example; see LossNeeds.
        """
        self.loss = loss
        self.loss_agg_mode = loss_agg_mode or self.loss_agg_mode
        if loss_agg_mode is not None or loss_agg_norm is not None:
            self.loss_agg_norm = loss_agg_norm
        self.loss_agg_units = loss_agg_units or self.loss_agg_units
        self.loss_per = loss_per or self.loss_per
        self.needs = {**self.needs, **needs}

    def set_metric_reductions(
        self, metrics: Mapping[str, str | Sequence[str] | Mapping[str, str]], *, on_policy: Collection[str] = ()
    ) -> None:
        """Sets how the loss's metrics are named and reduced. Default: each is logged as its mean.

        Args:
            metrics: name -> one of REDUCTIONS ("mean", "max", "min" over tokens, "weighted" as the loss,
                "sequence_mean", ...); or several of them, logged as name/how; or {label: how}.
            on_policy: metrics that have a meaning only where all trained tokens come from the current weights. They are
                left out of other updates.
        Raises: ConfigError: an unknown reduction.
        """
        for name, how in metrics.items():
            labels: Any = {name: how} if isinstance(how, str) or callable(how) else how
            if not isinstance(labels, Mapping):
                labels = {f"{name}/{h}": h for h in labels}
            for h in labels.values():
                if h not in REDUCTIONS:
                    raise lookup_error(f"reduction of metric {name}", getattr(h, "__name__", str(h)), REDUCTIONS)
            self.reductions[name] = dict(labels)
        self.on_policy_metrics |= set(on_policy)

    def add_loss_weights(self, batch: TokenBatch) -> TokenBatch:
        """Returns the batch with the weights of its tokens or units, which are made once per optimizer step from all of
        it.
        """
        if batch.weights is not None or batch.unit_weights is not None:
            return batch
        if self.loss_per == "unit":
            count = float(batch.num_units) if self.loss_agg_units == "all" else None
            return batch.replace(unit_weights=unit_weights(batch.mask, batch.unit, num_units=count))
        units = float(len(batch.group_of)) if self.loss_agg_units == "all" else None
        weights = token_weights(
            batch.mask,
            batch.trajectory,
            self.loss_agg_mode,
            norm=self.loss_agg_norm,
            num_units=units,
            prompt=batch.group_of.index_select(0, batch.trajectory),
        )
        return batch.replace(weights=weights)

    @property
    def train_steps(self) -> int:
        """Updates taken, over all resumes; skipped ones don't count."""
        return self.worker.updates

    @property
    def updated_since_sync(self) -> bool:
        """Whether the weights were updated since they got their policy version."""
        return self._updated_version == self.worker.version

    def stale_versions(self, batch: TokenBatch) -> list[int]:
        """Returns the policy versions of trained tokens that are not the model's current one."""
        return batch.versions[batch.mask & (batch.versions != self.worker.version)].unique().tolist()

    def is_on_policy(self, batch: TokenBatch) -> bool:
        """Returns whether all trained tokens of a batch come from the current weights."""
        return not self.updated_since_sync and not self.stale_versions(batch)

    def _reductions(self, batch: TokenBatch) -> Reductions:
        """Returns the reductions of the loss's metrics on a batch, without those that have no meaning off policy."""
        left_out = () if self.is_on_policy(batch) else self.on_policy_metrics
        return {**self.reductions, **{name: {} for name in left_out}}

    def update(
        self,
        batch: TokenBatch,
        *,
        select: SequenceSelector | None = None,
        adjust_metrics: MetricsAdjuster | None = None,
    ) -> Metrics:
        """Takes one optimizer step on one mini-batch: adds loss weights, selects, runs forward and backward, steps.

        Args:
            batch: the whole mini-batch; `weights` are added if it has none.
            select: `f(batch) -> Long [M]`, the sequences that are run. The others must have no gradient; they have been
                counted in the weights. None = all.
            adjust_metrics: `f(metrics, batch, selected) -> metrics` turns the metrics of the selected sequences into
                those of the whole mini-batch.
        Returns: the loss's metrics, grad_norm, learning_rate, optim/skipped, under the role's prefix.
        Raises: TrainingError: the tenth update in a row whose gradient is not finite.
        """
        batch = self.add_loss_weights(batch)
        selected = batch if select is None else batch.select(select(batch))
        reductions = self._reductions(batch)
        metrics = self.worker.forward_backward(selected, self.loss, reductions=reductions, **self.needs)
        metrics = merge(per_update(metrics), self.worker.optim_step())
        if metrics["optim/skipped"].value:
            self._log_skipped(metrics)
        else:
            self.skipped, self._updated_version = 0, self.worker.version
        if adjust_metrics is not None:
            metrics = adjust_metrics(metrics, batch, selected)
        metrics = self._prefixed(metrics)
        for listener in list(self.listeners):
            listener(self, metrics)
        return metrics

    def load(self, folder: Path, *, skipped: int = 0, shards: ShardReader | None = None) -> None:
        """Restores the model and optimizer that its worker saved. Raises CheckpointError where they don't fit.

        Args: skipped: the skipped updates in a row before the save. shards: of a sharded checkpoint.
        """
        self.worker.load(folder, shards)
        self.skipped = skipped
        self._updated_version = None  # checkpoints are written between steps

    def _prefixed(self, metrics: Metrics) -> Metrics:
        return {f"{self.prefix}{name}": metric for name, metric in metrics.items()}

    def _log_skipped(self, metrics: Metrics) -> None:
        """Logs a skipped update; ends the run after MAX_SKIPPED in a row."""
        self.skipped += 1
        which = f"the {self.role.value}'s update {self.train_steps + 1}"
        numbers = f"loss {metrics['loss'].value:.6g}, learning rate {metrics['learning_rate'].value:.6g}"
        counter = f"{self.prefix}optim/skipped"
        log.warning("%s skipped: its gradient is not finite (%s); %s counts them", which, numbers, counter)
        if self.skipped >= MAX_SKIPPED:
            raise TrainingError(
                f"{MAX_SKIPPED} updates in a row had a gradient that is not finite, the last one {which} ({numbers}); "
                f"{lower_lr_advice(self.role)}. Check the rewards and the loss for huge values too"
            )

    def evaluate_batch(self, batch: TokenBatch) -> Metrics:
        """Computes the loss and its metrics on a batch.

        Parts of a batch that got their weights together add up to the loss of the whole.
        Args: batch: `weights` are added if it has none.
        """
        batch = self.add_loss_weights(batch)
        metrics = self.worker.evaluate(batch, self.loss, reductions=self._reductions(batch), **self.needs)
        return self._prefixed(metrics)


def check_token_ids(batch: TokenBatch, num_ids: int, name: str) -> TokenBatch:
    """Returns the batch. Raises DataError for a token id that the model does not have. Args: name: the model's."""
    highest = max(int(x.max()) for x in (batch.prefixes, batch.tokens))
    if highest >= num_ids:
        raise DataError(f"token id {highest} is outside the {num_ids} ids that {name} knows; take its own tokenizer")
    return batch


def lower_lr_advice(role: Role = Role.ACTOR) -> str:
    """Returns the advice to resume with a lower learning rate, for messages.

    >>> lower_lr_advice(Role.CRITIC)[:70]
    'resume from an earlier checkpoint (trainer.resume=<its step-* folder>)'
    """
    name = role.value
    return (
        f"resume from an earlier checkpoint (trainer.resume=<its step-* folder>) with a lower {name}.optim.lr (from "
        f"Python {name}_optimizer) and trainer.allow_config_change=true, without which a resume keeps to the "
        "configuration that was saved"
    )


def per_update(metrics: Metrics) -> Metrics:
    """Turns sums over one mini-batch (the loss, and metrics weighted like it) into means over mini-batches."""
    return {n: Mean(m.value) if isinstance(m, Sum) else m for n, m in metrics.items()}
