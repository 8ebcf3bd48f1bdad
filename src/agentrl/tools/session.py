"""List the tools of one trajectory under unique names, call them, and release their state at the end."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Self

from agentrl.concurrency import task_group
from agentrl.documents.model_call import Condensed
from agentrl.errors import ToolServerError
from agentrl.tools.base import (
    ROLES,
    Rewarding,
    Schema,
    ServerSession,
    ToolResult,
    function_schema,
    outages_of,
    schema_name,
)

Condense = Callable[[str, Mapping[str, Any], str], Awaitable[Condensed | None]]
"""Returns a tool's text condensed, by the tool's name, arguments and text; None leaves it as it is."""


_SAFE = re.compile(r"[^\W\d][\w.-]{0,63}")
"""Names that every chat format can call; OpenAI's and Anthropic's APIs take 64 characters too."""
_UNSAFE = re.compile(r"[^\w.-]")
_LONGEST = 64


class ToolNames:
    """The names under which the tools of several servers are offered: safe, and each for one tool.

    A name depends on the names of the tools alone, since it stands in prompts that are trained.
    """

    def __init__(self, tools: Mapping[str, Iterable[Schema]]) -> None:
        """``tools`` holds each server's schemas, by the server's name."""
        own = {(server, schema_name(schema)) for server, schemas in tools.items() for schema in schemas}
        servers_with = Counter(tool for _, tool in own)
        self._shared = {tool for tool, count in servers_with.items() if count > 1}
        self._offered: dict[tuple[str, str], str] = {}
        for server, tool in sorted(own, key=lambda of: (not _SAFE.fullmatch(self._plain(*of)), of)):
            self.offered(server, tool)

    def offered(self, server: str, tool: str) -> str:
        """Return the name that the model sees, also for a tool that a server has added since."""
        key = (server, tool)
        if key not in self._offered:
            name = plain = self._plain(server, tool)
            if not _SAFE.fullmatch(plain):
                name = _UNSAFE.sub("_", plain)
                name = name if _SAFE.match(name) else f"_{name}"
            if len(name) > _LONGEST or name in self._offered.values():
                digest = sha256("\0".join(key).encode("utf-8", "replace")).hexdigest()[:8]
                name = f"{name[: _LONGEST - 9]}_{digest}"
            self._offered[key] = name
        return self._offered[key]

    def _plain(self, server: str, tool: str) -> str:
        return f"{server}.{tool}" if tool in self._shared else tool

    def renamed(self, server: str, schema: Schema) -> Schema:
        """Return ``schema`` under the name that the model sees."""
        function = schema["function"]
        name = self.offered(server, function["name"])
        return function_schema(name, function["description"], function["parameters"])


class ToolSession:
    """One trajectory's sessions with its servers, as one: ``async with pool.session(trajectory)``."""

    def __init__(
        self,
        sessions: Mapping[str, ServerSession],
        names: ToolNames,
        *,
        max_chars: int,
        max_parallel: int,
        condense: Condense | None = None,
    ) -> None:
        """``sessions`` are the trajectory's, by server. A result longer than ``max_chars`` is cut, and
        ``max_parallel`` calls run at a time. ``condense`` may shorten a result before it is cut."""
        self._sessions = sessions
        self._names = names
        self._max_chars = max_chars
        self._condense = condense
        self._slots = asyncio.Semaphore(max_parallel)
        self._call_rewards: dict[str, list[float]] = {}

    async def __aenter__(self) -> Self:
        try:
            async with task_group() as opening:
                for name, session in self._sessions.items():
                    opening.create_task(_open(name, session))
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def list(self) -> Sequence[Schema]:
        """Return the function schemas of the tools offered now, sorted by name."""
        offered = [
            self._names.renamed(server, schema)
            for server, session in self._sessions.items()
            for schema in await session.list()
        ]
        return sorted(offered, key=schema_name)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call one tool by the name that ``list`` gives it.

        The tool's error and its timeout are results. Raises ToolServerError for a lost server.
        """
        target = await self._target(name)
        if target is None:
            text = f"there is no tool {name} any more: its server no longer lists it"
            return ToolResult(text=text, error=True, seconds=0.0, server="")
        server, tool = target
        async with self._slots:
            start = time.monotonic()
            with outages_of(server):
                reply = await self._sessions[server].call(tool, arguments)
            seconds = time.monotonic() - start
        if reply.reward is not None:
            self._call_rewards.setdefault(name, []).append(reply.reward)
        text, condensed = reply.text, None
        if self._condense is not None and not reply.error:
            condensed = await self._condense(name, arguments, text)
            if condensed is not None and condensed.result is not None:
                text = condensed.result
        return ToolResult(
            text=_cut(text, reply.max_chars or self._max_chars),
            error=reply.error,
            seconds=seconds,
            server=server,
            reward=reply.reward,
            condensed=condensed,
            images=reply.images,
        )

    async def rewards(self) -> dict[str, dict[str, Any]]:
        """Return ``{tool: {"calls": rewards of its calls, "state": reward of its state}}`` of tools that give
        rewards; call it before ``close``. Rewards of roles are ``roles``, and the first is that of the state.
        What an environment's reward was made of is ``details``.
        Raises ToolServerError."""
        rewards: dict[str, dict[str, Any]] = {
            name: {"calls": list(calls)} for name, calls in self._call_rewards.items()
        }
        for server, session in self._sessions.items():
            with outages_of(server):
                state = await session.reward() if isinstance(session, Rewarding) else None
            if isinstance(state, Mapping):
                first = next(iter(state.values()))
                rewards.setdefault(server, {"calls": []}).update({"state": first, ROLES: dict(state)})
            elif state is not None:
                rewards.setdefault(server, {"calls": []})["state"] = state
            if details := getattr(session, "reward_details", None):
                rewards[server]["details"] = details
        return rewards

    async def close(self) -> None:
        """Close every session: their teardown hooks. Idempotent."""
        await asyncio.gather(*(session.close() for session in self._sessions.values()))

    async def _target(self, name: str) -> tuple[str, str] | None:
        for server, session in self._sessions.items():
            for schema in await session.list():
                tool = schema_name(schema)
                if self._names.offered(server, tool) == name:
                    return server, tool
        return None


async def _open(server: str, session: ServerSession) -> None:
    with outages_of(server):
        try:
            await session.open()
        except asyncio.CancelledError:  # a task group would take it for an opened session
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise ToolServerError(f"the opening of tool server {server} was cancelled") from None


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[cut: {len(text) - limit} more characters]"
