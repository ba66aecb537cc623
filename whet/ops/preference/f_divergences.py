"""The f-divergences of f-DPO. Each function is f', which replaces the log-ratio in a loss of differences.

Dim legend: u units.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["F_DIVERGENCES", "alpha_divergence", "bounded", "forward_kl", "js_divergence", "reverse_kl"]

F = torch.nn.functional

_STEEPEST = 30.0
"""Above this exponent an exponential continues as a straight line, so that it and its square are finite in fp32."""


def bounded(exponential: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An exponential (exp, expm1) that continues along its tangent above x = 30, so value and gradient stay finite.

    >>> bounded(torch.exp, torch.tensor([0.0, 1000.0])).isfinite()
    tensor([True, True])
    """
    return exponential(x.clamp(max=_STEEPEST)) + math.exp(_STEEPEST) * torch.relu(x - _STEEPEST)


def reverse_kl(d: Tensor) -> Tensor:
    """The reverse KL, DPO's own divergence.

    f'(t) = log t (+ 1), as a function of d = log t = log π − log π_ref of a side.
    Args: d [u].
    Returns: [u].
    Source: DPO (arXiv:2305.18290).

    >>> reverse_kl(torch.tensor([2.0]))
    tensor([2.])
    """
    return d


def forward_kl(d: Tensor) -> Tensor:
    """The forward KL: the policy covers all answers of the reference. The score is at most 1.

    f'(t) = 1 − 1/t = 1 − exp(−d), d = log t = log π − log π_ref of a side.
    Args: d [u].
    Returns: [u]; a straight line below d = −30.
    Source: f-DPO (arXiv:2309.16240); agrees with TRL, which has a gradient of NaN for d below −88 in fp32.

    >>> forward_kl(torch.tensor([1.0]))  # 1 - exp(-1)
    tensor([0.6321])
    """
    return -bounded(torch.expm1, -d)


def js_divergence(d: Tensor) -> Tensor:
    """The Jensen-Shannon divergence, between the forward and the reverse KL. The score is at most log 2.

    f'(t) = log(2t / (1 + t)) = log 2 + log σ(d), d = log t = log π − log π_ref of a side.
    Args: d [u].
    Returns: [u].
    Source: f-DPO (arXiv:2309.16240); agrees with TRL.

    >>> js_divergence(torch.tensor([0.0])).abs() < 1e-6
    tensor([True])
    """
    return math.log(2) + F.logsigmoid(d)


def alpha_divergence(d: Tensor, *, f_alpha_divergence_coef: float = 0.5) -> Tensor:
    """The α-divergences: α = 1 is the reverse KL, α = 0 the forward KL.

    f'(t) = (t^(α−1) − 1) / (α − 1), d = log t = log π − log π_ref of a side; log t at α = 1.
    Args: d [u]. f_alpha_divergence_coef: α.
    Returns: [u]; a straight line where (α − 1) d is above 30.
    Source: f-DPO (arXiv:2309.16240); agrees with TRL, which has it only in fp32 and below.

    >>> alpha_divergence(torch.tensor([1.0]), f_alpha_divergence_coef=0.0)  # 1 - exp(-1)
    tensor([0.6321])
    """
    slope = f_alpha_divergence_coef - 1.0
    if abs(slope) < 1e-6:
        return d
    return bounded(torch.expm1, slope * d) / slope


F_DIVERGENCES: dict[str, Callable[..., Tensor]] = {
    "alpha_divergence": alpha_divergence,
    "forward_kl": forward_kl,
    "js_divergence": js_divergence,
    "reverse_kl": reverse_kl,
}
"""fn(d [u], **kw) -> [u], by name."""
