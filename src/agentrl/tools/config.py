"""Describe tool servers, read them from a file, limit their calls, and hide their secrets."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from pydantic import AfterValidator, BeforeValidator

from agentrl.base.registry import Registry
from agentrl.base.validation import (
    Count,
    PlainText,
    Positive,
    PositiveWhole,
    SettingsFile,
    SettingsModel,
    Switch,
    Text,
    broken,
    read_settings,
    wrong,
)
from agentrl.documents.status import ToolState

WORKDIR = "${workdir}"
"""In a stdio server's args, env and cwd: a folder of that process alone, deleted when it ends."""
_WINDOW_SECONDS = 60.0
HIDDEN = "***"
_SHORTEST = 8
"""Shorter values stay in messages: they are ports, names and flags."""
_TOKEN_PART = re.compile(r"(?=.*\d)[^/]{16,}|[^/]{32,}")


class Scope(StrEnum):
    """Who shares one connection."""

    TRAJECTORY = "trajectory"
    """Each trajectory has its own: for stdio a process, for HTTP a session."""
    SHARED = "shared"
    """All trajectories of this process share one: for servers that keep no state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(SettingsModel):
    """Limits of the calls to one tool; None leaves the run's flag, or no limit."""

    concurrency: PositiveWhole | None = None
    """Calls in flight, over all trajectories of this process."""
    calls_per_minute: Positive | None = None
    timeout_seconds: Positive | None = None
    """Longest silence: each progress message restarts it."""
    max_seconds: Positive | None = None
    """Longest call, even with progress messages; by default ten times the timeout."""
    max_result_chars: PositiveWhole | None = None

    def over(self, base: Limits) -> Limits:
        """Return these limits, completed by those of ``base``."""
        return Limits(
            **{
                item.name: getattr(base, item.name) if (own := getattr(self, item.name)) is None else own
                for item in dataclasses.fields(Limits)
            }
        )


def _kept_by_server(state: ToolState) -> ToolState:
    if state is ToolState.SNAPSHOT:
        raise broken(
            "is 'snapshot', and the files of a tool server are not kept", hint="write replay, or outside"
        )
    return state


ServerState = Annotated[ToolState, AfterValidator(_kept_by_server)]
"""What tools of a server keep between their calls: ``stateless``, ``replay`` or ``outside``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOptions(Limits):
    """Options of one tool; ``state`` None leaves that of its server."""

    state: ServerState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook(SettingsModel):
    """A tool call that the sampler makes for a trajectory.

    ``${trajectory}`` and ``${meta.KEY}`` in its arguments are the trajectory's id and a value of its task.
    """

    tool: Text
    arguments: Mapping[str, Any] = field(default_factory=dict)


def _hook(value: Any) -> Any:
    """Read a tool's name as a hook."""
    if not isinstance(value, (str, dict)):
        raise wrong("a tool's name or a mapping {tool, arguments}")
    return {"tool": value} if isinstance(value, str) else value


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


OneHook = Annotated[Hook, BeforeValidator(_hook)]
Hooks = Annotated[tuple[OneHook, ...], BeforeValidator(_listed)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(SettingsModel):
    """Options of every MCP server's entry, for every transport."""

    scope: Scope = Scope.SHARED
    warm: Count = 1
    """Idle processes kept ready, with scope trajectory."""
    ordered: Switch = False
    """Run the calls of one trajectory one after another."""
    setup: Hooks = ()
    teardown: Hooks = ()
    reset: OneHook | None = None
    """Clears a process for the next trajectory; without it, the process is replaced."""
    offer: tuple[PlainText, ...] | None = None
    """The tools that the model may see; None: all."""
    resources: Switch = False
    """Offer the tools list_resources and read_resource."""
    prompts: Switch = False
    """Offer the tools list_prompts and get_prompt."""
    state: ServerState | None = None
    """What its tools keep between their calls; None: what their annotations and the scope say."""
    limits: Limits = field(default_factory=Limits)
    tools: Mapping[str, ToolOptions] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.reset is not None and self.scope is Scope.SHARED:
            raise broken(
                "clears a trajectory's own server, and the scope is shared", "reset",
                hint="write 'scope: trajectory', or leave 'reset' out",
            )  # fmt: skip

    def limits_of(self, tool: str, base: Limits) -> Limits:
        """Return the limits of ``tool``: its own, then the server's, then ``base``."""
        return self.tools.get(tool, ToolOptions()).over(self.limits).over(base)

    @property
    def is_replayed(self) -> bool:
        """Return whether a new session of the trajectory gets the calls of the one before again."""
        if self.state is not None:
            return self.state is ToolState.REPLAY
        return self.scope is Scope.TRAJECTORY or bool(self.setup)

    def state_of(self, tool: str, *, reads: bool, repeatable: bool) -> ToolState:
        """Return what ``tool`` keeps between its calls: as declared, or by what its annotations say.

        ``reads``: it changes nothing. ``repeatable``: a second equal call changes nothing more.
        """
        declared = self.tools.get(tool, ToolOptions()).state or self.state
        if declared is not None:
            return declared
        if self.is_replayed:
            return ToolState.STATELESS if reads else ToolState.REPLAY
        # Take a shared server's unknown tool for one with effects: what keeps state by trajectory goes on
        # by the same id, and a call that was cut off may have been made.
        return ToolState.STATELESS if repeatable else ToolState.OUTSIDE


@dataclass(frozen=True, slots=True, kw_only=True)
class StdioSpec:
    """A server that runs as a child process."""

    name: str
    command: str
    args: tuple[str, ...] = field(default=(), repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str | None = None
    options: Options = field(default_factory=lambda: Options(scope=Scope.TRAJECTORY))


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSpec:
    """A server behind streamable HTTP, or, with ``sse``, behind the older HTTP+SSE transport."""

    name: str
    url: str = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    sse: bool = False
    options: Options = field(default_factory=Options)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerSpec:
    """An MCP manager: many servers behind one HTTP interface; ``server`` is one of them, or ``all``."""

    url: str = field(repr=False)
    server: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


McpSpec = StdioSpec | HttpSpec
ServerSpec = McpSpec | ManagerSpec


class CallGate:
    """The limits of one server's calls, over all trajectories of this process."""

    def __init__(self, options: Options, base: Limits, *, connections: int) -> None:
        """``base`` holds the run's limits; ``connections`` bounds the server's calls in flight."""
        self._options = options
        self._base = base
        self._server = asyncio.Semaphore(connections)
        self._tools: dict[str, _ToolGate] = {}

    def limits(self, tool: str) -> Limits:
        """Return the limits of one tool."""
        return self._options.limits_of(tool, self._base)

    @asynccontextmanager
    async def enter(self, tool: str) -> AsyncIterator[Limits]:
        """Wait for a slot of ``tool``, first come, first served, and hold it; yield the tool's limits."""
        limits = self.limits(tool)
        gate = self._tools.setdefault(tool, _ToolGate(limits))
        # Take the tool's slot first, or calls that queue for one tool would hold the slots of the others.
        async with gate.slots, self._server:
            await gate.wait()
            yield limits


class _ToolGate:
    """The slots and the rate of one tool. A burst of a tenth of a minute's calls may start at once."""

    def __init__(self, limits: Limits) -> None:
        self.slots = asyncio.Semaphore(limits.concurrency or 1_000_000)
        rate = limits.calls_per_minute
        self._interval = _WINDOW_SECONDS / rate if rate else 0.0
        self._burst = max(rate / 10, 1.0) if rate else 1.0
        self._next = 0.0

    async def wait(self) -> None:
        """Wait until the next call may start."""
        if self._interval == 0.0:
            return
        now = asyncio.get_running_loop().time()
        start = max(self._next, now - (self._burst - 1) * self._interval)
        # Book the start before sleeping, or calls that wait together would all start at once.
        self._next = start + self._interval
        await asyncio.sleep(max(start - now, 0.0))


def redact_address(spec: StdioSpec | HttpSpec | ManagerSpec) -> str:
    """Return the command without arguments, or the URL without user info, query and token-like path parts."""
    if isinstance(spec, StdioSpec):
        return f"{spec.command}, {len(spec.args)} arguments" if spec.args else spec.command
    return redact_url(spec.url)


def redact_url(url: str) -> str:
    """Return ``url`` without user info, query, fragment and token-like path parts."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    user = f"{HIDDEN}@" if "@" in parts.netloc else ""
    path = "/".join(HIDDEN if _TOKEN_PART.fullmatch(part) else part for part in parts.path.split("/"))
    query = f"?{HIDDEN}" if parts.query else ""
    return f"{parts.scheme}://{user}{host}{path}{query}"


def redact_secrets(text: str, spec: StdioSpec | HttpSpec | ManagerSpec) -> str:
    """Return ``text`` without values that ``redact_address`` omits and without header and variable values."""
    if isinstance(spec, StdioSpec):
        secrets = [*spec.args, *(part for arg in spec.args for part in arg.split("=")), *spec.env.values()]
        return _hide(text, [value for value in secrets if not value.startswith("-")])
    parts = urlsplit(spec.url)
    secrets = [*parts.netloc.rpartition("@")[0].split(":"), *(value for _, value in parse_qsl(parts.query))]
    secrets += [part for part in parts.path.split("/") if _TOKEN_PART.fullmatch(part)]
    # Hide every spelling: errors repeat a URL with or without its percent signs.
    secrets = [form for value in secrets for form in (value, unquote(value), quote(value, safe=""))]
    secrets += [part for value in spec.headers.values() for part in (value, value.rpartition(" ")[2])]
    return _hide(text.replace(spec.url, redact_url(spec.url)), secrets)


def _hide(text: str, secrets: Iterable[str]) -> str:
    # Begin with the longest: replacing a secret inside another would leave the rest of that in view.
    for secret in sorted(set(secrets), key=len, reverse=True):
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, HIDDEN)
    return text


_SERVERS_HINT = (
    "write 'servers:' with entries 'NAME: {command, args, env, cwd, sandbox}' or 'NAME: {url, headers,"
    " headers_env}'; docs/tools.md lists every key"
)
URL_HINT = "write http://HOST:PORT/PATH or https://…"
_OPTIONS = frozenset(item.name for item in dataclasses.fields(Options))


Isolate = Callable[[StdioSpec, Any, SettingsFile, Sequence[str]], StdioSpec]
"""Returns the server that runs another in the ``sandbox`` of its entry, whose value stands at a place of the
file. Raises ConfigError for a value that is wrong, and for a sandbox that this machine cannot give."""

SERVER_SANDBOXES: Registry[Isolate] = Registry(
    "sandbox of tool servers",
    group="agentrl.server_sandboxes",
    built_in=("agentrl.worlds.sandbox.tool",),
)


def _isolated(spec: StdioSpec, sandbox: Any, file: SettingsFile, place: Sequence[str]) -> StdioSpec:
    """Return the server that runs ``spec`` in ``sandbox``. Raises ConfigError: it never runs without it."""
    isolate = SERVER_SANDBOXES.known().get("stdio")
    if isolate is None:
        raise file.error(
            f"{'.'.join(place)}: agentrl.worlds, which has the sandbox, is not installed", *place,
            hint="install the whole of agentrl, or leave 'sandbox' out for a server that you trust",
        )  # fmt: skip
    return isolate(spec, sandbox, file, place)


def load_servers(path: str | Path) -> list[McpSpec]:
    """Read the servers of a file, in order: ours in YAML, or the ``mcpServers`` JSON of other MCP clients.

    ``${VARIABLE}`` and ``${VARIABLE:-default}`` are replaced by environment variables; ``command: python``
    is the current interpreter. Raises ConfigError.
    """
    file = read_settings(path, what="--mcp_servers_file", hint=_SERVERS_HINT)
    content = file.content if isinstance(file.content, dict) else {}
    for key, read in (("mcpServers", _foreign), ("servers", _own)):
        if isinstance(content.get(key), dict):
            specs = [read(file, key, str(name), entry) for name, entry in content[key].items()]
            return [spec for spec in specs if spec is not None]
    raise file.error("has neither a mapping 'servers' nor 'mcpServers'")


def is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _http_url(url: str) -> str:
    if not is_http(url):
        raise broken("is not a URL of HTTP", hint=URL_HINT)  # a URL may hold secrets: it is not shown
    return url


@dataclass(frozen=True, slots=True, kw_only=True)
class _StdioEntry(Options):
    """An entry with a command."""

    command: Text
    args: tuple[PlainText, ...] = ()
    env: Mapping[str, PlainText] = field(default_factory=dict)
    cwd: Text | None = None
    sandbox: Any = None
    scope: Scope = Scope.TRAJECTORY

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.sandbox is not None and self.cwd is not None:
            raise broken(
                "is in a sandbox, and has no 'cwd' of the host", hint="remove it: it has one of its own"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _HttpEntry(Options):
    """An entry with a URL."""

    url: Annotated[Text, AfterValidator(_http_url)]
    headers: Mapping[str, PlainText] = field(default_factory=dict)
    headers_env: Mapping[str, Text] = field(default_factory=dict)
    """Header → the environment variable with its value."""
    transport: Literal["http", "streamable-http", "streamableHttp", "streamable_http", "sse"] = "http"

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        for header, variable in self.headers_env.items():
            if variable not in os.environ:
                raise broken(
                    f"names {variable}, which is not set", "headers_env", header, hint=f"export {variable}=…"
                )


_OWN = (
    frozenset(item.name for kind in (_StdioEntry, _HttpEntry) for item in dataclasses.fields(kind)) - _OPTIONS
)


def _foreign(file: SettingsFile, key: str, name: str, entry: Any) -> McpSpec | None:
    """Read another client's server: keys that only that client knows are ignored; None if it is disabled."""
    if not isinstance(entry, dict):
        return _own(file, key, name, entry)
    if entry.get("disabled") is True or entry.get("enabled") is False:
        return None
    # Leave `tools` out: other clients list names there, such as ["*"], and ours maps names to limits.
    own = {each: value for each, value in entry.items() if each in _OWN | _OPTIONS and each != "tools"}
    url = next((entry[each] for each in ("url", "httpUrl", "serverUrl") if each in entry), None)
    if url is not None:
        own["url"] = url
    if "type" in entry:
        own["transport"] = entry["type"]
    # Drop `type: stdio`, which other clients write beside a command: only URLs have a transport here.
    if "command" in own:
        own.pop("transport", None)
    return _own(file, key, name, own)


def _own(file: SettingsFile, key: str, name: str, entry: Any) -> McpSpec:
    if isinstance(entry, dict):
        if ("command" in entry) == ("url" in entry):
            raise file.error(f"{key}.{name} needs either 'command' or 'url'", key, name)
        entry = {
            each: file.expand(value, key, name, each, keep=WORKDIR) if each in _OWN else value
            for each, value in entry.items()
        }
    if isinstance(entry, dict) and "url" in entry:
        http = file.check(_HttpEntry, entry, key, name)
        headers = {**http.headers, **{header: os.environ[each] for header, each in http.headers_env.items()}}
        return HttpSpec(
            name=name, url=http.url, headers=headers, sse=http.transport == "sse", options=_options(http)
        )
    stdio = file.check(_StdioEntry, entry, key, name)
    command = sys.executable if stdio.command == "python" else stdio.command
    spec = StdioSpec(
        name=name, command=command, args=stdio.args, env=stdio.env, cwd=stdio.cwd, options=_options(stdio)
    )
    if stdio.sandbox is None:
        return spec
    return _isolated(spec, stdio.sandbox, file, (key, name, "sandbox"))


def _options(entry: Options) -> Options:
    return Options(**{name: getattr(entry, name) for name in _OPTIONS})
