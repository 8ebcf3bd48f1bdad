"""The trainer's data: waits for a step's worth of fresh groups, and fetches the next while one computes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.batching.freshness import choose_groups, oldest_fresh
from agentrl.documents.training import DBRecordData
from agentrl.errors import AgentRLError, TrainingError

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
LOG_EVERY_SECONDS = 30.0
_LOOKAHEAD_STEPS = 8


@dataclass(frozen=True)
class StepData:
    """One step's groups. ``is_rest``: sampling has ended, and fewer groups than a step's were left."""

    groups: tuple[str, ...]
    data: tuple[DBRecordData, ...]
    is_rest: bool


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """How data are chosen, and how long they are waited for."""

    split: str = "train"
    groups_per_step: int
    num_generations: int
    num_epochs: int
    max_staleness: int
    wait_seconds: float


class DataStream:
    """Chooses whole groups, oldest first, that are fresh enough for the version a step starts from."""

    def __init__(self, store: Store, settings: StreamSettings) -> None:
        self._store = store
        self._settings = settings
        self._prefetched: tuple[tuple[int, int], asyncio.Task[StepData | None]] | None = None
        self._avoid: frozenset[str] = frozenset()

    def prefetch(self, step: int, version: int) -> None:
        """Begin to wait for the data of ``step``, which is expected to start from ``version``."""
        self._prefetched = ((step, version), asyncio.create_task(self._wait(step, version)))

    async def take(self, step: int, version: int) -> StepData | None:
        """The data of ``step``, which starts from ``version``; None when all is sampled and trained.

        Marks data that are too old as stale. Raises TrainingError after ``wait_seconds``.
        """
        settings = self._settings
        stale = await self._store.training.mark_stale(
            settings.split, oldest_fresh(version, settings.max_staleness)
        )
        if stale:
            logger.info("%d trajectories are older than %d versions: stale", stale, settings.max_staleness)
        try:
            async with asyncio.timeout(settings.wait_seconds):
                return await self._take(step, version)
        except TimeoutError as error:
            raise await self._no_data() from error

    def avoid(self, data_ids: frozenset[str]) -> None:
        """Prefer other groups than those of ``data_ids``, whose last step was skipped."""
        self._avoid = data_ids

    async def close(self) -> None:
        """Stop prefetching."""
        if self._prefetched is not None:
            task = self._prefetched[1]
            self._prefetched = None
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, AgentRLError):
                await task

    async def ready_groups(self, step: int, version: int) -> int:
        """Groups that ``step`` could train now, counted up to a few steps' worth."""
        return len(await self._choose(step, version, _LOOKAHEAD_STEPS * self._settings.groups_per_step))

    async def _take(self, step: int, version: int) -> StepData | None:
        if self._prefetched is not None and self._prefetched[0] == (step, version):
            result = await self._prefetched[1]
            self._prefetched = None
            if result is not None and not result.is_rest:
                return result
        await self.close()
        return await self._wait(step, version)

    async def _wait(self, step: int, version: int) -> StepData | None:
        count = self._settings.groups_per_step
        log_at = time.monotonic() + LOG_EVERY_SECONDS
        while True:
            finished = await self._sampling_finished()
            groups = await self._choose(step, version, count)
            if len(groups) == count or finished:
                return await self._fetch(groups, is_rest=len(groups) < count) if groups else None
            if time.monotonic() >= log_at:
                logger.info("waiting for groups: %d of %d are ready", len(groups), count)
                log_at += LOG_EVERY_SECONDS
            await self._store.wait_for_change("DBRecordData", "Task", timeout=POLL_SECONDS)

    async def _choose(self, step: int, version: int, count: int) -> dict[str, list[str]]:
        settings = self._settings
        members = await self._store.training.ready(
            settings.split,
            min_version=oldest_fresh(version, settings.max_staleness),
            limit=_LOOKAHEAD_STEPS * settings.groups_per_step * settings.num_generations,
            step=step,
        )
        return choose_groups(members, count, self._avoid)

    async def _fetch(self, groups: dict[str, list[str]], *, is_rest: bool) -> StepData:
        ids = [id for members in groups.values() for id in members]
        fetched = {item.id: item for item in await self._store.training.fetch(ids)}
        return StepData(tuple(groups), tuple(fetched[id] for id in ids), is_rest)

    async def _sampling_finished(self) -> bool:
        """True when every epoch has been opened and each of its groups is finalised."""
        split = self._settings.split
        epochs = await self._store.tasks.epochs(split)
        if len(epochs) < self._settings.num_epochs:
            return False
        return await self._store.tasks.unfinished(split) == 0

    async def _no_data(self) -> TrainingError:
        counts = await self._store.tasks.counts(self._settings.split)
        told = ", ".join(f"{number} {status}" for status, number in counts.items()) or "none"
        return TrainingError(
            f"fewer than {self._settings.groups_per_step} groups became ready within"
            f" {self._settings.wait_seconds:g} s; tasks: {told}",
            cure="see that `agentrl serve` and `agentrl sample` run (`agentrl audit run` shows them), then"
            " start the trainer again: it resumes; or raise --data_wait_seconds",
        )
