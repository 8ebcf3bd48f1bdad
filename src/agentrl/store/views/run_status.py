"""Read the present state of one run in a few indexed queries, cheap enough to repeat every second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from pymongo.errors import OperationFailure

from agentrl.documents.outage import Outage
from agentrl.documents.run import TrainerLease
from agentrl.documents.serving import InferenceService
from agentrl.documents.status import (
    APPLIED_STEPS,
    DataStatus,
    RecordStatus,
    ServiceStatus,
    TaskStatus,
    TrainerEnd,
    values,
)
from agentrl.store.connection import Json, Repository, database_call
from agentrl.store.names import DATA, RECORD, STEP, TASK
from agentrl.store.services import Services
from agentrl.store.trainer_lease import TrainerLeases
from agentrl.store.views import VIEWS
from agentrl.store.views.aggregation import as_is
from agentrl.store.views.failures import Failures
from agentrl.store.views.rows import FailureCount, StepRow

TRAIN = "train"
LAST_STEPS = 40
RATE_SECONDS = 300.0
"""Rates are those of the trajectories that were begun within this time."""

_RECENT_FAILURES = 1000
_RECENT_RECORDS = 10_000
_MAX_TIME_MS = 5_000

Activity = Literal["training", "sampling", "finished", "serving", "idle"]


def activity_of(*, trainer: bool, samplers: bool, engines: bool, ended: TrainerEnd | None) -> Activity:
    """Return what a run does now, of its live processes; ``ended`` says how its last trainer ended."""
    if trainer:
        return "training"
    if samplers:
        return "sampling"
    if ended is TrainerEnd.FINISHED:
        return "finished"
    return "serving" if engines else "idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """The trainer that holds, or held last, the lease of the run."""

    owner: str
    host: str | None
    pid: int | None
    alive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """One engine that is not stopped."""

    url: str
    engine: str
    status: ServiceStatus
    alive: bool
    policy_version: int | None
    running_requests: int
    heartbeat: datetime
    detail: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Queues:
    """What waits between the processes of the train split."""

    tasks_created: int
    """Groups that are not admitted yet."""
    tasks_running: int
    """Admitted groups with a trajectory that is not done."""
    tasks_waiting: int
    """Groups whose trajectories are done, and that are not finalized."""
    tasks_completed: int
    waiting_for_score: int
    """Trajectories."""
    data_ready: int
    """Trajectories that may be trained."""
    data_planned: int
    """Trajectories of a step that has not committed."""
    data_trained: int
    """Trajectories that are trained ``max_trained_count`` times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the trajectories begun in the last ``seconds`` amount to."""

    seconds: float
    trajectories: int
    scored: int
    failed: int
    generated_tokens: int
    mean_score: float | None

    @property
    def per_minute(self) -> float:
        """Scored trajectories per minute."""
        return 60.0 * self.scored / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """Sizes in bytes: the run's database, and the file system of the server; None if they may not be read."""

    run: int | None = None
    free: int | None = None
    total: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The contents of ``agentrl status`` for one run, at the server's time ``at``."""

    run_name: str
    at: datetime
    activity: Activity
    steps: Sequence[StepRow]
    """The last applied steps, oldest first."""
    rates: Rates
    queues: Queues
    trainer: TrainerState | None
    ended: TrainerEnd | None
    """How the last trainer ended."""
    samplers: Mapping[str, int]
    """Sampler → slots that it holds under live leases."""
    last_claim: datetime | None
    engines: Sequence[EngineState]
    outages: Sequence[Outage]
    """What samplers find down now."""
    failures: Sequence[FailureCount]
    """The newest failed attempts by kind, the most frequent first."""
    disk: Disk


class RunStatuses(Repository):
    """Reads the status of the connection's run. It never writes."""

    @database_call
    async def status(self, *, alive_seconds: float) -> RunStatus:
        """Return the status; an engine is dead without a heartbeat for ``alive_seconds``."""
        liveness = await Services(self._connection).liveness(TRAIN, alive_seconds)
        lease = await TrainerLeases(self._connection).read()
        live = {engine.id for engine in liveness.live_engines}
        rates = await self._rates(liveness.at)
        is_held = lease.is_held(liveness.at)
        return RunStatus(
            run_name=self._connection.database.name,
            at=liveness.at,
            activity=activity_of(
                trainer=is_held, samplers=bool(liveness.claims), engines=bool(live), ended=lease.ended
            ),
            steps=await self._steps(),
            rates=rates,
            queues=await self._queues(liveness.waiting_for_score),
            trainer=_trainer_state(lease, alive=is_held),
            ended=lease.ended,
            samplers=liveness.claims,
            last_claim=liveness.last_claim,
            engines=[
                _engine_state(engine, engine.id in live)
                for engine in liveness.engines
                if engine.status is not ServiceStatus.STOPPED
            ],
            outages=liveness.outages,
            failures=await Failures(self._connection).attempts(_RECENT_FAILURES),
            disk=await self._disk(),
        )

    async def _steps(self) -> list[StepRow]:
        _, pipeline = VIEWS["audit_steps"]
        newest = await self._aggregate(
            STEP,
            {"$match": {"status": {"$in": values(APPLIED_STEPS)}}},
            {"$sort": {"step": -1}},
            {"$limit": LAST_STEPS},
            *pipeline,
        )
        return [StepRow.from_document(row) for row in reversed(newest)]

    async def _rates(self, at: datetime) -> Rates:
        is_failed = {"$eq": ["$status", RecordStatus.FAILED.value]}
        found = await self._aggregate(
            RECORD,
            {"$match": {"created_at": {"$gte": at - timedelta(seconds=RATE_SECONDS)}}},
            {"$sort": {"created_at": -1}},
            {"$limit": _RECENT_RECORDS},
            {"$project": as_is("status", "score", "generated_tokens", "created_at")},
            {
                "$group": {
                    "_id": None,
                    "trajectories": {"$sum": 1},
                    "scored": {"$sum": {"$cond": [{"$isNumber": "$score"}, 1, 0]}},
                    "failed": {"$sum": {"$cond": [is_failed, 1, 0]}},
                    "generated_tokens": {"$sum": "$generated_tokens"},
                    "mean_score": {"$avg": "$score"},
                    "oldest": {"$min": "$created_at"},
                }
            },
        )
        if not found:
            return Rates(
                seconds=RATE_SECONDS, trajectories=0, scored=0, failed=0, generated_tokens=0, mean_score=None
            )
        (group,) = found
        oldest = group.pop("oldest")
        is_cut = group["trajectories"] == _RECENT_RECORDS
        seconds = max(1.0, (at - oldest).total_seconds()) if is_cut else RATE_SECONDS
        del group["_id"]
        return Rates(seconds=seconds, **group)

    async def _queues(self, waiting_for_score: int) -> Queues:
        tasks = {
            status: await self._collection(TASK).count_documents({"split": TRAIN, "status": status.value})
            for status in TaskStatus
        }
        data = {
            status: await self._collection(DATA).count_documents({"split": TRAIN, "status": status.value})
            for status in (DataStatus.READY, DataStatus.PLANNED, DataStatus.TRAINED)
        }
        return Queues(
            tasks_created=tasks[TaskStatus.CREATED],
            tasks_running=tasks[TaskStatus.RUNNING],
            tasks_waiting=tasks[TaskStatus.WAITING],
            tasks_completed=tasks[TaskStatus.COMPLETED],
            waiting_for_score=waiting_for_score,
            data_ready=data[DataStatus.READY],
            data_planned=data[DataStatus.PLANNED],
            data_trained=data[DataStatus.TRAINED],
        )

    async def _disk(self) -> Disk:
        """Return the sizes; without the right to read them, none."""
        try:
            stats = await self._connection.database.command("dbStats")
        except OperationFailure:
            return Disk()
        total, used = stats.get("fsTotalSize"), stats.get("fsUsedSize")
        return Disk(
            run=int(stats.get("totalSize", stats["storageSize"])),
            free=None if total is None or used is None else int(total - used),
            total=None if total is None else int(total),
        )

    async def _aggregate(self, name: str, *stages: Json) -> list[Json]:
        cursor = await self._collection(name).aggregate(list(stages), maxTimeMS=_MAX_TIME_MS)
        return await cursor.to_list()


def _engine_state(engine: InferenceService, alive: bool) -> EngineState:
    return EngineState(
        url=engine.url, engine=engine.engine, status=engine.status, alive=alive,
        policy_version=engine.policy_version, running_requests=engine.running_requests,
        heartbeat=engine.heartbeat, detail=engine.detail,
    )  # fmt: skip


def _trainer_state(lease: TrainerLease, *, alive: bool) -> TrainerState | None:
    if lease.owner is None:
        return None
    return TrainerState(owner=lease.owner, host=lease.host, pid=lease.pid, alive=alive)
