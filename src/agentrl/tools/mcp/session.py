"""Call an MCP server for one trajectory: hooks, limits, order, and notes on tools that changed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.errors import ToolServerError, tool_server
from agentrl.tools.base import Reply, Schema, Trajectory, schema_name
from agentrl.tools.mcp.connection import TRAJECTORY_KEY
from agentrl.tools.specs import CallGate, Hook, Limits, Options

logger = logging.getLogger(__name__)

_PLACEHOLDER = re.compile(r"\$\{(trajectory|meta\.[^}]+)\}")
_SHOWN = 10


Request = Callable[[str, Mapping[str, Any], Limits], Awaitable[Reply]]
"""Calls a tool with arguments, within limits."""


class McpSession(ABC):
    """What shared and dedicated servers have in common; subclasses make the request."""

    def __init__(self, trajectory: Trajectory, options: Options, gate: CallGate) -> None:
        self.options = options
        self.meta = {TRAJECTORY_KEY: trajectory.id}
        self._trajectory = trajectory
        self._gate = gate
        self._order = asyncio.Lock() if options.ordered else None
        self._seen: Sequence[Schema] = ()

    @property
    @abstractmethod
    def server_name(self) -> str:
        """Return the name of the server."""

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
                    outage=tool_server(self.server_name) if reply.lost else None,
                )

    async def run_teardown(self, request: Request) -> None:
        """Run the teardown hooks by ``request``; their errors are logged."""
        for hook in self.options.teardown:
            try:
                reply = await self._run(hook, request)
                problem = reply.text if reply.error else ""
            except ToolServerError as error:
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
