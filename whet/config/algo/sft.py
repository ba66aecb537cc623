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
    """What every supervised objective has."""

    @property
    def keywords(self) -> Mapping[str, Any]:
        """What the functions of an objective are given where they ask for it by name: the fields."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


@config
class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning.

    >>> SFTConfig().loss_agg_mode
    'token-mean'
    """

    loss_type: Name | Fn = "nll"
    """Logprobs -> a loss per token: "nll", "dft" (weighted by the token's own probability, arXiv:2508.05629), a
    function or "package.module:function"."""
    loss_agg_mode: Name | Fn = "token-mean"
    """How token losses become one number: "token-mean" over the whole batch, "sequence-mean-token-mean" ..., as in
    reinforcement learning. Rows without a trained token are left out before, so no mean over sequences counts them."""
    loss_agg_norm: Float | None = None
    """The constant of loss_agg_mode=sequence-mean-token-scale and -sum-norm."""
    log_entropy: Bool = False
    """Log the mean entropy of the distributions before the trained tokens, which costs some time."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        if self.loss_agg_norm is not None and self.loss_agg_norm <= 0:
            raise ConfigError(f"loss_agg_norm must be positive, got {self.loss_agg_norm!r}; None = the mode's own")
