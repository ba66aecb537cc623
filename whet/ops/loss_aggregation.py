"""Loss aggregation as token weights: the only place where a loss is divided.

The weights are computed once per optimizer step from counts over the whole global batch. The aggregate is
(weights * loss).sum(), so micro-batches, ranks and accumulation only add. Dim legend: S tokens on the token axis.
A unit is a trajectory, which the names of the modes call a sequence.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from numbers import Real

import torch
from torch import Tensor

from whet.errors import ConfigError, DataError, lookup_error
from whet.ops.masked import segment_count, to_fp32
from whet.ops.shapes import check_shapes

__all__ = ["LOSS_AGG_MODES", "aggregate", "token_weights", "unit_weights"]

Weighting = Callable[..., Tensor]
"""fn(mask Bool [S], trajectory Long [S], **options) -> the weight of each token, [S] or 0-d.

It receives those of norm, num_units and prompt (Long [S], the prompt of each token) that it has as arguments.
"""


def _token_mean(mask: Tensor, trajectory: Tensor) -> Tensor:
    """1/M, M the trained tokens."""
    return 1 / mask.sum().clamp(min=1).double()


def _sequence_mean_token_mean(mask: Tensor, trajectory: Tensor, *, num_units: float | None) -> Tensor:
    """1/(n·U), n the trained tokens of the sequence, U the sequences."""
    lengths = _unit_lengths(mask, trajectory).clamp(min=1).index_select(0, trajectory)
    return 1 / (lengths * _units(mask, trajectory, num_units))


def _sequence_mean_token_scale(
    mask: Tensor, trajectory: Tensor, *, norm: float | None, num_units: float | None
) -> Tensor:
    """1/(norm·U), norm a constant: by default the longest completion allowed."""
    if norm is None:
        raise ConfigError(
            "loss_agg_mode 'sequence-mean-token-scale' divides by a constant: give norm, the longest completion allowed"
        )
    return 1 / (norm * _units(mask, trajectory, num_units))


def _seq_mean_token_sum(mask: Tensor, trajectory: Tensor, *, num_units: float | None) -> Tensor:
    """1/U, U the sequences."""
    return 1 / _units(mask, trajectory, num_units)


def _sequence_mean_token_sum_norm(
    mask: Tensor, trajectory: Tensor, *, norm: float | None, num_units: float | None
) -> Tensor:
    """1/norm; 1/U without one."""
    units = _units(mask, trajectory, num_units)
    return 1 / (units if norm is None else torch.full_like(units, norm))


def _prompt_mean_token_mean(mask: Tensor, trajectory: Tensor, *, num_units: float | None, prompt: Tensor) -> Tensor:
    """1/(m·P), m the trained tokens of all completions of the prompt, P the prompts."""
    prompts = None if num_units is None else float(len(prompt.unique()))
    return _sequence_mean_token_mean(mask, prompt, num_units=prompts)


LOSS_AGG_MODES: dict[str, Weighting] = {
    "prompt-mean-token-mean": _prompt_mean_token_mean,
    "seq-mean-token-sum": _seq_mean_token_sum,
    "sequence-mean-token-mean": _sequence_mean_token_mean,
    "sequence-mean-token-scale": _sequence_mean_token_scale,
    "sequence-mean-token-sum-norm": _sequence_mean_token_sum_norm,
    "token-mean": _token_mean,
}
"""Aggregations by Tunix's names, and the mean over prompts.

The aggregations of other libraries, with loss_agg_units and loss_agg_norm:

    Tunix                              the same names; units "trained"
    TRL grpo, sapo; TorchRL            sequence-mean-token-mean, units "all": rows without a trained token count
        prompt_mean (a mean over rows)
    TRL bnpo, dapo, cispo, vespo;      token-mean
        TorchRL token_mean
    TRL dr_grpo                        sequence-mean-token-scale, norm = the longest completion, units "all"
    TRL luspo                          seq-mean-token-sum, units "all"
    a constant length of the batch     sequence-mean-token-sum-norm with a norm
    ScaleRL's prompt average           prompt-mean-token-mean: each prompt's tokens are pooled, prompts weigh alike

All divide by counts of the whole optimizer step. TRL takes bnpo's count, and that of rows, of each micro-batch, and
divides by their number: the same where there is one, or for rows where all are of one size.
"""


def token_weights(
    mask: Tensor,
    trajectory: Tensor,
    mode: str | Weighting,
    *,
    norm: float | None = None,
    num_units: float | None = None,
    prompt: Tensor | None = None,
) -> Tensor:
    """Returns the weight of each token's loss in the aggregate of a whole optimizer step.

    With M = Σ m, n_i the trained tokens of unit i, U the units that have any: token-mean 1/M; sequence-mean-token-mean
    1/(n_i·U); sequence-mean-token-scale 1/(norm·U); seq-mean-token-sum 1/U; sequence-mean-token-sum-norm 1/norm;
    prompt-mean-token-mean 1/(n_p·P), n_p the trained tokens of a prompt's trajectories, P the prompts that have any.

    Args:
        mask: Bool [S], True = trained.
        trajectory: Long [S], 0, 1, ...: the trajectory of each token.
        mode: a name of LOSS_AGG_MODES or a function like them.
        norm: a positive constant for the two modes that have one (the others don't depend on it): token-scale needs it,
            the longest completion in tokens; sum-norm takes U without it.
        num_units: takes U's place, e.g. to count units with nothing to train as well; P is all prompts then.
        prompt: Long [S], the prompt of each token, for modes that ask for it.
    Returns: float64 [S]; 0 where masked out.
    Raises: ConfigError: an unknown mode, a norm or num_units that is not a positive number, token-scale without norm.
        DataError: mask and trajectory of different shapes; no prompt for a mode that asks for it.
    Source: agrees with Tunix's aggregate_loss, but token-scale has no default norm (Tunix: the padded width, which
        depends on the batch) and sum-norm's default is that of Tunix 0.1.7; the mean over prompts is ScaleRL's,
        arXiv:2510.13786. TRL's and TorchRL's: the table at LOSS_AGG_MODES.

    >>> token_weights(torch.tensor([True, True, True]), torch.tensor([0, 0, 1]), "sequence-mean-token-mean")
    tensor([0.2500, 0.2500, 0.5000], dtype=torch.float64)
    """
    _check(mask, trajectory, norm=norm, num_units=num_units)
    if isinstance(mode, str):
        if mode not in LOSS_AGG_MODES:
            raise lookup_error("loss_agg_mode", mode, LOSS_AGG_MODES)
        mode = LOSS_AGG_MODES[mode]
    mask = mask.bool()
    arguments = inspect.signature(mode).parameters
    if "prompt" in arguments:
        _check_prompt(prompt, trajectory)
    options = {"norm": norm, "num_units": num_units, "prompt": prompt}
    options = {name: value for name, value in options.items() if name in arguments}
    return torch.where(mask, mode(mask, trajectory, **options).double(), 0.0)


def unit_weights(mask: Tensor, unit: Tensor, *, num_units: float | None = None) -> Tensor:
    """Returns the weight of each unit's loss in the aggregate of a whole optimizer step: a mean over units.

    w_i = 1/U where unit i has a trained token, else 0; U the units that have one.
    Args: mask: Bool [S], True = trained. unit: Long [S], 0, 1, ...: the unit of each token (a pair, an episode).
        num_units: takes U's place, e.g. to count units with nothing to train as well.
    Returns: float64 [units]; for losses that return one number per unit.
    Raises: ConfigError: num_units is not a positive number. DataError: mask and unit of different shapes.

    >>> unit_weights(torch.tensor([True, True, False, True]), torch.tensor([0, 0, 1, 2]))
    tensor([0.5000, 0.0000, 0.5000], dtype=torch.float64)
    """
    _check(mask, unit, num_units=num_units)
    mask = mask.bool()
    there = _unit_lengths(mask, unit) > 0
    return torch.where(there, 1 / _units(mask, unit, num_units), 0.0)


def aggregate(loss: Tensor, weights: Tensor) -> Tensor:
    """Returns the weighted sum of a loss per token, or per unit.

    L = Σ w·l over the tokens (units) with w ≠ 0: a loss of NaN at a masked-out token is ignored.
    Args: loss [S]. weights [S], from token_weights. Of units: [U] both, from unit_weights.
    Returns: 0-d, in the loss's dtype; fp32 for half precision.
    Raises: DataError: loss and weights of different shapes.

    >>> aggregate(torch.tensor([1., 3., torch.nan]), torch.tensor([0.5, 0.5, 0.]))
    tensor(2.)
    """
    check_shapes("[S]", loss=loss, weights=weights)
    loss = to_fp32(loss)
    return (torch.where(weights != 0, loss, 0.0) * weights.to(loss.dtype)).sum()


def _check_prompt(prompt: Tensor | None, trajectory: Tensor) -> None:
    """Raises DataError if prompt is missing, or does not have one entry for each token."""
    if prompt is None or prompt.shape != trajectory.shape:
        problem = "none was given" if prompt is None else f"it has the shape {list(prompt.shape)}"
        raise DataError(
            f"this loss_agg_mode needs prompt=, the prompt of each token, {list(trajectory.shape)}; {problem}"
        )


def _check(mask: Tensor, unit: Tensor, **numbers: float | None) -> None:
    """Raises where shapes differ, or a number is not positive."""
    check_shapes("[S]", mask=mask, unit=unit)
    for name, value in numbers.items():
        if value is not None and not _positive(value):
            raise ConfigError(f"Invalid '{name}' value {value!r}: it must be a positive number, or None")


def _unit_lengths(mask: Tensor, unit: Tensor) -> Tensor:
    """Float64 [U']: the trained tokens of each unit, empty ones included."""
    return segment_count(mask, unit, int(unit.max()) + 1 if len(unit) else 0).double()


def _units(mask: Tensor, unit: Tensor, num_units: float | None) -> Tensor:
    """Float64 0-d: num_units, or the units with a trained token, at least 1."""
    if num_units is not None:
        return torch.tensor(float(num_units), dtype=torch.float64, device=mask.device)
    return (_unit_lengths(mask, unit) > 0).sum().clamp(min=1).double()


def _positive(value: object) -> bool:
    """Returns a finite real number above 0; a bool is none."""
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < math.inf
