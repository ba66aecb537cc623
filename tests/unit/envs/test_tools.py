"""Tools: calls at once within limits, errors as answers, and tools of an MCP server."""

import asyncio
import sys
import threading
import time

import pytest

from whet.envs.tools import Tool, ToolCounts, ToolLimits, Tools
from whet.errors import ConfigError, InfrastructureError


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def slow(text: str, seconds: float = 0.2) -> str:
    """Waits.

    Args:
        text: what to return.
        seconds: how long.
    """
    time.sleep(seconds)
    return text


async def slow_too(text: str) -> str:
    """Waits without a thread.

    Args:
        text: what to return.
    """
    await asyncio.sleep(0.2)
    return text


def fails(kind: str) -> str:
    """Fails.

    Args:
        kind: of the error.
    """
    if kind == "end":
        next(iter(()))
    raise {"key": KeyError, "time": TimeoutError}[kind](kind)


def run(tools, *calls):
    counts = ToolCounts()
    messages = asyncio.run(tools.run(list(calls), counts))
    return [m["content"] for m in messages], counts


def test_calls_run_at_once_and_are_answered_in_order():
    tools = Tools([slow, slow_too])
    start = time.monotonic()
    contents, counts = run(tools, *(call(("slow", "slow_too")[i % 2], text=str(i)) for i in range(6)))
    assert contents == [str(i) for i in range(6)] and time.monotonic() - start < 0.9
    assert (counts.calls, counts.failures) == (6, 0)


def test_no_more_than_max_concurrent_run_at_once():
    running, most, lock = 0, 0, threading.Lock()

    def count() -> int:
        """Counts."""
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1
        return most

    run(Tools([count], limits=ToolLimits(max_concurrent=2)), *[call("count")] * 6)
    assert most == 2


def test_errors_and_late_answers_are_texts_for_the_model():
    tools = Tools([slow, slow_too, fails], limits=ToolLimits(timeout_s=0.1))
    start = time.monotonic()
    contents, counts = run(
        tools,
        call("slow", text="a", seconds=2.0),
        call("slow_too", text="b"),
        call("fails", kind="key"),
        call("fails", kind="time"),
        call("none"),
        call("slow", wrong=1),
        {"type": "function", "function": {"name": "slow", "arguments": "no mapping"}},
        call("slow", text="c", seconds=0.0),
        call("fails", kind="end"),
    )
    assert time.monotonic() - start < 1.5 and counts.failures == 8
    assert contents[0] == contents[1] == "{'error': 'no answer within 0.1 s'}"
    assert contents[2] == "{'error': \"'key'\"}" and contents[3] == "{'error': 'time'}"
    assert "Tool none not found" in contents[4] and "unexpected keyword argument" in contents[5]
    assert "must be a mapping" in contents[6] and contents[7] == "c"
    assert contents[8] == "{'error': 'StopIteration()'}"  # it has no words of its own


def test_a_tool_that_exits_is_answered_by_its_error():
    def leave(code: int) -> str:
        """Exits.

        Args:
            code: of the exit.
        """
        sys.exit(code)

    async def leave_too(code: int) -> str:
        """Exits.

        Args:
            code: of the exit.
        """
        sys.exit(code)

    tools = Tools([leave, leave_too], limits=ToolLimits(timeout_s=5.0))
    contents, counts = run(tools, call("leave", code=3), call("leave_too", code=4))
    assert counts.failures == 2 and "SystemExit(3)" in contents[0] and "SystemExit(4)" in contents[1]


def test_a_call_has_a_time_limit_unless_it_is_taken_away():
    assert ToolLimits().timeout_s == 60.0 and Tools([slow]).limits.timeout_s == 60.0


def test_a_long_answer_keeps_its_ends():
    tools = Tools([slow], limits=ToolLimits(max_chars=4))
    assert run(tools, call("slow", text="abcdefgh", seconds=0.0))[0] == ["ab [4 characters left out] gh"]
    assert tools.answer([call("slow", text="abc", seconds=0.0)], ToolCounts())[0]["content"] == "abc"


def test_a_tool_may_bring_its_own_schema():
    schema = {"type": "function", "function": {"name": "raw", "description": "", "parameters": {"type": "object"}}}
    tools = Tools([Tool(schema, lambda **arguments: sorted(arguments))])
    assert tools.schemas == [schema] and run(tools, call("raw", b=1, a=2))[0] == ["['a', 'b']"]


SERVER = '''
import os
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("calculator")
calls = 0


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    global calls
    calls += 1
    return a + b


@server.tool()
def count() -> int:
    """The number of additions so far."""
    return calls


@server.tool()
def end() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
def broken(text: str) -> str:
    """Fails."""
    raise ToolError("it broke: " + text)


server.run()
'''


def test_tools_of_an_mcp_server(tmp_path):
    pytest.importorskip("mcp", reason="the mcp client is not installed; pip install mcp")
    from whet.envs.mcp import McpServer

    (tmp_path / "server.py").write_text(SERVER)
    with McpServer(sys.executable, [str(tmp_path / "server.py")]) as server:
        tools = Tools(server.tools)
        assert list(tools.functions) == ["add", "count", "end", "broken"]
        parameters = tools.schemas[0]["function"]["parameters"]
        assert parameters["properties"]["a"]["type"] == "integer" and parameters["required"] == ["a", "b"]
        contents, counts = run(tools, call("add", a=2, b=3), call("broken", text="x"), call("add", a="no"))
        assert contents[0] == "5" and "it broke: x" in contents[1] and "error" in contents[2] and counts.failures == 2
        assert tools.answer([call("count")], ToolCounts())[0]["content"] == "1"  # the server keeps its state
        with pytest.raises(InfrastructureError, match="has ended"):
            run(tools, call("end"))
    assert "is closed; start another one" in run(tools, call("count"))[0][0]


def test_an_mcp_server_that_does_not_start_is_refused():
    pytest.importorskip("mcp", reason="the mcp client is not installed; pip install mcp")
    from whet.envs.mcp import McpServer

    with pytest.raises(ConfigError, match="did not start"):
        McpServer("no-such-program-here")
    with pytest.raises(ConfigError, match="did not start"):
        McpServer(sys.executable, ["-c", "print('no json')"], timeout_s=10.0)
