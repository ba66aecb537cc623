"""GRPOConfig: group-relative policy optimisation."""

from __future__ import annotations

from whet.config.algo.policy import PolicyConfig
from whet.config.base import config
from whet.config.fields import Size
from whet.errors import ConfigError

__all__ = ["GRPOConfig"]


@config
class GRPOConfig(PolicyConfig):
    """Group-relative policy optimisation (arXiv:2402.03300) and its relatives.

    >>> GRPOConfig(num_generations=1)
    Traceback (most recent call last):
    whet.errors.ConfigError: num_generations must be greater than 1, got 1: a completion is compared with its group
    """

    num_generations: Size = 2
    """G, the completions of each prompt. 1 needs an advantage_estimator that does not compare within the group."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        super().__post_init__()
        if self.advantage_estimator == "gae":
            raise ConfigError(
                "advantage_estimator='gae' needs the values of a critic, and GRPO has none; train with PPO (whet ppo, "
                "PPOConfig), or choose an estimator that reads only rewards (grpo, rloo, reinforce_plus_plus)"
            )
        self.check_groups()
