"""The output of a loss: TorchRL's fields; the fields that begin with loss_ sum to the loss.

>>> import torch
>>> out = GRPOLossOutput(loss_objective=torch.tensor(1.), clip_fraction=torch.tensor(.5), kl_approx=torch.tensor(0.),
...                      ESS=torch.tensor(1.), loss_entropy=torch.tensor(-.25))
>>> out.loss, out.mean(reduce=True), out.sum(reduce=True)
(tensor(0.7500), tensor(0.7500), tensor(0.7500))
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorClass
from torch import Tensor

__all__ = ["CISPOLossOutput", "DAPOLossOutput", "GRPOLossOutput", "LLMLossOutput"]

LOSSES = ("loss_objective", "loss_entropy", "loss_kl_to_ref", "loss_kl_to_inference")


class LLMLossOutput(TensorClass["nocast"]):  # pyright: ignore[reportInvalidTypeArguments]
    """The parts of a loss, and metrics without gradient: 0-d each.

    If aggregation or reduction is "none", the loss_ fields are [B, T, 1], with 0 at tokens that are not trained.
    """

    loss_objective: Tensor
    """The surrogate, aggregated."""
    clip_fraction: Tensor
    """The share of trained tokens with a ratio outside the clip range, whatever the advantage."""
    kl_approx: Tensor
    """The mean over trained tokens of log π_sampler − log π."""
    ESS: Tensor
    """The effective sample size, as a share: 1 if all ratios are equal."""
    entropy: Tensor | None = None
    """The mean over trained tokens of the policy's entropy."""
    loss_entropy: Tensor | None = None
    """−entropy_coeff times the entropy, aggregated."""
    loss_kl_to_ref: Tensor | None = None
    """kl_to_ref_coeff times the divergence from the reference (k3), aggregated."""
    kl_to_ref: Tensor | None = None
    """Its mean over the tokens of the loss."""
    loss_kl_to_inference: Tensor | None = None
    """kl_to_inference_coeff times the divergence from the policy that sampled (k3), aggregated."""
    kl_to_inference: Tensor | None = None
    """Its mean over the tokens of the loss."""

    @property
    def loss(self) -> Tensor:
        """The loss: the sum of the fields that begin with loss_."""
        parts = [part for part in (getattr(self, name) for name in LOSSES) if part is not None]
        return torch.stack(torch.broadcast_tensors(*parts)).sum(0)

    def mean(self, dim: Any = None, *, reduce: bool | None = None, **options: Any) -> Any:  # pyright: ignore
        """With reduce=True, as in TorchRL's recipes, the loss; else TensorDict's mean of every field."""
        return self.loss.mean() if reduce else self.to_tensordict().mean(dim, **options)

    def sum(self, dim: Any = None, *, reduce: bool | None = None, **options: Any) -> Any:  # pyright: ignore
        """With reduce=True the loss, summed over tokens if it is per token; else TensorDict's sum."""
        return self.loss.sum() if reduce else self.to_tensordict().sum(dim, **options)


class GRPOLossOutput(LLMLossOutput):
    """The output of GRPOLoss."""


class DAPOLossOutput(LLMLossOutput):
    """The output of DAPO."""


class CISPOLossOutput(LLMLossOutput):
    """The output of CISPOLoss."""


LLMLossOutput.__doc__ = "The terms of a loss and its metrics; the property `loss` is their sum."
for _kind, _loss in ((GRPOLossOutput, "GRPOLoss"), (DAPOLossOutput, "DAPO"), (CISPOLossOutput, "CISPOLoss")):
    _kind.__doc__ = f"The output of {_loss}: the fields of LLMLossOutput."  # TensorClass replaces it by a signature
