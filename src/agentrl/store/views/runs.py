"""List the runs of a server: every database with Tasks, how far it is and whether it is alive."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from pymongo.errors import OperationFailure, PyMongoError

from agentrl.config.run import SYSTEM_DATABASES
from agentrl.config.schema import RunConfig
from agentrl.documents.run import SCHEMA, TRAINER, TrainerLease
from agentrl.documents.status import APPLIED_STEPS, ServiceStatus, SlotStatus, TaskStatus, TrainerEnd, values
from agentrl.store.client import open_connection
from agentrl.store.connection import Connection, Json, Repository, database_call
from agentrl.store.names import LEASE, RECORD, RUN, SCHEMA_VERSION, SERVICE, STEP, TASK
from agentrl.store.views.run_status import Activity, activity_of

_AT_A_TIME = 8
"""Databases that are read at the same time."""
_ANY_DATABASE = "agentrl"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run of a server. Fields of a run that cannot be read have their defaults."""

    name: str
    problem: str | None = None
    """Why it cannot be read: another schema version, or missing rights."""
    steps: int = 0
    """The last committed optimizer step."""
    reward: float | None = None
    pass_rate: float | None = None
    trajectories: int = 0
    """Estimated number of Records."""
    trainer: bool = False
    """Whether a trainer holds the lease."""
    ended: TrainerEnd | None = None
    """How the last trainer ended."""
    samplers: int = 0
    """Samplers that hold a slot of any split."""
    engines: int = 0
    """Engines with a recent heartbeat."""
    stepped_at: datetime | None = None
    active_at: datetime | None = None
    """When the newest Record was created, or the last step committed."""
    at: datetime

    @property
    def alive(self) -> bool:
        """Whether a process of it works."""
        return self.trainer or self.samplers > 0 or self.engines > 0

    @property
    def activity(self) -> Activity:
        """What it does now."""
        return activity_of(
            trainer=self.trainer, samplers=self.samplers > 0, engines=self.engines > 0, ended=self.ended
        )


class Runs(Repository):
    """Reads the summaries of every run; never writes."""

    @database_call
    async def all(self, alive_seconds: float) -> list[RunSummary]:
        """Return the runs that this user may see, those with the latest activity first.

        An engine is alive while its heartbeat is not older than ``alive_seconds``.
        """
        client = self._connection.client
        hello = await client.admin.command("hello")
        at = hello["localTime"].replace(tzinfo=UTC)
        reply = await client.admin.command("listDatabases", nameOnly=True, authorizedDatabases=True)
        names = sorted({database["name"] for database in reply["databases"]} - SYSTEM_DATABASES)
        limit = asyncio.Semaphore(_AT_A_TIME)

        async def one(name: str) -> RunSummary | None:
            async with limit:
                return await self._summary(name, at, alive_seconds)

        found = await asyncio.gather(*(one(name) for name in names))
        runs = [summary for summary in found if summary is not None]
        oldest = datetime.min.replace(tzinfo=UTC)
        return sorted(runs, key=lambda run: (run.active_at or oldest, run.name), reverse=True)

    async def _summary(self, name: str, at: datetime, alive_seconds: float) -> RunSummary | None:
        database = self._connection.client[name]
        empty = RunSummary(name=name, at=at)
        try:
            if not await database.list_collection_names(filter={"name": TASK}):
                return None
            schema = await database[RUN].find_one({"_id": SCHEMA}) or {"version": 1}
            if schema["version"] != SCHEMA_VERSION:
                known = f"this AgentRL reads {SCHEMA_VERSION}"
                return replace(empty, problem=f"schema version {schema['version']}; {known}")
            return await self._read(empty, alive_seconds)
        except OperationFailure as error:
            return replace(empty, problem=f"this user may not read it (code {error.code})")
        except PyMongoError as error:
            raise self._connection.error(f"reading run {name!r}", error) from error

    async def _read(self, empty: RunSummary, alive_seconds: float) -> RunSummary:
        database, at = self._connection.client[empty.name], empty.at
        step: Json = (
            await database[STEP].find_one(
                {"status": {"$in": values(APPLIED_STEPS)}},
                {"step": 1, "committed_at": 1, "metrics.reward": 1, "metrics.pass_rate": 1},
                sort=[("step", -1)],
            )
            or {}
        )
        found = await database[LEASE].find_one({"_id": TRAINER})
        lease = TrainerLease() if found is None else TrainerLease.from_document(found)
        newest: Json = await database[RECORD].find_one({}, {"created_at": 1}, sort=[("created_at", -1)]) or {}
        engines = await database[SERVICE].count_documents(
            {
                "status": {"$ne": ServiceStatus.STOPPED.value},
                "heartbeat": {"$gte": at - timedelta(seconds=alive_seconds)},
            }
        )
        metrics = step.get("metrics", {})
        moments = [moment for moment in (newest.get("created_at"), step.get("committed_at")) if moment]
        return replace(
            empty,
            steps=step.get("step", 0),
            reward=metrics.get("reward"),
            pass_rate=metrics.get("pass_rate"),
            trajectories=await database[RECORD].estimated_document_count(),
            trainer=lease.is_held(at),
            ended=lease.ended,
            samplers=len(await self._samplers(empty.name, at)),
            engines=engines,
            stepped_at=step.get("committed_at"),
            active_at=max(moments, default=None),
        )

    async def _samplers(self, name: str, at: datetime) -> list[str]:
        claimed = {"status": SlotStatus.RUNNING.value, "lease_expires_at": {"$gt": at}}
        cursor = await self._connection.client[name][TASK].aggregate(
            [
                # any split: the index begins with it
                {"$match": {"split": {"$gte": ""}, "status": TaskStatus.RUNNING.value}},
                {"$match": {"slots": {"$elemMatch": claimed}}},
                {"$unwind": "$slots"},
                {"$match": {f"slots.{field}": value for field, value in claimed.items()}},
                {"$group": {"_id": "$slots.owner"}},
            ]
        )
        return [group["_id"] for group in await cursor.to_list()]


async def connect_server(run: RunConfig) -> Connection:
    """Connect to the server of ``run``, whatever its run is. Raises StoreErrors as ``open_connection``."""
    return await open_connection(replace(run, run_name=_ANY_DATABASE))
