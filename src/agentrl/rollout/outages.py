"""Hold calls while a dependency is down, and decide what may be claimed meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from agentrl.concurrency import Deadline, end_tasks, task_group
from agentrl.errors import (
    ENGINES,
    Dependency,
    DependencyKind,
    FailureError,
    ServerFullError,
    SessionLostError,
    ToolServerError,
    tool_server,
)
from agentrl.rollout.breaker import FIRST_PROBE_SECONDS, Breaker
from agentrl.store.admission import Needs
from agentrl.tools.pool import ToolPool

T = TypeVar("T")

OWN_FAILURES = 3
"""Failures of one call, each after the dependency served others, that fail the trajectory's attempt."""

LOST_SESSIONS = 10
"""Lost sessions of one slot in one process that fail an attempt: its own actions may end the server."""

_QUEUE_SECONDS = 5.0
"""Time for trajectories that wait for a score to probe a judge before new ones may."""


class Clock:
    """The time limits of a trajectory; they stand still while the trajectory is held."""

    def __init__(self) -> None:
        self._limits: list[Deadline] = []

    @asynccontextmanager
    async def limit(self, seconds: float | None) -> AsyncIterator[None]:
        """Raise TimeoutError if the block takes longer; None sets no limit."""
        if seconds is None:
            yield
            return
        limit = Deadline(seconds)
        self._limits.append(limit)
        try:
            async with limit.enforced():
                yield
        finally:
            self._limits.remove(limit)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock in the block. Blocks of parallel calls may overlap."""
        with ExitStack() as stack:
            for limit in self._limits:
                stack.enter_context(limit.paused())
            yield


@dataclass(slots=True)
class Blame:
    """A call's failures since the dependency served others; ``served`` is the breaker's count at the last."""

    served: int
    failures: int = 0

    def is_own(self, served: int) -> bool:
        """Count one more failure; return whether the dependency serves others and fails this call alone."""
        if served > self.served:
            self.failures += 1
            self.served = served
        return self.failures >= OWN_FAILURES


class Outages:
    """The circuit breakers of one process, and what its trajectories do while one is open."""

    def __init__(self, wait_seconds: float = 3600.0) -> None:
        """A call is held for at most ``wait_seconds``."""
        self.changed: Callable[[], None] = lambda: None
        """Called when something goes down or comes up, and when a claim may probe it."""
        self.known_servers: frozenset[str] | None = None
        """The tool servers whose names are known, while a manager that may have others is down; None: all."""
        self._wait_seconds = wait_seconds
        self._breakers: dict[Dependency, Breaker] = {}
        self._scorers: dict[str, set[Dependency]] = {}
        """Scorer → the dependencies whose outages it has reported."""
        self._probers: dict[Dependency, str] = {}
        """Dependency → the trajectory that was chosen last to probe it."""
        self._lost: Counter[tuple[str, int]] = Counter()
        """Slot → its sessions that were lost."""

    @property
    def open(self) -> list[Breaker]:
        """Return the breakers of the dependencies that are down."""
        return [breaker for breaker in self._breakers.values() if breaker.is_open]

    def breaker(self, dependency: Dependency) -> Breaker:
        """Return the breaker of a dependency, which records its calls."""
        if dependency not in self._breakers:
            self._breakers[dependency] = Breaker(dependency, lambda: self.changed())
        return self._breakers[dependency]

    def scorer_failed(self, scorer: str, error: FailureError) -> None:
        """Record that a scorer needs the dependency that ``error`` names, and that it is down."""
        if error.outage is not None:
            self._scorers.setdefault(scorer, set()).add(error.outage)
            self.breaker(error.outage).failed(error.message, error.retry_after)

    def scorer_succeeded(self, scorer: str) -> None:
        """Record that a scorer gave a score: what it needs is up."""
        for dependency in self._scorers.get(scorer, ()):
            self.breaker(dependency).succeeded()

    async def hold(self, call: Callable[[], Awaitable[T]], clock: Clock) -> T:
        """Return the result of ``call``; while it fails because of an outage, wait and repeat it.

        Raises the error after ``wait_seconds``, and a SessionLostError at once. It is raised without
        ``outage``, so that it counts as an attempt, if the dependency serves others and this call still
        fails: then the trajectory is to blame, unless the server is full.
        """
        deadline = time.monotonic() + self._wait_seconds
        blame: dict[Dependency, Blame] = {}
        while True:
            try:
                result = await call()
            except FailureError as error:
                dependency = error.outage
                if dependency is None:
                    raise
                breaker = self.breaker(dependency)
                breaker.failed(error.message, error.retry_after)
                if isinstance(error, SessionLostError):
                    raise
                own = blame.setdefault(dependency, Blame(breaker.served))
                if own.is_own(breaker.served) and not isinstance(error, ServerFullError):
                    error.outage = None
                    raise
                if time.monotonic() >= deadline:
                    raise
                with clock.stopped():
                    await self._pause(breaker, deadline)
            else:
                for dependency in blame:
                    self.breaker(dependency).succeeded()
                return result

    def count_lost_session(self, task_id: str, traj_id: int) -> bool:
        """Count that a trajectory of a slot lost its session; return whether the slot is to blame for it."""
        self._lost[task_id, traj_id] += 1
        return self._lost[task_id, traj_id] >= LOST_SESSIONS

    def blocks_claims(self, running: int) -> bool:
        """Return whether nothing may be claimed: the engines are down, and it is not time to probe them.

        With ``running`` trajectories, these find out that the engines are back.
        """
        breaker = self._breakers.get(ENGINES)
        return breaker is not None and breaker.is_open and (running > 0 or not breaker.probe_is_due)

    def needs_down(self, record_id: str | None = None, *, of_new: bool = False) -> Needs:
        """Return what is down of tool servers, environments and scorers; not what the caller may probe now.

        ``record_id`` is a trajectory that may have been chosen to probe. ``of_new`` trajectories leave judges
        to those that wait for a score, and probe only if none does.
        """
        down = {
            breaker.dependency
            for breaker in self.open
            if self._probers.get(breaker.dependency) != (record_id or "")
            and not breaker.probe_due_for(
                _QUEUE_SECONDS if of_new and breaker.dependency.kind is DependencyKind.JUDGE else 0.0
            )
        }
        servers = frozenset(item.name for item in down if item.kind is DependencyKind.TOOL)
        scorers = frozenset(scorer for scorer, needs in self._scorers.items() if needs & down)
        environments = frozenset(item.name for item in down if item.kind is DependencyKind.ENVIRONMENT)
        return Needs(servers, scorers, self.known_servers, environments)

    def begin_probes(
        self, record_id: str, servers: tuple[str, ...] | None, scorer: str,
        environment: Dependency | None = None,
    ) -> None:  # fmt: skip
        """Record that a trajectory of a task with these needs probes what is down; ``servers`` None: all."""
        needs = self._scorers.get(scorer, set())
        for breaker in self.open:
            dependency = breaker.dependency
            is_tool = dependency.kind is DependencyKind.TOOL and (
                servers is None or dependency.name in servers
            )
            if (
                is_tool or dependency in (ENGINES, environment) or dependency in needs
            ) and breaker.probe_is_due:  # fmt: skip
                breaker.begin_probe()
                self._probers[dependency] = record_id

    def close(self) -> None:
        """Stop all timers, and wake all calls that wait."""
        for breaker in self._breakers.values():
            breaker.close()

    @staticmethod
    async def _pause(breaker: Breaker, deadline: float) -> None:
        """Wait until the breaker is closed or probed; if it is closed already, for a moment."""
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                if not breaker.is_open:
                    await asyncio.sleep(FIRST_PROBE_SECONDS)
                await breaker.wait()
        except TimeoutError:
            return


class LateServers:
    """The servers of one sampler that have not answered yet. Each is an outage until it does."""

    def __init__(self, tools: ToolPool, outages: Outages, wait_seconds: float) -> None:
        """``wait_seconds`` bounds the wait of a sampler that can claim nothing at all."""
        self._tools = tools
        self._outages = outages
        self._wait_seconds = wait_seconds

    def begin(self) -> None:
        """Declare the outages, before the first claim."""
        self._outages.known_servers = self._tools.known
        for name, error in self._tools.down.items():
            self._outages.breaker(tool_server(name)).went_down(error.message)

    async def run(self, check: Callable[[], Awaitable[None]], has_claimed: Callable[[], bool]) -> None:
        """Probe each server, with a back-off, until all are connected.

        ``check`` is awaited before anything that needs a new server is claimed; its errors are raised here.
        Raises ToolServerError if after ``wait_seconds`` nothing ``has_claimed``, and ToolServerConfigError.
        """
        connecting = asyncio.create_task(self._connect_all(check))
        try:
            done, _ = await asyncio.wait([connecting], timeout=self._wait_seconds)
            if not done and not has_claimed():
                errors = "; ".join(error.message for error in self._tools.down.values())
                raise ToolServerError(
                    f"nothing could be claimed for {self._wait_seconds:g} s: {errors}",
                    hint="start it; --outage_wait_seconds sets how long a sampler waits that can do nothing"
                    " else",
                )
            await connecting
        finally:
            await end_tasks(connecting)

    async def _connect_all(self, check: Callable[[], Awaitable[None]]) -> None:
        begun: set[str] = set()

        async def connect(name: str) -> None:
            await self._connect(name)
            await check()
            self.begin()
            self._outages.breaker(tool_server(name)).succeeded()
            begin_new()

        def begin_new() -> None:
            """Connect to each server that is down; a manager that answers may name some."""
            for name in self._tools.down.keys() - begun:
                begun.add(name)
                group.create_task(connect(name))

        async with task_group() as group:
            begin_new()

    async def _connect(self, name: str) -> None:
        breaker = self._outages.breaker(tool_server(name))
        while True:
            await breaker.wait()
            try:
                await self._tools.connect(name)
            except ToolServerError as error:
                if error.outage is None:
                    raise
                breaker.failed(error.message, error.retry_after)
            else:
                return
