"""OpenEnv: an environment behind an OpenEnv server.

    class Echo(OpenEnv):
        base_url = "http://localhost:8000"
        action_field = "message"

Left out on purpose: starting the server; OpenEnv's own command and its images do that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from whet.errors import ConfigError
from whet.util.install import install_hint

__all__ = ["OpenEnv"]


class OpenEnv:
    """A session of a server. The reward is the sum of the steps' rewards.

    Example: `class Echo(OpenEnv): base_url = "http://localhost:8000"`, and rollout.env_path=env.py:Echo.
    """

    base_url: ClassVar[str] = ""
    """Of the server."""
    action_field: ClassVar[str] = "message"
    """The field of an action that the content of a turn becomes."""
    observation_field: ClassVar[str | None] = None
    """The field of an observation that the model is told; None = all of it, as JSON."""

    def __init__(self) -> None:
        try:
            from openenv.core import GenericEnvClient  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(f"environments of OpenEnv need the package; {install_hint('openenv')}") from error
        # its own loop in a thread: `close` comes from another loop than `step`
        self._client: Any = GenericEnvClient(base_url=self.base_url).sync()
        self.total, self.done = 0.0, False

    def reset(self, seed: int | None = None, **_: Any) -> str:
        """Begins an episode. Args: seed: a column of the row; None = a random one. Returns: the first observation."""
        self._client.connect()
        return self._take(self._client.reset(**({} if seed is None else {"seed": seed})))

    def step(self, message: Mapping[str, Any]) -> str:
        """Plays the model's turn. Returns: the next observation."""
        return self._take(self._client.step(self._parse(str(message["content"]))))

    def get_reward(self) -> float:
        """Returns the sum of the rewards."""
        return self.total

    def close(self) -> None:
        """Ends the session."""
        self._client.close()

    def _take(self, result: Any) -> str:
        self.total += float(result.reward or 0.0)
        self.done = bool(result.done)
        return self._describe(result.observation)

    def _describe(self, observation: Mapping[str, Any]) -> str:
        """Returns an observation as a text."""
        if self.observation_field is not None:
            return str(observation[self.observation_field])
        return json.dumps(observation, ensure_ascii=False, default=str)

    def _parse(self, text: str) -> Mapping[str, Any]:
        """Returns the action of a turn."""
        return {self.action_field: text}
