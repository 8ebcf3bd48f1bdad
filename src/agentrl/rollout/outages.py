"""Hold calls while a dependency is down, and decide what may be claimed meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

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

if TYPE_CHECKING:
    pass


T = TypeVar("T")

OWN_FAILURES = 3
"""Failures of one call, each after the dependency served others, that fail the trajectory's attempt."""

LOST_SESSIONS = 10
"""Lost sessions of one slot in one process that fail an attempt: its own actions may end the server."""

_QUEUE_SECONDS = 5.0
"""Time for trajectories that wait for a score to probe a judge before new ones may."""


class Clock:
    """The time limits of a trajectory; they stand still while the trajectory is held."""

    def __init__(self, limit: asyncio.Timeout) -> None:
        self._limits = [limit]
        self._holds = 0
        self._left: list[tuple[asyncio.Timeout, float]] = []

    @asynccontextmanager
    async def limit(self, seconds: float | None) -> AsyncIterator[None]:
        """Raise TimeoutError if the block takes longer; None is no limit of its own."""
        async with asyncio.timeout(seconds) as limit:
            self._limits.append(limit)
            try:
                yield
            finally:
                self._limits.remove(limit)
                self._left = [(held, left) for held, left in self._left if held is not limit]

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock in the block. Blocks of parallel calls may overlap."""
        loop = asyncio.get_running_loop()
        if not self._holds:
            ends = [(limit, limit.when()) for limit in self._limits]
            self._left = [(limit, end - loop.time()) for limit, end in ends if end is not None]
            for limit, _ in self._left:
                limit.reschedule(None)
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            if not self._holds:
                for limit, left in self._left:
                    if not limit.expired():
                        limit.reschedule(loop.time() + left)


@dataclass(slots=True)
class _Blame:
    """A call's failures since the dependency served others; ``served`` is the breaker's count at the last."""

    served: int
    failures: int = 0


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
        self._lost: Counter[str] = Counter()
        """Slot → its sessions that were lost."""

    @property
    def open(self) -> list[Breaker]:
        """Return the breakers of the dependencies that are down."""
        return [breaker for breaker in self._breakers.values() if breaker.is_open]

    def failed(self, dependency: Dependency, why: str, retry_after: float | None = None) -> None:
        """Record a failed call. ``retry_after`` is the wait in seconds that the dependency asked for."""
        self._breaker(dependency).failed(why, retry_after)

    def went_down(self, dependency: Dependency, why: str) -> None:
        """Record that a dependency is down, without waiting for more failed calls."""
        self._breaker(dependency).went_down(why)

    def not_up_yet(self, dependency: Dependency) -> None:
        """Hold calls until a dependency starts for the first time. No outage is reported."""
        self._breaker(dependency).not_up_yet()

    async def until_probe(self, dependency: Dependency) -> None:
        """Return when a dependency is up, or when the caller may probe it."""
        await self._breaker(dependency).wait()

    def succeeded(self, dependency: Dependency) -> None:
        """Record a successful call."""
        self._breaker(dependency).succeeded()

    def scorer_failed(self, scorer: str, error: FailureError) -> None:
        """Record that a scorer needs the dependency that ``error`` names, and that it is down."""
        if error.outage is not None:
            self._scorers.setdefault(scorer, set()).add(error.outage)
            self._breaker(error.outage).failed(error.message, error.retry_after)

    def scorer_succeeded(self, scorer: str) -> None:
        """Record that a scorer gave a score: what it needs is up."""
        for dependency in self._scorers.get(scorer, ()):
            self._breaker(dependency).succeeded()

    def served(self, dependency: Dependency) -> int:
        """Return the number of successful calls."""
        return self._breaker(dependency).served

    async def hold(self, call: Callable[[], Awaitable[T]], clock: Clock) -> T:
        """Return the result of ``call``; while it fails because of an outage, wait and repeat it.

        Raises the error after ``wait_seconds``, and a SessionLostError at once. It is raised without
        ``outage``, so that it counts as an attempt, if the dependency serves others and this call still
        fails: then the trajectory is to blame, unless the server is full.
        """
        deadline = time.monotonic() + self._wait_seconds
        blame: dict[Dependency, _Blame] = {}
        while True:
            try:
                result = await call()
            except FailureError as error:
                dependency = error.outage
                if dependency is None:
                    raise
                breaker = self._breaker(dependency)
                breaker.failed(error.message, error.retry_after)
                if isinstance(error, SessionLostError):
                    raise
                own = self._is_own(blame.setdefault(dependency, _Blame(breaker.served)), breaker)
                if own and not isinstance(error, ServerFullError):
                    error.outage = None
                    raise
                if time.monotonic() >= deadline:
                    raise
                with clock.stopped():
                    await self._pause(breaker, deadline)
            else:
                for dependency in blame:
                    self.succeeded(dependency)
                return result

    def loses_too_often(self, slot: str) -> bool:
        """Record that the trajectory of a slot lost its session; return whether the slot is to blame."""
        self._lost[slot] += 1
        return self._lost[slot] >= LOST_SESSIONS

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

    def _breaker(self, dependency: Dependency) -> Breaker:
        if dependency not in self._breakers:
            self._breakers[dependency] = Breaker(dependency, lambda: self.changed())
        return self._breakers[dependency]

    @staticmethod
    def _is_own(blame: _Blame, breaker: Breaker) -> bool:
        if breaker.served > blame.served:
            blame.failures += 1
            blame.served = breaker.served
        return blame.failures >= OWN_FAILURES

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
