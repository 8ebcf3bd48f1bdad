"""Find the tools that flags and files name, open their servers, and give each trajectory a session."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from agentrl.base.validation import PlainText, Text, broken, read_settings, wrong
from agentrl.config.schema import ToolConfig
from agentrl.errors import ConfigError, ToolServerConfigError, ToolServerError, tool_server
from agentrl.tools.browse import BrowseAgent
from agentrl.tools.config import (
    URL_HINT,
    HttpSpec,
    ManagerSpec,
    ServerSpec,
    ServerState,
    is_http,
    load_servers,
)
from agentrl.tools.manager import managed_servers
from agentrl.tools.mcp.server import mcp_server
from agentrl.tools.python import StatefulTools, python_servers
from agentrl.tools.tool import (
    ENVIRONMENT,
    OwnSession,
    Schema,
    ServerSession,
    ToolNames,
    ToolServer,
    ToolSession,
    TrajectoryInfo,
    schema_name,
)

_TOOLS_HINT = "write 'tools:' with a list of {class_name, config, tool_schema}, as in verl's examples"
_ALL = "all"


def configured_servers(config: ToolConfig) -> list[ServerSpec]:
    """Return every server that the flags name; there may be none."""
    specs: list[ServerSpec] = []
    if config.mcp_servers_file is not None:
        specs.extend(load_servers(config.mcp_servers_file))
    if config.mcp_manager_url is not None:
        specs.append(_manager(config, config.mcp_manager_url))
    return specs


def _manager(config: ToolConfig, url: str) -> ServerSpec:
    token = os.environ.get(config.mcp_auth_token_env)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = url.rstrip("/")
    if not is_http(url):
        raise ConfigError("--mcp_manager_url is not a URL of HTTP", hint=URL_HINT)
    if url.endswith("/mcpapi"):
        return ManagerSpec(url=url, server=config.mcp_server_name, headers=headers)
    name = "mcp" if config.mcp_server_name == "all" else config.mcp_server_name
    return HttpSpec(name=name, url=url, headers=headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredTools:
    """The tools of one file."""

    tools: tuple[StatefulTools, ...] = ()
    servers: tuple[ServerSpec, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mcp:
    """The servers of an entry; keys that only verl reads are ignored, as in the whole file."""

    mcp_servers_config_path: Text
    tool_selected_list: tuple[PlainText, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A tool class with its settings, or MCP servers."""

    class_name: Text | None = None
    config: Mapping[str, Any] | None = None
    tool_schema: Any = None
    mcp: _Mcp | None = None
    state: ServerState | None = None
    """What the tool keeps between its calls; None: what its class declares."""

    def __post_init__(self) -> None:
        kind = (self.config or {}).get("type", "native")
        if kind not in ("native", "mcp") and self.mcp is None:
            raise wrong("native or mcp", "config", "type")
        if kind == "mcp" and self.mcp is None:
            raise broken("has no mcp_servers_config_path", "mcp", hint="give the path of a JSON file")
        if kind == "native" and self.class_name is None:
            raise broken("has no class_name")


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    tools: tuple[_Entry, ...]


def load_tools(path: str | None, *, call_timeout: float) -> ConfiguredTools:
    """Return the tools of the file; none without a path. Raises ConfigError."""
    if path is None:
        return ConfiguredTools()
    file = read_settings(path, what="--tool_config_path", hint=_TOOLS_HINT)
    tools: list[StatefulTools] = []
    servers: list[ServerSpec] = []
    for index, entry in enumerate(file.check(_File, file.content).tools):
        settings = dict(entry.config or {})
        if settings.pop("type", "native") == "native":
            where = f"{path}: tools[{index}]"
            name = str(entry.class_name)
            tools.append(
                StatefulTools.load(
                    _class(name, where), settings, entry.tool_schema, where=f"{where} ({name})",
                    call_timeout=call_timeout, state=entry.state,
                )
            )  # fmt: skip
        elif entry.mcp is not None:
            servers += _offered(entry.mcp)
    return ConfiguredTools(tools=tuple(tools), servers=tuple(servers))


def _offered(mcp: _Mcp) -> list[ServerSpec]:
    """Return the servers, which offer only the tools that the entry selects."""
    return [
        spec
        if mcp.tool_selected_list is None or isinstance(spec, ManagerSpec)
        else replace(spec, options=replace(spec.options, offer=mcp.tool_selected_list))
        for spec in load_servers(mcp.mcp_servers_config_path)
    ]


def _class(name: str, where: str) -> Any:
    """Import ``module.Class`` or ``module:Class``."""
    module, _, attribute = name.rpartition(":" if ":" in name else ".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        hint = "the path is module.Class; its file must lie in the working folder or on PYTHONPATH"
        if module.partition(".")[0] == "verl":
            hint = "install verl, or name another class: agentrl.worlds.sandbox.tool.PythonSandbox"
        raise ConfigError(f"{where}: class_name {name!r} cannot be imported: {error}", hint=hint) from error


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
