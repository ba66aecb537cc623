"""Losses that compare sorted numbers of the batch, the k-th smallest with the k-th smallest, and not single pairs.

The partner of a pair may lie in another micro-batch. So a pass of the policy before the update gives the numbers of the
whole optimizer step. They are sorted, and each pair gets its partner's number as a column, a constant. The loss is that
of the whole step in value and in gradient. TRL sorts each micro-batch.
Dim legend: u units; U units of a whole optimizer step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whet.ops.preference.inputs import PreferenceInputs, StepColumns, StepInputs, needs
from whet.ops.preference.pairs import smoothed_logsigmoid

__all__ = ["aot", "aot_unpaired"]


def _partner(numbers: Tensor, others: Tensor, counted: Tensor) -> Tensor:
    """[U]: for each number the one of the same rank among `others`; 0 for units that are not counted.

    >>> _partner(torch.tensor([3., 1., 2.]), torch.tensor([10., 30., 20.]), torch.ones(3, dtype=torch.bool))
    tensor([30., 10., 20.])
    """
    partners = torch.zeros_like(numbers)
    places = counted.nonzero().squeeze(1)
    order = numbers[places].argsort(stable=True)
    partners[places[order]] = others[places].sort().values
    return partners


def _reference_of_rank(step: StepInputs) -> StepColumns:
    """The reference's k-th least margin for the pair whose own is the k-th least."""
    chosen, rejected = step.rows.chosen, step.rows.rejected
    zeros = torch.zeros_like(chosen.logps)
    ref = zeros if chosen.ref_logps is None or rejected.ref_logps is None else chosen.ref_logps - rejected.ref_logps
    return StepColumns(columns={"aot_partner": _partner(chosen.logps - rejected.logps, ref, step.counted)})


@needs(weighable=False, policy_pass=True, step=_reference_of_rank)
def aot(p: PreferenceInputs, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """Margins as a distribution: the policy's are to dominate the reference's.

    l = −(1 − ε) log σ(β (m − q)) − ε log σ(−β (m − q)), m = log π(y_w|x) − log π(y_l|x) of the pair, the k-th least of
    the step, and q the k-th least of the reference's
    Args: p: pairs, with the step column aot_partner, q. beta: β. label_smoothing: ε.
    Returns: [u]. The column is made in a pass without gradient over the whole optimizer step.
    Source: AOT (arXiv:2406.05882), its paired form; agrees with TRL, which sorts each micro-batch by itself: the same
        without gradient accumulation.

    >>> from whet.ops.preference import make_pair
    >>> aot(make_pair((-3.0, -3.0), (-4.0, -2.0), (2, 1), aot_partner=-2.0), beta=0.5)
    tensor([0.3133])
    """
    margin = p.chosen.logps - p.rejected.logps
    return smoothed_logsigmoid(beta * (margin - p.step_column("aot_partner").to(margin.dtype)), label_smoothing)


def _other_of_rank(step: StepInputs) -> StepColumns:
    """For each side the other side's log-ratio of the same rank."""
    chosen, rejected = step.rows.chosen.logratio, step.rows.rejected.logratio
    partners = [_partner(a, b, step.counted) for a, b in ((chosen, rejected), (rejected, chosen))]
    return StepColumns(columns={"aot_other": torch.stack(partners, 1)})


@needs(weighable=False, policy_pass=True, step=_other_of_rank)
def aot_unpaired(p: PreferenceInputs, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """Rewards as distributions: those of chosen answers are to dominate those of rejected ones, whatever the prompt.

    L = Σ_k f(c_k − d_k) / U, f(z) = −(1 − ε) log σ(β z) − ε log σ(−β z), c_k and d_k the k-th least r_w and r_l of the
    step's U pairs; of one pair l = ½ (f(r_w − d) + f(c − r_l)) with the gradient of their sum, d and c the partners of
    its sides
    Args: p: pairs, with the step column aot_other, the partners. beta: β. label_smoothing: ε.
    Returns: [u]. Each f has two arguments in different pairs: both pairs have it, half of its value and the gradient
        of their own argument each. The column is made in a pass without gradient over the whole optimizer step.
    Source: AOT (arXiv:2406.05882), its unpaired form; agrees with TRL, which sorts each micro-batch by itself: the
        same without gradient accumulation.

    >>> from whet.ops.preference import make_pair
    >>> aot_unpaired(make_pair((-3.0, -3.0), (-4.0, -2.0), (2, 1), aot_other=0.5), beta=0.5)
    tensor([0.4814])
    """
    p.step_column("aot_other")
    sides = [(side.logratio, side.columns["aot_other"].to(side.logps.dtype)) for side in (p.chosen, p.rejected)]
    (chosen, below), (rejected, above) = sides
    both = smoothed_logsigmoid(beta * (chosen - below), label_smoothing)
    both = both + smoothed_logsigmoid(beta * (above - rejected), label_smoothing)
    return both - 0.5 * both.detach()
