"""PreferenceInputs, the argument of a preference loss (sums over each unit's two sides), and a loss's declarations.

A unit is a pair, or one row with a label. A row has one side: chosen if the label is desirable, else rejected.
Dim legend: s tokens of a micro-batch, n its sequences, u its units; U units of a whole optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from whet.errors import DataError
from whet.ops.masked import masked_column, segment_count, segment_sum
from whet.types import LossInputs

__all__ = [
    "Needs",
    "PreferenceInputs",
    "Side",
    "StepColumns",
    "StepInputs",
    "declared_needs",
    "make_pair",
    "needs",
    "preference_inputs",
]

LossOutput = tuple[Tensor, dict[str, Tensor]]
"""(loss [u], {metric: [u]})."""
LossFn = TypeVar("LossFn", bound=Callable[..., Any])
Generator = Callable[[Tensor], Tensor]
"""f'(exp d) of an f-divergence, as a function of the log-ratio d."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """One side of each unit: the sums of its sequences. All are 0 where a unit lacks this side.

    >>> side = make_pair((-3.0, -3.0), (-4.0, -2.0), length=(2, 1)).chosen
    >>> side.logratio, side.per_token(side.logps)
    (tensor([1.]), tensor([-1.5000]))
    """

    present: Tensor
    """Bool [u]: the unit has a sequence of this side."""
    length: Tensor
    """Long [u]: trained tokens."""
    logps: Tensor
    """[u], with gradient: Σ log π of the trained tokens; with ld_alpha those beyond the shorter side's length count
    ld_alpha each."""
    ref_logps: Tensor | None
    """[u]: the same of the reference; None = there is none, and it counts as 0."""
    score: Tensor
    """[u], with gradient: f'(exp logratio) of the f-divergence; the logratio itself for the reverse KL."""
    nll: Tensor
    """[u], with gradient: −Σ log π, every token alike."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """[u] each: the batch's columns of this side's sequences, by name."""

    @property
    def logratio(self) -> Tensor:
        """[u]: log π / π_ref of the side."""
        return self.logps if self.ref_logps is None else self.logps - self.ref_logps

    def per_token(self, number: Tensor) -> Tensor:
        """[u]: a number of the side divided by its length; 0 where that is 0."""
        return number / self.length.clamp(min=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class PreferenceInputs:
    """The argument of a preference loss: the u units of one micro-batch.

    >>> import torch
    >>> from whet.types import LossInputs
    >>> x = LossInputs(sequence=torch.tensor([0, 0, 1]), mask=torch.ones(3, dtype=torch.bool),
    ...                logprobs=torch.tensor([-1., -2., -4.]), ref_logprobs=torch.tensor([-1., -1., -1.]),
    ...                unit_of=torch.tensor([0, 0]), sequence_columns={"chosen": torch.tensor([1., 0.])})
    >>> p = preference_inputs(x)
    >>> p.chosen.logratio, p.rejected.logratio, p.chosen.length
    (tensor([-1.]), tensor([-3.]), tensor([2]))
    """

    chosen: Side
    rejected: Side
    x: LossInputs
    """The tokens, for a loss that looks at them."""

    def step_column(self, name: str) -> Tensor:
        """[u]: a column that was computed from the whole step before the update.

        Raises: DataError: there is no such column.
        """
        if name not in self.chosen.columns:
            raise DataError(
                f"the loss needs {name}, which is computed from the whole batch of an optimizer step: call "
                "PreferenceObjective.with_counts(batch), and with_passes, before the update"
            )
        return torch.where(self.chosen.present, self.chosen.columns[name], self.rejected.columns[name])


@dataclass(frozen=True, kw_only=True, eq=False)
class StepInputs:
    """The argument of a loss's `step` function before an update: the whole batch of the optimizer step.

    >>> step = StepInputs(rows=make_pair((-3.0, -3.0)), counted=torch.tensor([True]))
    >>> step.rows.chosen.length.sum()
    tensor(1)
    """

    rows: PreferenceInputs
    """Of all U units. The policy's numbers are its own before the update where the loss asks for that pass, else 0."""
    counted: Tensor
    """Bool [U]: the units with a trained token, which a mean over units counts."""
    mismatched: PreferenceInputs | None = None
    """Each prompt with another row's completion, where the loss asks for that pass."""
    running: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the loss keeps from step to step."""
    learning: bool = True
    """False in evaluation, which does not change the kept numbers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepColumns:
    """The result of a loss's `step` function.

    >>> StepColumns(columns={"tokens_per_pair": torch.tensor(2.5)}).running
    {}
    """

    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """By name: a number of each side [U 2] (chosen, rejected), of each unit [U], or one of all [] ."""
    running: Mapping[str, float] = field(default_factory=dict)
    """Numbers to keep for the next step."""


StepFn = Callable[..., StepColumns]
"""fn(step: StepInputs, **keywords of the loss) -> StepColumns."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The declaration of a preference loss by `needs`. A function without one has the defaults.

    >>> Needs().rows, Needs().reference
    ('pairs', True)
    """

    rows: Literal["pairs", "labels"] = "pairs"
    """Units of a chosen and a rejected side, or rows with a label."""
    reference: bool = True
    """It reads the reference's log-probabilities."""
    difference: bool = False
    """It uses only the difference of both scores. Then every f-divergence is valid, because β log Z(x) cancels."""
    weighable: bool = True
    """A pair's loss does not depend on other pairs, so it may be weighted (WPO)."""
    policy_pass: bool = False
    """Its step columns need the policy's log-probabilities before the update."""
    mismatched_pass: bool = False
    """Its step columns need mismatched rows, scored by policy and reference."""
    running: bool = False
    """It keeps numbers from step to step."""
    step: StepFn | None = None
    """Computes its step columns."""


def needs(**declared: Any) -> Callable[[LossFn], LossFn]:
    """Declares the input of a preference loss, for the learner and for error messages.

    Args: declared: fields of Needs that differ from their defaults.
    Returns: a decorator that marks the loss and returns it.

    >>> @needs(reference=False)
    ... def own(p, *, beta=0.1):
    ...     return -(beta * (p.chosen.logps - p.rejected.logps)).sigmoid().log()
    >>> declared_needs(own).reference, declared_needs(partial(own, beta=1.0)).rows, declared_needs(print).reference
    (False, 'pairs', True)
    """

    def declare(loss: LossFn) -> LossFn:
        loss.needs = Needs(**declared)  # pyright: ignore[reportFunctionMemberAccess]
        return loss

    return declare


def declared_needs(loss: Callable[..., Any]) -> Needs:
    """The declaration of a loss, or of a partial's function, by `needs`.

    >>> declared_needs(needs(rows="labels")(lambda p: p.chosen.logratio)).rows
    'labels'
    """
    while isinstance(loss, partial):
        loss = loss.func
    return getattr(loss, "needs", Needs())


def preference_inputs(
    x: LossInputs,
    *,
    side: str = "chosen",
    reference: bool = True,
    ld_alpha: float | None = None,
    generator: Generator | None = None,
) -> PreferenceInputs:
    """The sums of each unit's two sides.

    logps = Σ w log π over the trained tokens, w = 1; with ld_alpha w = α for the tokens of a sequence beyond the
    trained length of the shorter side.

    Args:
        x: with the column `side`, and with ref_logprobs where the reference is read.
        side: the column per sequence that is 1 for the chosen side, 0 for the rejected one.
        reference: read ref_logprobs; False = the reference counts as 0 everywhere.
        ld_alpha: α of LD-DPO; None = 1.
        generator: f' of an f-divergence, as a function of the log-ratio; None = the reverse KL.
    Returns: PreferenceInputs of u units.
    Raises: DataError: one of them is missing.
    Source: LD-DPO (arXiv:2409.06411) and f-DPO (arXiv:2309.16240), as TRL's DPOTrainer.

    >>> x = LossInputs(sequence=torch.tensor([0, 0, 1]), mask=torch.ones(3, dtype=torch.bool),
    ...                logprobs=torch.tensor([-1., -2., -4.]), unit_of=torch.tensor([0, 0]),
    ...                sequence_columns={"chosen": torch.tensor([1., 0.])})
    >>> preference_inputs(x, reference=False, ld_alpha=0.5).chosen.logps  # -1 - 0.5 * 2
    tensor([-2.])
    """
    place = 2 * x.unit_of + (x.need(side) < 0.5).long()
    place_of_token, number = place.index_select(0, x.sequence), 2 * x.num_units
    sums = lambda values: segment_sum(masked_column(values, x.mask), place_of_token, number).view(-1, 2)
    length = segment_count(x.mask, place_of_token, number).view(-1, 2)
    present = torch.zeros(number, dtype=torch.bool, device=place.device).index_fill(0, place, True).view(-1, 2)
    weights = None if ld_alpha is None else _length_weights(x, length, ld_alpha)
    weighted = lambda values: sums(values if weights is None else masked_column(values, x.mask) * weights)
    logps, ref = weighted(x.logprobs), weighted(x.need("ref_logprobs")) if reference else None
    logratio = logps if ref is None else logps - ref
    score, nll = logratio if generator is None else generator(logratio), -sums(x.logprobs)
    columns = {n: _of_sides(c, place, number) for n, c in x.sequence_columns.items() if c.dim() == 1}
    sides = (
        Side(
            present=present[:, i],
            length=length[:, i],
            logps=logps[:, i],
            ref_logps=None if ref is None else ref[:, i],
            score=score[:, i],
            nll=nll[:, i],
            columns={name: c[:, i] for name, c in columns.items()},
        )
        for i in (0, 1)
    )
    return PreferenceInputs(chosen=next(sides), rejected=next(sides), x=x)


def make_pair(
    logps: tuple[float, float],
    ref_logps: tuple[float, float] = (0.0, 0.0),
    length: tuple[int, int] = (1, 1),
    **columns: float,
) -> PreferenceInputs:
    """One pair of made-up sums, (chosen, rejected) each: for examples, and to try a loss of one's own.

    Args: logps, ref_logps: Σ log π of policy and reference. length: trained tokens. columns: step columns.
    Returns: PreferenceInputs of one unit.

    >>> make_pair((-3.0, -3.0), (-4.0, -2.0)).chosen.logratio
    tensor([1.])
    """
    tokens = [torch.full((n,), logp / n) for n, logp in zip(length, logps)]
    refs = [torch.full((n,), logp / n) for n, logp in zip(length, ref_logps)]
    x = LossInputs(
        sequence=torch.tensor([0] * length[0] + [1] * length[1]),
        mask=torch.ones(sum(length), dtype=torch.bool),
        logprobs=torch.cat(tokens),
        ref_logprobs=torch.cat(refs),
        unit_of=torch.tensor([0, 0]),
        sequence_columns={"chosen": torch.tensor([1.0, 0.0]), **{n: torch.full((2,), c) for n, c in columns.items()}},
    )
    return preference_inputs(x)


def _length_weights(x: LossInputs, length: Tensor, ld_alpha: float) -> Tensor:
    """[s]: 1, and α for the tokens of a sequence beyond the shorter side's trained length."""
    seen = x.mask.long().cumsum(0)
    lengths = segment_count(torch.ones_like(x.mask), x.sequence, x.num_sequences)
    before = torch.cat([seen.new_zeros(1), seen]).index_select(0, lengths.cumsum(0) - lengths)
    position = seen - before.index_select(0, x.sequence)  # 1 for the first trained token
    shared = length.amin(1).index_select(0, x.unit)
    return torch.where(position > shared, ld_alpha, 1.0).to(x.logprobs.dtype)


def _of_sides(column: Tensor, place: Tensor, number: int) -> Tensor:
    """[u 2]: the column of each side's sequences, which have equal values; 0 if the unit lacks the side."""
    return column.new_zeros(number).index_copy(0, place, column).view(-1, 2)
