"""TextArena: a game of TextArena. The model is player 0.

class Guess(TextArena):
    env_id = "GuessTheNumber-v0"
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

from whet.errors import ConfigError
from whet.util.install import install_hint

__all__ = ["TextArena"]

_SEEDING = threading.Lock()
"""TextArena's games draw from Python's own generator, which `reset` seeds."""


class TextArena:
    """A game, whose reward is that of player 0.

    The model is told what is new since its last turn. Games of several players need `_play`, which moves the others.

    Example: `class Guess(TextArena): env_id = "GuessTheNumber-v0"`, and rollout.env_path=env.py:Guess.
    """

    env_id: ClassVar[str] = ""
    """As textarena.make takes it."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Further arguments of textarena.make."""
    num_players: ClassVar[int] = 1

    def __init__(self) -> None:
        try:
            package: Any = import_module("textarena")
        except ImportError as error:
            raise ConfigError(f"games of TextArena need the package; {install_hint('textarena')}") from error
        if self.num_players > 1 and type(self)._play is TextArena._play:
            raise ConfigError(
                f"{type(self).__name__} has {self.num_players} players; write _play(player, observation), which "
                "returns the actions of those besides the model, player 0"
            )
        # without the game's own wrappers, which repeat the whole history in each observation
        self._env: Any = package.make(f"{self.env_id}-raw", **self.options)
        self._game = package.GAME_ID
        self.done, self.reward = False, 0.0

    def reset(self, seed: int | None = None, **_: Any) -> str:
        """Begins a game. Args: seed: a column of the row; None = a random one. Returns: the rules."""
        with _SEEDING:
            self._env.reset(num_players=self.num_players, seed=seed)
        return self._observe()

    def step(self, message: Mapping[str, Any]) -> str:
        """Plays the model's turn. Returns: what happened since."""
        self._move(str(message["content"]))
        return "" if self.done else self._observe()

    def get_reward(self) -> float:
        """Returns the reward of player 0; 0 for a game that has not ended."""
        return self.reward

    def _play(self, player: int, observation: str) -> str:
        """Returns the action of another player. Args: observation: what is new to it."""
        raise NotImplementedError

    def _observe(self) -> str:
        """Returns what is new to player 0, once it is its turn."""
        player, messages = self._env.get_observation()
        while player != 0 and not self.done:
            self._move(self._play(player, self._text(player, messages)))
            player, messages = self._env.get_observation()
        return self._text(player, messages)

    def _move(self, action: str) -> None:
        self.done, _ = self._env.step(action=action)
        if self.done:
            rewards, _ = self._env.close()
            self.reward = float((rewards or {}).get(0, 0.0))

    def _text(self, player: int, messages: Any) -> str:
        """Returns the messages of others and of the game; the player's own actions are left out."""
        names = self._env.state.role_mapping
        return "\n".join(
            text if sender == self._game else f"[{names.get(sender, f'Player {sender}')}] {text}"
            for sender, text, *_ in messages
            if sender != player
        )
