"""Tools: functions that the model calls between its turns, and the messages that answer the calls.

    def multiply(a: int, b: int) -> int: ...       # with type hints and a docstring of Google's form, for the model

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

__all__ = ["ToolCounts", "Tools"]


@dataclass
class ToolCounts:
    """Numbers of calls and failures since they were last taken."""

    calls: int = 0
    failures: int = 0

    def take(self, completions: int) -> dict[str, float]:
        """tools/call_frequency, calls per completion, and tools/failure_frequency, failures per call; resets both."""
        metrics = {
            "tools/call_frequency": self.calls / max(completions, 1),
            "tools/failure_frequency": self.failures / max(self.calls, 1),
        }
        self.calls = self.failures = 0
        return metrics


class Tools:
    """Functions by name, and their schemas for a chat template.

    Args: functions: plain or async.
    Raises: ConfigError: a function without type hints or a docstring; two functions of one name.

    >>> def double(x: int) -> int:
    ...     '''Doubles a number.
    ...
    ...     Args:
    ...         x: the number.
    ...     '''
    ...     return 2 * x
    >>> tools = Tools([double])
    >>> tools.answer([{"type": "function", "function": {"name": "double", "arguments": {"x": 4}}}], ToolCounts())
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

    def answer(self, calls: Sequence[Mapping[str, Any]], counts: ToolCounts) -> list[dict[str, Any]]:
        """Runs the calls of a turn: plain functions in order, then async ones together.

        Args: calls: of a message. counts: their number and that of the failures are added to it.
        Returns: the messages that answer them.
        """
        results: list[tuple[str, Any]] = []
        pending: list[tuple[str, Coroutine[Any, Any, Any]]] = []
        for call in calls:
            name, result = self._call(call)
            (pending if inspect.iscoroutine(result) else results).append((name, result))
        awaited = _run_together([coroutine for _, coroutine in pending])
        results += zip([name for name, _ in pending], awaited, strict=True)
        counts.calls += len(calls)
        counts.failures += sum(isinstance(result, Exception) for _, result in results)
        return [{"role": "tool", "name": name, "content": _text(result)} for name, result in results]

    def _call(self, call: Mapping[str, Any]) -> tuple[str, Any]:
        """The name of a call, and what its function returned: also a coroutine, or an error."""
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


def _run_together(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Their results, errors included. They run on a thread of their own, since a notebook's loop is running already."""
    if not coroutines:
        return []

    async def gather() -> list[Any]:
        return await asyncio.gather(*coroutines, return_exceptions=True)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, gather()).result()


def _text(result: Any) -> str:
    """A result as the content of a message."""
    return str({"error": str(result)} if isinstance(result, Exception) else result)
