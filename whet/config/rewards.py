"""What the sections reward and reward_model say together, of a run and of an evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whet.errors import ConfigError

if TYPE_CHECKING:
    from whet.config.model import RoleConfig

__all__ = ["MAX_WORKERS", "REWARD_MODEL", "RewardFields", "check_workers"]

REWARD_MODEL = "reward_model"
"""The place of the reward model among the rewards: its section's own name."""
MAX_WORKERS = 1024
"""Processes of reward functions."""


class RewardFields:
    """The rewards of a configuration in their order, with their weights; a base of those that have the two sections."""

    if TYPE_CHECKING:  # what the configuration has
        reward: str | list[str] | dict[str, float] | None
        reward_model: RoleConfig | None

    def check_rewards(self) -> None:
        """Raises ConfigError where the reward model is named and there is none."""
        if self.reward_model is None and REWARD_MODEL in self._listed:
            raise ConfigError("reward names reward_model, and there is none; set reward_model.model")

    @property
    def _listed(self) -> tuple[str, ...]:
        return (self.reward,) if isinstance(self.reward, str) else tuple(self.reward or ())

    @property
    def reward_names(self) -> tuple[str, ...]:
        """The reward functions in their order; a reward model that is not listed is the last."""
        unlisted = self.reward_model is not None and REWARD_MODEL not in self._listed
        return (*self._listed, *((REWARD_MODEL,) if unlisted else ()))

    @property
    def reward_weights(self) -> tuple[float, ...] | None:
        """Their weights; None = 1.0 each."""
        if not isinstance(self.reward, dict):
            return None
        return tuple(self.reward.get(name, 1.0) for name in self.reward_names)


def check_workers(count: int) -> None:
    """Raises ConfigError where reward_workers is not a possible number of processes.

    >>> check_workers(-1)
    Traceback (most recent call last):
    whet.errors.ConfigError: reward_workers must be between 0 and 1024, got -1; 0 = no processes
    """
    if not 0 <= count <= MAX_WORKERS:
        raise ConfigError(f"reward_workers must be between 0 and {MAX_WORKERS}, got {count}; 0 = no processes")
