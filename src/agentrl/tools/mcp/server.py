"""Open connections to an MCP server, shared or each trajectory's own; call it for a trajectory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentrl.base.concurrency import Backoff, end_tasks
from agentrl.config.schema import ToolConfig
from agentrl.documents.status import ToolState
from agentrl.errors import (
    FailureError,
    SessionLostError,
    ToolServerConfigError,
    ToolServerError,
    tool_server,
)
from agentrl.tools.config import CallGate, Hook, HttpSpec, Limits, McpSpec, Scope, StdioSpec, redact_address
from agentrl.tools.mcp.connection import (
    TRAJECTORY_KEY,
    Listed,
    LostError,
    McpConnection,
    RefusedError,
    UnusableError,
)
from agentrl.tools.tool import (
    Reply,
    Schema,
    ServerSession,
    ToolServer,
    TrajectoryInfo,
    schema_name,
    timed_out,
)

if TYPE_CHECKING:
    import httpx2

logger = logging.getLogger(__name__)

RECONNECT_DELAYS = (0.0, 0.5, 2.0)
"""Waits before each attempt to connect, in seconds."""
_MAX_BACKOFF_SECONDS = 15.0
_PARALLEL_STARTS = 4
"""Processes of one server that start at a time."""
_PLACEHOLDER = re.compile(r"\$\{(trajectory|meta\.[^}]+)\}")
_SHOWN = 10
Request = Callable[[str, Mapping[str, Any], Limits], Awaitable[Reply]]
"""Calls a tool with arguments, within limits."""


class McpServer(ToolServer, ABC):
    """The client of one server: what shared and dedicated servers have in common."""

    def __init__(self, spec: McpSpec, config: ToolConfig) -> None:
        self.name = spec.name
        self.options = spec.options
        self._spec = spec
        self._connections = config.max_tool_connections
        base = Limits(
            timeout_seconds=config.tool_timeout_seconds, max_result_chars=config.max_tool_result_chars
        )
        self.gate = CallGate(self.options, base, connections=self._connections)
        own = (limits.over(base) for limits in (self.options.limits, *self.options.tools.values()))
        longest = max(max(each.timeout_seconds or 0.0, each.max_seconds or 0.0) for each in (base, *own))
        # Let HTTP wait longer than a call may be silent: the call's own limit must be what ends it.
        self._read_seconds = longest + 10.0
        is_process = isinstance(spec, StdioSpec)
        self._slots = asyncio.Semaphore(_PARALLEL_STARTS if is_process else self._connections)
        self._http: httpx2.AsyncClient | None = None
        self._backoff = Backoff(f"tool server {spec.name}", 1.0, _MAX_BACKOFF_SECONDS, jitter=0.25)
        self._problem: ConnectionError = ConnectionError("it is not connected")
        self._again_at = 0.0
        self._closing: set[asyncio.Task[None]] = set()

    @property
    @abstractmethod
    def listed(self) -> Listed:
        """Return its tools as it last listed them."""

    @property
    def schemas(self) -> Sequence[Schema]:
        return self.listed.schemas

    def state_of(self, tool: str, listed: Listed | None = None) -> ToolState:
        """Return what a tool keeps, as its entry declares; else as its annotations and the scope say.

        ``listed`` are the tools of one connection; None: those that the server last listed.
        """
        known = listed or self.listed
        return self.options.state_of(tool, reads=tool in known.reads, repeatable=tool in known.repeatable)

    async def connect(self) -> McpConnection:
        """Return a new connection. Raises ToolServerError, at once while the back-off lasts.

        While the server is down, concurrent callers share one series of attempts. The error is a
        ToolServerConfigError if another attempt cannot help.
        """
        loop = asyncio.get_running_loop()
        async with self._slots:
            if self._backoff.attempts and loop.time() < self._again_at:
                raise self.unreachable(self._problem)
            for delay in RECONNECT_DELAYS:
                await asyncio.sleep(delay)
                connection = McpConnection(self._spec, self._http_client())
                try:
                    await connection.open()
                except ConnectionError as error:
                    self._problem = error
                    if isinstance(error, UnusableError):
                        break
                    continue
                self._backoff.reset()
                return connection
            self._again_at = loop.time() + self._backoff.next()
            raise self.unreachable(self._problem)

    def unreachable(self, error: RefusedError | LostError | ConnectionError) -> ToolServerError:
        """Return the error of a server that is down or refuses all calls."""
        kind = ToolServerConfigError if isinstance(error, UnusableError) else ToolServerError
        return kind(
            f"tool server {self.name} ({redact_address(self._spec)}) cannot be reached: {error}",
            hint="start it, or correct its entry in --mcp_servers_file or --mcp_manager_url",
            outage=tool_server(self.name),
            retry_after=error.retry_after if isinstance(error, RefusedError) else None,
        )

    @property
    def is_remote(self) -> bool:
        """Return whether the server is behind HTTP rather than a process of the trajectory."""
        return isinstance(self._spec, HttpSpec)

    def session_lost(self, why: str) -> SessionLostError:
        """Return the error of a trajectory whose state was in a session that the server does not know."""
        return SessionLostError(f"tool server {self.name} has lost the session of this trajectory: {why}")

    def discard(self, connection: McpConnection, why: str, *, session: bool = False) -> None:
        """Close a connection that is lost, in the background; of a lost ``session``, after its calls."""
        logger.warning("tool server lost", extra={"server": self.name, "why": why})
        self.later(connection.retire() if session else connection.close())

    def later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do ``work`` in the background; ``close`` waits for it."""
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def close(self) -> None:
        """Wait for what closes in the background, and close the HTTP pool. Idempotent."""
        await asyncio.gather(*self._closing, return_exceptions=True)
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    def _http_client(self) -> httpx2.AsyncClient | None:
        if not isinstance(self._spec, HttpSpec) or self._spec.sse:
            return None
        if self._http is None:
            from agentrl.tools.mcp.http import open_client

            self._http = open_client(
                self._spec, connections=self._connections, read_seconds=self._read_seconds
            )
        return self._http


class McpSession(ServerSession, ABC):
    """What shared and dedicated servers have in common; subclasses make the request."""

    def __init__(self, server: McpServer, trajectory: TrajectoryInfo) -> None:
        self.options = server.options
        self._key = trajectory.key(replayed=self.options.is_replayed)
        self.meta = {TRAJECTORY_KEY: self._key}
        self._name = server.name
        self._state_of = server.state_of
        self._trajectory = trajectory
        self._gate = server.gate
        self._order = asyncio.Lock() if server.options.ordered else None
        self._seen: Sequence[Schema] = ()

    @abstractmethod
    async def prepare(self) -> None:
        """Run the setup hooks, or arrange that they run. Raises ToolServerError."""

    @property
    @abstractmethod
    def listed(self) -> Listed:
        """Return the tools as last listed, without a request."""

    @abstractmethod
    async def settle(self) -> None:
        """Wait until announced changes of the tools are listed."""

    @abstractmethod
    async def request(self, tool: str, arguments: Mapping[str, Any], limits: Limits) -> Reply:
        """Call one tool within ``limits``. Raises ToolServerError."""

    @abstractmethod
    async def close(self) -> None:
        """Release the trajectory's state."""

    async def open(self) -> None:
        """Prepare the trajectory's state. Raises ToolServerError if a setup hook reports an error."""
        await self.prepare()
        self._seen = self.listed.schemas

    async def list(self) -> Sequence[Schema]:
        """Return the tools as last listed, sorted by name."""
        return self.listed.schemas

    def state_of(self, tool: str) -> ToolState:
        return self._state_of(tool, self.listed)

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Reply:
        """Call one tool within its limits; the reply says if the server's tools changed."""
        async with contextlib.AsyncExitStack() as stack:
            if self._order is not None:
                await stack.enter_async_context(self._order)
            limits = await stack.enter_async_context(self._gate.enter(tool))
            reply = await self.request(tool, arguments, limits)
        await self.settle()
        text = "\n".join(part for part in (reply.text, self._changes()) if part)
        return replace(reply, text=text, max_chars=limits.max_result_chars)

    async def run_setup(self, request: Request) -> None:
        """Run the setup hooks by ``request``. Raises ToolServerError if one reports an error.

        It is an outage if the server gave no answer; all hooks run again when it is over.
        """
        for hook in self.options.setup:
            reply = await self._run(hook, request)
            if reply.error:
                raise ToolServerError(
                    f"the setup call {hook.tool} reported an error: {reply.text[:300]}",
                    hint="correct the entry's 'setup' in --mcp_servers_file",
                    outage=tool_server(self._name) if reply.lost else None,
                )

    async def run_teardown(self, request: Request) -> None:
        """Run the teardown hooks by ``request``; their errors are logged."""
        for hook in self.options.teardown:
            try:
                reply = await self._run(hook, request)
                problem = reply.text if reply.error else ""
            except FailureError as error:
                problem = error.message
            if problem:
                logger.warning("a teardown call failed", extra={"tool": hook.tool, "why": problem[:300]})

    async def _run(self, hook: Hook, request: Request) -> Reply:
        arguments = {key: self._filled(value) for key, value in hook.arguments.items()}
        return await request(hook.tool, arguments, self._gate.limits(hook.tool))

    def _filled(self, value: Any) -> Any:
        """Replace ``${trajectory}`` and ``${meta.KEY}``; a text of one placeholder keeps the value's type."""
        if isinstance(value, Mapping):
            return {key: self._filled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._filled(item) for item in value]
        if not isinstance(value, str):
            return value
        whole = _PLACEHOLDER.fullmatch(value)
        if whole is not None:
            return self._value(whole[1])
        return _PLACEHOLDER.sub(lambda found: str(self._value(found[1])), value)

    def _value(self, name: str) -> Any:
        if name == "trajectory":
            return self._key
        key = name.removeprefix("meta.")
        if key not in self._trajectory.meta:
            raise ToolServerError(
                f"a hook of this tool server needs {key!r} of the task's meta", hint="add it to the task"
            )
        return self._trajectory.meta[key]

    def _changes(self) -> str:
        """Return a note to the model if the server's tools differ from those it saw last."""
        before, now = self._seen, self.listed.schemas
        if before is now:
            return ""
        self._seen = now
        old = {schema_name(schema): schema for schema in before}
        new = {schema_name(schema): schema for schema in now}
        added = [json.dumps(new[name]["function"], ensure_ascii=False) for name in new if name not in old]
        removed = [name for name in old if name not in new]
        changed = [name for name in new if name in old and new[name] != old[name]]
        parts = [
            f"{what} {', '.join(names[:_SHOWN])}"
            for what, names in (("now also", added), ("no longer", removed), ("changed", changed))
            if names
        ]
        return f"[the tools of this server changed: {'; '.join(parts)}]" if parts else ""


class SharedServer(McpServer):
    """The client of one shared server."""

    def __init__(self, spec: McpSpec, config: ToolConfig) -> None:
        super().__init__(spec, config)
        self._connection: McpConnection | None = None
        self._opening: asyncio.Task[McpConnection | ToolServerError] | None = None
        self._testing: asyncio.Task[None] | None = None
        self._listed = Listed()

    @property
    def listed(self) -> Listed:
        if self._connection is not None and self._connection.listed.schemas:
            self._listed = self._connection.listed
        return self._listed

    async def open(self) -> None:
        """Connect and list the tools. Raises ToolServerError."""
        await self.live()

    def session(self, trajectory: TrajectoryInfo) -> SharedSession:
        return SharedSession(self, trajectory)

    async def live(self) -> McpConnection:
        """Return the connection; reconnect if it is lost. All callers share one attempt.

        Raises ToolServerError.
        """
        if self._connection is not None and self._connection.alive:
            return self._connection
        if self._opening is None:
            self._opening = asyncio.create_task(self._reopen(), name=f"connect-{self.name}")
        # Shield the attempt: all callers share it, and one that is cancelled must not end it.
        opened = await asyncio.shield(self._opening)
        if isinstance(opened, ToolServerError):
            raise opened
        return opened

    def lost(self, connection: McpConnection, why: str, *, session: bool = False) -> None:
        """Give up a connection; the next call opens a new one."""
        # Leave a newer connection alone: every call in flight reports the loss of the old one.
        if self._connection is not connection:
            return
        self._listed = self.listed
        self._connection = None
        self.discard(connection, why, session=session)

    def suspect(self, connection: McpConnection) -> asyncio.Future[None]:
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

    async def _reopen(self) -> McpConnection | ToolServerError:
        stale, self._connection = self._connection, None
        try:
            if stale is not None:
                self._listed = stale.listed if stale.listed.schemas else self._listed
                self.later(stale.close())
            self._connection = await self.connect()
            return self._connection
        # Return the error: if all callers are cancelled, asyncio would log a raised one as never retrieved.
        except ToolServerError as error:
            return error
        finally:
            self._opening = None

    async def _test(self, connection: McpConnection) -> None:
        if not await connection.answers():
            self.lost(connection, "it did not answer a call, nor a list of its tools")


class SharedSession(McpSession):
    """The calls of one trajectory to a shared server."""

    def __init__(self, server: SharedServer, trajectory: TrajectoryInfo) -> None:
        super().__init__(server, trajectory)
        self._server = server
        self._is_closed = False
        self._used: McpConnection | None = None
        """The connection that has answered a call, and so holds what the setup hooks have made."""

    async def prepare(self) -> None:
        await self.run_setup(self.request)

    @property
    def listed(self) -> Listed:
        return self._server.listed

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
                # Test in the background: the model need not wait, and other calls may still be answered.
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


class DedicatedServer(McpServer):
    """The pool of one server's connections. A trajectory takes one at its first call."""

    def __init__(self, spec: McpSpec, config: ToolConfig) -> None:
        super().__init__(spec, config)
        self._listed = Listed()
        self._warm: list[McpConnection] = []
        self._filling: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def listed(self) -> Listed:
        """Return the tools that the first connection listed."""
        return self._listed

    async def open(self) -> None:
        """Open the first connection and list its tools. Raises ToolServerError."""
        first = await self.connect()
        self._listed = first.listed
        self._warm.append(first)
        self._fill()

    def session(self, trajectory: TrajectoryInfo) -> DedicatedSession:
        return DedicatedSession(self, trajectory)

    async def take(self) -> McpConnection:
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

    def give_back(self, connection: McpConnection, meta: Mapping[str, str], *, is_idle: bool) -> None:
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

    async def _recycle(self, connection: McpConnection, meta: Mapping[str, str]) -> None:
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

    def __init__(self, server: DedicatedServer, trajectory: TrajectoryInfo) -> None:
        super().__init__(server, trajectory)
        self._server = server
        self._connection: McpConnection | None = None
        self._used: McpConnection | None = None
        """The connection that has answered a call, and so holds state of the trajectory."""
        self._taking = asyncio.Lock()
        self._was_lost = False
        self._running = 0
        self._has_abandoned = False

    async def prepare(self) -> None:
        """Take a connection now if there are setup hooks; else at the first call."""
        if self.options.setup:
            await self._own()

    @property
    def listed(self) -> Listed:
        """Return the tools of the trajectory's connection, or those that a new one lists."""
        own = Listed() if self._connection is None else self._connection.listed
        return own if own.schemas else self._server.listed

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
                # Ask before replacing it: a slow tool is no lost server, whose state would go with it.
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
        # Wait for a call that is taking a connection: nobody would give that one back.
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

    async def _own(self) -> McpConnection:
        """Return the trajectory's connection; take one, and run the setup hooks, if it has none.

        Raises SessionLostError if a server behind HTTP has ended it, with the trajectory's state. That a
        process has ended is told to the model instead: the trajectory's own calls may be the reason.
        """
        # Take one at a time: parallel first calls would each get a process, with a state of its own.
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

    def _on(self, connection: McpConnection) -> Request:
        """Return a function that calls tools on ``connection``; a loss is an outage."""

        async def request(tool: str, arguments: Mapping[str, Any], limits: Limits) -> Reply:
            try:
                return await connection.call(tool, arguments, limits, self.meta)
            except TimeoutError:
                return timed_out(tool, limits.timeout_seconds, lost=True)
            except (LostError, RefusedError) as error:
                raise self._server.unreachable(error) from error

        return request

    def _lose(self, connection: McpConnection, why: str, *, session: bool = False) -> None:
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
