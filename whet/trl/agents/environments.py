"""environment_factory: objects that a rollout plays with; `reset` begins it, methods are tools, `get_reward` ends it.

Instances are kept and reset: so many of each kind as a batch needs at once. Left out on purpose: images.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whet.data.prompts import PromptEncoder
from whet.errors import ConfigError, DataError, format_value, lookup_error
from whet.trl.agents.tools import Tools
from whet.types import Prompt

__all__ = ["Environments"]

_OWN = ("reset", "get_reward")
"""Methods that are no tools."""
_COLUMN = "environment"


class Environments:
    """The environments of a run.

    Args: factory: makes one, or a dict of names to such, of which a row's column `environment` chooses. tools: that
        every environment has besides its methods.
    Raises: ConfigError: an environment without `reset`.
    """

    def __init__(self, factory: Any, tools: Sequence[Callable[..., Any]]) -> None:
        self.factory, self._several = factory, isinstance(factory, Mapping)
        self._factories: dict[Any, Callable[[], Any]] = dict(factory) if self._several else {None: factory}
        self._standalone = list(tools)
        self._pool: dict[Any, list[tuple[Any, Tools]]] = {name: [] for name in self._factories}
        self.playing: list[Any] = []
        """The environments of the last rollout, one for each completion, in order."""
        for name in self._factories:
            self._made(name, 0)

    def _made(self, name: Any, place: int) -> tuple[Any, Tools]:
        """The environment of a name at a place of its pool, with its tools."""
        pool = self._pool[name]
        while len(pool) <= place:
            found = self._factories[name]()
            methods = {n for n, _ in inspect.getmembers(type(found), inspect.isfunction) if not n.startswith("_")}
            if "reset" not in methods:
                raise ConfigError(
                    f"{type(found).__name__}, which environment_factory made, has no method reset; it begins a rollout"
                )
            own = [getattr(found, n) for n in sorted(methods.difference(_OWN))]
            pool.append((found, Tools([*self._standalone, *own])))
        return pool[place]

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """The tools of the one kind that there is; of several, where a row chooses, none."""
        return [] if self._several else list(self._made(None, 0)[1].functions.values())

    @property
    def rewards(self) -> list[Callable[..., Any]]:
        """A reward function for each kind of environment with `get_reward`, of that name."""
        kinds = dict.fromkeys(type(self._made(name, 0)[0]) for name in self._factories)
        return [_reward(kind) for kind in kinds if hasattr(kind, "get_reward")]

    def begin(
        self, prompts: Sequence[Prompt], number: int, encoder: Callable[[Sequence[Any]], PromptEncoder]
    ) -> list[tuple[Prompt, Tools]]:
        """Resets an environment for each completion.

        Args: prompts: of the rows. number: completions of each. encoder: (schemas of tools) -> what encodes a prompt.
        Returns: for each completion its prompt, with what `reset` said at its end, and its tools.
        Raises: DataError: an unknown environment; a `reset` that gives neither a text nor None.
        """
        self.playing, taken, begun = [], dict.fromkeys(self._factories, 0), []
        encoders: dict[Any, PromptEncoder] = {}
        for prompt in prompts:
            name = prompt.columns.get(_COLUMN) if self._several else None
            if name not in self._factories:
                found = lookup_error(_COLUMN, str(name), [str(n) for n in self._factories])
                raise DataError(f"a row's {_COLUMN} is not among the environments of environment_factory: {found}")
            for _ in range(number):
                environment, tools = self._made(name, taken[name])
                taken[name] += 1
                self.playing.append(environment)
                encoders.setdefault(name, encoder(tools.schemas))
                said = environment.reset(**self._row(prompt))
                begun.append((_told(prompt, said, encoders[name], type(environment).__name__), tools))
        return begun

    def _row(self, prompt: Prompt) -> dict[str, Any]:
        """What `reset` is given: the row, but for the column that has chosen the environment."""
        row = {"prompt": prompt.source, **prompt.columns}
        return {n: v for n, v in row.items() if not (self._several and n == _COLUMN)}


def _told(prompt: Prompt, said: Any, encode: PromptEncoder, name: str) -> Prompt:
    """A prompt with an observation at the end of its last message."""
    if said is not None and not isinstance(said, str):
        raise DataError(f"{name}.reset gave {format_value(said, 80)}; give a text, or None")
    if not isinstance(prompt.source, list):
        raise DataError(f"row {prompt.row}: an environment needs a prompt of messages, and this one is a text")
    *before, last = prompt.source
    source = [*before, {**last, "content": last["content"] + (said or "")}]
    made = encode({"prompt": source, **prompt.columns}, prompt.row)
    if made is None:
        raise DataError(
            f"row {prompt.row}: the prompt with what {name}.reset gave is too long; raise max_prompt_length"
        )
    return dataclasses.replace(made, columns=prompt.columns)


def _reward(kind: type) -> Callable[..., Any]:
    """The reward of one kind of environment; None for the others."""

    def given(environments: Sequence[Any], **_: Any) -> list[Any]:
        return [e.get_reward() if type(e) is kind else None for e in environments]

    async def awaited(environments: Sequence[Any], **_: Any) -> list[Any]:
        return [await e.get_reward() if type(e) is kind else None for e in environments]

    own: Any = kind
    made = awaited if inspect.iscoroutinefunction(own.get_reward) else given
    made.__name__ = kind.__name__
    return made
