"""The objective of supervised fine-tuning."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from whet.config.base import config
from whet.config.fields import Bool, Float, Fn, Name
from whet.errors import ConfigError

__all__ = ["SFTConfig", "SupervisedConfig"]


@config
class SupervisedConfig:
    """The base class of supervised objectives."""

    @property
    def keywords(self) -> Mapping[str, Any]:
        """The fields by name: each function receives those that it has as keyword-only arguments."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


@config
class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning.

    >>> SFTConfig().loss_agg_mode
    'token-mean'
    """

    loss_type: Name | Fn = "nll"
    """The loss of each token, from its logprob: "nll", "dft" (weighted by the token's own probability,
    arXiv:2508.05629), a function or "package.module:function"."""
    loss_agg_mode: Name | Fn = "token-mean"
    """How the losses of tokens become one loss: "token-mean" over the whole batch, "sequence-mean-token-mean" ..., as
    in reinforcement learning. Rows without a trained token are left out first, so no mean over sequences counts
    them."""
    loss_agg_norm: Float | None = None
    """The constant of sequence-mean-token-scale and sequence-mean-token-sum-norm; None = their default."""
    log_entropy: Bool = False
    """Log the mean entropy of the distributions of the trained tokens, in nats. It costs some time."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        if self.loss_agg_norm is not None and self.loss_agg_norm <= 0:
            raise ConfigError(f"loss_agg_norm must be positive, got {self.loss_agg_norm!r}; None = the mode's own")
