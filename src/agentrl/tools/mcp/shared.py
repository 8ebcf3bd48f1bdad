"""Share one connection to an MCP server among all trajectories; reconnect once for all callers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.concurrency import end_tasks
from agentrl.config.schema import ToolConfig
from agentrl.errors import ToolServerError
from agentrl.tools.base import Reply, Schema, Trajectory, timed_out
from agentrl.tools.mcp.connection import Connection, LostError, RefusedError
from agentrl.tools.mcp.server import McpServer, McpSession
from agentrl.tools.specs import Limits, McpSpec

logger = logging.getLogger(__name__)


class SharedServer(McpServer):
    """The client of one shared server."""

    def __init__(self, spec: McpSpec, config: ToolConfig) -> None:
        super().__init__(spec, config)
        self._connection: Connection | None = None
        self._opening: asyncio.Task[Connection | ToolServerError] | None = None
        self._testing: asyncio.Task[None] | None = None
        self._schemas: Sequence[Schema] = ()

    @property
    def schemas(self) -> Sequence[Schema]:
        """Return the tools as last listed, sorted by name."""
        if self._connection is not None and self._connection.schemas:
            self._schemas = self._connection.schemas
        return self._schemas

    async def open(self) -> None:
        """Connect and list the tools. Raises ToolServerError."""
        await self.live()

    def session(self, trajectory: Trajectory) -> SharedSession:
        return SharedSession(self, trajectory)

    async def live(self) -> Connection:
        """Return the connection; reconnect if it is lost. All callers share one attempt.

        Raises ToolServerError.
        """
        if self._connection is not None and self._connection.alive:
            return self._connection
        if self._opening is None:
            self._opening = asyncio.create_task(self._reopen(), name=f"connect-{self.name}")
        opened = await asyncio.shield(self._opening)
        if isinstance(opened, ToolServerError):
            raise opened
        return opened

    def lost(self, connection: Connection, why: str, *, session: bool = False) -> None:
        """Give up a connection; the next call opens a new one."""
        if self._connection is not connection:
            return
        self._schemas = self.schemas
        self._connection = None
        self.discard(connection, why, session=session)

    def suspect(self, connection: Connection) -> asyncio.Future[None]:
        """Test a connection in the background; give it up if it does not answer. One test runs at a time."""
        if self._testing is None or self._testing.done():
            self._testing = self.later(self._test(connection))
        return asyncio.shield(self._testing)

    async def settled(self) -> None:
        """Wait until announced changes of the tools are listed."""
        if self._connection is not None:
            await self._connection.settled()

    async def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._opening is not None:
            await end_tasks(self._opening)
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
        await super().close()

    async def _reopen(self) -> Connection | ToolServerError:
        stale, self._connection = self._connection, None
        try:
            if stale is not None:
                self._schemas = stale.schemas or self._schemas
                self.later(stale.close())
            self._connection = await self.connect()
            return self._connection
        except ToolServerError as error:
            return error
        finally:
            self._opening = None

    async def _test(self, connection: Connection) -> None:
        if not await connection.answers():
            self.lost(connection, "it did not answer a call, nor a list of its tools")


class SharedSession(McpSession):
    """The calls of one trajectory to a shared server."""

    def __init__(self, server: SharedServer, trajectory: Trajectory) -> None:
        super().__init__(server, trajectory)
        self._server = server
        self._is_closed = False
        self._used: Connection | None = None
        """The connection that has answered a call, and so holds what the setup hooks have made."""

    async def prepare(self) -> None:
        await self.run_setup(self.request)

    def current(self) -> Sequence[Schema]:
        return self._server.schemas

    async def settle(self) -> None:
        await self._server.settled()

    async def request(self, tool: str, arguments: Mapping[str, Any], limits: Limits) -> Reply:
        """Call one tool. A call that the server may have received is repeated only if it is repeatable.

        Raises SessionLostError if the server has forgotten the session with what the setup hooks made.
        """
        for is_last in (False, True):
            connection = await self._server.live()
            try:
                reply = await connection.call(tool, arguments, limits, self.meta)
                self._used = connection
                return reply
            except TimeoutError:
                self._server.suspect(connection)
                return timed_out(tool, limits.timeout_seconds, lost=True)
            except RefusedError as refused:
                raise self._server.unreachable(refused) from refused
            except LostError as lost:
                if lost.whole:
                    self._server.lost(connection, str(lost), session=lost.session)
                if lost.session and self.options.setup and connection is self._used:
                    raise self._server.session_lost(str(lost)) from lost
                test = self._server.suspect(connection) if not lost.whole else None
                if lost.sent and (is_last or not connection.repeatable(tool)):
                    return Reply(text=lost_text(tool, self._server.name), error=True, lost=True)
                if is_last:
                    raise self._server.unreachable(lost) from lost
                if test is not None:
                    await test
        raise AssertionError("the last attempt returns or raises")

    async def close(self) -> None:
        """Run the teardown hooks; the server is shared and stays."""
        if not self._is_closed:
            self._is_closed = True
            await self.run_teardown(self.request)


def lost_text(tool: str, server: str) -> str:
    """Return the text that the model reads when the server ended while a call ran."""
    return f"{tool} failed: the tool server {server} stopped while it ran; it may have taken effect"
