"""Tools of MCP servers. whet starts a server as a program and exchanges messages over its stdin and stdout.

    with McpServer("python", ["server.py"]) as server:
        tools = Tools(server.tools)

The official client (`mcp`, the extra of that name) runs in a thread with an event loop of its own, so that calls may
come from any thread or loop. Left out on purpose: servers over HTTP, resources, prompts, and requests of the server to
the model.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Any, Self

from whet.envs.tools import Tool
from whet.errors import ConfigError, InfrastructureError, format_exception
from whet.util.install import install_hint

__all__ = ["McpServer"]


class McpServer:
    """A running MCP server.

    Args:
        command: the program. args: its arguments.
        env: its environment variables; None = a few harmless ones, such as PATH and HOME.
        cwd: its folder; None = this one.
        timeout_s: of its start, and of each call.
    Raises: ConfigError: the package mcp is missing, or the server does not start.

    Example: `McpServer("uvx", ["mcp-server-time"]).tools`.
    """

    def __init__(
        self,
        command: str,
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        try:
            from mcp import StdioServerParameters
        except ImportError as error:
            raise ConfigError(f"MCP servers need the package mcp; {install_hint('mcp')}") from error
        self.name, self.timeout_s = " ".join([command, *args]), timeout_s
        self._parameters = StdioServerParameters(
            command=command, args=list(args), env=None if env is None else dict(env), cwd=cwd
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="whet-mcp", daemon=True)
        self._thread.start()
        self._session: Any = None
        self._end = asyncio.Event()
        started: Future[list[Tool]] = Future()
        self._running = asyncio.run_coroutine_threadsafe(self._run(started), self._loop)
        try:
            self.tools: list[Tool] = started.result(timeout_s)
            """Its tools, for `Tools`."""
        except Exception as error:
            self.close()
            reason = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else format_exception(error)
            raise ConfigError(f"the MCP server `{self.name}` did not start: {reason}; try it in a shell") from error

    async def _run(self, started: Future[list[Tool]]) -> None:
        """Opens the session, serves it and closes it in one task, as the client requires.

        Args: started: receives the tools.
        """
        from mcp import ClientSession
        from mcp.client.stdio import stdio_client
        from mcp.types import PaginatedRequestParams

        try:
            async with AsyncExitStack() as stack:
                streams = await stack.enter_async_context(stdio_client(self._parameters))
                self._session = await stack.enter_async_context(ClientSession(*streams))
                await self._session.initialize()
                tools, cursor = [], None
                while True:
                    page = await self._session.list_tools(params=PaginatedRequestParams(cursor=cursor))
                    tools += [self._tool(tool) for tool in page.tools]
                    cursor = page.next_cursor
                    if cursor is None:
                        break
                started.set_result(tools)
                await self._end.wait()
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            raise

    def _tool(self, tool: Any) -> Tool:
        schema = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}

        async def call(**arguments: Any) -> str:
            if self._end.is_set() or self._loop.is_closed():
                raise RuntimeError(f"the MCP server `{self.name}` is closed; start another one")
            return await asyncio.wrap_future(self._submit(self._call(tool.name, arguments)))

        return Tool({"type": "function", "function": schema}, call)

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Returns the text of a call's answer.

        Raises: RuntimeError: the server reports an error. InfrastructureError: the server has ended.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            result = await asyncio.wait_for(self._session.call_tool(name, dict(arguments)), self.timeout_s)
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise
            raise InfrastructureError(f"the MCP server `{self.name}` has ended: {error}") from error
        texts = [getattr(part, "text", f"[{part.type}]") for part in result.content]
        text = "\n".join(texts)
        if result.is_error:
            raise RuntimeError(text)
        return text

    def _submit(self, coroutine: Coroutine[Any, Any, str]) -> Future[str]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Ends the server."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._end.set)
        try:
            self._running.result(5.0)
        except BaseException:  # it failed at its start, or does not end
            self._running.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        if not self._thread.is_alive():
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
