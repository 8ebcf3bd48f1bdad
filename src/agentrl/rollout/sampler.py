"""The sampler: claim slots, run trajectories concurrently, renew leases, stop cleanly."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agentrl.base.concurrency import Backoff, end_tasks, task_group
from agentrl.columns.outages import Outages, report_outages
from agentrl.columns.pool import Pool, SlotLeases, bounded
from agentrl.columns.scores import QueuedScores
from agentrl.config.schema import ClaimConfig
from agentrl.documents.run import Doing
from agentrl.documents.status import Work
from agentrl.documents.task import Claim
from agentrl.environments.environment import environment_of, full_environments
from agentrl.errors import ToolServerError, tool_server
from agentrl.rollout.housekeeping import EpochPlan, GroupFinalizer, Housekeeping, Tails, collect_while_idle
from agentrl.rollout.preflight import require_tools
from agentrl.rollout.worker import Worker
from agentrl.store.claims import GroupLimit
from agentrl.store.epochs import Selection
from agentrl.store.services import SCORING
from agentrl.tools.pool import ToolPool

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

LOOK_SECONDS = 15.0
"""Longest interval of looks for new groups, which no change has announced."""

_A_GROUP = "for a group that it may sample"
_WORK = ("Task", "DBRecordData")
_TRAINING = ("TrainStep", "PolicyVersion")
_WATCH_SECONDS = 60.0
FIRST_LAG_SECONDS, LAG_SECONDS = 0.125, 1.0
"""Interval of looks for new groups while engines load a version: the first one, doubled up to the longest."""

_REST_SECONDS = 0.25
"""Changes within this time are coalesced: they wake a sampler once."""

_LONGEST_REST_SECONDS = 4.0
"""Each consecutive claim without a slot doubles the rest, up to this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerConfig:
    """Settings of one sampler."""

    split: str
    owner: str
    concurrency: int
    scorings: int = 16
    """Queued trajectories that it scores at a time."""
    claims: ClaimConfig
    plan: EpochPlan
    selection: Selection | None = None
    """None: groups begin in the order of their tasks."""
    idle_exit_seconds: float | None = None
    cut_after: int | None = None
    """Steps after which a trajectory that still runs is cut; None: never."""


class Sampler(SlotLeases):
    """Claim and run until all epochs are finalized, ``idle_exit_seconds`` pass without work, or ``stop``."""

    def __init__(
        self,
        store: Store,
        worker: Worker,
        finalizer: GroupFinalizer,
        config: SamplerConfig,
        groups_allowed: Callable[[], Awaitable[GroupLimit | int | None]],
    ) -> None:
        """``groups_allowed`` returns how many groups may be open now; None: no limit."""
        super().__init__(store, config.split, config.owner)
        self._worker = worker
        self._config = config
        self._groups_allowed = groups_allowed
        self._outages = worker.outages
        self._pool = Pool(store, self, config.claims, config.concurrency)
        self._tails = None if config.cut_after is None else Tails(store, self._pool, config.cut_after)
        scores = QueuedScores(worker.scoring, split=config.split, owner=f"{config.owner}{SCORING}")
        # Look rarely: what is sampled is scored at once, or else this is woken, and by the end of an outage.
        self._scores = Pool(store, scores, config.claims, config.scorings, patience=4)
        self._scoring_ended = asyncio.Event()
        self._late = LateServers(worker.tools, worker.outages, worker.sampling.outage_wait_seconds)
        self._has_claimed = False
        self._waits_for = _A_GROUP
        self._has_changed = False
        """Whether a change since the last claim may have made work."""
        self._misses = 0
        """Consecutive claims without a slot."""
        self.ended = 0
        """Trajectories that this sampler has run to an end, whatever it was."""
        self._resized = ""
        """How many trajectories it runs at a time, and why, if it finds that itself."""
        self._look_at = 0.0
        """Latest time of the next look for new groups (``time.monotonic``)."""
        self._lag = Backoff("engines to load a version", FIRST_LAG_SECONDS, LAG_SECONDS)
        self._lag_timer: asyncio.TimerHandle | None = None
        self._housekeeping = Housekeeping(
            store, finalizer, config.plan, split=config.split, claims=config.claims, made_work=self._changed
        )

    @property
    def doing(self) -> Doing:
        """What this sampler does now."""
        if len(self._pool) or len(self._scores):
            return Doing(work=Work.SAMPLING, what=self._resized)
        return Doing(work=Work.WAITING, what=self._waits_for)

    @property
    def running(self) -> int:
        """Return the number of trajectories that it runs."""
        return len(self._pool)

    def resize(self, number: int, why: str) -> None:
        """Run up to ``number`` trajectories at a time; those beyond it run to their end."""
        if number != self._pool.concurrency:
            logger.info("up to %d trajectories at a time, after %d: %s", number, self._pool.concurrency, why)
            self._pool.concurrency = number
            self._changed()
        self._resized = f"up to {number} trajectories at a time: {why}"

    @property
    def scored(self) -> int:
        """Return the number of trajectories that this sampler scored."""
        return self._pool.filled

    async def run(self, stop: asyncio.Event, at_once: asyncio.Event | None = None) -> None:
        """Sample until done or stopped; then let running calls end, and release the claims still held.

        ``at_once`` ends the wait for running calls.
        """
        self._outages.changed = self._outage_changed
        self._late.begin()
        jobs = [
            self._housekeeping.finalize_own(), self._housekeeping.work_for_all(),
            self._housekeeping.finalize_filled(), self._watch_work(), self._watch_training(),
            self._score_queued(stop, at_once), self._sweep_snapshots(),
            report_outages(self.store, lambda: self._outages.open, self.owner), collect_while_idle(),
            self._late.run(
                lambda: require_tools(self.store, self._worker.tools, self.split), lambda: self._has_claimed
            ),
        ]  # fmt: skip
        if self._tails is not None:
            jobs.append(self._tails.run(self._freed))
        async with self._pool.renewing(*jobs):
            try:
                await self._pool.work(stop)
            finally:
                # Finalize before the jobs end: one that is cancelled would lose the groups it has taken.
                self._worker.stop.set()
                released = await self._pool.release(at_once)
                if stop.is_set():
                    await self._scoring_ended.wait()  # as a job that is cancelled it would release nothing
                if released:
                    await bounded(self._housekeeping.finalize_completed())
                self._outages.changed = lambda: None
        logger.info("sampler ends", extra={"scored": self.scored})

    async def _score_queued(self, stop: asyncio.Event, at_once: asyncio.Event | None) -> None:
        try:
            await self._scores.run(stop, at_once=at_once)
        finally:
            self._scoring_ended.set()

    async def _sweep_snapshots(self) -> None:
        """Delete the files of trajectories whose samplers were killed when they were over."""
        if self._worker.snapshots is not None:
            await self._worker.snapshots.sweep(self.store.tasks.unfinished_records)

    def _changed(self) -> None:
        self._has_changed = True
        self._pool.wake()

    def _outage_changed(self) -> None:
        self._changed()
        self._scores.wake()

    async def claim(self, free: int) -> Sequence[Claim]:
        """Claim one slot. Look for new groups only after a change, or after a while without one.

        Every event that frees capacity wakes the sampler, except a weight update: it polls for that, every
        ``LAG_SECONDS`` at least.
        """
        opens, self._has_changed = self._has_changed or time.monotonic() >= self._look_at, False
        claim, self._waits_for = None, "until what its trajectories need is up"
        if not self._outages.blocks_claims(len(self._pool)):
            if opens:
                self._look_at = time.monotonic() + LOOK_SECONDS
            limit = await self._limit() if opens else 0
            is_behind = isinstance(limit, GroupLimit) and limit.engines_lag
            self._waits_for = "until an engine serves the newest version" if is_behind else _A_GROUP
            # Ask what is down only now: it may have gone down while the limit was read.
            needs = self._outages.needs_down(of_new=True)
            full = full_environments(held.task for held in self._pool.claims)
            claim = await self.store.claims.claim(
                split=self.split,
                owner=self.owner,
                lease_seconds=self._config.claims.lease_seconds,
                max_groups_open=limit,
                selection=self._config.selection,
                without=replace(needs, environments=needs.environments | full),
                epochs=self._config.plan.epochs,
            )
        if claim is None:
            if self._misses == 0:
                self._housekeeping.work_ran_out()
            self._misses += 1
            return []
        self._misses = 0
        self._has_claimed = True
        # Look for new groups at the next claim too: one change may have made room for many.
        self._has_changed = True
        task = claim.task
        self._outages.begin_probes(claim.record_id, task.tools, task.scorer, environment_of(task))
        if self._tails is not None:
            self._tails.begin(claim)
        return [claim]

    async def fill(self, claim: Claim) -> bool:
        """Run a trajectory to its score; return whether it was scored."""
        is_scored = False
        try:
            is_scored = await self._worker.run(claim)
            return is_scored
        finally:
            self.ended += 1
            self._freed()
            if not is_scored:
                self._scores.wake()

    async def is_done(self) -> bool:
        """Return whether every epoch is finalized, or there was no work for ``idle_exit_seconds``."""
        idle_limit = self._config.idle_exit_seconds
        if await self._housekeeping.nothing_is_left():
            logger.info("every task of every epoch is completed")
            return True
        # Do not count an outage as idleness: what waits for a dependency is work that is left.
        if self._outages.open:
            self._pool.busy_at = time.monotonic()
        elif idle_limit is not None and time.monotonic() - self._pool.busy_at >= idle_limit:
            logger.info("no work", extra={"idle_seconds": idle_limit})
            return True
        return False

    async def _limit(self) -> GroupLimit | int | None:
        limit = await self._groups_allowed()
        if self._lag_timer is not None:
            self._lag_timer.cancel()
        if isinstance(limit, GroupLimit) and limit.engines_lag:
            self._lag_timer = asyncio.get_running_loop().call_later(self._lag.next(), self._changed)
        else:
            self._lag.reset()
        return limit

    def _freed(self) -> None:
        """Note that a trajectory has ended: its group may be complete, and another may begin."""
        self._housekeeping.trajectory_ended()
        self._changed()

    async def _watch_work(self) -> None:
        """Wake the sampler after changes of groups and data; rest longer while others take the work."""
        while True:
            if await self.store.wait_for_change(*_WORK, timeout=_WATCH_SECONDS):
                self._changed()
                # Vary the rest, or all samplers that one change has woken claim again at the same moment.
                rest = Backoff(
                    "work", _REST_SECONDS, _LONGEST_REST_SECONDS, jitter=0.5, attempts=self._misses
                )
                await asyncio.sleep(rest.next())

    async def _watch_training(self) -> None:
        """Wake the sampler after a step or a policy version: both free capacity for groups."""
        while True:
            if await self.store.wait_for_change(*_TRAINING, timeout=_WATCH_SECONDS):
                self._changed()
                await asyncio.sleep(_REST_SECONDS)


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
            breaker = self._outages.breaker(tool_server(name))
            while True:
                await breaker.wait()
                try:
                    await self._tools.connect(name)
                    break
                except ToolServerError as error:
                    if error.outage is None:
                        raise
                    breaker.failed(error.message, error.retry_after)
            await check()
            self.begin()
            breaker.succeeded()
            begin_new()

        def begin_new() -> None:
            """Connect to each server that is down; a manager that answers may name some."""
            for name in self._tools.down.keys() - begun:
                begun.add(name)
                group.create_task(connect(name))

        async with task_group() as group:
            begin_new()
