"""Log-probabilities of chosen tokens, and entropies, from logits.

Dim legend: V vocabulary; "..." any leading dims. Half-precision logits are computed on in fp32; float64 stays float64.
All of it holds [tokens, V]; whet.models.linear_logprob does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whet.ops.masked import to_fp32
from whet.ops.shapes import check_shapes

__all__ = ["entropy", "is_argmax", "log_sum_sq_probs", "selective_log_softmax"]


def selective_log_softmax(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probability of one chosen token per row.

    log π(aᵢ) = zᵢ[aᵢ] − log Σⱼ exp(zᵢ[j]), z the logits, a the chosen ids, j over the vocabulary.
    Args: logits [..., V], -inf allowed. ids [...]: Long, the chosen token of each row.
    Returns: [...], fp32 or the dtype of logits where that is wider; in nats.
    Source: agrees with log_softmax(logits)[ids], without keeping the other V − 1 values.

    >>> selective_log_softmax(torch.tensor([[0., 0.]]), torch.tensor([1]))  # log 1/2
    tensor([-0.6931])
    """
    check_shapes("[...]", ids=ids, rows_of_logits=logits.shape[:-1])
    logits = to_fp32(logits)
    # Centred first: the difference of two large numbers would keep few digits.
    logits = logits - logits.detach().amax(-1, keepdim=True)
    chosen = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return chosen - logits.logsumexp(-1)


def entropy(logits: Tensor) -> Tensor:
    """Entropy of each row's distribution.

    H = −Σⱼ pⱼ log pⱼ, p = softmax(z), z the logits, j over the vocabulary; p log p = 0 where p = 0.
    Args: logits [..., V], -inf allowed: such a token adds nothing and its gradient is 0.
    Returns: [...], fp32 or the dtype of logits where that is wider; in nats.
    Source: Shannon; agrees with torch.distributions.Categorical(logits=z).entropy().

    >>> entropy(torch.tensor([[0., 0., -torch.inf]]))  # two equal tokens: log 2
    tensor([0.6931])
    """
    logits = to_fp32(logits)
    logp = logits.log_softmax(-1)
    # -inf is replaced before the product: 0 * -inf would be NaN, in the backward as well.
    return -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)).sum(-1)


def log_sum_sq_probs(logits: Tensor) -> Tensor:
    """Returns how concentrated each row's distribution is: the log of the expected probability of a token drawn from
    it.

    log Σⱼ pⱼ², p = softmax(z), z the logits, j over the vocabulary: 0 where one token is certain, −log V where all are
    alike.
    Args: logits [..., V], -inf allowed.
    Returns: [...], fp32 or the dtype of logits where that is wider; in nats.
    Source: the alignment of WPO's weights (arXiv:2406.11827); agrees with TRL's fused head.

    >>> log_sum_sq_probs(torch.tensor([[0., 0.]]))  # log (1/4 + 1/4)
    tensor([-0.6931])
    """
    return to_fp32(logits).softmax(-1).square().sum(-1).log()


def is_argmax(logits: Tensor, ids: Tensor) -> Tensor:
    """Returns whether the chosen token of each row is the likeliest; of equal ones the first is.

    Args: logits [..., V]. ids [...]: Long, the chosen token of each row.
    Returns: Bool [...].

    >>> is_argmax(torch.tensor([[0., 1.], [0., 0.]]), torch.tensor([1, 1]))
    tensor([ True, False])
    """
    check_shapes("[...]", ids=ids, rows_of_logits=logits.shape[:-1])
    return logits.argmax(-1) == ids
