"""EnvironmentClass: a user's class whose instances are the environments of episodes, and whose methods are tools.

    class Calculator:
        async def reset(self, prompt, **row):      # starts an episode: None, or a text or messages for the prompt
            self.used = 0

        def add(self, a: int, b: int) -> int:      # any other public method is a tool, with type hints and a docstring
            ...

        async def step(self, message):             # answers a turn without calls: a text, messages, or None = the end
            ...

        def get_turn_reward(self):                 # of the last turn; None = none
            ...

        def get_reward(self):                      # of the episode, besides those of turns; None = not applicable
            ...

Each method is optional, and plain or async. Each episode has an instance of its own, which keeps its state. A list
`tools` of the class has further tools, which all episodes share. An attribute `done` that is true after a turn ends the
episode. Left out on purpose: images.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from whet.data.prompts import PromptEncoder
from whet.envs.tools import ToolCounts, ToolLimits, Tools
from whet.envs.transcript import with_source
from whet.errors import ConfigError, DataError, RewardError, format_exception, format_value
from whet.rewards.call import select_keywords
from whet.rewards.checked_values import check_values
from whet.rollout.external_calls import CallGenerator, ExternalCall, run_function
from whet.types import Message, Prompt

__all__ = [
    "ENVIRONMENT_REWARD",
    "EnvironmentClass",
    "EnvironmentInstance",
    "close_in_thread",
    "method_names",
    "with_observation",
]

LOG = logging.getLogger("whet")

ENVIRONMENT_REWARD = "environment"
"""The name of the reward that get_reward returns."""
NOT_TOOLS = ("close", "get_reward", "get_turn_reward", "reset", "step")
"""Public methods of an environment that are not tools."""


def method_names(kind: type) -> list[str]:
    """Returns the public methods of a class, sorted.

    >>> class Door:
    ...     def knock(self): ...
    ...     def _open(self): ...
    >>> method_names(Door)
    ['knock']
    """
    return [n for n, _ in inspect.getmembers(kind, inspect.isfunction) if not n.startswith("_")]


class EnvironmentClass:
    """A user's class of environments: its tools, and what else it has.

    Args: kind: the class, which is called without arguments for each episode.
    Raises: ConfigError: the class needs arguments; a tool without type hints or a docstring; neither tools nor step nor
        get_reward; tools that are no list.

    >>> class Dice:
    ...     def roll(self, sides: int) -> int:
    ...         '''Rolls a die.
    ...
    ...         Args:
    ...             sides: of the die.
    ...         '''
    ...         return 1 + sides // 2
    >>> [schema["function"]["name"] for schema in EnvironmentClass(Dice).tools.schemas]
    ['roll']
    """

    def __init__(self, kind: type) -> None:
        self.kind, self.name = kind, kind.__name__
        try:
            inspect.signature(kind).bind()
        except TypeError as error:
            raise ConfigError(
                f"environment {self.name} is created as {self.name}() for each episode: {error}; give the arguments "
                "defaults, or read them in reset, which receives the columns of the row"
            ) from error
        except ValueError:  # a builtin has no signature
            pass
        names = method_names(kind)
        self.method_names = [name for name in names if name not in NOT_TOOLS]
        nobody = object()  # the schemas need bound methods, not an instance
        shared = getattr(kind, "tools", ()) if "tools" not in names else ()
        if not isinstance(shared, list | tuple | Tools):
            raise ConfigError(
                f"environment {self.name} has tools = {format_value(shared, 60)}; give a list of functions and Tools "
                "that its episodes share, or name the attribute otherwise"
            )
        methods = [inspect.getattr_static(kind, n).__get__(nobody, kind) for n in self.method_names]
        self.tools = Tools([*methods, *shared])
        self.tool_names = list(self.tools.functions)
        self.has_step, self.has_turn_reward = "step" in names, "get_turn_reward" in names
        self.has_final_reward = "get_reward" in names
        self.takes_row = bool(getattr(kind, "takes_row", False))
        """Whether reset is called as reset(prompt, row) in place of reset(prompt=..., **row)."""
        self._reset = inspect.getattr_static(kind, "reset").__get__(nobody, kind) if "reset" in names else None
        if not self.tool_names and not self.has_step and not self.has_reward:
            raise ConfigError(
                f"environment {self.name} has neither tools (public methods) nor step(message) nor get_reward(); write "
                "one of them"
            )

    @property
    def has_reward(self) -> bool:
        """Whether its episodes have a reward."""
        return self.has_turn_reward or self.has_final_reward

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raises ConfigError: `reset` needs a column that is not among them. Args: columns: of the rows, without the
        prompt.
        """
        if self._reset is not None and not self.takes_row:
            self.reset_keywords(self._reset, dict.fromkeys(("prompt", *columns)))

    def reset_keywords(self, reset: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keywords of a call of `reset`. Args: offered: prompt and columns. Raises: see check_columns."""
        return select_keywords(reset, offered, {}, name=self.name, kind="reset of", extras=["prompt"])

    def check_lifetime(self, episode_timeout_s: float | None) -> None:
        """Raises ConfigError: an episode may last longer than what the class says that an instance lives."""
        lifetime = getattr(self.kind, "lifetime_s", None)
        if lifetime is not None and (episode_timeout_s is None or episode_timeout_s >= lifetime):
            raise ConfigError(
                f"environment {self.name} lives {lifetime:g} s (its lifetime_s), and rollout.episode_timeout_s="
                f"{episode_timeout_s} lets an episode last longer; set it below that"
            )


class EnvironmentInstance:
    """The environment of one episode. Its methods are generators, which yield the calls to wait for.

    Args: of: the class. timeout_s: of each method, and of the calls of a turn together; None = no limit.
        tool_timeout_s: of one call of a tool.
    """

    def __init__(self, of: EnvironmentClass, *, timeout_s: float | None, tool_timeout_s: float | None) -> None:
        self.of, self.timeout_s = of, timeout_s
        self._limits = ToolLimits(timeout_s=tool_timeout_s)
        self.counts = ToolCounts()
        self._instance: Any = None
        self._tools: Tools = of.tools

    def reset(self, prompt: Prompt) -> CallGenerator[Any]:
        """Creates the instance and resets it.

        Args: prompt: of the group.
        Returns: what `reset` has returned, for `with_observation`.
        Raises: DataError: a column is named "prompt" besides the prompt, and the class does not take the row whole.
        """
        if "prompt" in prompt.columns and not self.of.takes_row:
            raise DataError(
                f"row {prompt.row} has a column 'prompt' besides its prompt, which reset receives under that name; "
                "rename the column"
            )
        source, columns = copy.deepcopy((prompt.source, dict(prompt.columns)))

        def create() -> None:
            self._instance = self.of.kind()

        def call_reset(reset: Callable[..., Any]) -> Any:
            if self.of.takes_row:
                return reset(source, columns)
            return reset(**self.of.reset_keywords(reset, {"prompt": source, **columns}))

        yield self._call(create, "__init__", phase="reset")
        observation: Any = None
        if (reset := getattr(self._instance, "reset", None)) is not None:
            observation = yield self._call(lambda: call_reset(reset), "reset", phase="reset")
        methods = {name: getattr(self._instance, name) for name in self.of.method_names}
        self._tools = self.of.tools.with_functions({**self.of.tools.functions, **methods}, self._limits)
        return observation

    def respond(self, message: Message) -> CallGenerator[Any]:
        """Runs the calls of a turn, or `step` if it has none. Returns: what answers it; [] = the episode ends."""
        answer: Any = None
        if calls := message.get("tool_calls"):
            answer = yield self._call(lambda: self._tools.run(calls, self.counts), "the tools", phase="tools")
        elif self.of.has_step:
            own_copy = copy.deepcopy(message)
            answer = yield self._call(lambda: self._instance.step(own_copy), "step", phase="step")
        if isinstance(answer, str):
            answer = [{"role": "user", "content": answer}]
        return [] if answer is None or getattr(self._instance, "done", False) else answer

    def get_reward(self, method: str = "get_reward") -> CallGenerator[float]:
        """Returns the reward of the episode, or by get_turn_reward that of its last turn; NaN = not applicable.

        Raises: RewardError: it is no finite number.
        """
        value = yield self._call(lambda: getattr(self._instance, method)(), method, phase="reward")
        checked = check_values([value], ["0_0"], name=method)
        if checked.wrong:
            raise RewardError(
                f"{method} of {self.of.name} returned {format_value(value, 80)}; return a finite number, or None where "
                "it does not apply"
            )
        return float(checked.rewards[0])

    def close(self) -> None:
        """Calls the method `close` of the instance, if it has one, in a thread that nobody waits for."""
        if (close := getattr(self._instance, "close", None)) is not None:
            close_in_thread(close, f"close of {self.of.name}")

    def _call(self, function: Callable[[], Any], method: str, *, phase: str) -> ExternalCall:
        name = f"{method} of {self.of.name}"
        return ExternalCall(function=function, name=name, timeout_s=self.timeout_s, phase=phase)


def close_in_thread(close: Callable[[], Any], name: str) -> None:
    """Calls a method `close`, plain or async, in a thread that nobody waits for; an error is a warning."""

    def run() -> None:
        try:
            asyncio.run(run_function(close))
        except Exception as error:
            LOG.warning("%s raised %s", name, format_exception(error))

    threading.Thread(target=run, name=name, daemon=True).start()


def with_observation(prompt: Prompt, observation: Any, encode: PromptEncoder, name: str) -> Prompt:
    """Returns a prompt with what `reset` returned: a text continues the last message, messages follow it.

    Args: observation: a text, messages or None. encode: of the prompt. name: of the method, for messages.
    Raises: DataError: it is something else, or the prompt is too long with it.

    >>> from whet.data.tokenizer import byte_tokenizer
    >>> encode = PromptEncoder(byte_tokenizer())
    >>> with_observation(encode({"prompt": "2+2", "answer": "4"}), " = ?", encode, "reset").source
    '2+2 = ?'
    """
    if observation is None:
        return prompt
    source = prompt.source
    is_messages = isinstance(observation, list | tuple) and all(isinstance(m, Mapping) for m in observation)
    if is_messages and not encode.is_plain(source):
        before = [{"role": "user", "content": source}] if isinstance(source, str) else source
        source = [*before, *map(dict, observation)]
    elif not isinstance(observation, str):
        raise DataError(
            f"{name} returned {format_value(observation, 80)}; return a text, messages (where the prompt is one of "
            "messages too), or None"
        )
    elif isinstance(source, str):
        source += observation
    else:
        *first, last = source
        source = [*first, {**last, "content": last["content"] + observation}]
    return with_source(prompt, source, encode)
