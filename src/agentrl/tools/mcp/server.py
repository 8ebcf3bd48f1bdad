"""Open connections to an MCP server, with a back-off that all callers share; call it for a trajectory."""

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

from agentrl.config.schema import ToolConfig
from agentrl.errors import (
    FailureError,
    SessionLostError,
    ToolServerConfigError,
    ToolServerError,
    tool_server,
)
from agentrl.tools.base import Reply, Schema, ServerSession, ToolServer, Trajectory, schema_name
from agentrl.tools.mcp.connection import TRAJECTORY_KEY, Connection, LostError, RefusedError, UnusableError
from agentrl.tools.specs import CallGate, Hook, HttpSpec, Limits, McpSpec, StdioSpec, redact_address

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
        self._read_seconds = longest + 10.0
        is_process = isinstance(spec, StdioSpec)
        self._slots = asyncio.Semaphore(_PARALLEL_STARTS if is_process else self._connections)
        self._http: httpx2.AsyncClient | None = None
        self._failures = 0
        self._problem: ConnectionError = ConnectionError("it is not connected")
        self._again_at = 0.0
        self._closing: set[asyncio.Task[None]] = set()

    async def connect(self) -> Connection:
        """Return a new connection. Raises ToolServerError, at once while the back-off lasts.

        While the server is down, concurrent callers share one series of attempts. The error is a
        ToolServerConfigError if another attempt cannot help.
        """
        loop = asyncio.get_running_loop()
        async with self._slots:
            if self._failures and loop.time() < self._again_at:
                raise self.unreachable(self._problem)
            for delay in RECONNECT_DELAYS:
                await asyncio.sleep(delay)
                connection = Connection(self._spec, self._http_client())
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

    def discard(self, connection: Connection, why: str, *, session: bool = False) -> None:
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

    def __init__(self, server: McpServer, trajectory: Trajectory) -> None:
        self.meta = {TRAJECTORY_KEY: trajectory.id}
        self.options = server.options
        self._name = server.name
        self._trajectory = trajectory
        self._gate = server.gate
        self._order = asyncio.Lock() if server.options.ordered else None
        self._seen: Sequence[Schema] = ()

    @abstractmethod
    async def prepare(self) -> None:
        """Run the setup hooks, or arrange that they run. Raises ToolServerError."""

    @abstractmethod
    def current(self) -> Sequence[Schema]:
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
        self._seen = self.current()

    async def list(self) -> Sequence[Schema]:
        """Return the tools as last listed, sorted by name."""
        return self.current()

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
            return self._trajectory.id
        key = name.removeprefix("meta.")
        if key not in self._trajectory.meta:
            raise ToolServerError(
                f"a hook of this tool server needs {key!r} of the task's meta", hint="add it to the task"
            )
        return self._trajectory.meta[key]

    def _changes(self) -> str:
        """Return a note to the model if the server's tools differ from those it saw last."""
        before, now = self._seen, self.current()
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
