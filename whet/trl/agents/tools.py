"""Tools: functions that the model calls between its turns, and what they answer.

    def multiply(a: int, b: int) -> int: ...       # type hints and a docstring of Google's form: the model is told them

A call that fails is answered by its error, and counted. Left out on purpose: images in an answer, and a sandbox; a tool
runs in this process, with arguments that the model has written.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from whet.errors import ConfigError

__all__ = ["Counts", "Tools"]


@dataclass
class Counts:
    """Calls of tools since they were last taken."""

    calls: int = 0
    failures: int = 0

    def take(self, completions: int) -> dict[str, float]:
        """tools/call_frequency, calls of a completion, and tools/failure_frequency, failures of a call; then 0."""
        made = {
            "tools/call_frequency": self.calls / max(completions, 1),
            "tools/failure_frequency": self.failures / max(self.calls, 1),
        }
        self.calls = self.failures = 0
        return made


class Tools:
    """Functions by name, with what a chat template is told of them.

    Args: functions: plain or async.
    Raises: ConfigError: one without type hints or a docstring; two of one name.

    >>> def double(x: int) -> int:
    ...     '''Doubles a number.
    ...
    ...     Args:
    ...         x: the number.
    ...     '''
    ...     return 2 * x
    >>> tools = Tools([double])
    >>> tools.answer([{"type": "function", "function": {"name": "double", "arguments": {"x": 4}}}], Counts())
    [{'role': 'tool', 'name': 'double', 'content': '8'}]
    """

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}
        self.schemas: list[Any] = []
        for fn in functions:
            try:
                schema = get_json_schema(fn)
            except (DocstringParsingException, TypeHintParsingException, AttributeError, TypeError) as error:
                raise ConfigError(
                    f"the tool {fn!r} needs type hints and a docstring of Google's form: {error}"
                ) from error
            name = schema["function"]["name"]
            if name in self.functions:
                raise ConfigError(f"two tools are named {name!r}, and the model calls them by name; rename one")
            self.functions[name] = fn
            self.schemas.append(schema)

    def answer(self, calls: Sequence[Mapping[str, Any]], counts: Counts) -> list[dict[str, Any]]:
        """The messages that the calls of a turn are answered by: plain functions in order, then async ones together.

        Args: calls: of a message. counts: takes their number, and that of the failures.
        """
        plain: list[tuple[str, Any]] = []
        later: list[tuple[str, Coroutine[Any, Any, Any]]] = []
        for call in calls:
            counts.calls += 1
            name, made = self._called(call)
            if inspect.iscoroutine(made):
                later.append((name, made))
            else:
                plain.append((name, made))
        answers = [*plain, *zip([name for name, _ in later], _together([c for _, c in later]), strict=True)]
        counts.failures += sum(isinstance(found, Exception) for _, found in answers)
        return [{"role": "tool", "name": name, "content": _text(found)} for name, found in answers]

    def _called(self, call: Mapping[str, Any]) -> tuple[str, Any]:
        """The name of a call, and what its function gave, a coroutine or an error among that."""
        if call.get("type", "function") != "function":
            return str(call.get("name", "unknown")), ValueError(f"Unsupported tool call type: {call['type']}")
        function = call.get("function", call)
        name = function["name"]
        if name not in self.functions:
            return name, ValueError(f"Tool {name} not found.")
        try:
            return name, self.functions[name](**function["arguments"])
        except Exception as error:  # the tool is the user's own code, and its arguments are the model's
            return name, error


def _together(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """What they give, errors among that; on a thread of their own, since a notebook's has a loop that runs already."""
    if not coroutines:
        return []

    async def gathered() -> list[Any]:
        return await asyncio.gather(*coroutines, return_exceptions=True)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, gathered()).result()


def _text(found: Any) -> str:
    """What a message says of a result."""
    return str({"error": str(found)} if isinstance(found, Exception) else found)
