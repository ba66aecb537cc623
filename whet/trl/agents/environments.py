"""Implements environment_factory. `reset` starts an episode, methods are tools, `get_reward` scores its end.

Instances are reused: there are as many of each kind as a batch needs at once. Images are not supported.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whet.data.prompts import PromptEncoder
from whet.envs.environment import method_names, with_observation
from whet.envs.recorded import Tape
from whet.envs.tools import Tool, ToolLimits, Tools
from whet.errors import ConfigError, DataError, lookup_error
from whet.types import Prompt

__all__ = ["Environments"]

_NOT_TOOLS = ("reset", "get_reward")
"""Public methods of an environment that are not tools."""
_COLUMN = "environment"


class Environments:
    """The environments of a run.

    Args:
        factory: makes an environment; or a dict of factories by name, from which a row's column `environment` chooses.
        tools: tools of every environment, besides its methods. limits: of the calls of a turn.
    Raises: ConfigError: an environment without `reset`.
    """

    def __init__(self, factory: Any, tools: Sequence[Callable[..., Any] | Tool], limits: ToolLimits) -> None:
        self.factory, self._has_names = factory, isinstance(factory, Mapping)
        self._factories: dict[Any, Callable[[], Any]] = dict(factory) if self._has_names else {None: factory}
        self._tools, self._limits = list(tools), limits
        self._pool: dict[Any, list[tuple[Any, Tools]]] = {name: [] for name in self._factories}
        self.in_use: list[Any] = []
        """The environments of the last rollout, one for each completion, in order."""
        for name in self._factories:
            self._get(name, 0)

    def _get(self, name: Any, index: int) -> tuple[Any, Tools]:
        """Returns an environment of the pool and its tools; extends the pool if it is too short."""
        pool = self._pool[name]
        while len(pool) <= index:
            environment = self._factories[name]()
            kind = type(environment)
            methods = method_names(kind)
            if "reset" not in methods:
                raise ConfigError(
                    f"{kind.__name__} of environment_factory has no method reset; define it: it starts a rollout"
                )
            bound = [getattr(environment, n) for n in methods if n not in _NOT_TOOLS]
            pool.append((environment, Tools([*self._tools, *bound], limits=self._limits)))
        return pool[index]

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """The tools of the only kind of environment; [] if rows choose among several."""
        return [] if self._has_names else list(self._get(None, 0)[1].functions.values())

    @property
    def rewards(self) -> list[Callable[..., Any]]:
        """A reward function for each kind of environment with `get_reward`, named after its class."""
        kinds = dict.fromkeys(type(self._get(name, 0)[0]) for name in self._factories)
        return [_reward_function(kind) for kind in kinds if hasattr(kind, "get_reward")]

    def reset(
        self,
        prompts: Sequence[Prompt],
        number: int,
        encoder: Callable[[Sequence[Any]], PromptEncoder],
        tapes: Sequence[Tape] = (),
    ) -> list[tuple[Prompt, Tools]]:
        """Resets an environment for each completion.

        Args: prompts: the rows' prompts. number: completions of a prompt. encoder: (tools' schemas) -> the prompts'
            encoder. tapes: the records of the completions, which may answer in place of `reset`; () = none.
        Returns: for each completion, its prompt, to which the text of `reset` is appended, and its tools.
        Raises: DataError: an unknown environment; a `reset` that returns neither a text nor messages nor None; a prompt
            that is a text.
        """
        self.in_use, used, started = [], dict.fromkeys(self._factories, 0), []
        encoders: dict[Any, PromptEncoder] = {}
        for prompt in prompts:
            name = prompt.columns.get(_COLUMN) if self._has_names else None
            if name not in self._factories:
                known = lookup_error(_COLUMN, str(name), [str(n) for n in self._factories])
                raise DataError(f"a row's {_COLUMN} is not among the environments of environment_factory: {known}")
            if not isinstance(prompt.source, list):
                raise DataError(
                    f"row {prompt.row}: the prompt is a text, but an environment needs messages; give messages"
                )
            row = {"prompt": prompt.source, **prompt.columns}
            if self._has_names:
                del row[_COLUMN]
            for _ in range(number):
                environment, tools = self._get(name, used[name])
                used[name] += 1
                self.in_use.append(environment)
                encoders.setdefault(name, encoder(tools.schemas))
                kind, reset = type(environment).__name__, functools.partial(environment.reset, **row)
                text = tapes[len(started)].ask_now("reset", prompt.tokens, reset) if tapes else reset()
                started.append((with_observation(prompt, text, encoders[name], f"{kind}.reset"), tools))
        return started


def _reward_function(kind: type) -> Callable[..., Any]:
    """Wraps get_reward of a kind of environment as a reward function; it returns None for other kinds."""

    def get_rewards(environments: Sequence[Any], **_: Any) -> list[Any]:
        return [e.get_reward() if type(e) is kind else None for e in environments]

    async def get_rewards_async(environments: Sequence[Any], **_: Any) -> list[Any]:
        return [await e.get_reward() if type(e) is kind else None for e in environments]

    is_async = inspect.iscoroutinefunction(getattr(kind, "get_reward"))  # noqa: B009 - kind is a plain type
    function = get_rewards_async if is_async else get_rewards
    function.__name__ = kind.__name__
    return function
