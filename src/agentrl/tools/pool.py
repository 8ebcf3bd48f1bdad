"""Call any tool of a process by name: resolve names, bound results, reuse connections."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

from agentrl.config.schema import AgentConfig
from agentrl.errors import ToolServerError
from agentrl.tools.base import Schema, ToolResult, ToolServer, function_schema, schema_name
from agentrl.tools.config import ManagerSpec, configured_servers
from agentrl.tools.manager import managed_servers
from agentrl.tools.mcp import McpServer
from agentrl.tools.python import PythonTools, python_servers


class ToolPool:
    """The configured tool servers.

    A tool keeps its own name unless several servers have it; then it is offered as ``server.tool``.
    """

    def __init__(self, config: AgentConfig) -> None:
        """Read the configuration without connecting. Raises ConfigError if it is invalid."""
        self._specs = configured_servers(config)
        self._python = python_servers(config.tools, call_timeout=config.tool_timeout_seconds)
        self._call_timeout = config.tool_timeout_seconds
        self._limit = config.max_tool_result_chars
        self._servers: dict[str, ToolServer] = {}
        self._names: dict[tuple[str, str], str] = {}
        """{(server, tool): name offered to the model}."""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def servers(self) -> tuple[str, ...]:
        """Return the names of the servers, as used in a task's ``tools``."""
        return tuple(self._servers)

    async def open(self) -> None:
        """Connect to every server. Raises ToolServerError for the first that cannot be reached."""
        try:
            for python in self._python:
                self._add(python)
            for spec in self._specs:
                if isinstance(spec, ManagerSpec):
                    for managed in await managed_servers(spec, call_timeout=self._call_timeout):
                        self._add(managed)
                else:
                    self._add(McpServer(spec, call_timeout=self._call_timeout))
            await asyncio.gather(*(server.open() for server in self._servers.values()))
            await self._resolve()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Disconnect from every server."""
        servers, self._servers = list(self._servers.values()), {}
        await asyncio.gather(*(server.close() for server in servers))

    async def schemas(self, servers: Sequence[str] | None = None) -> list[Schema]:
        """Return the function schemas of the tools of ``servers`` (None: all), sorted by name."""
        unknown = [name for name in servers or () if name not in self._servers]
        if unknown:
            raise ToolServerError(
                f"there is no tool server {', '.join(unknown)}",
                hint=f"the task's 'tools' may name: {', '.join(self._servers) or 'none, none is configured'}",
            )
        offered = []
        for name, server in self._servers.items():
            if servers is None or name in servers:
                offered += [self._renamed(name, schema) for schema in await server.schemas()]
        return sorted(offered, key=schema_name)

    @asynccontextmanager
    async def trajectory(self) -> AsyncIterator[TrajectoryTools]:
        """Open the tools of one trajectory; Python tools have state of their own in it."""
        own = {
            name: server.for_trajectory()
            for name, server in self._servers.items()
            if isinstance(server, PythonTools)
        }
        try:
            yield TrajectoryTools(self, own)
        finally:
            await asyncio.gather(*(server.close() for server in own.values()))

    async def call(
        self, name: str, arguments: Mapping[str, Any], own: Mapping[str, ToolServer] | None = None
    ) -> ToolResult:
        """Run one tool, on the server in ``own`` if there is one of that name.

        The tool's error and its timeout are results. Raises ToolServerError for a lost server.
        """
        target = self._target(name)
        if target is None:
            raise ToolServerError(f"no tool server offers {name!r}")
        server, tool = target
        start = time.monotonic()
        text, error = await ((own or {}).get(server) or self._servers[server]).call(tool, arguments)
        return ToolResult(text=self._cut(text), error=error, seconds=time.monotonic() - start, server=server)

    def _add(self, server: ToolServer) -> None:
        if server.name in self._servers:
            raise ToolServerError(
                f"two tool servers are named {server.name!r}", hint="rename one in --mcp_servers_file"
            )
        self._servers[server.name] = server

    async def _resolve(self) -> None:
        own = [
            (name, schema_name(schema))
            for name, server in self._servers.items()
            for schema in await server.schemas()
        ]
        servers_with = Counter(tool for _, tool in own)
        self._names = {
            (name, tool): f"{name}.{tool}" if servers_with[tool] > 1 else tool for name, tool in own
        }

    def _renamed(self, server: str, schema: Schema) -> Schema:
        function = schema["function"]
        name = self._names.get((server, function["name"]), function["name"])
        return function_schema(name, function["description"], function["parameters"])

    def _target(self, name: str) -> tuple[str, str] | None:
        return next((key for key, offered in self._names.items() if offered == name), None)

    def _cut(self, text: str) -> str:
        if len(text) <= self._limit:
            return text
        return f"{text[: self._limit]}\n[cut: {len(text) - self._limit} more characters]"


class TrajectoryTools:
    """The tools of one trajectory: the servers of the pool, and Python tools with their state."""

    def __init__(self, pool: ToolPool, own: Mapping[str, ToolServer]) -> None:
        """``own`` holds the servers of this trajectory alone, by name."""
        self._pool = pool
        self._own = own

    async def schemas(self, servers: Sequence[str] | None = None) -> list[Schema]:
        """Return ``ToolPool.schemas``."""
        return await self._pool.schemas(servers)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Run one tool as ``ToolPool.call``."""
        return await self._pool.call(name, arguments, self._own)
