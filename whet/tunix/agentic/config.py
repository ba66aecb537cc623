"""AgenticGRPOConfig: Tunix's GRPOConfig of its agentic learner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import model_validator
from pydantic_core import ArgsKwargs

from whet.config.base import config
from whet.config.fields import Bool, Count, Name, Number, Seconds, Text
from whet.errors import ConfigError
from whet.tunix.agentic.agents import TrajectoryStatus
from whet.tunix.configs import GRPOConfig

__all__ = ["AgenticGRPOConfig"]


@config
class AgenticGRPOConfig(GRPOConfig):
    """GRPO over the episodes of agents and environments, with Tunix's defaults.

    >>> AgenticGRPOConfig(reward_manager="agentic-sequence-level").max_response_length
    1024
    """

    algo_variant: Name = "agentic_grpo"
    """The name of the algorithm. No effect: the other fields define the algorithm."""
    system_prompt: Text = ""
    """The first message of an agent that is created without one."""
    max_response_length: Count = 1024
    """Most tokens of an episode after its prompt, the environment's included."""
    max_concurrency: Count = 16
    """Episodes at a time. No effect: all of a step run, and the engine bounds its batch."""
    off_policy_steps: Number = 0
    """Must be 0: rollouts and updates take turns in one process."""
    episode_timeout: Seconds = 1800.0
    """Longest time of an episode, in seconds."""
    filter_statuses: Any = None
    """The statuses that overlong_filter leaves out; None = too many steps or tokens, and too late."""
    overlong_filter: Bool = False
    """Don't train on episodes that were too long or too late, and leave out their final reward."""
    degenerate_group_masking: Bool = False
    """Leave out groups with equal rewards. No effect: their advantages are 0."""

    @model_validator(mode="before")
    @classmethod
    def _rename_manager(cls, arguments: Any) -> Any:
        """Reads Tunix's name of the reward manager, which adds the environment's reward as whet's does anyway."""
        values = arguments.kwargs if isinstance(arguments, ArgsKwargs) else arguments
        if not isinstance(values, Mapping) or values.get("reward_manager") != "agentic-sequence-level":
            return arguments
        values = {name: value for name, value in values.items() if name != "reward_manager"}
        return ArgsKwargs((), values) if isinstance(arguments, ArgsKwargs) else values

    def __post_init__(self) -> None:
        """Checks the ranges."""
        super().__post_init__()
        if self.num_generations < 2:
            raise ConfigError(f"num_generations must be greater than 1. Received: {self.num_generations}")
        if self.off_policy_steps:
            raise ConfigError(
                f"off_policy_steps must be 0, got {self.off_policy_steps}: rollouts and updates take turns in one "
                "process, so no episode is of an older policy; leave it out"
            )
        statuses = self.filter_statuses
        if statuses is not None and not all(isinstance(status, TrajectoryStatus) for status in statuses):
            raise ConfigError(f"filter_statuses={statuses!r}: give a set of TrajectoryStatus")
