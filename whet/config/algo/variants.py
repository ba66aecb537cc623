"""DAPOConfig and DrGRPOConfig: Tunix's classes, GRPOConfig with other defaults.

The methods as their papers have them are presets.dapo() and presets.dr_grpo().
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any

from pydantic import BeforeValidator

from whet.config.algo.base import OverlongBuffer
from whet.config.algo.grpo import GRPOConfig
from whet.config.base import config
from whet.config.fields import Bool, Float, Fn, Name
from whet.errors import ConfigError

__all__ = ["DAPOConfig", "DrGRPOConfig"]


def _or_zero(value: Any) -> Any:
    """0.0 for None, which Tunix's field has to be."""
    return 0.0 if value is None else value


@config
class DAPOConfig(GRPOConfig):
    """DAPO (arXiv:2503.14476) under Tunix's name and with its defaults.

    >>> DAPOConfig(beta=0.1)
    Traceback (most recent call last):
    whet.errors.ConfigError: DAPO does not support KL penalty, so beta must be None. Got: 0.1; GRPOConfig has one
    """

    algo_variant: Name = "dapo"
    """Tunix's name of the algorithm. No effect: the fields below define the algorithm."""
    loss_agg_mode: Name | Fn = "token-mean"
    """How the losses of tokens become one: a name, or a function that gives every token its weight."""
    beta: Annotated[Float, BeforeValidator(_or_zero)] = 0.0
    """Weight of the KL to the reference: 0.0 or null, since DAPO has none."""
    epsilon_high: Float | None = 0.28
    """The ratio is clipped above 1 + ε_high, which is at least epsilon; None = epsilon."""
    dynamic_sampling: Bool = True
    """Leave out groups whose rewards are all equal, and sample further batches of prompts until the step has as many
    groups as a batch has prompts. Needs trainer.max_steps."""
    overlong_buffer: OverlongBuffer = field(default_factory=lambda: OverlongBuffer(enable=True))
    """Soft punishment of completions that come near the limit of length."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        super().__post_init__()
        if self.beta != 0:
            raise ConfigError(
                f"DAPO does not support KL penalty, so beta must be None. Got: {self.beta!r}; GRPOConfig has one"
            )
        low, high = self.clip_range
        if high < low:
            raise ConfigError(
                f"epsilon_high must be greater than or equal to epsilon. Got: {high!r} and {low!r}; GRPOConfig takes "
                "any two"
            )


@config
class DrGRPOConfig(GRPOConfig):
    """Dr. GRPO (arXiv:2503.20783) under Tunix's name and with its defaults.

    >>> DrGRPOConfig().advantage_estimator
    'drgrpo'
    """

    algo_variant: Name = "drgrpo"
    """Tunix's name of the algorithm. No effect: the fields below define the algorithm."""
    advantage_estimator: Name | Fn = "drgrpo"
    """Rewards -> advantages: a name, a function or "package.module:function"."""
    loss_agg_mode: Name | Fn = "sequence-mean-token-scale"
    """How the losses of tokens become one: a name, or a function that gives every token its weight."""
