"""Hold calls while a dependency is down: a circuit breaker each; decide what may be claimed meanwhile.

Open breakers are stored as outages, so that ``agentrl audit run`` and the trainer's log show them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.base.concurrency import Backoff, Deadline
from agentrl.calls.turns import Tools
from agentrl.documents.model_call import ToolExecution
from agentrl.documents.status import ToolState
from agentrl.errors import (
    DATABASE,
    ENGINES,
    Dependency,
    DependencyKind,
    FailureError,
    ServerFullError,
    SessionLostError,
    StoreError,
    tool_server,
)
from agentrl.observe.logging import redact_and_cut
from agentrl.store.claims import Needs
from agentrl.store.mechanics.retry import log_store_errors
from agentrl.tools.tool import Schema, ToolResult

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

OPEN_AFTER = 3
"""Consecutive failed calls, over all trajectories of the process, that open a breaker."""

FIRST_PROBE_SECONDS, LONGEST_PROBE_SECONDS = 1.0, 15.0
"""Wait before the first probe of a dependency that is down; each failed probe doubles it, up to the last."""

LONGEST_PAUSE_SECONDS = 3600.0
"""Longest wait that a dependency may ask for: it may be wrong, or mean harm."""

_PROBE_LIMIT_SECONDS = 120.0
"""Time after which a probe without a result no longer keeps others from probing."""

_REMINDER_SECONDS = 60.0
REPORT_SECONDS = 2.0
_END_SECONDS = 2.0
_WHY_CHARS = 500


class Breaker:
    """Opens after ``OPEN_AFTER`` consecutive failed calls. While it is open, one call at a time probes.

    The first successful call closes it and wakes all that wait. Probes go round among the waiting calls, so
    that a call which cannot succeed does not keep the others from finding the dependency up again.
    """

    def __init__(self, dependency: Dependency, changed: Callable[[], None]) -> None:
        """``changed`` is called when the breaker opens or closes, and when a probe is due."""
        self.dependency = dependency
        self.served = 0
        """Number of calls that succeeded."""
        self.down_since: float | None = None
        """When the breaker opened (``time.monotonic``); None while it is closed."""
        self.why = ""
        """The last error."""
        self.is_awaited = False
        """Whether it waits for the first start of the dependency. That is not reported as an outage."""
        self._changed = changed
        self._failures = 0
        self._backoff = Backoff(str(dependency), FIRST_PROBE_SECONDS, LONGEST_PROBE_SECONDS)
        self._probe_at = 0.0
        self._probing = False
        self._waiting: deque[asyncio.Future[bool]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._remind_at = 0.0

    @property
    def is_open(self) -> bool:
        """Return whether the dependency is down."""
        return self.down_since is not None

    @property
    def held(self) -> int:
        """Return how many calls wait for the dependency."""
        return len(self._waiting)

    @property
    def probe_is_due(self) -> bool:
        """Return whether new work may probe the dependency: it is time, and no call waits or probes."""
        return self.probe_due_for(0.0)

    def probe_due_for(self, seconds: float) -> bool:
        """Return whether ``probe_is_due`` has been true for ``seconds``."""
        is_free = self.is_open and not self._waiting and not self._probing
        return is_free and time.monotonic() >= self._probe_at + seconds

    def failed(self, why: str, retry_after: float | None = None) -> None:
        """Record a failed call. ``retry_after`` is the wait in seconds that the dependency asked for."""
        self.why = why
        self._failures += 1
        if self.is_awaited:
            self.is_awaited = False
            self._open(retry_after)
            return
        if self.down_since is None:
            if self._failures >= OPEN_AFTER:
                self._open(retry_after)
            return
        # Back off after probes only: calls that began before the outage fail in it too, and many at once.
        if self._probing:
            self._backoff.next()
            self._schedule_probe(retry_after)
        now = time.monotonic()
        if now >= self._remind_at:
            self._remind_at = now + _REMINDER_SECONDS
            logger.warning("%s: still down after %.0f s: %s", self.dependency, now - self.down_since, why)

    def went_down(self, why: str) -> None:
        """Open at once: the dependency is known to be down."""
        if self.down_since is None:
            self.why = why
            self._failures = OPEN_AFTER
            self._open(None)

    def not_up_yet(self) -> None:
        """Open without a warning: the dependency has not come up yet. A failed call makes it an outage."""
        if self.down_since is None:
            self.is_awaited, self.why = True, "it has not come up yet"
            self._open(None)

    def succeeded(self) -> None:
        """Record a successful call: the dependency is up."""
        self.served += 1
        self._failures = 0
        if self.down_since is None:
            return
        if not self.is_awaited:
            logger.warning("%s: up again after %.0f s", self.dependency, time.monotonic() - self.down_since)
        self.down_since, self.is_awaited = None, False
        self.close()
        self._changed()

    def begin_probe(self) -> None:
        """Let new work of the caller probe the dependency."""
        self._probing = True
        self._start_timer(_PROBE_LIMIT_SECONDS)

    def gave_up(self) -> None:
        """Note that the call that probes has ended otherwise, as by an error of its own: let others probe."""
        if self.is_open and self._probing:
            self._schedule_probe(None)

    async def wait(self) -> bool:
        """Return False when the dependency is up; True when it is this call's turn to probe it."""
        if not self.is_open:
            return False
        probe_was_due = self.probe_is_due
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        if probe_was_due:
            self._let_one_probe()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self.gave_up()  # its turn came in the moment in which it was cancelled
            raise
        finally:
            if turn in self._waiting:
                self._waiting.remove(turn)

    def close(self) -> None:
        """Wake all calls that wait, and stop the timer."""
        self._probing = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(False)

    def _open(self, retry_after: float | None) -> None:
        self.down_since = time.monotonic()
        self._remind_at = self.down_since + _REMINDER_SECONDS
        self._backoff.reset()
        self._backoff.next()
        self._schedule_probe(retry_after)
        if not self.is_awaited:
            logger.warning(
                "%s: down; what needs it waits, and no attempt is used: %s", self.dependency, self.why
            )
        self._changed()

    def _schedule_probe(self, retry_after: float | None) -> None:
        self._probing = False
        seconds = min(max(self._backoff.seconds, retry_after or 0.0), LONGEST_PAUSE_SECONDS)
        self._probe_at = time.monotonic() + seconds
        self._start_timer(seconds)

    def _start_timer(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._let_one_probe)

    def _let_one_probe(self) -> None:
        """Wake the call that has waited longest; without one, let new work probe."""
        self._probing = False
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                self.begin_probe()
                turn.set_result(True)
                return
        self._changed()


async def report_outages(store: Store, breakers: Callable[[], list[Breaker]], owner: str) -> None:
    """Store every ``REPORT_SECONDS`` which ``breakers`` are open, until cancelled; then end all outages.

    An outage of the database itself is stored when it is over.
    """
    reports = _Reports(store, owner)
    try:
        while True:
            with log_store_errors(logger, "outages could not be stored"):
                await reports.write([breaker for breaker in breakers() if not breaker.is_awaited])
            await asyncio.sleep(REPORT_SECONDS)
    finally:
        with suppress(TimeoutError, StoreError):
            async with asyncio.timeout(_END_SECONDS):
                await reports.write([])


class _Reports:
    def __init__(self, store: Store, owner: str) -> None:
        self._store = store
        self._owner = owner
        self._ongoing: dict[Breaker, tuple[str, float]] = {}
        """Breaker → id of the stored outage, and when it began (``time.monotonic``)."""
        self._count = 0

    async def write(self, down: list[Breaker]) -> None:
        """Store past outages of the database, refresh the outages that go on, and end the others."""
        for past in self._store.take_past_outages():
            self._count += 1
            await self._store.outages.add_past(
                f"{self._owner}/{self._count}",
                dependency=str(DATABASE),
                by=self._owner,
                why=redact_and_cut(past.why, _WHY_CHARS),
                ago=time.monotonic() - past.ended,
                seconds=past.ended - past.began,
            )
        for breaker, (outage_id, began) in list(self._ongoing.items()):
            # Compare the beginnings: between two reports a breaker may close, and open for another outage.
            if breaker not in down or breaker.down_since != began:
                await self._store.outages.end(outage_id)
                del self._ongoing[breaker]
        for breaker in down:
            # Look again: it may have closed while the outages above were written.
            if breaker.down_since is None:
                continue
            if breaker not in self._ongoing:
                self._count += 1
                self._ongoing[breaker] = f"{self._owner}/{self._count}", breaker.down_since
            await self._store.outages.refresh(
                self._ongoing[breaker][0],
                dependency=str(breaker.dependency),
                by=self._owner,
                why=redact_and_cut(breaker.why, _WHY_CHARS),
                held=breaker.held,
                seconds=time.monotonic() - breaker.down_since,
            )


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

    def spent(self) -> float:
        """Return the seconds that have counted for the outermost limit; 0 without a limit."""
        return self._limits[0].spent() if self._limits else 0.0

    def spend(self, seconds: float) -> None:
        """Let the limits have begun ``seconds`` earlier."""
        for limit in self._limits:
            limit.spend(seconds)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock in the block. Blocks of parallel calls may overlap."""
        with ExitStack() as stack:
            for limit in self._limits:
                stack.enter_context(limit.paused())
            yield


@dataclass(slots=True)
class CallFailures:
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
            # Look up ``changed`` when it is called: a sampler sets it after the first breakers exist.
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
        blame: dict[Dependency, CallFailures] = {}
        probed: Breaker | None = None
        try:
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
                    own = blame.setdefault(dependency, CallFailures(breaker.served))
                    if own.is_own(breaker.served) and not isinstance(error, ServerFullError):
                        error.outage = None
                        raise
                    if time.monotonic() >= deadline:
                        raise
                    if probed is not None and probed is not breaker:
                        probed.gave_up()
                    with clock.stopped():
                        probed = breaker if await self._pause(breaker, deadline) else None
                else:
                    for dependency in blame:
                        self.breaker(dependency).succeeded()
                    return result
        finally:
            # A probe that ends in an error of its own would keep others from probing for two minutes.
            if probed is not None:
                probed.gave_up()

    def count_lost_session(self, task_id: str, traj_id: int) -> bool:
        """Count that a trajectory of a slot lost its session; return whether the slot is to blame for it."""
        slot = task_id, traj_id
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

    @staticmethod
    async def _pause(breaker: Breaker, deadline: float) -> bool:
        """Wait until the breaker is closed or probed; if it is closed already, for a moment.

        Return whether it is this call's turn to probe.
        """
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                # Rest although it is closed: below OPEN_AFTER failures the call would repeat at once.
                if not breaker.is_open:
                    await asyncio.sleep(FIRST_PROBE_SECONDS)
                return await breaker.wait()
        except TimeoutError:
            return False


class HeldTools:
    """The tools of one trajectory; a call waits while its server is down."""

    def __init__(self, tools: Tools, outages: Outages, clock: Clock) -> None:
        self._tools = tools
        self._outages = outages
        self._clock = clock

    async def list(self) -> Sequence[Schema]:
        return await self._outages.hold(self._tools.list, self._clock)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Run one tool. A successful result shows that its server is up."""
        result = await self._outages.hold(lambda: self._tools.call(name, arguments), self._clock)
        if not result.error:
            self._outages.breaker(tool_server(result.server)).succeeded()
        return result

    def state_of(self, name: str, server: str | None = None) -> ToolState:
        return self._tools.state_of(name, server)

    def recall(self, execution: ToolExecution) -> None:
        self._tools.recall(execution)

    async def replay(self, executions: Sequence[ToolExecution]) -> int | None:
        """Make stored calls again; each waits while its server is down."""
        for index, execution in enumerate(executions):
            # Hold one at a time: what is repeated after an outage must not make the calls before it again.
            again = partial(self._tools.replay, (execution,))
            if await self._outages.hold(again, self._clock) is not None:
                return index
        return None

    @property
    def keeps_files(self) -> bool:
        return self._tools.keeps_files

    async def snapshot(self) -> str | None:
        return await self._tools.snapshot()

    async def restore(self, reference: str) -> bool:
        return await self._outages.hold(partial(self._tools.restore, reference), self._clock)

    async def rewards(self) -> dict[str, dict[str, Any]]:
        return await self._outages.hold(self._tools.rewards, self._clock)
