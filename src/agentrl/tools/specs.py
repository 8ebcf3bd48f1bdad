"""Describe tool servers: command or address, scope, hooks, limits of calls; hide their secrets in texts."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from pydantic import BeforeValidator

from agentrl.validation import (
    Count,
    PlainText,
    Positive,
    PositiveWhole,
    Settings,
    Switch,
    Text,
    broken,
    wrong,
)

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
class Limits(Settings):
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
                for item in dataclasses.fields(self)
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook(Settings):
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
class Options(Settings):
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
    limits: Limits = field(default_factory=Limits)
    tools: Mapping[str, Limits] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.reset is not None and self.scope is Scope.SHARED:
            raise broken(
                "clears a trajectory's own server, and the scope is shared", "reset",
                hint="write 'scope: trajectory', or leave 'reset' out",
            )  # fmt: skip

    def limits_of(self, tool: str, base: Limits) -> Limits:
        """Return the limits of ``tool``: its own, then the server's, then ``base``."""
        return self.tools.get(tool, Limits()).over(self.limits).over(base)


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
    secrets = [form for value in secrets for form in (value, unquote(value), quote(value, safe=""))]
    secrets += [part for value in spec.headers.values() for part in (value, value.rpartition(" ")[2])]
    return _hide(text.replace(spec.url, redact_url(spec.url)), secrets)


def _hide(text: str, secrets: Iterable[str]) -> str:
    for secret in sorted(set(secrets), key=len, reverse=True):
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, HIDDEN)
    return text
