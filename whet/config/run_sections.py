"""The sections of a run with the defaults of the command line.

Each is a section's class with other defaults. From Python, RolloutConfig, GRPOConfig and PPOConfig have Tunix's
defaults. RunConfig, every recipe and every command have the defaults of this module. docs/defaults.md compares both
with TRL's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from pydantic_core import ArgsKwargs

from whet.config.algo import GRPOConfig, PPOConfig
from whet.config.base import config
from whet.config.data import DataConfig, SupervisedDataConfig
from whet.config.fields import Bool, Count, Float, Size, Temperature
from whet.config.rollout import RolloutConfig
from whet.errors import ConfigError

__all__ = [
    "NEW_TOKENS",
    "RunDataConfig",
    "RunGRPOConfig",
    "RunPPOConfig",
    "RunRolloutConfig",
    "RunSupervisedDataConfig",
    "take_base_sections",
]

NEW_TOKENS = 512
"""Default length limit of a completion in tokens, if the model's context allows it."""
LENGTHS = ("max_tokens_to_generate", "max_prompt_length")
"""Lengths in tokens that a run may leave to model and data."""


@config
class RunRolloutConfig(RolloutConfig):
    """How completions are sampled in a run. The command sets lengths that are None after it has read the data.

    >>> RunRolloutConfig().most_tokens
    Traceback (most recent call last):
    whet.errors.ConfigError: rollout.max_tokens_to_generate=None is settled by a command, which reads model and data \
first; from Python give a number
    """

    max_tokens_to_generate: Count | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Length limit of a completion in tokens, stop token included; None = 512, or less if the longest prompt leaves
    less of the model's context."""
    temperature: Temperature = 1.0
    """Sampling temperature, by which the logits are divided; 0.0 = greedy."""
    max_prompt_length: Count | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Length limit of a prompt in tokens; on_long_prompt decides about longer ones. None = the longest prompt of the
    data, which must fit into the model's context."""

    def __post_init__(self) -> None:
        """Checks that the lengths in `eval` are numbers."""
        super().__post_init__()
        for name in LENGTHS:
            if name in self.eval and self.eval[name] is None:
                raise ConfigError(f"eval.{name}: expected a positive int, got None; leave it out: it is training's")

    @property
    def most_tokens(self) -> int:
        """The most tokens that can follow a prompt: see RolloutConfig. Raises ConfigError: a length is still None."""
        for name in self.open_lengths:
            raise ConfigError(
                f"rollout.{name}=None is settled by a command, which reads model and data first; from Python give "
                "a number"
            )
        return super().most_tokens

    @property
    def open_lengths(self) -> tuple[str, ...]:
        """The lengths that are still None.

        >>> RunRolloutConfig(max_prompt_length=64).open_lengths
        ('max_tokens_to_generate',)
        """
        return tuple(name for name in LENGTHS if vars(self)[name] is None)


@config
class RunGRPOConfig(GRPOConfig):
    """Group-relative policy optimisation in a run.

    >>> RunGRPOConfig().num_generations, GRPOConfig().num_generations
    (8, 2)
    """

    num_generations: Size = 8
    """G, the completions of each prompt. 1 needs an advantage_estimator that does not compare within the group."""
    beta: Float = 0.0
    """Weight of the KL to the reference model; 0.0 = off, and no reference is loaded."""


@config
class RunPPOConfig(PPOConfig):
    """Proximal policy optimisation in a run.

    >>> RunPPOConfig().beta, PPOConfig().beta
    (0.0, 0.04)
    """

    beta: Float = 0.0
    """Weight of the KL to the reference model; 0.0 = off, and no reference is loaded."""


@config
class RunDataConfig(DataConfig):
    """The source of a run's prompts."""

    apply_chat_template: Bool | Literal["auto"] = "auto"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Make each plain-text prompt a user's turn in the chat template; conversations always go through it. auto = if
    the tokenizer has a chat template; false = plain text stays unchanged."""


@config
class RunSupervisedDataConfig(SupervisedDataConfig):
    """The source of a supervised run's rows, and the tokens that are trained."""

    apply_chat_template: Bool | Literal["auto"] = "auto"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Make a plain-text prompt a user's turn and its response the assistant's; conversations always go through it. auto
    = if the tokenizer has a chat template; false = plain text stays unchanged. No effect on rows without a prompt."""


def take_base_sections(cls: type, arguments: Any) -> Any:
    """Returns the arguments of a run's configuration, with objects of a base section (e.g. GRPOConfig) as objects of
    the run's own section (RunGRPOConfig) with the same values.

    >>> from whet.config import RunConfig
    >>> RunConfig(algo=GRPOConfig()).algo.num_generations
    2
    """
    words = arguments.kwargs if isinstance(arguments, ArgsKwargs) else arguments
    if not isinstance(words, Mapping):
        return arguments
    converted = dict(words)
    for field in dataclasses.fields(cls):
        kind, value = field.default_factory, words.get(field.name)
        if dataclasses.is_dataclass(value) and isinstance(kind, type) and type(value) is kind.__base__:
            converted[field.name] = kind(**{f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    return ArgsKwargs((), converted) if isinstance(arguments, ArgsKwargs) else converted
