"""Tunix's tools, the manager that calls them, and the parsers of calls.

A tool is a class with `get_json_schema` and `apply` or `apply_async`. The parser of Qwen's form reads what many chat
templates write; an agent of whet's own reads the form of the tokenizer's template (whet.envs.tool_calls).
"""

from __future__ import annotations

import abc
import asyncio
import inspect
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from whet.errors import lookup_error

__all__ = [
    "BaseTool",
    "CalculatorTool",
    "GeminiToolParser",
    "QwenToolParser",
    "ToolCall",
    "ToolManager",
    "ToolOutput",
    "ToolParser",
    "get_tool_parser",
]


@dataclass
class ToolCall:
    """A call."""

    name: str
    arguments: dict[str, Any]


@dataclass
class ToolOutput:
    """The end of a call.

    >>> str(ToolOutput("add", output=[5])), str(ToolOutput("add", error="no number"))
    ('[5]', 'Error: no number')
    """

    name: str
    output: str | list[Any] | dict[str, Any] | None = None
    error: str | None = None
    metadata: dict[str, Any] | None = None

    def __repr__(self) -> str:
        """Returns the text for the model."""
        if self.error:
            return f"Error: {self.error}"
        if isinstance(self.output, dict | list):
            return json.dumps(self.output)
        return "" if self.output is None else str(self.output)

    __str__ = __repr__


class _Locked(abc.ABCMeta):
    """Classes whose instances can't be changed once they are made: all episodes of a run share a tool."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        instance = super().__call__(*args, **kwargs)
        object.__setattr__(instance, "_locked", True)
        return instance


class BaseTool(metaclass=_Locked):
    """A tool without state. Args: name, description: for the model."""

    def __init__(self, name: str, description: str) -> None:
        self.name, self.description = name, description

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_locked", False):
            raise AttributeError(
                f"Cannot modify immutable {type(self).__name__}.{name}: all episodes share a tool; keep the state in "
                "the environment"
            )
        super().__setattr__(name, value)

    @abc.abstractmethod
    def get_json_schema(self) -> dict[str, Any]:
        """Returns the tool in the form of OpenAI's API."""

    def to_mcp_json(self) -> dict[str, Any]:
        """Returns the tool with its attribute inputSchema as its parameters."""
        parameters = getattr(self, "inputSchema", {})
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def apply(self, **kwargs: Any) -> ToolOutput:
        """Runs the tool."""
        raise NotImplementedError(f"{type(self).__name__} has neither apply nor apply_async; write one")

    async def apply_async(self, **kwargs: Any) -> ToolOutput:
        """Runs the tool, on an event loop."""
        raise NotImplementedError(f"{type(self).__name__} has neither apply nor apply_async; write one")


class CalculatorTool(BaseTool):
    """Calculates with two numbers: addition, subtraction, multiplication and division.

    >>> str(CalculatorTool("calculator", "").apply(a=6, b=4, op="/"))
    '1.5'
    """

    OPERATIONS: ClassVar[dict[str, Callable[[float, float], float]]] = {
        "+": lambda a, b: a + b,
        "-": lambda a, b: a - b,
        "*": lambda a, b: a * b,
        "/": lambda a, b: a / b,
    }

    def get_json_schema(self) -> dict[str, Any]:
        """Returns the tool in the form of OpenAI's API."""
        number = lambda which: {"type": "number", "description": f"The {which} operand"}
        operations = list(self.OPERATIONS)
        op = {"type": "string", "enum": operations, "description": f"Operator, one of: {' '.join(operations)}"}
        properties = {"a": number("first"), "b": number("second"), "op": op}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def apply(self, **kwargs: Any) -> ToolOutput:
        """Calculates `a op b`."""
        a, b, op = (kwargs.get(name) for name in ("a", "b", "op"))
        if a is None or b is None or op is None:
            return ToolOutput(self.name, error="Missing required arguments: 'a', 'b', and 'op'")
        if not isinstance(a, int | float) or not isinstance(b, int | float):
            return ToolOutput(self.name, error="Operands 'a' and 'b' must be numbers (int or float)")
        if op not in self.OPERATIONS:
            return ToolOutput(self.name, error=f"Unsupported operator: {op}")
        if op == "/" and b == 0:
            return ToolOutput(self.name, error="Division by zero is not allowed")
        return ToolOutput(self.name, output=str(self.OPERATIONS[op](a, b)))


class ToolManager:
    """Tools by name. An error of a tool is an answer for the model.

    Args: tool_map: name -> class. desc_fallback: the description of a class without a docstring.
    Raises: TypeError: a class without get_json_schema.

    >>> manager = ToolManager({"calculator": CalculatorTool})
    >>> list(manager.execute_calls([ToolCall("calculator", {"a": 2, "b": 3, "op": "*"})]).values())
    ['6']
    """

    def __init__(self, tool_map: Mapping[str, type[BaseTool]], *, desc_fallback: str = "") -> None:
        self._tool_dict: dict[str, BaseTool] = {}
        for name, kind in tool_map.items():
            if inspect.isabstract(kind):
                raise TypeError(
                    f"Cannot instantiate abstract tool class {name!r}: {kind.__name__}; write its get_json_schema"
                )
            self._tool_dict[name] = kind(name=name, description=kind.__doc__ or desc_fallback)

    @property
    def names(self) -> list[str]:
        """The names of the tools."""
        return list(self._tool_dict)

    def get_tools(self) -> list[BaseTool]:
        """Returns the tools."""
        return list(self._tool_dict.values())

    def get_json_schema(self) -> list[dict[str, Any]]:
        """Returns the tools in the form of OpenAI's API."""
        return [tool.get_json_schema() for tool in self._tool_dict.values()]

    def get_mcp_schema(self) -> list[dict[str, Any]]:
        """Returns the tools by `to_mcp_json`."""
        return [tool.to_mcp_json() for tool in self._tool_dict.values()]

    def register_mcp_tool(self, tool: BaseTool) -> None:
        """Adds a tool that exists already."""
        self._tool_dict[tool.name] = tool

    async def run_async(self, tool_name: str, **kwargs: Any) -> ToolOutput:
        """Calls a tool by its `apply_async`."""
        tool = self._tool_dict.get(tool_name)
        if tool is None:
            return ToolOutput(tool_name, error=f"Tool '{tool_name}' not registered.")
        try:
            return await tool.apply_async(**kwargs)
        except Exception as error:
            return ToolOutput(tool_name, error=f"{type(error).__name__}: {error}")

    def run(self, tool_name: str, **kwargs: Any) -> ToolOutput:
        """Calls a tool; one that is async alone runs on a loop of its own."""
        tool = self._tool_dict.get(tool_name)
        if tool is None:
            return ToolOutput(tool_name, error=f"Tool '{tool_name}' not registered.")
        kind = type(tool)  # of any class with apply
        if isinstance(tool, BaseTool) and kind.apply is BaseTool.apply and kind.apply_async is not BaseTool.apply_async:
            return asyncio.run(self.run_async(tool_name, **kwargs))
        try:
            return tool.apply(**kwargs)
        except Exception as error:
            return ToolOutput(tool_name, error=f"{type(error).__name__}: {error}")

    def execute_calls(self, calls: Sequence[ToolCall], parallel: bool = True) -> dict[str, str]:
        """Makes calls, each in a thread, or one after the other.

        Returns: id of the call (its attribute `id`, or a new one) -> answer, in the order of the calls.
        """
        ids = [getattr(call, "id", None) or str(uuid.uuid4()) for call in calls]
        run = lambda call: str(self.run(call.name, **call.arguments))
        if not parallel or len(calls) < 2:
            return dict(zip(ids, map(run, calls), strict=True))
        with ThreadPoolExecutor(len(calls)) as pool:
            return dict(zip(ids, pool.map(run, calls), strict=True))


class ToolParser(abc.ABC):
    """Reads the calls of a turn, and describes tools to the model."""

    @abc.abstractmethod
    def parse(self, model_response: str) -> list[ToolCall]:
        """Returns the calls of a turn."""

    @abc.abstractmethod
    def get_tool_prompt(self, tools: Sequence[BaseTool], *, schema_style: str = "openai") -> str:
        """Returns the part of the system prompt that describes tools. Args: schema_style: openai, or mcp."""

    def _tools_schema_dump(self, tools: Sequence[BaseTool], schema_style: str) -> str:
        schemas = [tool.to_mcp_json() if schema_style == "mcp" else tool.get_json_schema() for tool in tools]
        return json.dumps(schemas, ensure_ascii=False, indent=2)


class QwenToolParser(ToolParser):
    """Calls of the form <tool_call>{"name": ..., "arguments": {...}}</tool_call>.

    >>> QwenToolParser().parse('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [ToolCall(name='add', arguments={'a': 1})]
    """

    tool_call_begin, tool_call_end = "<tool_call>", "</tool_call>"
    tool_output_begin, tool_output_end = "<tool_response>", "</tool_response>"

    def parse(self, model_response: str) -> list[ToolCall]:
        """Returns the calls of a turn; what is no JSON with a name and arguments is none."""
        calls = []
        pattern = f"{re.escape(self.tool_call_begin)}(.*?){re.escape(self.tool_call_end)}"
        for body in re.findall(pattern, model_response, re.DOTALL):
            with suppress(ValueError, KeyError, TypeError):
                call = json.loads(body)
                calls.append(ToolCall(str(call["name"]), dict(call["arguments"])))
        return calls

    def get_tool_prompt(self, tools: Sequence[BaseTool], *, schema_style: str = "openai") -> str:
        """Returns the part of the system prompt that describes tools, as Qwen's chat template does."""
        return (
            "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
            f"{self._tools_schema_dump(tools, schema_style)}\n</tools>\n\n"
            "For each function call, return a json object with function name and arguments within "
            f"{self.tool_call_begin}{self.tool_call_end} XML tags:\n{self.tool_call_begin}\n"
            f'{{"name": "<function-name>", "arguments": <args-json-object>}}\n{self.tool_call_end}'
        )


class GeminiToolParser(ToolParser):
    """Reads no calls, like Tunix's: a turn of Gemini's API has its calls beside the text."""

    def parse(self, model_response: Any) -> list[ToolCall]:
        """Returns no calls."""
        return []

    def get_tool_prompt(self, tools: Sequence[BaseTool], *, schema_style: str = "gemini") -> str:
        """Returns what Tunix says."""
        return "Return a functionCall with name and args."


_PARSERS: dict[str, type[ToolParser]] = {"qwen": QwenToolParser, "gemini": GeminiToolParser}


def get_tool_parser(parser_name: str = "qwen") -> type[ToolParser]:
    """Returns the class of a parser. Raises ConfigError (a ValueError): there is none of that name.

    >>> get_tool_parser().__name__
    'QwenToolParser'
    """
    if parser_name not in _PARSERS:
        raise lookup_error("tool_parser_name", parser_name, _PARSERS)
    return _PARSERS[parser_name]
