"""Open connections to one server: a few attempts with delays, then a back-off that all callers share."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from agentrl.errors import ToolServerConfigError, ToolServerError, tool_server
from agentrl.tools.mcp.connection import Connection, UnusableError
from agentrl.tools.redact import redact_address
from agentrl.tools.specs import HttpSpec, McpSpec

if TYPE_CHECKING:
    import httpx2

RECONNECT_DELAYS = (0.0, 0.5, 2.0)
"""Waits before each attempt to connect, in seconds."""
_MAX_BACKOFF_SECONDS = 15.0


class Connector:
    """Opens connections. While a server is down, concurrent callers share one series of attempts."""

    def __init__(self, spec: McpSpec, *, connections: int, read_seconds: float, parallel: int) -> None:
        """``parallel`` connections are opened at a time."""
        self.spec = spec
        self._connections = connections
        self._read_seconds = read_seconds
        self._slots = asyncio.Semaphore(parallel)
        self._http: httpx2.AsyncClient | None = None
        self._failures = 0
        self._problem: ConnectionError = ConnectionError("it is not connected")
        self._again_at = 0.0

    async def open(self) -> Connection:
        """Return a new connection. Raises ToolServerError, at once while the back-off lasts.

        It is a ToolServerConfigError if another attempt cannot help.
        """
        loop = asyncio.get_running_loop()
        async with self._slots:
            if self._failures and loop.time() < self._again_at:
                raise self._failed()
            for delay in RECONNECT_DELAYS:
                await asyncio.sleep(delay)
                connection = Connection(self.spec, self._client())
                try:
                    await connection.open()
                except ConnectionError as error:
                    self._problem = error
                    if isinstance(error, UnusableError):
                        break
                    continue
                self._failures = 0
                return connection
            self._failures += 1
            self._again_at = loop.time() + min(2.0 ** (self._failures - 1), _MAX_BACKOFF_SECONDS)
            raise self._failed()

    def unreachable(
        self,
        problem: str,
        *,
        retry_after: float | None = None,
        kind: type[ToolServerError] = ToolServerError,
    ) -> ToolServerError:
        """Return the error of a server that is down or refuses everybody."""
        return kind(
            f"tool server {self.spec.name} ({redact_address(self.spec)}) cannot be reached: {problem}",
            hint="start it, or correct its entry in --mcp_servers_file or --mcp_manager_url",
            outage=tool_server(self.spec.name),
            retry_after=retry_after,
        )

    async def close(self) -> None:
        """Close the HTTP pool. Idempotent."""
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    def _failed(self) -> ToolServerError:
        is_unusable = isinstance(self._problem, UnusableError)
        kind = ToolServerConfigError if is_unusable else ToolServerError
        return self.unreachable(str(self._problem), kind=kind)

    def _client(self) -> httpx2.AsyncClient | None:
        if not isinstance(self.spec, HttpSpec) or self.spec.sse:
            return None
        if self._http is None:
            from agentrl.tools.mcp.http import open_client

            self._http = open_client(
                self.spec, connections=self._connections, read_seconds=self._read_seconds
            )
        return self._http
