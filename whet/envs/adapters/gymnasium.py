"""Gymnasium: an environment of gymnasium, played in texts.

    class Lake(Gymnasium):
        env_id = "FrozenLake-v1"
        options = {"is_slippery": False}

Left out on purpose: observations that are images; _describe may turn them into texts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

from whet.errors import ConfigError
from whet.util.install import install_hint

__all__ = ["Gymnasium"]


class Gymnasium:
    """An environment whose observations and actions are texts, or an action space that is Discrete.

    Of a space Text the action is the content of the turn; of a space Discrete it is the last whole number in it. A turn
    without a valid action is answered by what is expected, and does not move the environment. The reward is the sum of
    the environment's rewards.

    Example: `class Lake(Gymnasium): env_id = "FrozenLake-v1"`, and rollout.env_path=env.py:Lake.
    """

    env_id: ClassVar[str] = ""
    """As gymnasium.make takes it."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Further arguments of gymnasium.make."""

    def __init__(self) -> None:
        try:
            package: Any = import_module("gymnasium")
        except ImportError as error:
            raise ConfigError(f"environments of gymnasium need the package; {install_hint('gymnasium')}") from error
        self._env: Any = package.make(self.env_id, **self.options)
        self.total, self.done = 0.0, False

    def reset(self, seed: int | None = None, **_: Any) -> str:
        """Begins an episode. Args: seed: a column of the row; None = a random one. Returns: the first observation."""
        observation, info = self._env.reset(seed=seed)
        return self._describe(observation, info)

    def step(self, message: Mapping[str, Any]) -> str:
        """Plays the model's turn. Returns: the next observation, or what is expected of a turn."""
        space = self._env.action_space
        action = self._parse(str(message["content"]))
        if action is None or not space.contains(action):
            return f"This is no valid action. The actions are {space}."
        observation, reward, terminated, truncated, info = self._env.step(action)
        self.total += float(reward)
        self.done = bool(terminated or truncated)
        return self._describe(observation, info)

    def get_reward(self) -> float:
        """Returns the sum of the rewards."""
        return self.total

    def close(self) -> None:
        """Closes the environment."""
        self._env.close()

    def _describe(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Returns an observation as a text. Args: info: as `reset` or `step` returned it."""
        return str(observation)

    def _parse(self, text: str) -> Any:
        """Returns the action of a turn; None = it has none."""
        space = self._env.action_space
        if not hasattr(space, "n"):
            return text.strip()
        numbers = re.findall(r"(?<!\d)-?\d+", text)
        return int(numbers[-1]) if numbers else None
