"""The objective of preference training: one loss, or a weighted sum of losses, of pairs or of rows with a label.

    l = v · Σ_k w_k l_k        per unit; v = 1, or WPO's weight of the pair

The weights of units turn it into one number later. Dim legend: s tokens of a micro-batch, n its sequences, u its
units; N sequences, S tokens and U units of a whole optimizer step.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from whet.errors import ConfigError, DataError
from whet.ops.masked import masked_column, segment_count, segment_sum
from whet.ops.preference.inputs import (
    LossOutput,
    Needs,
    PreferenceInputs,
    StepInputs,
    declared_needs,
    preference_inputs,
)
from whet.ops.preference.pairs import sigmoid
from whet.types import LossInputs, TokenBatch

__all__ = ["PreferenceObjective", "StepPasses"]

_CHOSEN_METRICS, _REJECTED_METRICS = ("rewards/chosen", "logps/chosen"), ("rewards/rejected", "logps/rejected")


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPasses:
    """Log-probabilities of policy and reference before an update, for losses that need them.

    >>> StepPasses(logprobs=torch.tensor([-1.0])).mismatched is None
    True
    """

    logprobs: Tensor | None = None
    """[S]: the policy's, of the batch."""
    mismatched: TokenBatch | None = None
    """Of `mismatched_rows`, with the reference's logprobs as its column ref_logprobs if there is a reference."""
    mismatched_logprobs: Tensor | None = None
    """The policy's, of the mismatched rows."""


@dataclass(frozen=True, kw_only=True)
class PreferenceObjective:
    """The loss of preference training of each unit: loss(x) -> ([u], metrics), for RoleTrainer with loss_per="unit".

    l = v · Σ_k w_k l_k, w the loss_weights; with use_weighting v = exp(mean over y_w's tokens of (log π − log Σ p²)) ·
    the same of y_l, a constant; else v = 1.
    Call it with LossInputs of units: with the column chosen (or label), with ref_logprobs where `needs.reference`, and
    with the columns that `with_counts` and `with_passes` make of the whole batch.
    Returns: (loss [u], metrics [u] each), by TRL's names: rewards/chosen, rewards/rejected (β r unless a loss has
        rewards of its own), rewards/accuracies, rewards/margins, logps/chosen, logps/rejected; logits/chosen,
        logits/rejected, mean_token_accuracy and, where the loss was given it, entropy, which are sums (see `ratios`);
        the losses' own, and with several losses each as loss/<name>. Of rows with a label those of a side are 0 where
        the row is of the other, and rows/chosen, rows/rejected say which.
    Raises: ConfigError: losses that don't go together. DataError: a missing column, or a loss of another shape.
    Source: WPO (arXiv:2406.11827), MPO (arXiv:2411.10442); agrees with TRL's DPOTrainer.

    >>> x = LossInputs(sequence=torch.tensor([0, 1]), mask=torch.ones(2, dtype=torch.bool),
    ...                logprobs=torch.tensor([-1., -1.]), ref_logprobs=torch.tensor([-1., -1.]),
    ...                unit_of=torch.tensor([0, 0]), sequence_columns={"chosen": torch.tensor([1., 0.])})
    >>> PreferenceObjective()(x)[0]  # log 2
    tensor([0.6931])
    """

    losses: Mapping[str, Callable[..., Any]] = field(default_factory=lambda: {"sigmoid": sigmoid})
    """fn(p: PreferenceInputs) -> [u], or ([u], metrics), with their parameters bound, by the name that they are logged
    under."""
    loss_weights: tuple[float, ...] | None = None
    """w, in the order of the losses; None = 1 each."""
    beta: float = 0.1
    """β of the rewards that are logged."""
    reference_free: bool = False
    """The reference counts as 0 everywhere: none is read."""
    ld_alpha: float | None = None
    """α of LD-DPO; None = 1."""
    generator: Callable[[Tensor], Tensor] | None = None
    """f' of another f-divergence than the reverse KL."""
    use_weighting: bool = False
    """Weigh each pair by the probability of both answers under the policy, as WPO."""

    def __post_init__(self) -> None:
        """Checks that the losses go together."""
        if not self.losses:
            raise ConfigError("a preference objective needs a loss, got none; pass losses={name: loss}")
        if self.loss_weights is not None and len(self.loss_weights) != len(self.losses):
            raise ConfigError(
                f"loss_weights has {len(self.loss_weights)} numbers for {len(self.losses)} losses "
                f"({', '.join(self.losses)}); give one for each"
            )
        declared = {name: declared_needs(loss) for name, loss in self.losses.items()}
        if len({need.rows for need in declared.values()}) > 1:
            shown = ", ".join(f"{name}: {need.rows}" for name, need in declared.items())
            raise ConfigError(f"losses of pairs and of rows with a label can't be mixed ({shown}); choose one kind")
        if self.generator is not None and (wrong := [n for n, need in declared.items() if not need.difference]):
            raise ConfigError(
                f"loss {wrong[0]!r} is not a function of the difference of two rewards, and only such a loss allows an "
                "f-divergence other than reverse_kl; leave f_divergence_type at 'reverse_kl'"
            )
        if self.use_weighting and (wrong := [n for n, need in declared.items() if not need.weighable]):
            raise ConfigError(
                f"loss {wrong[0]!r} ranks the batch, so no pair has a loss to weigh; leave use_weighting out"
            )
        for option, on in (("use_weighting", self.use_weighting), ("ld_alpha", self.ld_alpha is not None)):
            if on and self.needs.rows == "labels":
                raise ConfigError(
                    f"{option} compares the two answers of a pair, and {', '.join(self.losses)} has no pairs; leave "
                    f"{option} out"
                )

    @functools.cached_property
    def needs(self) -> Needs:
        """The needs of all its losses together."""
        declared = [declared_needs(loss) for loss in self.losses.values()]
        return Needs(
            rows=declared[0].rows,
            reference=not self.reference_free and any(n.reference for n in declared),
            policy_pass=any(n.policy_pass for n in declared),
            mismatched_pass=any(n.mismatched_pass for n in declared),
            running=any(n.running for n in declared),
        )

    @property
    def ratios(self) -> dict[str, str]:
        """Metrics that are sums over units -> the metric that divides them at the end of a step."""
        ratios = {
            "entropy": "tokens/both",
            "logits/chosen": "tokens/chosen",
            "logits/rejected": "tokens/rejected",
            "mean_token_accuracy": "tokens/chosen",
        }
        if self.needs.rows == "labels":
            ratios |= dict.fromkeys(_CHOSEN_METRICS, "rows/chosen") | dict.fromkeys(_REJECTED_METRICS, "rows/rejected")
        return ratios

    @property
    def constants(self) -> tuple[str, ...]:
        """The model outputs that it needs in addition to log-probabilities: RoleTrainer.set_loss(constants=...)."""
        return ("correct", "mean_logits", *(("log_sum_sq_probs",) if self.use_weighting else ()))

    def inputs(self, x: LossInputs) -> PreferenceInputs:
        """The argument of the losses: the sums of each unit's sides."""
        return preference_inputs(
            x,
            side=self._side(x),
            reference=self.needs.reference,
            ld_alpha=self.ld_alpha,
            generator=self.generator,
        )

    def with_counts(self, batch: TokenBatch) -> TokenBatch:
        """The batch with the step columns that need no forward pass, e.g. a count of tokens.

        Args: batch: of whole units.
        Returns: it with more columns per sequence.
        Raises: DataError: a pair without one of its sides, or a row that is a pair where labels are needed.
        """
        x = _loss_inputs(batch, torch.zeros(batch.num_tokens))
        rows = preference_inputs(x, side=self._side(x), reference=False)
        self._check_sides(rows)
        step = StepInputs(rows=rows, counted=_trained_units(batch))
        return self._with_columns(batch, step, passes=False)[0]

    def with_passes(
        self,
        batch: TokenBatch,
        passes: StepPasses,
        *,
        running: Mapping[str, float] | None = None,
        learning: bool = True,
    ) -> tuple[TokenBatch, dict[str, float]]:
        """The batch with the step columns that need a forward pass, and the numbers to keep.

        Args: batch: of whole units, with ref_logprobs where `needs.reference`. passes: of `needs.policy_pass`
            and `needs.mismatched_pass`. running: the kept numbers. learning: False in evaluation, which keeps them.
        Returns: (the batch with more columns per sequence, the numbers to keep).
        """
        logprobs = torch.zeros(batch.num_tokens) if passes.logprobs is None else passes.logprobs
        mismatched = None
        if passes.mismatched is not None and passes.mismatched_logprobs is not None:
            x = _loss_inputs(passes.mismatched, passes.mismatched_logprobs)
            mismatched = preference_inputs(x, reference=self.needs.reference)
        step = StepInputs(
            rows=self.inputs(_loss_inputs(batch, logprobs)),
            counted=_trained_units(batch),
            mismatched=mismatched,
            running=running or {},
            learning=learning,
        )
        batch, numbers = self._with_columns(batch, step, passes=True)
        return batch, numbers if learning else dict(step.running)

    def _with_columns(
        self, batch: TokenBatch, step: StepInputs, *, passes: bool
    ) -> tuple[TokenBatch, dict[str, float]]:
        """The columns of the losses that need a pass, or of those that don't."""
        x = _loss_inputs(batch, torch.zeros(batch.num_tokens))
        place = batch.unit_of, (x.need(self._side(x)) < 0.5).long()
        running = dict(step.running)
        for loss in self.losses.values():
            needs = declared_needs(loss)
            if needs.step is None or (needs.policy_pass or needs.mismatched_pass) != passes:
                continue
            parameters = inspect.signature(needs.step).parameters.values()
            names = {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
            bound = loss.keywords if isinstance(loss, functools.partial) else {}
            options = {name: value for name, value in bound.items() if name in names}
            result = needs.step(dataclasses.replace(step, running=running), **options)
            batch = batch.with_sequence_columns(**{n: _per_sequence(c, place) for n, c in result.columns.items()})
            running |= result.running
        return batch, running

    def __call__(self, x: LossInputs) -> LossOutput:
        """The loss and the metrics of every unit."""
        p = self.inputs(x)
        weights = self.loss_weights or (1.0,) * len(self.losses)
        factor = self._pair_weights(x, p) if self.use_weighting else 1.0
        total, metrics = torch.zeros_like(p.chosen.logps), {}
        for (name, loss), weight in zip(self.losses.items(), weights, strict=True):
            result = loss(p)
            value, own = result if isinstance(result, tuple) else (result, {})
            if value.shape != total.shape:
                raise DataError(
                    f"loss {name!r} has the shape {list(value.shape)}; it must have one number for each of the "
                    f"{len(total)} units"
                )
            value = value * factor
            total = total + weight * value
            each = {f"loss/{name}": value} if len(self.losses) > 1 else {}
            metrics = {**own, **each, **metrics}
        if x.logprobs.requires_grad and not total.requires_grad:
            raise DataError("the loss has no gradient: make it of p.chosen.logps and p.rejected.logps, not detached")
        metrics = self._all_metrics(x, p, metrics)
        return total, {name: value.detach().to(total.dtype) for name, value in metrics.items()}

    def _side(self, x: LossInputs) -> str:
        """The column that marks the sequences of the chosen side."""
        return "label" if self.needs.rows == "labels" and "label" in x.sequence_columns else "chosen"

    def _check_sides(self, rows: PreferenceInputs) -> None:
        both = rows.chosen.present & rows.rejected.present
        pairs = self.needs.rows == "pairs"
        if pairs and not bool(both.all()):
            raise DataError(
                f"unit {int((~both).nonzero()[0])} is no pair: {', '.join(self.losses)} needs a chosen and a rejected "
                "side; rows with a label take loss_type=kto or apo_zero_unpaired"
            )
        if not pairs and bool(both.any()):
            raise DataError(
                f"unit {int(both.nonzero()[0])} is a pair: {', '.join(self.losses)} takes each row by itself; lay the "
                "batch with TokenBatch.from_examples(paired=False)"
            )

    def _pair_weights(self, x: LossInputs, p: PreferenceInputs) -> Tensor:
        """[u]: WPO's weight of each pair, a constant."""
        aligned = masked_column(x.logprobs.detach() - x.need("log_sum_sq_probs"), x.mask)
        units = x.unit_of.index_select(0, x.sequence)
        of_chosen = (x.need("chosen") >= 0.5).index_select(0, x.sequence)
        mean = lambda side, mask: side.per_token(segment_sum(torch.where(mask, aligned, 0.0), units, x.num_units))
        return (mean(p.chosen, of_chosen) + mean(p.rejected, ~of_chosen)).exp()

    def _all_metrics(self, x: LossInputs, p: PreferenceInputs, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The metrics of every unit; a loss's own have precedence."""
        reward = lambda side: self.beta * side.logratio
        metrics = {"rewards/chosen": reward(p.chosen), "rewards/rejected": reward(p.rejected)}
        metrics |= {"logps/chosen": p.chosen.logps, "logps/rejected": p.rejected.logps, **own}
        if self.needs.rows == "labels":
            metrics |= {"rows/chosen": p.chosen.present, "rows/rejected": p.rejected.present}
            for side, names in ((p.chosen, _CHOSEN_METRICS), (p.rejected, _REJECTED_METRICS)):
                metrics |= {name: torch.where(side.present, metrics[name], 0.0) for name in names}
        else:
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
            metrics["rewards/accuracies"] = metrics["rewards/margins"] > 0
        return {**metrics, **self._token_metrics(x, p)}

    def _token_metrics(self, x: LossInputs, p: PreferenceInputs) -> dict[str, Tensor]:
        """The metrics of tokens: sums over each unit, and the counts to divide them by."""
        of_chosen = (x.need(self._side(x)) >= 0.5).index_select(0, x.sequence)
        total = lambda values, mask: segment_sum(torch.where(mask, values.detach(), 0.0), x.unit, x.num_units)
        metrics = {"tokens/chosen": p.chosen.length, "tokens/rejected": p.rejected.length}
        if x.correct is not None:
            metrics["mean_token_accuracy"] = segment_count(x.correct & x.mask & of_chosen, x.unit, x.num_units)
        if x.mean_logits is not None:
            metrics["logits/chosen"] = total(x.mean_logits, x.mask & of_chosen)
            metrics["logits/rejected"] = total(x.mean_logits, x.mask & ~of_chosen)
        if x.entropy is not None:
            metrics |= {"entropy": total(x.entropy, x.mask), "tokens/both": p.chosen.length + p.rejected.length}
        return metrics


def _trained_units(batch: TokenBatch) -> Tensor:
    """Bool [U]: the units with a trained token."""
    return segment_count(batch.mask, batch.unit, batch.num_units) > 0


def _loss_inputs(batch: TokenBatch, logprobs: Tensor) -> LossInputs:
    """Returns the loss inputs of a whole batch."""
    return LossInputs(
        sequence=batch.sequence,
        mask=batch.mask,
        logprobs=logprobs,
        unit_of=batch.unit_of,
        num_sequences=batch.num_sequences,
        num_units=batch.num_units,
        token_columns={n: c for n, c in batch.token_columns.items() if n != "mask"},
        sequence_columns=batch.sequence_columns,
    )


def _per_sequence(column: Tensor, place: tuple[Tensor, Tensor]) -> Tensor:
    """[N]: a column of sides [U 2], of units [U] or of the whole step [], repeated for each sequence."""
    unit, side = place
    if column.dim() == 0:
        return column.expand(len(unit)).clone()
    return column[unit] if column.dim() == 1 else column[unit, side]
