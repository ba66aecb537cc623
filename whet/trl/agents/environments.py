"""environment_factory: objects that an episode plays with. `reset` starts it, methods are tools, `get_reward` ends it.

Instances are kept and reset: as many of each kind as a batch needs at once. Left out on purpose: images.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whet.data.prompts import PromptEncoder
from whet.envs.tools import Tools
from whet.errors import ConfigError, DataError, format_value, lookup_error
from whet.types import Prompt

__all__ = ["Environments"]

_NOT_TOOLS = ("reset", "get_reward")
"""Public methods of an environment that are not tools."""
_COLUMN = "environment"


class Environments:
    """The environments of a run.

    Args:
        factory: makes an environment; or a dict of names to factories, and a row's column `environment` has the name.
        tools: that every environment has besides its methods.
    Raises: ConfigError: an environment without `reset`.
    """

    def __init__(self, factory: Any, tools: Sequence[Callable[..., Any]]) -> None:
        self.factory, self._has_names = factory, isinstance(factory, Mapping)
        self._factories: dict[Any, Callable[[], Any]] = dict(factory) if self._has_names else {None: factory}
        self._tools = list(tools)
        self._pool: dict[Any, list[tuple[Any, Tools]]] = {name: [] for name in self._factories}
        self.in_use: list[Any] = []
        """The environments of the last rollout, one for each completion, in order."""
        for name in self._factories:
            self._get(name, 0)

    def _get(self, name: Any, place: int) -> tuple[Any, Tools]:
        """The environment of a name at a place of its pool, with its tools; made where the pool is too short."""
        pool = self._pool[name]
        while len(pool) <= place:
            environment = self._factories[name]()
            kind = type(environment)
            methods = {n for n, _ in inspect.getmembers(kind, inspect.isfunction) if not n.startswith("_")}
            if "reset" not in methods:
                raise ConfigError(
                    f"{kind.__name__}, which environment_factory made, has no method reset; it begins a rollout"
                )
            own = [getattr(environment, n) for n in sorted(methods.difference(_NOT_TOOLS))]
            pool.append((environment, Tools([*self._tools, *own])))
        return pool[place]

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """The tools of the only kind of environment; [] where a row chooses among several."""
        return [] if self._has_names else list(self._get(None, 0)[1].functions.values())

    @property
    def rewards(self) -> list[Callable[..., Any]]:
        """A reward function for each kind of environment with `get_reward`, of that name."""
        kinds = dict.fromkeys(type(self._get(name, 0)[0]) for name in self._factories)
        return [_reward_function(kind) for kind in kinds if hasattr(kind, "get_reward")]

    def reset(
        self, prompts: Sequence[Prompt], number: int, encoder: Callable[[Sequence[Any]], PromptEncoder]
    ) -> list[tuple[Prompt, Tools]]:
        """Resets an environment for each completion.

        Args: prompts: of the rows. number: completions of each. encoder: (schemas of tools) -> the prompts' encoder.
        Returns: for each completion its prompt, with the text of `reset` at its end, and its tools.
        Raises: DataError: an unknown environment; a `reset` that returns neither a text nor None.
        """
        self.in_use, used, started = [], dict.fromkeys(self._factories, 0), []
        encoders: dict[Any, PromptEncoder] = {}
        for prompt in prompts:
            name = prompt.columns.get(_COLUMN) if self._has_names else None
            if name not in self._factories:
                known = lookup_error(_COLUMN, str(name), [str(n) for n in self._factories])
                raise DataError(f"a row's {_COLUMN} is not among the environments of environment_factory: {known}")
            row = {"prompt": prompt.source, **prompt.columns}
            if self._has_names:
                del row[_COLUMN]
            for _ in range(number):
                environment, tools = self._get(name, used[name])
                used[name] += 1
                self.in_use.append(environment)
                encoders.setdefault(name, encoder(tools.schemas))
                text = environment.reset(**row)
                started.append((_append_text(prompt, text, encoders[name], type(environment).__name__), tools))
        return started


def _append_text(prompt: Prompt, text: Any, encode: PromptEncoder, name: str) -> Prompt:
    """A prompt with a text at the end of its last message. Args: text: of `reset`. name: of the environment."""
    if text is not None and not isinstance(text, str):
        raise DataError(f"{name}.reset gave {format_value(text, 80)}; give a text, or None")
    if not isinstance(prompt.source, list):
        raise DataError(f"row {prompt.row}: an environment needs a prompt of messages, and this one is a text")
    *before, last = prompt.source
    source = [*before, {**last, "content": last["content"] + (text or "")}]
    encoded = encode({"prompt": source, **prompt.columns}, prompt.row)
    if encoded is None:
        raise DataError(
            f"row {prompt.row}: the prompt with what {name}.reset gave is too long; raise max_prompt_length"
        )
    return dataclasses.replace(encoded, columns=prompt.columns)


def _reward_function(kind: type) -> Callable[..., Any]:
    """get_reward of one kind of environment as a reward function; None for the environments of other kinds."""

    def plain(environments: Sequence[Any], **_: Any) -> list[Any]:
        return [e.get_reward() if type(e) is kind else None for e in environments]

    async def awaited(environments: Sequence[Any], **_: Any) -> list[Any]:
        return [await e.get_reward() if type(e) is kind else None for e in environments]

    environment: Any = kind
    function = awaited if inspect.iscoroutinefunction(environment.get_reward) else plain
    function.__name__ = kind.__name__
    return function
