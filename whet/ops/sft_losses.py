"""The losses of supervised fine-tuning: fn(x: LossInputs) -> [s], or ([s], {metric: [s]}).

π(a) is the probability of a trained token. Dim legend: s tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from whet.ops.masked import masked_column
from whet.ops.policy_losses.base import LossOutput
from whet.ops.policy_losses.policy_gradient import nll
from whet.types import LossInputs

__all__ = ["SFT_LOSSES", "dynamic_fine_tuning"]


def dynamic_fine_tuning(x: LossInputs) -> LossOutput:
    """Negative log-likelihood, each token weighted by its own probability: unlikely tokens move the model less.

    l = −sg(π(a)) · log π(a), sg = no gradient.
    Args: x: needs logprobs and mask.
    Returns: loss [s], 0 where masked out, and the metric nll.
    Source: arXiv:2508.05629 equation 9; TRL's loss_type="dft".

    >>> import torch
    >>> x = LossInputs(sequence=torch.tensor([0]), mask=torch.tensor([True]), logprobs=torch.tensor([-1.0]))
    >>> dynamic_fine_tuning(x)[0]
    tensor([0.3679])
    """
    logprobs = masked_column(x.logprobs, x.mask)
    return -logprobs.detach().exp() * logprobs, {"nll": -logprobs.detach()}


SFT_LOSSES: dict[str, Callable[..., Any]] = {"nll": nll, "dft": dynamic_fine_tuning}
"""loss_type -> loss."""
