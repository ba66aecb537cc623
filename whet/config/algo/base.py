"""AlgorithmConfig: the fields of every algorithm, and their checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar

from whet.config.algo.choices import CHOICES
from whet.config.algo.fields_read import POLICY_READS, Readers
from whet.config.base import config
from whet.config.fields import Bool, Count, Float, Fn, Name, Size
from whet.errors import ConfigError

__all__ = ["AlgorithmConfig", "OverlongBuffer"]


@config
class OverlongBuffer:
    """A penalty for completions that come near the length limit, as a reward function of weight 1.

    R(y) = -penalty · clip((|y| - (max_response_length - overlong_buffer_length)) / overlong_buffer_length, 0, 1), |y|
    in tokens.

    >>> OverlongBuffer(overlong_buffer_length=0)
    Traceback (most recent call last):
    whet.errors.ConfigError: OverlongBuffer.overlong_buffer_length must be a positive integer. Got: 0
    """

    enable: Bool = False
    """Add the penalty to the reward functions."""
    overlong_buffer_length: Size = 4096
    """The number of tokens before max_response_length over which the penalty grows from 0 to its maximum."""
    overlong_buffer_penalty: Float = 1.0
    """The largest penalty."""
    max_response_length: Size = 20480
    """The length in tokens at which the penalty is largest; usually rollout.max_tokens_to_generate."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        if self.overlong_buffer_penalty < 0:
            raise ConfigError(f"overlong_buffer_penalty must be non-negative, got {self.overlong_buffer_penalty!r}")
        if self.overlong_buffer_length > self.max_response_length:
            raise ConfigError(
                f"overlong_buffer_length must be at most max_response_length, {self.max_response_length}, got "
                f"{self.overlong_buffer_length}: otherwise an empty completion would have a penalty"
            )


@config
class AlgorithmConfig:
    """The fields of every algorithm. A function is given by name, as an object, or as "package.module:function".

    >>> AlgorithmConfig(preset="dapo")
    Traceback (most recent call last):
    whet.errors.ConfigError: AlgorithmConfig.preset: a preset is a function: from whet import presets; presets.dapo(...)
    """

    CHOICES: ClassVar[Mapping[str, Mapping[str, str]]] = CHOICES
    READS: ClassVar[Readers] = POLICY_READS
    REFUSED: ClassVar[dict[str, str]] = {
        "preset": "a preset is a function: from whet import presets; presets.dapo(...)",
    }

    advantage_estimator: Name | Fn = "grpo"
    """How rewards become advantages: a name, a function or "package.module:function"."""
    policy_loss_fn: Name | Fn = "grpo"
    """The loss of each token, from logprobs and advantages: a name, a function or "package.module:function"."""
    reward_manager: Name | Fn = "sequence-level"
    """How the rewards of several functions become one reward."""
    reward_weights: tuple[Float, ...] | None = None
    """Weight of each reward function, in their order; None = 1.0 each."""
    reward_clip_range: tuple[Float, Float] | None = None
    """(low, high): clip the weighted sum of the rewards before advantages are computed and before a KL in the reward;
    None = off. dynamic_sampling compares the clipped rewards; the logged rewards are not clipped. gdpo refuses it,
    because it has no such sum."""
    overlong_buffer: OverlongBuffer = field(default_factory=OverlongBuffer)
    """A penalty for completions that come near the length limit (DAPO)."""
    num_iterations: Count = 1
    """μ, the number of passes over each rollout."""
    kl_clamp_value: Float | None = None
    """Clip the KL estimate of each token to plus and minus this; None = off."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        if self.kl_clamp_value is not None and self.kl_clamp_value <= 0:
            raise ConfigError(f"kl_clamp_value must be positive, got {self.kl_clamp_value!r}; None turns it off")
        clip = self.reward_clip_range
        if clip is not None and not clip[0] < clip[1]:
            raise ConfigError(f"reward_clip_range must be (low, high) with low below high, got {clip!r}; None = off")
        if clip is not None and self.advantage_estimator == "gdpo":
            raise ConfigError(
                f"reward_clip_range={clip!r} has no effect with advantage_estimator='gdpo', which normalises each "
                "reward function by itself and never sees their sum: bound the values in the functions, and leave it "
                "at None"
            )

    @property
    def keywords(self) -> Mapping[str, Any]:
        """The fields by name: each function receives those that it has as keyword-only arguments."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
