"""RewardFields: the sections reward and reward_model together, of a run or an evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whet.errors import ConfigError

if TYPE_CHECKING:
    from whet.config.model import RoleConfig

__all__ = ["MAX_WORKERS", "REWARD_MODEL", "RewardFields", "check_workers"]

REWARD_MODEL = "reward_model"
"""The name of the reward model among the rewards, which is the name of its section."""
MAX_WORKERS = 1024
"""Most processes of reward functions."""


class RewardFields:
    """A base class of configurations with rewards: the rewards in order, with their weights."""

    if TYPE_CHECKING:  # fields of the configuration
        reward: str | list[str] | dict[str, float] | None
        reward_model: RoleConfig | None

    def check_rewards(self) -> None:
        """Raises ConfigError if `reward` names the reward model and there is none."""
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
        """The weights of reward_names; None = 1.0 each."""
        if not isinstance(self.reward, dict):
            return None
        return tuple(self.reward.get(name, 1.0) for name in self.reward_names)


def check_workers(count: int) -> None:
    """Raises ConfigError if reward_workers is out of range.

    >>> check_workers(-1)
    Traceback (most recent call last):
    whet.errors.ConfigError: reward_workers must be between 0 and 1024, got -1; 0 = no processes
    """
    if not 0 <= count <= MAX_WORKERS:
        raise ConfigError(f"reward_workers must be between 0 and {MAX_WORKERS}, got {count}; 0 = no processes")
