"""Losses of single rows with a label, desirable or not, and the mismatched rows for KTO's KL.

Dim legend: u units, a row each; U units of a whole optimizer step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whet.errors import DataError
from whet.ops.preference.inputs import PreferenceInputs, StepColumns, StepInputs, needs
from whet.types import TokenBatch

__all__ = ["apo_zero_unpaired", "kto", "mismatched_rows"]


def mismatched_rows(batch: TokenBatch, max_length: int | None = None) -> TokenBatch:
    """Each sequence's prompt with a completion of the previous row; the first row takes those of the last.

    A row's k-th sequence gets the k-th completion of the previous row, modulo the number of its completions.
    Args: batch: at least two rows. max_length: the most tokens of prompt and completion together; longer ones are
        truncated at the end. None = no limit.
    Returns: as many sequences, each its own unit, without the columns of the reference and of rows.
    Raises: DataError: there is only one row.
    Source: KTO (arXiv:2402.01306); agrees with TRL's KTOTrainer for single rows, which turns by one within what was a
        micro-batch when the data set was read.

    >>> from whet.types import Example, TrainSequence
    >>> import numpy as np
    >>> of = lambda x, y: TrainSequence(prefix=np.array([x]), tokens=np.array([y]), mask=np.array([True]))
    >>> rows = [Example(sequences=(of(x, 10 * x),)) for x in (1, 2, 3)]
    >>> turned = mismatched_rows(TokenBatch.from_examples(rows))
    >>> turned.prefixes.tolist(), turned.tokens.tolist()
    ([1, 2, 3], [30, 10, 20])
    """
    rows = batch.group_of.index_select(0, batch.trajectory_of)
    n = batch.num_sequences
    if int(rows.max()) == int(rows.min()):
        raise DataError(
            "a KL over mismatched rows needs at least two rows in an optimizer step, got 1; raise the batch size"
        )
    source = _in_previous_row(rows)
    lengths = batch.lengths.index_select(0, source)
    if max_length is not None:
        room = max_length - batch.prefix_lengths.index_select(0, batch.prefix_of)
        lengths = torch.minimum(lengths, room.clamp(min=1))
    ends = lengths.cumsum(0)
    first = batch.starts.index_select(0, source) - (ends - lengths)
    places = torch.arange(int(ends[-1])) + first.repeat_interleave(lengths)
    kept = ("tokens", "mask", "sampler_logprobs", "versions")
    return TokenBatch(
        prefixes=batch.prefixes,
        prefix_ends=batch.prefix_ends,
        prefix_of=batch.prefix_of,
        ends=ends,
        trajectory_of=torch.arange(n),
        group_of=torch.arange(n),
        token_columns={name: batch.token_columns[name].index_select(0, places) for name in kept},
        sequence_columns={"chosen": torch.ones(n)},
    )


def _in_previous_row(rows: Tensor) -> Tensor:
    """[n]: for each sequence one of the previous row; the first row takes the last. Args: rows [n]: the row of each.

    >>> _in_previous_row(torch.tensor([0, 0, 1, 2])).tolist()
    [3, 3, 0, 2]
    """
    order = rows.argsort(stable=True)
    sizes = rows.unique(return_counts=True)[1]
    starts, row = sizes.cumsum(0) - sizes, torch.arange(len(sizes)).repeat_interleave(sizes)
    before, place = (row - 1) % len(sizes), torch.arange(len(rows)) - starts[row]
    source = torch.empty_like(order)
    source[order] = order[starts[before] + place % sizes[before]]
    return source


def _kl(step: StepInputs) -> StepColumns:
    """Z of this step; the z of the step before if this step has only one row, because nothing can be mismatched."""
    z = step.running.get("kto_kl", 0.0)
    if step.mismatched is not None:
        z = float(step.mismatched.chosen.logratio.double().mean().clamp(min=0))
    return StepColumns(columns={"kto_kl": torch.tensor(z, dtype=torch.float64)}, running={"kto_kl": z})


@needs(rows="labels", mismatched_pass=True, running=True, step=_kl)
def kto(
    p: PreferenceInputs, *, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Prospect theory: gains and losses relative to the policy's divergence from the reference on other answers.

    l = λ_D (1 − σ(β (r − z))) for a desirable row, λ_U (1 − σ(β (z − r))) for another; z = max(0, mean of
    log π(y'|x) / π_ref(y'|x)) over the step's mismatched rows, a constant
    Args: p: rows with a label, with the step column kto_kl, z. beta: β. desirable_weight: λ_D. undesirable_weight: λ_U.
    Returns: ([u], metrics). z is made in a pass without gradient over the mismatched rows of the whole optimizer step;
        a step of one row has the z of the step before.
    Source: KTO (arXiv:2402.01306), equation 7; agrees with TRL's KTOTrainer, which has a z for each micro-batch: the
        same without gradient accumulation.

    >>> from whet.ops.preference import make_pair
    >>> kto(make_pair((-3.0, -3.0), (-4.0, -2.0), (2, 1), kto_kl=0.5), beta=0.5)[0]
    tensor([0.4378])
    """
    z = p.step_column("kto_kl").to(p.chosen.logps.dtype)
    gain = desirable_weight * (beta * (z - p.chosen.logratio)).sigmoid()
    loss = undesirable_weight * (beta * (p.rejected.logratio - z)).sigmoid()
    return torch.where(p.chosen.present, gain, loss), {"kl": z}


@needs(rows="labels")
def apo_zero_unpaired(
    p: PreferenceInputs, *, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> Tensor:
    """apo_zero of single rows: no KL, so no further passes.

    l = λ_D (1 − σ(β r)) for a desirable row, λ_U σ(β r) for another
    Args: p: rows with a label. beta: β. desirable_weight: λ_D. undesirable_weight: λ_U.
    Returns: [u].
    Source: APO (arXiv:2408.06266); agrees with TRL's KTOTrainer.

    >>> from whet.ops.preference import make_pair
    >>> apo_zero_unpaired(make_pair((-3.0, -3.0), (-4.0, -2.0), (2, 1)), beta=0.5)
    tensor([0.3775])
    """
    gain = desirable_weight * (-beta * p.chosen.logratio).sigmoid()
    loss = undesirable_weight * (beta * p.rejected.logratio).sigmoid()
    return torch.where(p.chosen.present, gain, loss)
