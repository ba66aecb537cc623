"""Log-probabilities of chosen tokens, and entropies, from logits.

Dim legend: V vocabulary; "..." any leading dims. Half-precision logits are computed on in fp32; float64 stays float64.
Left out on purpose: anything that avoids holding [tokens, V]; the fused linear-logprob belongs to the models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whet.ops.masked import to_fp32

__all__ = ["entropy", "selective_log_softmax"]


def selective_log_softmax(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probability of one chosen token per row.

    log π(aᵢ) = zᵢ[aᵢ] − log Σⱼ exp(zᵢ[j]), z the logits, a the chosen ids, j over the vocabulary.
    Args: logits [..., V], -inf allowed. ids [...]: Long, the chosen token of each row.
    Returns: [...], fp32 or the dtype of logits where that is wider; in nats.
    Source: agrees with log_softmax(logits)[ids], without keeping the other V − 1 values.

    >>> selective_log_softmax(torch.tensor([[0., 0.]]), torch.tensor([1]))  # log 1/2
    tensor([-0.6931])
    """
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
