"""Connect to one MCP server over stdio or streamable HTTP, and reconnect when the connection is lost."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from agentrl.errors import ToolServerError, tool_server
from agentrl.tools.base import Reply, Schema, Trajectory, function_schema, schema_name, timeout_text
from agentrl.tools.config import HttpSpec, StdioSpec
from agentrl.tools.redact import redact_address, redact_secrets

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import CallToolResult

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 30.0
RECONNECT_DELAYS = (0.0, 0.5, 2.0)
"""Waits before each attempt to connect, in seconds."""

_GRACE_SECONDS = 5.0
_CLOSED, _TIMED_OUT = -32000, -32001


class McpServer:
    """The client of one server; all trajectories of a process use it.

    An MCP connection belongs to the asyncio task that opened it, so each connection has an owner task; any
    task may call. A call on a lost connection is retried once on a new one.
    """

    def __init__(self, spec: StdioSpec | HttpSpec, *, call_timeout: float) -> None:
        """``call_timeout`` bounds one tool call, in seconds."""
        self.name = spec.name
        self._spec = spec
        self._call_timeout = call_timeout
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()

    async def open(self) -> None:
        """Connect and list the tools. Raises ToolServerError if the server cannot be reached."""
        await self.live()

    @property
    def schemas(self) -> Sequence[Schema]:
        """Return the tools of the last connection, sorted by name."""
        return [] if self._connection is None else self._connection.schemas

    def session(self, trajectory: Trajectory) -> McpSession:
        """Return the calls of one trajectory."""
        return McpSession(self)

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Reply:
        """Call one tool. Raises ToolServerError if the server stays lost."""
        connection = await self.live()
        try:
            return await self._request(connection, tool, arguments)
        except ConnectionError as lost:
            logger.warning(
                "tool server lost; connecting again", extra={"server": self.name, "why": self._redact(lost)}
            )
            await self._drop(connection)
        connection = await self.live()
        try:
            return await self._request(connection, tool, arguments)
        except ConnectionError as lost:
            await self._drop(connection)
            raise ToolServerError(
                f"tool server {self.name} was lost twice while it ran {tool}: {self._redact(lost)}",
                outage=tool_server(self.name),
            ) from lost

    async def close(self) -> None:
        """Close the connection; this ends a stdio server."""
        if self._connection is not None:
            await self._drop(self._connection)

    async def _request(self, connection: _Connection, tool: str, arguments: Mapping[str, Any]) -> Reply:
        from mcp import MCPError

        try:
            async with asyncio.timeout(self._call_timeout + _GRACE_SECONDS):
                result = await connection.client.call_tool(
                    tool, dict(arguments), read_timeout_seconds=self._call_timeout
                )
        except MCPError as error:
            if error.code == _CLOSED:
                raise ConnectionError(str(error)) from error
            if error.code == _TIMED_OUT:
                return Reply(text=timeout_text(tool, self._call_timeout), error=True)
            return Reply(text=str(error), error=True)
        except TimeoutError as error:
            raise ConnectionError("it stopped answering") from error
        except (OSError, RuntimeError, ExceptionGroup) as error:
            raise ConnectionError(_reasons(error)) from error
        return Reply(text=_text_of(result), error=bool(result.is_error))

    async def live(self) -> _Connection:
        """Return the current connection, or open a new one."""
        async with self._connecting:
            if self._connection is not None and self._connection.alive:
                return self._connection
            problem = ""
            for delay in RECONNECT_DELAYS:
                await asyncio.sleep(delay)
                connection = _Connection(self._spec, self._call_timeout)
                try:
                    await connection.open()
                except ConnectionError as error:
                    problem = self._redact(error)
                    continue
                self._connection = connection
                return connection
            raise ToolServerError(
                f"tool server {self.name} ({redact_address(self._spec)}) cannot be reached: {problem}",
                hint="start it, or correct its entry in --mcp_servers_file or --mcp_manager_url",
                outage=tool_server(self.name),
            )

    def _redact(self, error: ConnectionError) -> str:
        return redact_secrets(str(error), self._spec)

    async def _drop(self, connection: _Connection) -> None:
        async with self._connecting:
            if self._connection is connection:
                self._connection = None
        await connection.close()


class McpSession:
    """The calls of one trajectory to a shared server."""

    def __init__(self, server: McpServer) -> None:
        self._server = server

    async def open(self) -> None:
        """Do nothing: the server is shared."""

    async def list(self) -> Sequence[Schema]:
        """Return the tools of the current connection, sorted by name."""
        return (await self._server.live()).schemas

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Reply:
        """Call one tool."""
        return await self._server.call(tool, arguments)

    async def close(self) -> None:
        """Do nothing: the server is shared."""


class _Connection:
    """One connection and its owner task."""

    client: Client
    schemas: list[Schema]

    def __init__(self, spec: StdioSpec | HttpSpec, call_timeout: float) -> None:
        self._spec = spec
        self._call_timeout = call_timeout
        self._stop = asyncio.Event()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        """Return whether the owner task runs: it ends by ``close`` or when the transport breaks."""
        return self._owner is not None and not self._owner.done() and not self._stop.is_set()

    async def open(self) -> None:
        """Connect. Raises ConnectionError with the reason."""
        self._owner = asyncio.create_task(self._own(), name=f"mcp-{self._spec.name}")
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await asyncio.shield(self._ready)
        except TimeoutError as error:
            await self.close()
            raise ConnectionError(f"no answer within {CONNECT_SECONDS:g} s") from error
        except (ConnectionError, asyncio.CancelledError):
            await self.close()
            raise

    async def close(self) -> None:
        """Close the connection in its owner task, within a time limit."""
        self._stop.set()
        if self._owner is not None and not self._owner.done():
            _, pending = await asyncio.wait([self._owner], timeout=_GRACE_SECONDS * 2)
            for task in pending:
                task.cancel()
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()

    async def _own(self) -> None:
        """Open the connection, wait for ``close``, then close it. Errors go to ``open``, or to the log."""
        try:
            async with AsyncExitStack() as stack:
                self.client = await stack.enter_async_context(await self._client(stack))
                self.schemas = await _list_tools(self.client)
                self._ready.set_result(None)
                await self._stop.wait()
        except Exception as error:  # noqa: BLE001  any error of a foreign server or transport
            if not self._ready.done():
                self._ready.set_exception(ConnectionError(_reasons(error)))
            elif not self._stop.is_set():
                logger.warning(
                    "tool server connection broke",
                    extra={"server": self._spec.name, "why": redact_secrets(_reasons(error), self._spec)},
                )

    async def _client(self, stack: AsyncExitStack) -> Client:
        from mcp import Client, StdioServerParameters

        if isinstance(self._spec, StdioSpec):
            return Client(
                StdioServerParameters(
                    command=self._spec.command,
                    args=list(self._spec.args),
                    env=dict(self._spec.env),
                    cwd=self._spec.cwd,
                ),
                read_timeout_seconds=CONNECT_SECONDS,
            )
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        limits = httpx2.Timeout(CONNECT_SECONDS, read=self._call_timeout + _GRACE_SECONDS)
        http = await stack.enter_async_context(
            httpx2.AsyncClient(headers=dict(self._spec.headers), timeout=limits)
        )
        return Client(
            streamable_http_client(self._spec.url, http_client=http), read_timeout_seconds=CONNECT_SECONDS
        )


async def _list_tools(client: Client) -> list[Schema]:
    schemas: list[Schema] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        schemas += [function_schema(tool.name, tool.description, tool.input_schema) for tool in page.tools]
        cursor = page.next_cursor
        if cursor is None:
            return sorted(schemas, key=schema_name)


def _text_of(result: CallToolResult) -> str:
    """Return the result as the model reads it: its text, and a description of any other content."""
    parts = []
    for item in result.content:
        if item.type == "text":
            parts.append(item.text)
        elif item.type == "resource":
            text = getattr(item.resource, "text", None)
            parts.append(text if text is not None else f"[resource {item.resource.uri}]")
        elif item.type == "resource_link":
            parts.append(f"[resource {item.uri}]")
        else:
            parts.append(f"[{item.type} of {item.mime_type}, {len(item.data)} base64 characters]")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _reasons(error: BaseException) -> str:
    """Return the messages of an exception; for an exception group, those of its members."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(dict.fromkeys(_reasons(inner) for inner in error.exceptions))
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
