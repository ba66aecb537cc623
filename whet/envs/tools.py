"""Tools: functions that the model calls between its turns, and the messages that answer the calls.

    def multiply(a: int, b: int) -> int: ...       # with type hints and a docstring of Google's form, for the model

A call that fails, or exceeds its time, is answered by its error, and counted. Left out on purpose: images in an answer,
and a sandbox (whet.envs.sandbox); a tool runs in this process, with arguments that the model has written.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from whet.errors import ConfigError, InfrastructureError

__all__ = ["Tool", "ToolCounts", "ToolLimits", "Tools"]


@dataclass
class ToolCounts:
    """Numbers of calls and failures since they were last taken."""

    calls: int = 0
    failures: int = 0

    def add(self, other: ToolCounts) -> None:
        """Adds the numbers of an episode."""
        self.calls, self.failures = self.calls + other.calls, self.failures + other.failures

    def take(self, completions: int) -> dict[str, float]:
        """tools/call_frequency, calls per completion, and tools/failure_frequency, failures per call; resets both."""
        metrics = {
            "tools/call_frequency": self.calls / max(completions, 1),
            "tools/failure_frequency": self.failures / max(self.calls, 1),
        }
        self.calls = self.failures = 0
        return metrics


@dataclass(frozen=True, kw_only=True)
class ToolLimits:
    """Limits of the calls of one turn, for `Tools.run`."""

    max_concurrent: int = 8
    """Calls that run at once; the others wait."""
    timeout_s: float | None = 60.0
    """Time limit of a call, without its waiting; None = no limit, and a call that hangs then stops the run. A function
    in a thread can't be stopped: its answer is the error, and the thread goes on until the function returns."""
    max_chars: int | None = None
    """Characters of an answer, which keeps its first and its last half; None = all."""


@dataclass(frozen=True, eq=False)
class Tool:
    """A tool that is no Python function, such as an MCP server's."""

    schema: Mapping[str, Any]
    """As chat templates take it: {"type": "function", "function": {"name", "description", "parameters"}}."""
    call: Callable[..., Any]
    """Plain or async, called with the arguments as keywords."""


class Tools:
    """Functions by name, and their schemas for a chat template.

    Args: functions: plain or async functions, or Tools. limits: of the calls of one turn.
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

    def __init__(self, functions: Iterable[Callable[..., Any] | Tool], *, limits: ToolLimits = ToolLimits()) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}
        self.schemas: list[Any] = []
        self.limits = limits
        for fn in functions:
            schema = dict(fn.schema) if isinstance(fn, Tool) else _schema(fn)
            name = schema["function"]["name"]
            if name in self.functions:
                raise ConfigError(f"two tools are named {name!r}, and the model calls them by name; rename one")
            self.functions[name] = fn.call if isinstance(fn, Tool) else fn
            self.schemas.append(schema)

    def with_functions(self, functions: Mapping[str, Callable[..., Any]], limits: ToolLimits) -> Tools:
        """Tools of the same names and schemas with other functions, such as the methods of another instance."""
        tools = copy.copy(self)
        tools.functions, tools.limits = dict(functions), limits
        return tools

    def __iter__(self) -> Iterator[Tool]:
        """Returns the tools, each with its schema."""
        return (Tool(schema, call) for schema, call in zip(self.schemas, self.functions.values(), strict=True))

    async def run(self, calls: Sequence[Mapping[str, Any]], counts: ToolCounts) -> list[dict[str, Any]]:
        """Runs the calls of a turn at once, within the limits; plain functions run in threads.

        Args: calls: of a message. counts: their number and that of the failures are added to it.
        Returns: the messages that answer them, in order.
        Raises: InfrastructureError: a tool raised it, so the failure is not the model's.
        """
        semaphore = asyncio.Semaphore(self.limits.max_concurrent)

        async def run_one(call: Mapping[str, Any]) -> tuple[str, Any]:
            async with semaphore:
                deadline = asyncio.timeout(self.limits.timeout_s)
                try:
                    async with deadline:
                        result = await _in_thread(lambda: self._call(call)[1])
                        return _name(call), await result if inspect.isawaitable(result) else result
                except SystemExit as error:  # of an async tool; it would end the loop
                    return _name(call), RuntimeError(f"the tool raised {error!r}")
                except Exception as error:
                    late = f"no answer within {self.limits.timeout_s:g} s" if deadline.expired() else ""
                    return _name(call), TimeoutError(late) if late else error

        results = await asyncio.gather(*map(run_one, calls))
        for _, result in results:
            if isinstance(result, InfrastructureError):
                raise result
        return self._messages(results, counts)

    def answer(self, calls: Sequence[Mapping[str, Any]], counts: ToolCounts) -> list[dict[str, Any]]:
        """Runs the calls of a turn here: plain functions in order, on this thread, then async ones together.

        Args: calls: of a message. counts: their number and that of the failures are added to it.
        Returns: the messages that answer them.
        """
        results: list[tuple[str, Any]] = []
        pending: list[tuple[str, Coroutine[Any, Any, Any]]] = []
        for call in calls:
            name, result = self._call(call)
            (pending if inspect.iscoroutine(result) else results).append((name, result))
        awaited = _run_together([coroutine for _, coroutine in pending])
        return self._messages([*results, *zip([name for name, _ in pending], awaited, strict=True)], counts)

    def _messages(self, results: Sequence[tuple[str, Any]], counts: ToolCounts) -> list[dict[str, Any]]:
        counts.calls += len(results)
        counts.failures += sum(isinstance(result, Exception) for _, result in results)
        return [{"role": "tool", "name": name, "content": self._text(result)} for name, result in results]

    def _call(self, call: Mapping[str, Any]) -> tuple[str, Any]:
        """Returns the name of a call, and what its function returned: also a coroutine, or an error."""
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

    def _text(self, result: Any) -> str:
        """Returns a result as the content of a message."""
        text = str({"error": str(result) or repr(result)} if isinstance(result, Exception) else result)
        most = self.limits.max_chars
        if most is None or len(text) <= most:
            return text
        left_out = f" [{len(text) - most} characters left out] "
        return text[: (most + 1) // 2] + left_out + (text[-(most // 2) :] if most > 1 else "")


def _schema(fn: Callable[..., Any]) -> dict[str, Any]:
    """Returns the schema of a function. Raises ConfigError: it has no type hints or no docstring."""
    try:
        return get_json_schema(fn)
    except (DocstringParsingException, TypeHintParsingException, AttributeError, TypeError) as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise ConfigError(f"the tool {name} needs type hints and a docstring of Google's form: {error}") from error


def _name(call: Mapping[str, Any]) -> str:
    return str(call.get("function", call).get("name", "unknown"))


async def _in_thread(work: Callable[[], Any]) -> Any:
    """Returns what a function returns, run in a daemon thread: one that hangs does not keep the program alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # such as SystemExit: without an outcome the caller would wait forever
            result = RuntimeError(f"the tool raised {error!r}")
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(result))

    threading.Thread(target=run, name="whet-tool", daemon=True).start()
    return await future


def _run_together(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Returns their results, errors included. They run on a thread of their own, since a notebook's loop is running
    already.
    """
    if not coroutines:
        return []

    async def gather() -> list[Any]:
        return await asyncio.gather(*coroutines, return_exceptions=True)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, gather()).result()
