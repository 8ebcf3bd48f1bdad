"""The sampler: claim slots, run trajectories concurrently, renew leases, stop cleanly."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agentrl.base.concurrency import Backoff
from agentrl.config.schema import ClaimConfig
from agentrl.documents.task import Claim
from agentrl.environments.session import environment_of, full_environments
from agentrl.errors import StoreUnavailableError
from agentrl.rollout.held_claims import HeldClaims, bounded
from agentrl.rollout.housekeeping import EpochPlan, GroupFinalizer, Housekeeping, Tails, collect_while_idle
from agentrl.rollout.outages import LateServers, report_outages
from agentrl.rollout.preflight import require_tools
from agentrl.rollout.scoring import ScoringQueue
from agentrl.rollout.worker import Worker
from agentrl.store.claims import GroupLimit, Needs
from agentrl.store.epochs import Selection

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

POLL_SECONDS = 5.0
"""Interval of polls for work that no change announces: a retry that is due, a lease that expired."""

_WORK = ("Task", "DBRecordData")
_TRAINING = ("TrainStep", "PolicyVersion")
_WATCH_SECONDS = 60.0
_LOOK_POLLS = 3
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
    grace_seconds: float | None = None
    """How long trajectories may go on after a stop signal; None: the default of ``HeldClaims.release``."""


class Sampler:
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
        self._store = store
        self._worker = worker
        self._config = config
        self._groups_allowed = groups_allowed
        self._outages = worker.outages
        self._held = HeldClaims(store, config.claims, config.owner, config.split, self._ended)
        self._tails = None if config.cut_after is None else Tails(store, self._held, config.cut_after)
        self._queue = ScoringQueue(
            worker.scoring, split=config.split, owner=f"{config.owner}-scoring", concurrency=config.scorings
        )
        self._late = LateServers(worker.tools, worker.outages, worker.sampling.outage_wait_seconds)
        self._has_claimed = False
        self._changed = asyncio.Event()
        """Set if a change since the last claim may have made work."""
        self._misses = 0
        """Consecutive claims without a slot."""
        self._look_at = 0.0
        """Latest time of the next look for new groups (``time.monotonic``)."""
        self._lag = Backoff("engines to load a version", FIRST_LAG_SECONDS, LAG_SECONDS)
        self.scored = 0
        """Number of trajectories that this sampler scored."""
        self._housekeeping = Housekeeping(
            store,
            finalizer,
            config.plan,
            split=config.split,
            claims=config.claims,
            made_work=self._changed.set,
            first_warning_seconds=POLL_SECONDS,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Sample until done or stopped; then finish or release the claims still held."""
        self._outages.changed = self._outage_changed
        self._late.begin()
        jobs = [
            self._housekeeping.finalize_own(), self._housekeeping.work_for_all(),
            self._housekeeping.finalize_filled(), self._watch_work(), self._watch_training(),
            self._queue.run(stop),
            report_outages(self._store, lambda: self._outages.open, self._config.owner), collect_while_idle(),
            self._late.run(
                lambda: require_tools(self._store, self._worker.tools, self._config.split),
                lambda: self._has_claimed,
            ),
        ]  # fmt: skip
        if self._tails is not None:
            jobs.append(self._tails.run(self._freed))
        async with self._held.renewing(*jobs):
            try:
                await self._claim_and_start(stop)
            finally:
                if await self._held.release(self._config.grace_seconds):
                    await bounded(self._housekeeping.finalize_completed())
                self._outages.changed = lambda: None
        logger.info("sampler ends", extra={"scored": self.scored})

    def _outage_changed(self) -> None:
        self._changed.set()
        self._queue.wake()

    async def _claim_and_start(self, stop: asyncio.Event) -> None:
        busy_at, idle_limit = time.monotonic(), self._config.idle_exit_seconds
        while not stop.is_set():
            if self._held.error is not None:
                raise self._held.error
            has_room = len(self._held) < self._config.concurrency
            claim = await self._claim(stop) if has_room else None
            if claim is not None:
                self._misses = 0
                self._start(claim)
                # Look for new groups at the next claim too: one change may have made room for many.
                self._changed.set()
                continue
            if has_room:
                if self._misses == 0:
                    self._housekeeping.work_ran_out()
                self._misses += 1
            if self._held:
                busy_at = time.monotonic()
            elif await self._is_done(stop):
                logger.info("every task of every epoch is completed")
                return
            # Do not count an outage as idleness: what waits for a dependency is work that is left.
            elif self._outages.open:
                busy_at = time.monotonic()
            elif idle_limit is not None and time.monotonic() - busy_at >= idle_limit:
                logger.info("no work", extra={"idle_seconds": idle_limit})
                return
            await self._wait(stop)

    async def _claim(self, stop: asyncio.Event) -> Claim | None:
        """Claim one slot. Look for new groups only after a change, or after a while without one.

        Every event that frees capacity wakes the sampler, except a weight update: it polls for that, every
        ``LAG_SECONDS`` at least.
        """
        if self._outages.blocks_claims(len(self._held)):
            self._changed.clear()
            return None
        opens = self._changed.is_set() or time.monotonic() >= self._look_at
        # Clear before the claim, not after it: a change that comes meanwhile must wake the next one.
        self._changed.clear()
        if opens:
            self._look_at = time.monotonic() + _LOOK_POLLS * POLL_SECONDS
        try:
            return await self._store.claims.claim(
                split=self._config.split,
                owner=self._config.owner,
                lease_seconds=self._config.claims.lease_seconds,
                max_groups_open=await self._limit() if opens else 0,
                max_attempts=self._config.claims.max_attempts,
                selection=self._config.selection,
                without=self._not_now(),
            )
        except StoreUnavailableError:
            # End quietly: the same signal cuts the wait for an unavailable database to two seconds.
            if stop.is_set():
                return None
            raise

    def _not_now(self) -> Needs:
        """Return what is down, and the environments that run as many trajectories as they may."""
        down = self._outages.needs_down(of_new=True)
        full = full_environments(claim.task for claim in self._held.claims)
        return replace(down, environments=down.environments | full) if full else down

    async def _limit(self) -> GroupLimit | int | None:
        limit = await self._groups_allowed()
        if isinstance(limit, GroupLimit) and limit.engines_lag:
            self._look_at = min(self._look_at, time.monotonic() + self._lag.next())
        else:
            self._lag.reset()
        return limit

    def _start(self, claim: Claim) -> None:
        self._has_claimed = True
        task = claim.task
        self._outages.begin_probes(claim.record_id, task.tools, task.scorer, environment_of(task))
        self._held.start(claim, self._worker.run(claim))
        if self._tails is not None:
            self._tails.begin(claim)

    def _freed(self) -> None:
        """Note that a trajectory has ended: its group may be complete, and another may begin."""
        self._housekeeping.trajectory_ended()
        self._changed.set()

    def _ended(self, is_scored: bool) -> None:
        self._freed()
        self.scored += is_scored

    async def _wait(self, stop: asyncio.Event) -> None:
        """Wait for a trajectory to end, a change that may have made work, ``stop``, or ``POLL_SECONDS``."""
        events, timeout = [stop], POLL_SECONDS
        # Leave the change out while full: nobody claims and clears it, and each wait would end at once.
        if len(self._held) < self._config.concurrency:
            events.append(self._changed)
            timeout = min(timeout, max(0.0, self._look_at - time.monotonic()))
        await self._held.wait(*events, timeout=timeout)

    async def _is_done(self, stop: asyncio.Event) -> bool:
        try:
            return await self._housekeeping.nothing_is_left()
        except StoreUnavailableError:
            if stop.is_set():
                return False
            raise

    async def _watch_work(self) -> None:
        """Wake the sampler after changes of groups and data; rest longer while others take the work."""
        while True:
            if await self._store.wait_for_change(*_WORK, timeout=_WATCH_SECONDS):
                self._changed.set()
                # Vary the rest, or all samplers that one change has woken claim again at the same moment.
                rest = Backoff(
                    "work", _REST_SECONDS, _LONGEST_REST_SECONDS, jitter=0.5, attempts=self._misses
                )
                await asyncio.sleep(rest.next())

    async def _watch_training(self) -> None:
        """Wake the sampler after a step or a policy version: both free capacity for groups."""
        while True:
            if await self._store.wait_for_change(*_TRAINING, timeout=_WATCH_SECONDS):
                self._changed.set()
                await asyncio.sleep(_REST_SECONDS)
