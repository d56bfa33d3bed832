# pyright: reportMissingImports=false
"""Tools of MCP servers, over stdin and stdout: each episode has a server of its own."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Any, TypeVar

Result = TypeVar("Result")
START_SECONDS = 60.0
"""Time for a server to start and to list its tools."""


def tools_of(command: str, *arguments: str, **variables: str) -> dict[str, Callable[..., Any]]:
    """The tools of the server that this command starts, as functions by name; `variables` are its environment's.

    Example, in a file whose functions a config names as tools:
        globals().update(tools_of("uvx", "mcp-server-time"))
    """
    server = _ToolServer(command, arguments, variables)
    tools = {tool.name: _function(server, tool) for tool in server.run(lambda session: session.list_tools()).tools}
    server.close()
    return tools


def _function(server: "_ToolServer", tool: Any) -> Callable[..., Any]:
    def call(**arguments: Any) -> str:
        result = server.run(lambda session: session.call_tool(tool.name, arguments))
        text = "\n".join(str(getattr(part, "text", f"({part.type})")) for part in result.content)
        if _as_sent(result)["isError"]:
            raise RuntimeError(text)
        return text

    call.__name__ = call.__qualname__ = tool.name
    call.__doc__ = tool.description
    parameters = _as_sent(tool)["inputSchema"]
    described = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    vars(call)["schema"] = {"type": "function", "function": described}
    return call


def _as_sent(message: Any) -> dict[str, Any]:
    """The message by the protocol's names: mcp 2 has given its attributes others than mcp 1."""
    return message.model_dump(by_alias=True, mode="json")


class _ToolServer:
    """A server of this process: a process that was forked starts another one when it is first asked."""

    def __init__(self, command: str, arguments: tuple[str, ...], variables: dict[str, str]) -> None:
        self._how = {"command": command, "args": list(arguments), "env": variables or None}
        self._process = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None

    def run(self, ask: Callable[[Any], Coroutine[Any, Any, Result]]) -> Result:
        """Ask the server and wait for its answer; its session lives on its own thread, whatever loop the caller has."""
        if self._process != os.getpid():
            ready: Future[Any] = Future()
            self._thread = threading.Thread(target=asyncio.run, args=(self._serve(ready),), daemon=True)
            self._thread.start()
            self._session = ready.result(START_SECONDS)
            self._process = os.getpid()
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(ask(self._session), self._loop).result()

    def close(self) -> None:
        assert self._loop is not None
        assert self._ended is not None
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(START_SECONDS)
        self._process = 0

    async def _serve(self, ready: Future[Any]) -> None:
        try:
            from mcp import ClientSession
            from mcp.client.stdio import StdioServerParameters, stdio_client

            self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
            async with AsyncExitStack() as until:
                streams = await until.enter_async_context(stdio_client(StdioServerParameters(**self._how)))
                session = await until.enter_async_context(ClientSession(*streams))
                await session.initialize()
                ready.set_result(session)
                await self._ended.wait()
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)
