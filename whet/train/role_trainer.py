"""RoleTrainer: the update of one role, with its loss and the metrics that it reports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from whet.config import Role
from whet.errors import DataError, TrainingError, lookup_error
from whet.metrics import Mean, Sum, merge
from whet.ops import token_weights, unit_weights
from whet.ops.loss_aggregation import Weighting
from whet.train.metric_reduction import Reductions
from whet.train.worker import REDUCTIONS, Divergence, Loss, Metrics, ModelWorker
from whet.types import TokenBatch

__all__ = ["MetricsAdjuster", "RoleTrainer", "SequenceSelector", "check_ids", "lower_lr_advice"]

log = logging.getLogger("whet")

SequenceSelector = Callable[[TokenBatch], Tensor]
MetricsAdjuster = Callable[[Metrics, TokenBatch, TokenBatch], Metrics]

MAX_SKIPPED = 10
"""Updates in a row that may be skipped before the run ends: nothing is learned from then on."""


class RoleTrainer:
    """Updates one model: loss, token weights, metrics.

    Args:
        worker: the model.
        loss: per token.
        loss_agg_mode, loss_agg_norm: how token losses become one number where a batch comes without weights.
        accumulate: batches of `update_all` that make one optimizer step.
        role: whose model it is. The actor's metrics have their plain names, those of another role begin with its own:
            critic/loss.
    """

    def __init__(
        self,
        worker: ModelWorker,
        *,
        loss: Loss,
        loss_agg_mode: str | Weighting = "token-mean",
        loss_agg_norm: float | None = None,
        accumulate: int = 1,
        role: Role | str = Role.ACTOR,
    ) -> None:
        self.worker = worker
        self.role = Role(role)
        self.prefix = "" if self.role is Role.ACTOR else f"{self.role.value}/"
        self.loss = loss
        self.loss_agg_mode = loss_agg_mode
        self.loss_agg_norm = loss_agg_norm
        self.loss_agg_units: Literal["trained", "all"] = "trained"
        self.accumulate = accumulate
        self.entropy = False
        self.constants: frozenset[str] = frozenset()
        self.scores = False
        self.divergence: Divergence | None = None
        self.loss_per: Literal["token", "unit"] = "token"
        self.reductions: dict[str, dict[str, str]] = {}
        self.displayed: tuple[str, ...] = ()
        self.skipped = 0
        """Updates in a row, up to now, whose gradient was not finite."""
        self.on_policy_metrics: frozenset[str] = frozenset()
        """Metrics of the loss that are logged of updates on policy alone."""
        self.listeners: list[Callable[[RoleTrainer, Metrics], Any]] = []
        """Called after each update, with its metrics."""
        self._updated_version: int | None = None

    def with_loss_fn(
        self,
        loss: Loss,
        *,
        loss_agg_mode: str | Weighting | None = None,
        loss_agg_norm: float | None = None,
        loss_agg_units: Literal["trained", "all"] | None = None,
        loss_per: Literal["token", "unit"] | None = None,
        entropy: bool | None = None,
        constants: Collection[str] | None = None,
        scores: bool | None = None,
        divergence: Divergence | None = None,
    ) -> RoleTrainer:
        """Sets the loss: `loss(x: LossInputs) -> (per token [s], {name: [s]})`.

        A loss per unit returns [u] in place of [s], and weighs all units with a trained token alike.

        Args:
            loss: of every token.
            loss_agg_mode, loss_agg_norm: how token losses become one number.
            loss_agg_units: which trajectories (units) a mean over them counts: those with a trained token, or all.
            loss_per: what the loss returns a number for: each token, or each unit of TokenBatch.unit_of.
            entropy: the loss needs x.entropy.
            constants: those of types.loss.CONSTANTS that the loss needs: "correct" for x.correct.
            scores: the loss needs x.scores, of a model with a value head.
            divergence: the loss needs x.divergence, from this teacher's distribution.
        """
        self.loss = loss
        self.loss_agg_mode = loss_agg_mode or self.loss_agg_mode
        if loss_agg_mode is not None or loss_agg_norm is not None:
            self.loss_agg_norm = loss_agg_norm
        self.loss_agg_units = loss_agg_units or self.loss_agg_units
        self.loss_per = loss_per or self.loss_per
        self.entropy = self.entropy if entropy is None else entropy
        self.constants = self.constants if constants is None else frozenset(constants)
        self.scores = self.scores if scores is None else scores
        self.divergence = divergence or self.divergence
        return self

    def with_rl_metrics_to_log(
        self, metrics: Mapping[str, str | Sequence[str] | Mapping[str, str]], *, on_policy: Collection[str] = ()
    ) -> RoleTrainer:
        """Sets how the loss's metrics are named and reduced; one that isn't named is logged as its mean.

        Args: metrics: name -> one of worker.REDUCTIONS ("mean", "max", "min" over tokens, "weighted" as the loss,
            "sequence_mean", ...); several of them, logged as name/how; or {label: how}. on_policy: those that mean
            something only where all trained tokens come from the weights as they are; left out of other updates.
        Raises: ConfigError: another word.
        """
        for name, how in metrics.items():
            labels: Any = {name: how} if isinstance(how, str) or callable(how) else how
            if not isinstance(labels, Mapping):
                labels = {f"{name}/{h}": h for h in labels}
            for h in labels.values():
                if h not in REDUCTIONS:
                    given = getattr(h, "__name__", None) or str(h)
                    raise lookup_error(f"reduction of metric {name}", given, REDUCTIONS)
            self.reductions[name] = dict(labels)
        self.on_policy_metrics |= set(on_policy)
        return self

    def with_tqdm_metrics_to_display(self, names: Iterable[str]) -> RoleTrainer:
        """Sets which metrics the progress bar shows next to the reward."""
        self.displayed = tuple(names)
        return self

    def add_loss_weights(self, batch: TokenBatch) -> TokenBatch:
        """The batch with the weights of its tokens, or units: made from all of it, once per optimizer step."""
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
        """The policy versions of trained tokens, other than the model's own now."""
        return batch.versions[batch.mask & (batch.versions != self.worker.version)].unique().tolist()

    def is_on_policy(self, batch: TokenBatch) -> bool:
        """Whether all trained tokens of a batch come from the weights as they are."""
        return not self.updated_since_sync and not self.stale_versions(batch)

    def _reductions(self, batch: TokenBatch) -> Reductions:
        """What becomes of the loss's metrics on a batch: nothing, of one that means nothing there."""
        left_out = () if self.is_on_policy(batch) else self.on_policy_metrics
        return {**self.reductions, **{name: {} for name in left_out}}

    @property
    def _asked(self) -> dict[str, Any]:
        """What the loss is given besides logprobs."""
        return {
            "entropy": self.entropy,
            "constants": self.constants,
            "scores": self.scores,
            "divergence": self.divergence,
        }

    def update(
        self,
        batch: TokenBatch,
        *,
        select: SequenceSelector | None = None,
        adjust_metrics: MetricsAdjuster | None = None,
    ) -> Metrics:
        """One optimizer step on one mini-batch: weighs its tokens, selects, runs forward and backward, steps.

        Args:
            batch: the whole mini-batch, with `weights`, or they are made here.
            select: gives the sequences that are run, Long [M], from the weighted mini-batch: those left out have no
                gradient, and have been counted in the weights. None = all.
            adjust_metrics: `f(metrics, whole, run) -> metrics`; it makes the metrics of the sequences that were run
                stand for the whole mini-batch.

        Returns: the loss's metrics, grad_norm, learning_rate, optim/skipped, under the role's prefix.
        Raises: TrainingError: the tenth update in a row whose gradient is not finite.
        """
        whole = self.add_loss_weights(batch)
        run = whole if select is None else whole.select(select(whole))
        metrics = self.worker.forward_backward(run, self.loss, **self._asked, reductions=self._reductions(whole))
        metrics = merge(_per_update(metrics), self.worker.optim_step())
        if metrics["optim/skipped"].value:
            self._note_skipped(metrics)
        else:
            self.skipped, self._updated_version = 0, self.worker.version
        if adjust_metrics is not None:
            metrics = adjust_metrics(metrics, whole, run)
        metrics = self._prefixed(metrics)
        for listener in list(self.listeners):
            listener(self, metrics)
        return metrics

    def load(self, folder: Path, *, skipped: int = 0) -> None:
        """Restores the model and optimizer that its worker saved. Raises CheckpointError where they don't fit.

        Args: skipped: updates in a row that had been skipped by then.
        """
        self.worker.load(folder)
        self.skipped = skipped
        self._updated_version = None  # checkpoints are written between steps

    def _prefixed(self, metrics: Metrics) -> Metrics:
        return {f"{self.prefix}{name}": metric for name, metric in metrics.items()}

    def _note_skipped(self, metrics: Metrics) -> None:
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

    def update_all(self, batches: Iterable[Any]) -> Metrics:
        """One optimizer step for every `accumulate` batches of a data set; a remainder makes a last, smaller one.

        Raises: DataError: no batches at all.
        """
        metrics: Metrics = {}
        held: list[TokenBatch] = []
        for item in _listed(batches):
            held.append(self._checked(item))
            if len(held) == self.accumulate:
                metrics = merge(metrics, self.update(TokenBatch.cat(held)))
                held = []
        if held:
            return merge(metrics, self.update(TokenBatch.cat(held)))
        if not metrics:
            raise DataError("the data set has no batch, so nothing would be updated; give at least one")
        return metrics

    def evaluate(self, batches: Iterable[Any]) -> Metrics:
        """The loss and its metrics over a data set, without an update."""
        metrics: Metrics = {}
        for item in _listed(batches):
            metrics = merge(metrics, _per_update(self.evaluate_batch(self._checked(item))))
        return metrics

    def evaluate_batch(self, batch: TokenBatch) -> Metrics:
        """The loss and its metrics on a batch, or on a part of one that was weighed as a whole: then they add up.

        Args: batch: with weights, or they are made here.
        """
        batch = self.add_loss_weights(batch)
        found = self.worker.evaluate(batch, self.loss, **self._asked, reductions=self._reductions(batch))
        return self._prefixed(found)

    def _checked(self, item: Any) -> TokenBatch:
        """Returns an item of a data set as a batch. Raises DataError: it is none, or its ids are not the model's."""
        if not isinstance(item, TokenBatch):
            raise DataError(f"expected a TokenBatch, got {type(item).__name__}; make one by TokenBatch.from_groups")
        loaded = self.worker.loaded
        return check_ids(item, loaded.num_ids, loaded.name)


def check_ids(batch: TokenBatch, num_ids: int, name: str) -> TokenBatch:
    """Returns the batch. Raises DataError for a token id that a model does not know. Args: name: of the model."""
    highest = max(int(x.max()) for x in (batch.prefixes, batch.tokens))
    if highest >= num_ids:
        raise DataError(f"token id {highest} is outside the {num_ids} ids that {name} knows; take its own tokenizer")
    return batch


def _listed(batches: Any) -> Iterable[Any]:
    """Returns a data set of batches. Raises DataError for a single batch, or for its arrays by name."""
    if isinstance(batches, Mapping | TokenBatch) or not isinstance(batches, Iterable):
        raise DataError(
            f"expected batches, one for each mini-batch, got {type(batches).__name__}; give a list, e.g. [batch]"
        )
    return batches


def lower_lr_advice(role: Role = Role.ACTOR) -> str:
    """How to resume a run that went wrong with a lower learning rate, for messages.

    >>> lower_lr_advice(Role.CRITIC)[:70]
    'resume from an earlier checkpoint (trainer.resume=<its step-* folder>)'
    """
    name = role.value
    return (
        f"resume from an earlier checkpoint (trainer.resume=<its step-* folder>) with a lower {name}.optim.lr (from "
        f"Python {name}_optimizer) and trainer.allow_config_change=true, without which a resume keeps to the "
        "configuration that was saved"
    )


def _per_update(metrics: Metrics) -> Metrics:
    """Sums over one mini-batch (the loss, and what is weighted like it) as means over mini-batches."""
    return {n: Mean(m.value) if isinstance(m, Sum) else m for n, m in metrics.items()}
