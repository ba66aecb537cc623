"""The divergence of two full distributions over a vocabulary.

It holds [tokens, V] in memory. The models bound that: they call it for a chunk of tokens at a time.
Dim legend: V vocabulary; "..." any leading dims.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from whet.errors import ConfigError
from whet.ops.shapes import check_shapes

__all__ = ["check_beta", "generalized_jsd", "log_mixture"]


def generalized_jsd(logprobs: Tensor, teacher_logprobs: Tensor, *, gkd_beta: float = 0.5) -> Tensor:
    """The generalised Jensen-Shannon divergence of a policy p from a teacher q.

    m = β q + (1 − β) p
    D_β = β Σ_v q_v (log q_v − log m_v) + (1 − β) Σ_v p_v (log p_v − log m_v)    0 < β < 1
    D_0 = Σ_v q_v (log q_v − log p_v)    the forward KL: the policy covers what the teacher does
    D_1 = Σ_v p_v (log p_v − log q_v)    the reverse KL: the policy seeks what the teacher finds likely
    A term of probability 0 is 0. D_0 and D_1 are not the limits of D_β, which are 0, but those of D_β / (β (1 − β)).

    Args:
        logprobs, teacher_logprobs: [..., V], log p and log q, each normalised; -inf allowed.
        gkd_beta: β, from 0 to 1.
    Returns: [...], in nats, with the gradient of both.
    Raises: ConfigError: β is not in [0, 1].
    Source: GKD, arXiv:2306.13649, equation 1 and section 3; agrees with TRL's GKDTrainer.generalized_jsd_loss, which
        gives NaN where a probability is 0.

    >>> p, q = (torch.tensor([[x, 1 - x]]).log() for x in (0.5, 0.25))
    >>> generalized_jsd(p, q, gkd_beta=1.0)  # (log 2 + log 2/3) / 2
    tensor([0.1438])
    """
    check_shapes("[..., V]", logprobs=logprobs, teacher_logprobs=teacher_logprobs)
    if gkd_beta == 0:
        return _kl(teacher_logprobs, logprobs)
    if gkd_beta == 1:
        return _kl(logprobs, teacher_logprobs)
    mixture = log_mixture(logprobs, teacher_logprobs, gkd_beta)
    return gkd_beta * _kl(teacher_logprobs, mixture) + (1 - gkd_beta) * _kl(logprobs, mixture)


def check_beta(gkd_beta: float) -> None:
    """Raises ConfigError where β is not in [0, 1].

    >>> check_beta(0.5)
    """
    if not 0 <= gkd_beta <= 1:
        raise ConfigError(f"gkd_beta must be between 0 (forward KL) and 1 (reverse KL), got {gkd_beta!r}")


def log_mixture(logprobs: Tensor, teacher_logprobs: Tensor, gkd_beta: float) -> Tensor:
    """The mixture log m, m = β q + (1 − β) p: [..., V]; at β = 1 the teacher, at β = 0 the policy itself.

    Args: as generalized_jsd.
    Raises: ConfigError: β is not in [0, 1].

    >>> log_mixture(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.0, 1.0]).log(), 0.5).exp()
    tensor([0.2500, 0.7500])
    """
    check_shapes("[..., V]", logprobs=logprobs, teacher_logprobs=teacher_logprobs)
    if gkd_beta in (0.0, 1.0):
        return teacher_logprobs if gkd_beta else logprobs
    check_beta(gkd_beta)
    none = (logprobs == -torch.inf) & (teacher_logprobs == -torch.inf)  # their backward would be NaN
    own, other = (x.masked_fill(none, 0.0) for x in (logprobs, teacher_logprobs))
    mixture = torch.logaddexp(own + math.log1p(-gkd_beta), other + math.log(gkd_beta))
    return mixture.masked_fill(none, -torch.inf)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Σ_v p_v (log p_v − log q_v)."""
    zero = log_p == -torch.inf  # masked before the difference: inf − inf would be NaN, in the backward as well
    return (log_p.exp() * (log_p - log_q.masked_fill(zero, 0.0)).masked_fill(zero, 0.0)).sum(-1)
