"""Background work of a sampler: finalize groups, reap leases, open epochs, cut tails, collect garbage."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl.columns.pool import Pool
from agentrl.config.schema import ClaimConfig, GroupConfig
from agentrl.data.finalize_group import TRAIN_SPLIT, GroupRules, finalize_group
from agentrl.documents.record import Failure
from agentrl.documents.status import TaskStatus
from agentrl.documents.task import Claim
from agentrl.errors import LeaseLostError, StoreUnavailableError
from agentrl.observe.logging import failure_text
from agentrl.store.mechanics.connection import COLUMN, STEP
from agentrl.store.mechanics.retry import log_store_errors

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

_BATCH = 16
ATTEMPTS = 4
"""Attempts to finalize a group before it is given up."""
RETRY_SECONDS = 5.0
"""Wait after the first failed attempt; doubles with each attempt."""


class GroupFinalizer:
    """Finalize the groups of one split. The process that wrote a group's last score does it.

    Several samplers may try the same group; exactly one succeeds.
    """

    def __init__(self, store: Store, config: GroupConfig, *, split: str, seed: int) -> None:
        """Groups of ``TRAIN_SPLIT`` become training data; groups of other splits are only summarized."""
        self._store = store
        self._split = split
        self._rules = GroupRules(config=config, seed=seed)
        self.columns = config.column_names if split == TRAIN_SPLIT else ()
        """The columns that a group waits for."""
        self._logged: set[str] = set()

    async def run_completed(self) -> int:
        """Finalize the groups that this process completed; return how many this call finalized."""
        completed = self._store.attempts.completed.take(self._split)
        return sum([await self.finalize(task_id) for task_id in completed])

    async def run_waiting(self, waiting_seconds: float = 0.0) -> int:
        """Finalize every group that has waited for ``waiting_seconds``; return how many this call finalized.

        This covers groups whose process ended after their last score and before they were finalized.
        """
        done = 0
        while waiting := await self._store.groups.waiting(self._split, _BATCH, waiting_seconds):
            finished = [await self.finalize(task_id) for task_id in waiting]
            done += sum(finished)
            # Stop without a success: groups whose failure was not counted would come again for ever.
            if not any(finished):
                break
        return done

    async def finalize(self, task_id: str) -> bool:
        """Finalize one waiting group; return False if another process did or if this attempt failed.

        A failed attempt is counted in the Task and retried later; after ``ATTEMPTS`` the group is given up.
        Raises StoreUnavailableError only; an outage does not count as an attempt.
        """
        try:
            outcome = await finalize_group(self._store, task_id, self._rules, self.columns)
        except StoreUnavailableError:
            raise
        # Contain what a filter or an estimator raises: one group must not stop all those behind it.
        except Exception as error:
            logger.exception("group not finalized", extra={"task": task_id})
            await self._failed(task_id, error)
            return False
        if outcome is None:
            return False
        logger.info("group finalized", extra={"task": task_id})
        self._log_masked(task_id, outcome.summary)
        return True

    def _log_masked(self, task_id: str, summary: Mapping[str, Any]) -> None:
        """Log once per sampling parameter that it masks model calls."""
        for masked in summary.get("masked_calls", ()):
            name = masked["because"].partition(" ")[0]
            if name not in self._logged:
                self._logged.add(name)
                logger.warning(
                    "model calls sampled with %s are recorded and not trained: the engine's logprobs leave it"
                    " out (`agentrl audit record`, Task.group.masked_calls)",
                    masked["because"],
                    extra={"task": task_id, "calls": masked["calls"]},
                )

    async def _failed(self, task_id: str, error: Exception) -> None:
        """Count the failed attempt; the last one gives the group up.

        If that fails too, the group is retried and the others continue.
        """
        groups, problem = self._store.groups, failure_text(error)
        try:
            attempts = await groups.count_failed_attempt(task_id, problem, retry_seconds=RETRY_SECONDS)
            if attempts >= ATTEMPTS and await groups.give_up(task_id, problem, self._rules.to_store()):
                logger.error("group given up", extra={"task": task_id, "attempts": attempts, "why": problem})
        except StoreUnavailableError:
            raise
        except Exception:
            logger.exception("a failed attempt is not counted", extra={"task": task_id})


HOUSEKEEPING_SECONDS = 2.0
"""Shortest interval between rounds of shared background work; each wait is up to twice as long."""

SWEEP_SECONDS = 5.0
"""Shortest time a group waits until samplers other than the one that completed it finalize it.

Each round waits up to twice as long, at random, so that samplers do not all read the same late group.
"""

_MOST_QUIET = 3
"""Largest number of idle rounds that double the wait."""

FIRST_WARNING_SECONDS, LOAD_WARNING_SECONDS = 5.0, 60.0
"""Time until the first warning that the split's tasks are not completely loaded; interval of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """Number of epochs of a split, and how the groups of an epoch are created."""

    epochs: int
    seed: int
    num_generations: int
    shuffle: bool


class Housekeeping:
    """Finalize groups, reap expired leases and open epochs for the samplers of one split."""

    def __init__(
        self,
        store: Store,
        finalizer: GroupFinalizer,
        plan: EpochPlan,
        *,
        split: str,
        claims: ClaimConfig,
        made_work: Callable[[], None],
    ) -> None:
        """``made_work`` is called when new work may be claimable."""
        self._store = store
        self._finalizer = finalizer
        self._plan = plan
        self._split = split
        self._claims = claims
        self._made_work = made_work
        self._finalizing = asyncio.Lock()
        self._has_ended = asyncio.Event()
        self._lacks_work = asyncio.Event()
        self._warn_at = time.monotonic() + FIRST_WARNING_SECONDS
        """Earliest time of the next warning about tasks that are not loaded (``time.monotonic``)."""

    def trajectory_ended(self) -> None:
        """Record that a trajectory of this sampler has ended; its group may be complete."""
        self._has_ended.set()

    def work_ran_out(self) -> None:
        """Record that a claim found no work: the next epoch may be due."""
        self._lacks_work.set()

    async def finalize_own(self) -> None:
        """Finalize each group as soon as this sampler's trajectories complete it."""
        while True:
            await self._has_ended.wait()
            # Clear before the work: a trajectory that ends during it needs another round.
            self._has_ended.clear()
            await self.finalize_completed()

    async def finalize_completed(self) -> None:
        """Finalize the groups that this process has completed so far."""
        # Take turns with the other jobs of this sampler: both would read one group to finalize it.
        async with self._finalizing:
            if await self._finalizer.run_completed():
                self._made_work()

    async def finalize_filled(self) -> None:
        """Finalize groups when a column is filled, if the groups of this run wait for any."""
        while self._finalizer.columns:
            await self._store.wait_for_change(COLUMN, timeout=SWEEP_SECONDS)
            with log_store_errors(logger, "groups with filled columns cannot be read"):
                async with self._finalizing:
                    if await self._finalizer.run_waiting():
                        self._made_work()

    async def work_for_all(self) -> None:
        """Do the shared work that any sampler may do: expired leases, waiting groups, the next epoch.

        Idle rounds become rarer, until this sampler itself runs out of work.
        """
        quiet = 0
        while True:
            await asyncio.sleep(HOUSEKEEPING_SECONDS * random.uniform(1, 2))
            with suppress(TimeoutError):
                async with asyncio.timeout(HOUSEKEEPING_SECONDS * (2**quiet - 1) * random.uniform(1, 2)):
                    await self._lacks_work.wait()
            self._lacks_work.clear()
            quiet = min(quiet + 1, _MOST_QUIET)
            with log_store_errors(logger, "housekeeping failed"):
                if await self._work_once():
                    quiet = 0
                    self._made_work()

    async def _work_once(self) -> bool:
        freed = await self._store.expired_leases.reap(self._split, grace_seconds=self._claims.lease_seconds)
        await self.finalize_completed()
        async with self._finalizing:
            swept = await self._finalizer.run_waiting(SWEEP_SECONDS * random.uniform(1, 2))
        opened = await self.open_next_epoch()
        return freed > 0 or swept > 0 or opened

    async def nothing_is_left(self) -> bool:
        """Return whether every group of every epoch is finalized; open the next epoch if it is due."""
        tasks, split = self._store.tasks, self._split
        following = await self._due()  # read first: an epoch that opens meanwhile has open tasks
        if await tasks.any_with_status(split, TaskStatus.CREATED, TaskStatus.RUNNING, TaskStatus.WAITING):
            return False
        if not await tasks.any_with_status(split, TaskStatus.COMPLETED):
            return False
        if following:
            await self.open_next_epoch()
        return not following

    async def open_next_epoch(self) -> bool:
        """Open or complete the next epoch if no task waits for its first claim; return whether it did.

        Each source of a mixture has epochs and waiting tasks of its own.
        """
        opened = 0
        for source, epoch in await self._due():
            if await self._store.tasks.any_with_status(self._split, TaskStatus.CREATED, source=source):
                continue
            plan = self._plan
            tasks = await self._store.epochs.open(
                self._split, epoch, plan.seed, plan.num_generations, plan.shuffle, source=source
            )
            if tasks:
                logger.info("epoch opened", extra={"epoch": epoch, "tasks": tasks, "source": source})
            opened += tasks
        return opened > 0

    async def _due(self) -> list[tuple[str | None, int]]:
        """Return the first epoch that does not hold every task, of each source; empty if all of them do."""
        following = await self._store.epochs.due(self._split, self._plan.epochs)
        if (None, 0) in following and time.monotonic() >= self._warn_at:
            self._warn_at = time.monotonic() + LOAD_WARNING_SECONDS
            logger.warning(
                "the tasks of split %s are not loaded to the end: this sampler waits for the rest; if no"
                " process is loading them, run: agentrl tasks load FILE", self._split,
            )  # fmt: skip
        return following


KIND = "cut"
"""``Record.failure.kind`` of a trajectory that was cut."""

WATCH_SECONDS = 10.0
"""Interval between looks for steps when the change stream reports none."""


class Tails:
    """Ends the trajectories of one sampler that are too late for training.

    A trajectory that began after step s is too late once step s + ``after_steps`` is committed: its first
    tokens are then older than ``--max_staleness`` allows, whichever process sampled them. Its slot is not
    sampled again. Its group is finalized with the trajectories that have a score.
    """

    def __init__(self, store: Store, held: Pool[Claim], after_steps: int) -> None:
        self._store = store
        self._held = held
        self._after_steps = after_steps
        self._step: int | None = None
        self._begun: dict[str, int | None] = {}
        """Record → last committed step when its trajectory began; None: not known yet."""

    def begin(self, claim: Claim) -> None:
        """Note that a trajectory begins here, or goes on here."""
        is_new = claim.attempt == claim.first_attempt
        self._begun[claim.record_id] = self._step if is_new else None

    async def run(self, freed: Callable[[], None]) -> None:
        """Cut trajectories after each step, until cancelled; call ``freed`` when some were cut."""
        while True:
            with log_store_errors(logger, "steps cannot be read; no trajectory is cut"):
                last = await self._store.steps.last()
                self._step = 0 if last is None else last.step
                if await self._cut():
                    freed()
            await self._store.wait_for_change(STEP, timeout=WATCH_SECONDS)

    async def _cut(self) -> int:
        assert self._step is not None
        running = {claim.record_id for claim in self._held.claims}
        self._begun = {record: step for record, step in self._begun.items() if record in running}
        for record in [record for record, step in self._begun.items() if step is None]:
            self._begun[record] = await self._first_step(record, self._step)
        latest = self._step - self._after_steps
        late = {record for record, step in self._begun.items() if step is not None and step <= latest}
        claims = await self._held.cancel(late)
        why = f"step {self._step} was trained while it was running (--tail_policy {KIND})"
        await asyncio.gather(*(self._fail(claim, why) for claim in claims))
        return len(claims)

    async def _first_step(self, record_id: str, default: int) -> int:
        """Return the step of the oldest weights that sampled a trajectory; ``default`` without a token."""
        record = await self._store.records.get(record_id)
        if record is None:
            return default
        versions = [] if record.min_version is None else [record.min_version]
        versions += [] if record.partial is None else [span.version for span in record.partial.versions]
        sampled = await self._store.policy_versions.by_ids(versions)
        return min((version.step for version in sampled), default=default)

    async def _fail(self, claim: Claim, why: str) -> None:
        logger.info("trajectory cut", extra={"record": claim.record_id, "why": why})
        try:
            await self._store.attempts.fail(
                claim, Failure(kind=KIND, message=why), max_attempts=1, backoff_seconds=0.0
            )
        except LeaseLostError:
            logger.info("the claim was lost before it was cut", extra={"record": claim.record_id})


_NEW_OBJECTS = 50_000
"""New objects after which Python itself collects, also while the process is busy; its default is 700."""

_INTERVAL_SECONDS = 0.1
_BUSY_SECONDS = 0.005
"""Delay of a timer from which on the process is busy."""

_FEW_OBJECTS = 2_000
"""New objects up to which a collection waits; one of so many takes about a millisecond."""

_PER_OLDER_GENERATION = (10, 100)
"""Collections of one generation after which the next older one is collected too."""


def collect_garbage_less_often() -> None:
    """Leave what was loaded at the start out of garbage collections, and collect less often.

    Call it once in a process. By default a tenth of a sampler's CPU time goes into collections that find
    nothing: prompts are long lists of ids, and each collection visits every id. One of all objects takes a
    tenth of a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, 10, 10)


async def collect_while_idle() -> None:
    """Collect every tenth of a second in which this process was not busy, until it is cancelled."""
    while True:
        planned = time.monotonic() + _INTERVAL_SECONDS
        await asyncio.sleep(_INTERVAL_SECONDS)
        if time.monotonic() - planned < _BUSY_SECONDS and gc.get_count()[0] > _FEW_OBJECTS:
            gc.collect(_due_generation(gc.get_count()))


def _due_generation(count: tuple[int, int, int]) -> int:
    """Return the oldest generation that is due; ``count`` is that of ``gc.get_count``."""
    if count[2] >= _PER_OLDER_GENERATION[1]:
        return 2
    return int(count[1] >= _PER_OLDER_GENERATION[0])
