"""The part of the store that training uses, in memory: for tests of pure logic."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.base.processes import ProcessIdentity
from agentrl.documents.document import now
from agentrl.documents.run import Doing, InferenceService, PolicyVersion, SavedCheckpoint
from agentrl.documents.status import DataStatus, StepStatus, TaskStatus, TrainerEnd, VersionStatus
from agentrl.documents.task import Task
from agentrl.documents.training import DBRecordData, TokenStatistics, TrainStep
from agentrl.errors import LeaseLostError
from agentrl.store.steps import StaleVersions


def engine(**changes: Any) -> InferenceService:
    """An engine as it registers itself."""
    fields: dict[str, Any] = {"engine": "local", "model": "m", "host": "h", "pid": 1, **changes}
    return InferenceService(id="e", url="u", **fields)


class _NoColumns:
    """A run that waits for no column."""

    async def waiting(self) -> dict[str, int]:
        """Nothing waits."""
        return {}


class FakeStore:
    """Tasks, training, policies and services of one run; ``database`` is what it holds."""

    def __init__(self) -> None:
        self.run_name = "run"
        self.columns = _NoColumns()
        self.data: dict[str, DBRecordData] = {}
        self.train_steps: dict[str, TrainStep] = {}
        self.versions: dict[int, PolicyVersion] = {}
        self.engines: list[InferenceService] = []
        self.group_tasks: dict[str, Task] = {}
        self.summaries: list[dict[str, Any]] = []
        self.counted: dict[str, int] = {}
        self.unfinished_groups = 0
        self.opened_epochs = [0]
        self.changed = asyncio.Event()
        self.tasks = _Tasks(self)
        self.epochs = _Epochs(self)
        self.training = _Training(self)
        self.steps = _Steps(self)
        self.groups = _Groups(self)
        self.policy_versions = _PolicyVersions(self)
        self.services = _Services(self)
        self.evaluations = _Evaluations(self)
        self.statistics: dict[str, TokenStatistics] = {}
        self.needed_versions: set[int] = set()
        """Versions that evaluations need."""
        self.oldest_version: int | None = None
        """The oldest version of a token of an unfinished group."""
        self.trainer_lease = _TrainerLease(self)
        self.attempt = 0
        self.discarded: tuple[str, ...] = ()
        self.places: dict[str, tuple[int, int]] = {}

    def add(self, *items: DBRecordData) -> None:
        self.data.update({item.id: item for item in items})
        self.changed.set()

    def set_status(self, items: Sequence[DBRecordData], status: DataStatus) -> None:
        for item in items:
            self.data[item.id] = replace(item, status=status)

    def publish(self, steps: Mapping[int, int], withdrawn: Collection[int] = ()) -> None:
        """Versions without weights: {version: the step it was published at}."""
        for number, step in steps.items():
            status = VersionStatus.WITHDRAWN if number in withdrawn else VersionStatus.PUBLISHED
            self.versions[number] = PolicyVersion(
                id=number, step=step, status=status, location="", files=(), train_step=None
            )

    def check_attempt(self, attempt: int) -> None:
        if attempt != self.attempt:
            raise LeaseLostError(f"attempt {attempt} has been replaced by {self.attempt}")

    async def wait_for_change(self, *collections: str, timeout: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(timeout, 0.01)):
                await self.changed.wait()
                self.changed.clear()

    def with_status(self, status: DataStatus) -> list[str]:
        return [item.id for item in self.data.values() if item.status is status]


class _Part:
    def __init__(self, store: FakeStore) -> None:
        self.store = store


class _Evaluations(_Part):
    async def needed_versions(self) -> set[int]:
        return set(self.store.needed_versions)


class _Epochs(_Part):
    async def due(self, split: str, epochs: int) -> list[tuple[None, int]]:
        return [(None, epoch) for epoch in range(epochs) if epoch not in self.store.opened_epochs][:1]


class _Tasks(_Part):
    async def any_with_status(self, split: str, *states: TaskStatus) -> bool:
        return TaskStatus.RUNNING in states and self.store.unfinished_groups > 0

    async def counts(self, split: str) -> dict[str, int]:
        return {"running": self.store.unfinished_groups}

    async def get(self, task_id: str) -> Task | None:
        return self.store.group_tasks.get(task_id)

    async def sort_keys(self, ids: Collection[str]) -> dict[str, tuple[int, int]]:
        return {id: place for id, place in self.store.places.items() if id in ids}


class _Training(_Part):
    async def ready_members(
        self, split: str, *, step: int, max_trained_count: int, old: StaleVersions | None, untrained: bool
    ) -> list[DBRecordData]:
        waiting = (DataStatus.READY, DataStatus.PLANNED)
        groups: dict[str, list[DBRecordData]] = {}
        for item in self.store.data.values():
            if item.status in waiting:
                groups.setdefault(item.task, []).append(item)
        chosen: list[DBRecordData] = []
        for items in groups.values():
            is_whole = all(
                item.status is DataStatus.READY and item.not_before_step <= step
                and item.trained_count < max_trained_count
                and not (old and old.spans == "any" and _is_stale(item, old))
                for item in items
            )  # fmt: skip
            if is_whole and not (untrained and any(item.trained_count for item in items)):
                chosen += [item for item in items if old is None or not _is_stale(item, old)]
        return chosen

    async def mark_stale(self, split: str, old: StaleVersions, *, attempt: int | None = None) -> int:
        if attempt is not None:
            self.store.check_attempt(attempt)
        ready = [item for item in self.store.data.values() if item.status is DataStatus.READY]
        stale = [item for item in ready if _is_stale(item, old)]
        if old.spans == "any":
            stale = [item for item in ready if item.task in {other.task for other in stale}]
        self.store.set_status(stale, DataStatus.STALE)
        return len(stale)

    async def fetch(self, ids: Sequence[str]) -> list[DBRecordData]:
        return [self.store.data[id] for id in reversed(ids)]

    async def fetch_readable(self, ids: Sequence[str]) -> tuple[dict[str, DBRecordData], dict[str, str]]:
        return {item.id: item for item in await self.fetch(ids)}, {}

    async def quarantine(self, query: Mapping[str, str], problem: str, *, attempt: int | None = None) -> int:
        bad = [self.store.data[query["_id"]]]
        bad = [item for item in bad if item.status is DataStatus.READY]
        self.store.set_status(bad, DataStatus.QUARANTINED)
        return len(bad)

    async def spent(self, tasks: Sequence[str]) -> dict[str, float]:
        spent = dict.fromkeys(("generate_seconds", "tool_seconds", "judge_seconds", "api_cost"), 1.0)
        return {**spent, "prefix_cache_hit_rate": 0.5} if tasks else {}

    async def mean_generated_tokens(
        self, *, tasks: Sequence[str] | None = None, records: Sequence[str] | None = None
    ) -> float | None:
        lengths = [
            float(item.trainable_tokens) for item in self.store.data.values()
            if item.record in (records or ()) or item.task in (tasks or ())
        ]  # fmt: skip
        return sum(lengths) / len(lengths) if lengths else None

    async def put_token_statistics(self, items: Sequence[TokenStatistics]) -> None:
        self.store.statistics.update({item.id: item for item in items})


class _Steps(_Part):
    async def plan(self, step: TrainStep, *, attempt: int) -> None:
        self.store.check_attempt(attempt)
        assert step.id not in self.store.train_steps
        items = [self.store.data[id] for id in step.data]
        assert all(item.status is DataStatus.READY for item in items)
        self.store.set_status(items, DataStatus.PLANNED)
        self.store.train_steps[step.id] = step

    async def commit(
        self, step_id: str, metrics: dict[str, Any], trained_ids: Sequence[str],
        max_trained_count: int, retrained_interval: int, *, attempt: int, counted: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.store.check_attempt(attempt)
        step = self.store.train_steps[step_id]
        self.store.train_steps[step_id] = replace(step, status=StepStatus.COMMITTED, metrics=metrics)
        self.store.set_status([self.store.data[id] for id in trained_ids], DataStatus.TRAINED)
        for task in counted:
            self.store.counted.setdefault(task, step.step)

    async def revert_after(self, step: int, *, attempt: int) -> int:
        self.store.check_attempt(attempt)
        reopened = 0
        for item in list(self.store.train_steps.values()):
            if item.step > step and item.status is not StepStatus.REVERTED:
                self.store.train_steps[item.id] = replace(item, status=StepStatus.REVERTED)
                self.store.set_status([self.store.data[id] for id in item.data], DataStatus.READY)
                reopened += len(item.data)
        self.store.counted = {task: at for task, at in self.store.counted.items() if at <= step}
        return reopened

    async def find(self, after: int = 0, status: StepStatus | None = None) -> list[TrainStep]:
        return [step for step in self.store.train_steps.values() if step.step > after]


class _Groups(_Part):
    async def oldest_version(self, split: str) -> int | None:
        return self.store.oldest_version

    async def count_open(self, split: str) -> int:
        return self.store.unfinished_groups

    async def uncounted(self, split: str) -> list[dict[str, Any]]:
        return [summary for summary in self.store.summaries if summary["task"] not in self.store.counted]


def _is_stale(item: DBRecordData, old: StaleVersions) -> bool:
    found = [any(low <= span.version <= high for low, high in old.ranges) for span in item.spans]
    return any(found) if old.spans == "any" else all(found)


class _PolicyVersions(_Part):
    async def get(self, id: int) -> PolicyVersion | None:
        return self.store.versions.get(id)

    async def newest_id(self) -> int | None:
        return max(self.store.versions, default=None)

    async def latest(self) -> PolicyVersion | None:
        return next(iter(await self.published(1)), None)

    async def published(self, limit: int, *, below: int | None = None) -> list[PolicyVersion]:
        published = self._newest_first(VersionStatus.PUBLISHED)
        return [version for version in published if below is None or version.id < below][:limit]

    async def steps_above(self, version: int) -> dict[int, int]:
        kept = (item for item in self.store.versions.values() if item.status is not VersionStatus.RESERVED)
        return {item.id: item.step for item in kept if item.id > version}

    async def withdrawn(self, step: int) -> list[PolicyVersion]:
        return [version for version in self._newest_first(VersionStatus.WITHDRAWN) if version.step == step]

    def _newest_first(self, status: VersionStatus) -> list[PolicyVersion]:
        kept = [version for version in self.store.versions.values() if version.status is status]
        return sorted(kept, key=lambda version: -version.id)

    async def all(self) -> list[PolicyVersion]:
        return [version for _, version in sorted(self.store.versions.items())]

    async def by_ids(self, ids: Sequence[int]) -> list[PolicyVersion]:
        return [version for id, version in sorted(self.store.versions.items()) if id in ids]

    async def reserved(self) -> PolicyVersion | None:
        return next(iter(self._newest_first(VersionStatus.RESERVED)), None)

    async def reserve(self, version: PolicyVersion, *, attempt: int) -> None:
        self.store.check_attempt(attempt)
        stored = self.store.versions.get(version.id)
        assert stored is None or stored.status is VersionStatus.RESERVED
        self.store.versions[version.id] = replace(version, status=VersionStatus.RESERVED)

    async def publish(self, version: PolicyVersion, *, attempt: int | None = None) -> None:
        if attempt is not None:
            self.store.check_attempt(attempt)
        stored = self.store.versions.get(version.id)
        assert stored is None or (stored.status, stored.attempt) == (VersionStatus.RESERVED, attempt)
        self.store.versions[version.id] = version
        self.store.changed.set()

    async def mark_pruned(self, versions: Sequence[int], *, attempt: int) -> None:
        self.store.check_attempt(attempt)
        for id in versions:
            self.store.versions[id] = replace(self.store.versions[id], pruned_at=now())

    async def withdraw_after(self, step: int, *, attempt: int) -> int:
        self.store.check_attempt(attempt)
        published = self._newest_first(VersionStatus.PUBLISHED)
        stored = max((item.id for item in published if item.is_stored and item.step <= step), default=-1)
        later = [item for item in published if item.step > step or (item.id > stored and not item.is_stored)]
        for item in later:
            self.store.versions[item.id] = replace(item, status=VersionStatus.WITHDRAWN)
        return len(later)

    async def reinstate(self, version: PolicyVersion, *, attempt: int) -> None:
        self.store.check_attempt(attempt)
        self.store.versions[version.id] = replace(
            version, status=VersionStatus.PUBLISHED, pruned_at=None
        )  # fmt: skip


class _TrainerLease(_Part):
    async def acquire(
        self, owner: str, host: str, pid: int, lease_seconds: float, process: ProcessIdentity | None = None
    ) -> int:
        self.store.attempt += 1
        return self.store.attempt

    async def discard_checkpoints(self, attempt: int, names: Sequence[str]) -> list[str]:
        self.store.check_attempt(attempt)
        self.store.discarded = tuple(names)
        return list(names)

    async def renew(self, attempt: int, lease_seconds: float, doing: Doing | None = None) -> None:
        self.store.check_attempt(attempt)

    async def record_saved(self, attempt: int, saved: SavedCheckpoint) -> None:
        self.store.check_attempt(attempt)

    async def release(self, attempt: int, ended: TrainerEnd | None = None) -> None:
        """Nobody waits for it."""


class _Services(_Part):
    async def live(self, max_age_seconds: float) -> list[InferenceService]:
        return self.store.engines
