"""Open the tool servers of one process, give each trajectory a session, and close them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from agentrl.config.schema import ToolConfig
from agentrl.errors import ToolServerError
from agentrl.tools.base import (
    ENVIRONMENT,
    OwnSession,
    Schema,
    ServerSession,
    ToolServer,
    Trajectory,
    schema_name,
)
from agentrl.tools.browse import BrowseAgent
from agentrl.tools.config import configured_servers
from agentrl.tools.manager import managed_servers
from agentrl.tools.mcp.servers import mcp_server
from agentrl.tools.names import ToolNames
from agentrl.tools.python import python_servers
from agentrl.tools.session import Condense, ToolSession
from agentrl.tools.specs import ManagerSpec
from agentrl.tools.tool_config_file import load_tools


class ToolPool:
    """The configured tool servers.

    A tool keeps its own name unless several servers have it; then it is offered as ``server.tool``.
    """

    def __init__(self, config: ToolConfig, browse: BrowseAgent | None = None) -> None:
        """Read the configuration without connecting. Raises ConfigError if it is invalid.

        ``browse`` condenses long results of its tools for the question of the trajectory.
        """
        self._browse = browse
        timeout = config.tool_timeout_seconds
        configured = load_tools(config.tool_config_path, call_timeout=timeout)
        self._specs = [*configured_servers(config), *configured.servers]
        self._python = [*python_servers(config.tools, call_timeout=timeout), *configured.tools]
        self._config = config
        self._servers: dict[str, ToolServer] = {}

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
                    for managed in await managed_servers(spec, self._config):
                        self._add(managed)
                else:
                    self._add(mcp_server(spec, self._config))
            await asyncio.gather(*(server.open() for server in self._servers.values()))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Disconnect from every server."""
        servers, self._servers = list(self._servers.values()), {}
        await asyncio.gather(*(server.close() for server in servers))

    def list(self, servers: Sequence[str] | None = None) -> Sequence[Schema]:
        """Return the function schemas of the tools of ``servers`` (None: all), as last listed."""
        names = self._names()
        offered = [
            names.renamed(name, schema)
            for name in self._chosen(servers)
            for schema in self._servers[name].schemas
        ]
        return sorted(offered, key=schema_name)

    def session(self, trajectory: Trajectory, environment: OwnSession | None = None) -> ToolSession:
        """Return the tools of one trajectory: ``async with pool.session(trajectory) as tools``.

        The tools of its ``environment`` are offered beside those of the servers. Raises ToolServerError for
        a server that is not configured.
        """
        sessions: dict[str, ServerSession] = {
            name: self._servers[name].session(trajectory) for name in self._chosen(trajectory.servers)
        }
        if environment is not None:
            sessions[ENVIRONMENT] = environment
        return ToolSession(
            sessions,
            self._names(environment),
            max_chars=self._config.max_tool_result_chars,
            max_parallel=self._config.max_parallel_tool_calls,
            condense=self._condense_for(trajectory.question),
        )

    def _condense_for(self, question: str) -> Condense | None:
        browse = self._browse
        if browse is None:
            return None
        return lambda tool, arguments, text: browse.condense(tool, arguments, text, question)

    def _add(self, server: ToolServer) -> None:
        if server.name == ENVIRONMENT:
            raise ToolServerError(
                f"a tool server is named {ENVIRONMENT!r}",
                hint="rename it: the tools of a task's environment have this name",
            )
        if server.name in self._servers:
            raise ToolServerError(
                f"two tool servers are named {server.name!r}", hint="rename one in --mcp_servers_file"
            )
        self._servers[server.name] = server

    def _chosen(self, servers: Sequence[str] | None) -> Sequence[str]:
        unknown = [name for name in servers or () if name not in self._servers]
        if unknown:
            raise ToolServerError(
                f"there is no tool server {', '.join(unknown)}",
                hint=f"the task's 'tools' may name: {', '.join(self._servers) or 'none, none is configured'}",
            )
        return [name for name in self._servers if servers is None or name in servers]

    def _names(self, environment: OwnSession | None = None) -> ToolNames:
        schemas = {name: server.schemas for name, server in self._servers.items()}
        return ToolNames(schemas if environment is None else {**schemas, ENVIRONMENT: environment.schemas})
