"""Open the tool servers of one process, give each trajectory a session, and close them."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any, Self

from agentrl.base.concurrency import task_group
from agentrl.config.schema import ToolConfig
from agentrl.documents.model_call import Condensed
from agentrl.errors import ToolServerConfigError, ToolServerError, tool_server
from agentrl.tools.browse import BrowseAgent
from agentrl.tools.config import ManagerSpec, configured_servers, load_tools
from agentrl.tools.manager import managed_servers
from agentrl.tools.mcp.server import mcp_server
from agentrl.tools.python import python_servers
from agentrl.tools.tool import (
    ENVIRONMENT,
    ROLES,
    OwnSession,
    Rewarding,
    Schema,
    ServerSession,
    ToolResult,
    ToolServer,
    TrajectoryInfo,
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
        # Name safe ones first, so that no renamed tool takes their names; sort for the same names everywhere.
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
        # Close what has opened: ``__aexit__`` is not called if ``__aenter__`` raises.
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
            # Start the clock in the slot: the tool's seconds do not hold the wait for other tools.
            start = time.monotonic()
            with outages_of(server):
                reply = await self._sessions[server].call(tool, arguments)
            seconds = time.monotonic() - start
        if reply.reward is not None:
            self._call_rewards.setdefault(name, []).append(reply.reward)
        text, condensed = reply.text, None
        # Condense outside of the slot: it waits for a model while other tools could run.
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


_ALL = "all"


class ToolPool:
    """The configured tool servers.

    A tool keeps its own name unless several of a trajectory's servers have it; then it is offered as
    ``server.tool``.
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
        self._managers: dict[str, ManagerSpec] = {}
        """``--mcp_server_name`` → a manager that has not yet told the names of its servers."""
        self._down: dict[str, ToolServerError] = {}

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def servers(self) -> tuple[str, ...]:
        """Return the names of the servers, as used in a task's ``tools``."""
        return tuple(self._servers)

    @property
    def down(self) -> Mapping[str, ToolServerError]:
        """Return the servers that have not answered yet, with their last error.

        A manager that has not named its servers stands under ``--mcp_server_name``.
        """
        return dict(self._down)

    @property
    def known(self) -> frozenset[str] | None:
        """Return the names of the servers that are known; None if these are all."""
        return frozenset(self._servers) if _ALL in self._managers else None

    async def open(self) -> None:
        """Connect to every server. Raises ToolServerError for the first that cannot be reached."""
        await self.open_reachable()
        for error in self.down.values():
            await self.close()
            raise error

    async def open_reachable(self) -> None:
        """Connect to every server that is up; ``down`` has the others, for ``connect``.

        Raises ToolServerConfigError for a server that cannot be used as it is configured.
        """
        try:
            for python in self._python:
                self._add(python)
            for spec in self._specs:
                if isinstance(spec, ManagerSpec):
                    self._managers[spec.server] = spec
                else:
                    self._add(mcp_server(spec, self._config))
            await asyncio.gather(*(self._try(name) for name in {**self._servers, **self._managers}))
            for error in self._down.values():
                if isinstance(error, ToolServerConfigError):
                    raise error
        except BaseException:
            await self.close()
            raise

    async def connect(self, name: str) -> None:
        """Connect to a server that is ``down``. Raises ToolServerError, and it stays there.

        A manager adds its servers; those that do not answer are ``down`` then, by their own names.
        """
        if name in self._managers:
            listed = await managed_servers(self._managers[name], self._config)
            del self._managers[name]
            self._down.pop(name, None)
            for server in listed:
                self._add(server)
            await asyncio.gather(*(self._try(server.name) for server in listed))
            if name in self._down:
                raise self._down[name]
        else:
            await self._servers[name].open()
            self._down.pop(name, None)

    async def close(self) -> None:
        """Disconnect from every server."""
        servers, self._servers = list(self._servers.values()), {}
        await asyncio.gather(*(server.close() for server in servers))

    def list(self, servers: Sequence[str] | None = None) -> Sequence[Schema]:
        """Return the function schemas of the tools of ``servers`` (None: all), as last listed."""
        chosen = self._chosen(servers)
        names = self._names(chosen)
        offered = [names.renamed(name, schema) for name in chosen for schema in self._servers[name].schemas]
        return sorted(offered, key=schema_name)

    def session(self, trajectory: TrajectoryInfo, environment: OwnSession | None = None) -> ToolSession:
        """Return the tools of one trajectory: ``async with pool.session(trajectory) as tools``.

        The tools of its ``environment`` are offered beside those of the servers. Raises ToolServerError for
        a server that is not configured, or that has not answered yet.
        """
        chosen = self._chosen(trajectory.servers)
        for name in self._down if trajectory.servers is None else trajectory.servers:
            if name in self._down:
                raise self._down[name]
        sessions: dict[str, ServerSession] = {
            name: self._servers[name].session(trajectory) for name in chosen
        }
        if environment is not None:
            sessions[ENVIRONMENT] = environment
        return ToolSession(
            sessions,
            self._names(chosen, environment),
            max_chars=self._config.max_tool_result_chars,
            max_parallel=self._config.max_parallel_tool_calls,
            condense=None if self._browse is None else partial(self._browse.condense, trajectory.question),
        )

    async def _try(self, name: str) -> None:
        try:
            await self.connect(name)
        except ToolServerError as error:
            self._down[name] = error

    def _add(self, server: ToolServer) -> None:
        if server.name == ENVIRONMENT:
            raise ToolServerConfigError(
                f"a tool server is named {ENVIRONMENT!r}",
                hint="rename it: the tools of a task's environment have this name",
            )
        if server.name in self._servers:
            raise ToolServerConfigError(
                f"two tool servers are named {server.name!r}", hint="rename one in --mcp_servers_file"
            )
        self._servers[server.name] = server

    def _chosen(self, servers: Sequence[str] | None) -> Sequence[str]:
        unknown = [name for name in servers or () if name not in self._servers]
        for manager in self._managers:
            if unknown and (manager == _ALL or manager in unknown):
                raise ToolServerError(
                    f"the MCP manager is down: it may have a tool server {', '.join(unknown)}",
                    outage=tool_server(manager),
                )
        if unknown:
            raise ToolServerError(
                f"unknown tool server {', '.join(unknown)}",
                hint=f"the task's 'tools' may name: {', '.join(self._servers) or 'none, none is configured'}",
            )
        return [name for name in self._servers if servers is None or name in servers]

    def _names(self, chosen: Sequence[str], environment: OwnSession | None = None) -> ToolNames:
        schemas = {name: self._servers[name].schemas for name in chosen}
        return ToolNames(schemas if environment is None else {**schemas, ENVIRONMENT: environment.schemas})
