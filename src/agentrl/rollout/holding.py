"""Hold calls while what they need is down, and connect the tool servers that were down at the start."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from agentrl.errors import ToolServerError, tool_server
from agentrl.rollout.outages import Clock, Outages
from agentrl.rollout.tool_calls import Tools
from agentrl.tools.base import Schema, ToolResult


class HeldTools:
    """The tools of one trajectory; a call waits while its server is down."""

    def __init__(self, tools: Tools, outages: Outages, clock: Clock) -> None:
        self._tools = tools
        self._outages = outages
        self._clock = clock

    async def list(self) -> Sequence[Schema]:
        """Return the function schemas of the tools offered."""
        return await self._outages.hold(self._tools.list, self._clock)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Run one tool. A successful result shows that its server is up."""
        result = await self._outages.hold(lambda: self._tools.call(name, arguments), self._clock)
        if not result.error:
            self._outages.succeeded(tool_server(result.server))
        return result

    async def rewards(self) -> dict[str, dict[str, Any]]:
        """Return the rewards that tools give, by tool."""
        return await self._outages.hold(self._tools.rewards, self._clock)


class LateToolSource(Protocol):
    """Tool servers of which some may not have answered yet: ``ToolPool``."""

    @property
    def down(self) -> Mapping[str, ToolServerError]:
        """Return the servers that have not answered yet, with their last error."""
        ...

    @property
    def known(self) -> frozenset[str] | None:
        """Return the names of the servers that are known; None if these are all."""
        ...

    async def connect(self, name: str) -> None:
        """Connect to a server that is ``down``. Raises ToolServerError, and it stays there."""
        ...


class LateServers:
    """The servers of one sampler that have not answered yet. Each is an outage until it does."""

    def __init__(self, tools: LateToolSource, outages: Outages, wait_seconds: float) -> None:
        """``wait_seconds`` bounds the wait of a sampler that can claim nothing at all."""
        self._tools = tools
        self._outages = outages
        self._wait_seconds = wait_seconds

    def begin(self) -> None:
        """Declare the outages, before the first claim."""
        self._outages.known_servers = self._tools.known
        for name, error in self._tools.down.items():
            self._outages.went_down(tool_server(name), error.message)

    async def run(self, check: Callable[[], Awaitable[None]], has_claimed: Callable[[], bool]) -> None:
        """Probe each server, with a back-off, until all are connected.

        ``check`` is awaited before anything that needs a new server is claimed; its errors are raised here.
        Raises ToolServerError if after ``wait_seconds`` nothing ``has_claimed``, and ToolServerConfigError.
        """
        connecting = asyncio.create_task(self._connect_all(check))
        try:
            done, _ = await asyncio.wait([connecting], timeout=self._wait_seconds)
            if not done and not has_claimed():
                raise self._gave_up()
            await connecting
        finally:
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)

    async def _connect_all(self, check: Callable[[], Awaitable[None]]) -> None:
        begun: set[str] = set()

        async def connect(name: str) -> None:
            await self._connect(name)
            await check()
            self.begin()
            self._outages.succeeded(tool_server(name))
            begin_new()

        def begin_new() -> None:
            """Connect to each server that is down; a manager that answers may name some."""
            for name in self._tools.down.keys() - begun:
                begun.add(name)
                group.create_task(connect(name))

        try:
            async with asyncio.TaskGroup() as group:
                begin_new()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _connect(self, name: str) -> None:
        while True:
            await self._outages.until_probe(tool_server(name))
            try:
                await self._tools.connect(name)
            except ToolServerError as error:
                if error.outage is None:
                    raise
                self._outages.failed(tool_server(name), error.message, error.retry_after)
            else:
                return

    def _gave_up(self) -> ToolServerError:
        errors = "; ".join(error.message for error in self._tools.down.values())
        return ToolServerError(
            f"nothing could be claimed for {self._wait_seconds:g} s: {errors}",
            hint="start it; --outage_wait_seconds sets how long a sampler waits that can do nothing else",
        )
