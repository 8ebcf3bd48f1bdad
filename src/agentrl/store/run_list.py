"""List the runs of a server: every database with Tasks, how far it is and whether it is alive."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, is_dataclass, replace
from datetime import UTC, datetime, timedelta
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import OperationFailure, PyMongoError

from agentrl.base.processes import ProcessIdentity, has_ended, owner_of
from agentrl.config.schema import RunConfig
from agentrl.documents.run import (
    FLAGS,
    PARENT,
    REMARKS,
    SCHEMA,
    TRAINER,
    InferenceService,
    Relative,
    RunFact,
    TrainerLease,
    flags_key,
)
from agentrl.documents.status import APPLIED_STEPS, ServiceStatus, TrainerEnd, values
from agentrl.errors import StoreError, StoreUnavailableError
from agentrl.store.claims import live_claims
from agentrl.store.client import open_connection
from agentrl.store.mechanics.connection import (
    LEASE,
    RECORD,
    RUN,
    SCHEMA_VERSION,
    SERVICE,
    SETTINGS,
    STEP,
    TASK,
    Connection,
    Json,
    Repository,
    database_call,
)
from agentrl.store.schema import unfinished
from agentrl.store.services import Samplers, alive_samplers

_AT_A_TIME = 8
"""Databases that are read at the same time."""
_ANY_DATABASE = "agentrl"
_NOT_ALLOWED = 13


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """Sizes in bytes: the run's database, and the file system of the server; None if they may not be read."""

    run: int | None = None
    free: int | None = None
    total: int | None = None


async def read_disk(database: AsyncDatabase[Json]) -> Disk:
    """Return the sizes of a database and of its server's file system; without the right, none."""
    try:
        stats = await database.command("dbStats")
    except OperationFailure:
        return Disk()
    total, used = stats.get("fsTotalSize"), stats.get("fsUsedSize")
    return Disk(
        run=int(stats.get("totalSize", stats["storageSize"])),
        free=None if total is None or used is None else int(total - used),
        total=None if total is None else int(total),
    )


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
class RunSummary:
    """One run of a server. Fields of a run that cannot be read have their defaults."""

    name: str
    problem: str | None = None
    """Why it cannot be read: another schema version, or missing rights."""
    steps: int = 0
    """The last committed optimizer step."""
    reward: float | None = None
    rewards: tuple[float | None, ...] = ()
    """Of the newest steps, in order, as many as were asked for."""
    pass_rate: float | None = None
    trajectories: int = 0
    """Estimated number of Records."""
    trainer: bool = False
    """Whether a trainer holds the lease."""
    ended: TrainerEnd | None = None
    """How the last trainer ended."""
    samplers: int = 0
    """Samplers that are alive, and others that hold a slot of any split."""
    engines: int = 0
    """Engines with a recent heartbeat."""
    stepped_at: datetime | None = None
    active_at: datetime | None = None
    """When the newest Record was created, or the last step committed."""
    model: str | None = None
    """``--model_name_or_path`` of its first trainer, sampler or engine."""
    tasks: int = 0
    """Estimated number of Tasks, of every split and epoch."""
    bytes: int | None = None
    """Size of its database; None without the right to read it."""
    tags: tuple[str, ...] = ()
    note: str | None = None
    parent: Relative | None = None
    """Where it begins in another run; None for a run of its own."""
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
    """Reads the summaries of every run, also of marked ones; never writes."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection.beside(connection.database.name))

    @database_call
    async def all(self, alive_seconds: float, steps: int = 1) -> list[RunSummary]:
        """Return the runs that this user may see, those with the latest activity first.

        An engine is alive while its heartbeat is not older than ``alive_seconds``. ``steps`` is the number of
        steps whose rewards are read.
        """
        at = await self._connection.server_time()
        limit = asyncio.Semaphore(_AT_A_TIME)

        async def one(name: str) -> RunSummary | None:
            async with limit:
                return await self._summary(name, at, alive_seconds, steps)

        summaries = await asyncio.gather(*map(one, await self._connection.databases()))
        runs = [summary for summary in summaries if summary is not None]
        oldest = datetime.min.replace(tzinfo=UTC)
        return sorted(runs, key=lambda run: (run.active_at or oldest, run.name), reverse=True)

    async def _summary(self, name: str, at: datetime, alive_seconds: float, steps: int) -> RunSummary | None:
        database = self._connection.client[name]
        empty = RunSummary(name=name, at=at)
        try:
            if not await database.list_collection_names(filter={"name": TASK}):
                return None
            schema: Json = await database[RUN].find_one({"_id": SCHEMA}) or {}
            if (error := unfinished(name, schema)) is not None:
                return replace(empty, problem=error.message)
            if (version := schema.get("version")) != SCHEMA_VERSION:
                return replace(
                    empty, problem=f"schema version {version}; this AgentRL reads {SCHEMA_VERSION}"
                )
            summary = await self._read(empty, alive_seconds, steps)
            if not _is_a(summary, RunSummary):
                raise ValueError("a field has another type")
            return summary
        except OperationFailure as error:
            what = "this user may not read it" if error.code == _NOT_ALLOWED else "it cannot be read"
            return replace(empty, problem=f"{what} (code {error.code})")
        except StoreUnavailableError:
            raise
        except (StoreError, AttributeError, TypeError, ValueError) as error:
            # an import may hold anything, and one such run must not hide the others
            return replace(empty, problem=f"its documents are damaged: {error}")
        except PyMongoError as error:
            raise self._connection.error(f"reading run {name!r}", error) from error

    async def _read(self, empty: RunSummary, alive_seconds: float, steps: int) -> RunSummary:
        database, at = self._connection.client[empty.name], empty.at
        applied = {"status": {"$in": values(APPLIED_STEPS)}}
        fields = {"step": 1, "committed_at": 1, "metrics.reward": 1, "metrics.pass_rate": 1}
        found = database[STEP].find(applied, fields, sort=[("step", -1)], limit=steps)
        newest_steps: list[Json] = await found.to_list()
        step: Json = newest_steps[0] if newest_steps else {}
        lease = TrainerLease.from_document(await database[LEASE].find_one({"_id": TRAINER}) or {})
        newest: Json = await database[RECORD].find_one({}, {"created_at": 1}, sort=[("created_at", -1)]) or {}
        engines = await database[SERVICE].count_documents(_alive(at, alive_seconds))
        remarks = RunFact.from_document(await database[RUN].find_one({"_id": REMARKS}) or {"_id": REMARKS})
        parent = await database[RUN].find_one({"_id": PARENT})
        keys = [flags_key(role) for role in FLAGS]
        named = {"_id": {"$in": keys}, "values.model_name_or_path": {"$type": "string"}}
        begun: Json = await database[SETTINGS].find_one(named, sort=[("at", 1)]) or {}
        beside = self._connection.beside(empty.name)
        claims = await live_claims(beside)
        samplers = alive_samplers(await Samplers(beside).holding(claims), claims)
        metrics = step.get("metrics", {})
        moments = [moment for moment in (newest.get("created_at"), step.get("committed_at")) if moment]
        return replace(
            empty,
            steps=step.get("step", 0),
            reward=metrics.get("reward"),
            rewards=tuple(each.get("metrics", {}).get("reward") for each in reversed(newest_steps)),
            pass_rate=metrics.get("pass_rate"),
            trajectories=await database[RECORD].estimated_document_count(),
            trainer=lease.is_held(at),
            ended=lease.ended,
            samplers=len(samplers),
            engines=engines,
            stepped_at=step.get("committed_at"),
            active_at=max(moments, default=None),
            model=begun.get("values", {}).get("model_name_or_path"),
            tasks=await database[TASK].estimated_document_count(),
            bytes=(await read_disk(database)).run,
            tags=remarks.tags,
            note=remarks.note,
            parent=None if parent is None else Relative.from_document(parent),
        )

    @database_call
    async def holders(self, name: str, alive_seconds: float) -> list[str]:
        """Return who works on a run of any schema version: its trainer, samplers and live engines.

        Samplers and engines are known by their heartbeats, other processes by their leases; one that is known
        to have ended counts no more.
        """
        at = await self._connection.server_time()
        database = self._connection.client[name]
        holders = []
        for collection in (LEASE, RUN):
            lease = TrainerLease.from_document(await database[collection].find_one({"_id": TRAINER}) or {})
            if lease.is_held(at) and not _is_dead(lease.process):
                holders.append(f"trainer {lease.owner} on {lease.host}")
        beside = self._connection.beside(name)
        claims = await live_claims(beside)
        samplers = alive_samplers(await Samplers(beside).holding(claims), claims)
        holders += [f"sampler {sampler}" for sampler in samplers if not _is_dead(owner_of(sampler))]
        async for engine in database[SERVICE].find(_alive(at, alive_seconds)):
            if not _is_dead(InferenceService.from_document(engine).process):
                holders.append(f"engine {engine['url']} on {engine['host']}")
        return holders


def _is_a(value: Any, hint: Any) -> bool:
    """Return whether a value has the type ``hint``, and its fields and items have theirs."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(_is_a(value, each) for each in inner)
    if kind is Literal:
        return value in inner
    if kind is tuple:
        return isinstance(value, tuple) and all(_is_a(item, inner[0]) for item in value)
    if kind is not None:  # a dict of any values
        return isinstance(value, kind)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_dataclass(hint):
        return isinstance(value, hint)
    hints = get_type_hints(hint)
    return type(value) is hint and all(_is_a(getattr(value, name), hints[name]) for name in hints)


def _is_dead(process: ProcessIdentity | None) -> bool:
    return process is not None and has_ended(process)


def _alive(at: datetime, alive_seconds: float) -> Json:
    """Return the query of engines that are alive at ``at``."""
    oldest = at - timedelta(seconds=alive_seconds)
    return {"status": {"$ne": ServiceStatus.STOPPED.value}, "heartbeat": {"$gte": oldest}}


async def connect_server(run: RunConfig) -> Connection:
    """Connect to the server of ``run``, whatever its run is. Raises StoreErrors as ``open_connection``."""
    return await open_connection(replace(run, run_name=_ANY_DATABASE))
