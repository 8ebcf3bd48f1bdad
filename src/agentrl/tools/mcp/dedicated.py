"""Give each trajectory a connection of its own to an MCP server: from a warm pool, reset or replaced."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.concurrency import end_tasks
from agentrl.config.schema import ToolConfig
from agentrl.errors import ToolServerError
from agentrl.tools.base import Reply, Schema, Trajectory, timed_out
from agentrl.tools.mcp.connection import Connection, LostError, RefusedError
from agentrl.tools.mcp.server import McpServer, McpSession, Request
from agentrl.tools.mcp.shared import SharedServer, lost_text
from agentrl.tools.specs import Limits, McpSpec, Scope

logger = logging.getLogger(__name__)


class DedicatedServer(McpServer):
    """The pool of one server's connections. A trajectory takes one at its first call."""

    def __init__(self, spec: McpSpec, config: ToolConfig) -> None:
        super().__init__(spec, config)
        self._schemas: Sequence[Schema] = ()
        self._warm: list[Connection] = []
        self._filling: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def schemas(self) -> Sequence[Schema]:
        """Return the tools that the first connection listed, sorted by name."""
        return self._schemas

    async def open(self) -> None:
        """Open the first connection and list its tools. Raises ToolServerError."""
        first = await self.connect()
        self._schemas = first.schemas
        self._warm.append(first)
        self._fill()

    def session(self, trajectory: Trajectory) -> DedicatedSession:
        return DedicatedSession(self, trajectory)

    async def take(self) -> Connection:
        """Return a connection that no other trajectory has. Raises ToolServerError."""
        while self._warm:
            connection = self._warm.pop(0)
            if connection.alive:
                self._fill()
                return connection
            self.later(connection.close())
        connection = await self.connect()
        self._fill()
        return connection

    def give_back(self, connection: Connection, meta: Mapping[str, str], *, is_idle: bool) -> None:
        """Reset an idle connection for the next trajectory, or replace it, in the background.

        One that may still work on an abandoned call is replaced: the call could change what comes after.
        """
        self.later(self._recycle(connection, meta) if is_idle else connection.close())

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        self._is_closed = True
        if self._filling is not None:
            await end_tasks(self._filling)
        warm, self._warm = self._warm, []
        await asyncio.gather(*(connection.close() for connection in warm))
        await super().close()

    async def _recycle(self, connection: Connection, meta: Mapping[str, str]) -> None:
        hook = self.options.reset
        if hook is None or self._is_closed or len(self._warm) >= max(self.options.warm, 1):
            await connection.close()
            return
        try:
            limits = self.gate.limits(hook.tool)
            reply = await connection.call(hook.tool, hook.arguments, limits, meta)
            problem = reply.text if reply.error else ""
        except (LostError, RefusedError, TimeoutError) as error:
            problem = str(error) or "no answer in time"
        if problem or self._is_closed:
            logger.warning("a server is not reset and replaced", extra={"server": self.name, "why": problem})
            await connection.close()
            self._fill()
            return
        self._warm.append(connection)

    def _fill(self) -> None:
        """Start opening connections in the background until ``warm`` of them are idle."""
        if self._filling is None and not self._is_closed and len(self._warm) < self.options.warm:
            self._filling = asyncio.create_task(self._fill_up(), name=f"warm-{self.name}")

    async def _fill_up(self) -> None:
        try:
            while len(self._warm) < self.options.warm:
                self._warm.append(await self.connect())
        except ToolServerError as error:
            logger.warning("no process is kept ready", extra={"server": self.name, "why": error.message})
        finally:
            self._filling = None


class DedicatedSession(McpSession):
    """The calls of one trajectory to its own connection."""

    def __init__(self, server: DedicatedServer, trajectory: Trajectory) -> None:
        super().__init__(server, trajectory)
        self._server = server
        self._connection: Connection | None = None
        self._used: Connection | None = None
        """The connection that has answered a call, and so holds state of the trajectory."""
        self._taking = asyncio.Lock()
        self._was_lost = False
        self._running = 0
        self._has_abandoned = False

    async def prepare(self) -> None:
        """Take a connection now if there are setup hooks; else at the first call."""
        if self.options.setup:
            await self._own()

    def current(self) -> Sequence[Schema]:
        """Return the tools of the trajectory's connection, or those that a new one lists."""
        own = self._connection.schemas if self._connection is not None else ()
        return own or self._server.schemas

    async def settle(self) -> None:
        if self._connection is not None:
            await self._connection.settled()

    async def request(self, tool: str, arguments: Mapping[str, Any], limits: Limits) -> Reply:
        """Call one tool. A call that the server may have received is never repeated: its state is gone.

        Raises SessionLostError if the server is up and has forgotten the session with the trajectory's state.
        """
        for is_last in (False, True):
            connection = await self._own()
            self._running += 1
            try:
                reply = await connection.call(tool, arguments, limits, self.meta)
                self._used = connection
                return self._noted(reply)
            except asyncio.CancelledError:
                self._has_abandoned = True
                raise
            except TimeoutError:
                self._has_abandoned = True
                if not await connection.answers():
                    self._lose(connection, "it did not answer a call, nor a list of its tools")
                return self._noted(timed_out(tool, limits.timeout_seconds))
            except RefusedError as refused:
                raise self._server.unreachable(refused) from refused
            except LostError as lost:
                if lost.whole or not await connection.answers():
                    self._lose(connection, str(lost), session=lost.session)
                if lost.session and connection is self._used:
                    raise self._server.session_lost(str(lost)) from lost
                if lost.sent:
                    return self._noted(Reply(text=lost_text(tool, self._server.name), error=True))
                if is_last:
                    raise self._server.unreachable(lost) from lost
            finally:
                self._running -= 1
        raise AssertionError("the last attempt returns or raises")

    async def close(self) -> None:
        """Run the teardown hooks and give the connection back. Idempotent."""
        async with self._taking:
            connection, self._connection = self._connection, None
        if connection is None:
            return
        if connection.alive:
            await self.run_teardown(self._on(connection))
            is_idle = not self._has_abandoned and self._running == 0
            self._server.give_back(connection, self.meta, is_idle=is_idle)
        else:
            self._server.discard(connection, "it ended before its trajectory")

    async def _own(self) -> Connection:
        """Return the trajectory's connection; take one, and run the setup hooks, if it has none.

        Raises SessionLostError if a server behind HTTP has ended it, with the trajectory's state. That a
        process has ended is told to the model instead: the trajectory's own calls may be the reason.
        """
        async with self._taking:
            if self._connection is not None and not self._connection.alive:
                ended, why = self._connection, "it ended between two calls"
                self._lose(ended, why)
                if self._server.is_remote and ended is self._used:
                    raise self._server.session_lost(why)
            if self._connection is None:
                connection = await self._server.take()
                try:
                    await self.run_setup(self._on(connection))
                except BaseException:
                    self._server.discard(connection, "its setup failed")
                    raise
                self._connection = connection
            return self._connection

    def _on(self, connection: Connection) -> Request:
        """Return a function that calls tools on ``connection``; a loss is an outage."""

        async def request(tool: str, arguments: Mapping[str, Any], limits: Limits) -> Reply:
            try:
                return await connection.call(tool, arguments, limits, self.meta)
            except TimeoutError:
                return timed_out(tool, limits.timeout_seconds, lost=True)
            except (LostError, RefusedError) as error:
                raise self._server.unreachable(error) from error

        return request

    def _lose(self, connection: Connection, why: str, *, session: bool = False) -> None:
        if self._connection is connection:
            self._connection = None
            self._was_lost = self._was_lost or connection is self._used
            self._server.discard(connection, why, session=session)

    def _noted(self, reply: Reply) -> Reply:
        """Tell the model once that the server was restarted."""
        if not self._was_lost:
            return reply
        self._was_lost = False
        note = f"[the tool server {self._server.name} was restarted; its earlier state is lost]"
        return replace(reply, text=f"{reply.text}\n{note}" if reply.text else note)


def mcp_server(spec: McpSpec, config: ToolConfig) -> McpServer:
    """Return the client of one server, according to its scope."""
    is_dedicated = spec.options.scope is Scope.TRAJECTORY
    return DedicatedServer(spec, config) if is_dedicated else SharedServer(spec, config)
