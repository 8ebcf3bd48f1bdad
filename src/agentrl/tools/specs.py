"""Describe tool servers: their command or address, their scope, hooks, and the limits of their calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

WORKDIR = "${workdir}"
"""In a stdio server's args, env and cwd: a folder of that process alone, deleted when it ends."""


class Scope(StrEnum):
    """Who shares one connection."""

    TRAJECTORY = "trajectory"
    """Each trajectory has its own: for stdio a process, for HTTP a session."""
    SHARED = "shared"
    """All trajectories of this process share one: for servers that keep no state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of the calls to one tool; None leaves the run's flag, or no limit."""

    concurrency: int | None = None
    """Calls in flight, over all trajectories of this process."""
    calls_per_minute: float | None = None
    timeout_seconds: float | None = None
    """Longest silence: each progress message restarts it."""
    max_seconds: float | None = None
    """Longest call, even with progress messages; by default ten times the timeout."""
    max_result_chars: int | None = None

    def over(self, base: Limits) -> Limits:
        """Return these limits, completed by those of ``base``."""
        return Limits(
            **{
                item.name: getattr(base, item.name) if (own := getattr(self, item.name)) is None else own
                for item in dataclasses.fields(self)
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """A tool call that the sampler makes for a trajectory.

    ``${trajectory}`` and ``${meta.KEY}`` in its arguments are the trajectory's id and a value of its task.
    """

    tool: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of every MCP server's entry, for every transport."""

    scope: Scope = Scope.SHARED
    warm: int = 1
    """Idle processes kept ready, with scope trajectory."""
    ordered: bool = False
    """Run the calls of one trajectory one after another."""
    setup: tuple[Hook, ...] = ()
    teardown: tuple[Hook, ...] = ()
    reset: Hook | None = None
    """Clears a process for the next trajectory; without it, the process is replaced."""
    offered: tuple[str, ...] | None = None
    """The tools that the model may see; None: all."""
    resources: bool = False
    """Offer the tools list_resources and read_resource."""
    prompts: bool = False
    """Offer the tools list_prompts and get_prompt."""
    limits: Limits = field(default_factory=Limits)
    tool_limits: Mapping[str, Limits] = field(default_factory=dict)

    def limits_of(self, tool: str, base: Limits) -> Limits:
        """Return the limits of ``tool``: its own, then the server's, then ``base``."""
        return self.tool_limits.get(tool, Limits()).over(self.limits).over(base)


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
