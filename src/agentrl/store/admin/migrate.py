"""Check the schema version of a run at every opening, and migrate older runs."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pymongo import UpdateOne
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import DuplicateKeyError

from agentrl.documents.run import ADMISSION, SCHEMA, TRAINER, ImportList
from agentrl.documents.status import CallStatus, RecordStatus, TaskStatus
from agentrl.errors import SchemaVersionError, StoreError
from agentrl.store.connection import Connection, Json, Repository, database_call, insert_if_missing
from agentrl.store.names import DATA, GATE, IMPORTS, LEASE, MODEL_CALL, RECORD, RUN, SCHEMA_VERSION, TASK
from agentrl.store.schema import prepare
from agentrl.store.slots import LIVE

_PAGE = 256
"""Documents changed in one batch of a migration."""
_SUPERSEDED = {"split_1_status_1_created_at_-1", "status_1_created_at_-1", "created_at_-1"}
_STOP = "stop its processes and wait until the leases have run out (--lease_seconds)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """One step from a version to the next. ``run`` is idempotent and returns how many documents changed."""

    origin: int
    target: int
    what: str
    run: Callable[[AsyncDatabase[Json]], Awaitable[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrated:
    """The result of one migration."""

    migration: Migration
    changed: int


async def released_records(database: AsyncDatabase[Json]) -> int:
    """1 → 2: a released Record has the status ``released``, and not a failure of kind "released"."""
    result = await database.get_collection(RECORD).update_many(
        {"status": RecordStatus.FAILED.value, "failure.kind": RecordStatus.RELEASED.value},
        {"$set": {"status": RecordStatus.RELEASED.value, "failure": None}},
        bypass_document_validation=True,
    )
    return result.modified_count


async def moved_gate_and_lease(database: AsyncDatabase[Json]) -> int:
    """2 → 3: move the gate and the trainer's lease out of ``Run``, which only administrators may write.

    The functions that tasks name are listed in ``Imports``, so that samplers may still import them; a list
    that exists is kept.
    """
    moved = 0
    named = [name for field in ("scorer", "agent_name") for name in await database[TASK].distinct(field)]
    paths = sorted({name for name in named if isinstance(name, str) and ":" in name})
    if paths:
        await insert_if_missing(database[IMPORTS], ImportList(paths=tuple(paths)))
    for key, target in ((ADMISSION, GATE), (TRAINER, LEASE)):
        document = await database[RUN].find_one({"_id": key})
        if document is not None:
            await database[target].replace_one({"_id": key}, document, upsert=True)
            await database[RUN].delete_one({"_id": key})
            moved += 1
    return moved


async def span_temperatures(database: AsyncDatabase[Json]) -> int:
    """3 → 4: copy the temperature of each model call to its spans; 1 if the call has none above 0.

    Data are changed page by page in the order of ``_id``; data that have temperatures are left alone.
    """
    data, changed, last = database.get_collection(DATA), 0, ""
    waiting: Json = {"spans": {"$elemMatch": {"temperature": {"$exists": False}}}}
    while page := await data.find(
        {"_id": {"$gt": last}, **waiting}, {"record": 1, "spans": 1}, sort=[("_id", 1)], limit=_PAGE
    ).to_list():
        records = [document["record"] for document in page]
        calls = database.get_collection(MODEL_CALL).find(
            {"record": {"$in": records}}, {"record": 1, "index": 1, "sampling_params.temperature": 1}
        )
        found = {
            (call["record"], call["index"]): call.get("sampling_params", {}).get("temperature")
            async for call in calls
        }
        writes = [
            UpdateOne({"_id": item["_id"]}, {"$set": {"spans": _with_temperatures(item, found)}})
            for item in page
        ]
        result = await data.bulk_write(writes, ordered=False, bypass_document_validation=True)
        changed += result.modified_count
        last = page[-1]["_id"]
    return changed


async def superseded_indexes(database: AsyncDatabase[Json]) -> int:
    """6 → 7: drop the indexes of Records that the new ones, which end in ``_id``, replace."""
    records = database.get_collection(RECORD)
    existing = {index["name"] async for index in await records.list_indexes()}
    for name in existing & _SUPERSEDED:
        await records.drop_index(name)
    return 0


async def faulty_calls(database: AsyncDatabase[Json]) -> int:
    """8 → 9: training data name their model calls that are malformed or repeat themselves."""
    data, changed = database.get_collection(DATA), 0
    faulty = {"$in": [CallStatus.FORMAT_ERROR.value, CallStatus.REPEAT_ERROR.value]}
    pipeline: list[Json] = [
        {"$match": {"status": faulty}},
        {"$group": {"_id": "$record", "calls": {"$push": "$index"}}},
    ]
    async for group in await database.get_collection(MODEL_CALL).aggregate(pipeline, allowDiskUse=True):
        is_trained = {"$in": ["$$call", "$spans.call"]}
        trained = {"$filter": {"input": sorted(group["calls"]), "as": "call", "cond": is_trained}}
        result = await data.update_one(
            {"_id": group["_id"]}, [{"$set": {"faulty_calls": trained}}], bypass_document_validation=True
        )
        changed += result.modified_count
    return changed


async def nothing(database: AsyncDatabase[Json]) -> int:
    """Change no document: collections, validators and indexes are updated after the migrations."""
    return 0


def _with_temperatures(data: Json, found: Mapping[tuple[str, int], Any]) -> list[Json]:
    def of_call(index: int) -> float:
        value = found.get((data["record"], index))
        return float(value) if isinstance(value, (int, float)) and value > 0 else 1.0

    return [{**span, "temperature": span.get("temperature", of_call(span["call"]))} for span in data["spans"]]


MIGRATIONS: Final[tuple[Migration, ...]] = (
    Migration(
        origin=1,
        target=2,
        what="Records that were handed back are released, not failed",
        run=released_records,
    ),
    Migration(
        origin=2,
        target=3,
        what="the admission gate and the trainer's lease have collections of their own",
        run=moved_gate_and_lease,
    ),
    Migration(
        origin=3,
        target=4,
        what="spans of training data have the temperature of their model call",
        run=span_temperatures,
    ),
    Migration(
        origin=4,
        target=5,
        what="slots may wait for a score, and Outage lists what is down; no document changes",
        run=nothing,
    ),
    Migration(
        origin=5,
        target=6,
        what="Evaluation lists evaluations of policies; no document changes",
        run=nothing,
    ),
    Migration(
        origin=6,
        target=7,
        what="Label holds what people say of trajectories, and Records are read page by page; no document"
        " changes",
        run=superseded_indexes,
    ),
    Migration(
        origin=7,
        target=8,
        what="TokenStatistics holds ratios and entropies of trained tokens; no document changes",
        run=nothing,
    ),
    Migration(
        origin=8,
        target=9,
        what="training data name their malformed and repeated model calls; new documents have checksums,"
        " and labels say who wrote them",
        run=faulty_calls,
    ),
)  # fmt: skip
"""In order; each starts from the version that the one before reaches."""


def unfinished(name: str, schema: Json) -> StoreError | None:
    """Return the error for a database that an import or a renaming left, by its schema document."""
    old, new = schema.get("renaming") or (None, None)
    if old == name or (old is not None and schema.get("importing")):
        return StoreError(
            f"renaming run {old!r} to {new!r} did not finish",
            hint=f"finish it: agentrl runs rename {old} {new}",
        )
    if schema.get("importing"):
        return StoreError(
            f"the import into run {name!r} did not finish",
            hint="import again: it replaces the documents that exist",
        )
    return None


async def stored_version(database: AsyncDatabase[Json]) -> int | None:
    """Return the schema version of a database; None without a run, 1 for a run that does not store it.

    Raises StoreError after an unfinished import or renaming, which is marked beside the version.
    """
    holds_tasks = bool(await database.list_collection_names(filter={"name": TASK}))
    schema = await database.get_collection(RUN).find_one({"_id": SCHEMA})
    if (problem := unfinished(database.name, schema or {})) is not None:
        raise problem
    if schema is not None:
        return int(schema["version"])
    return 1 if holds_tasks else None


async def check_version(database: AsyncDatabase[Json]) -> int | None:
    """Return ``stored_version``. Raises SchemaVersionError if it is not this code's."""
    version = await stored_version(database)
    if version is not None and version > SCHEMA_VERSION:
        raise SchemaVersionError(
            f"run {database.name!r} has schema version {version}, and this AgentRL knows {SCHEMA_VERSION}",
            hint="use the newer AgentRL that wrote it",
        )
    if version is not None and version < SCHEMA_VERSION:
        raise SchemaVersionError(
            f"run {database.name!r} has schema version {version}, and this AgentRL needs {SCHEMA_VERSION}",
            hint=f"stop its processes, then: agentrl db migrate --run_name {database.name}",
        )
    return version


async def open_schema(database: AsyncDatabase[Json]) -> None:
    """Create the schema of a new run, or check that of an existing run and create what is missing.

    A new run gets its version before its collections, so that no process can mistake it for an old run.
    """
    if await check_version(database) is None:
        with contextlib.suppress(DuplicateKeyError):  # another process opened the run at the same moment
            await database.get_collection(RUN).insert_one({"_id": SCHEMA, "version": SCHEMA_VERSION})
    await prepare(database)


async def write_version(database: AsyncDatabase[Json], version: int) -> None:
    """Store ``version`` unless a higher one is stored. It needs the rights of an administrator."""
    await database.get_collection(RUN).update_one(
        {"_id": SCHEMA}, {"$max": {"version": version}}, upsert=True
    )


class Migrations(Repository):
    """Migrates a run to the current schema version."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._database = connection.database

    @database_call
    async def pending(self) -> tuple[Migration, ...]:
        """Return the migrations that are due. Raises StoreError if the database is newer than this code."""
        version = await stored_version(self._database)
        if version is None or version > SCHEMA_VERSION:
            await check_version(self._database)
            return ()
        return tuple(migration for migration in MIGRATIONS if migration.origin >= version)

    @database_call
    async def run(self) -> list[Migrated]:
        """Migrate the database to this code's version, then update its validators, indexes and views.

        Raises StoreError while samplers or a trainer hold leases. An interrupted migration can be repeated.
        """
        pending = await self.pending()
        if pending:
            await self._require_idle()
        done = []
        for migration in pending:
            changed = await migration.run(self._database)
            await write_version(self._database, migration.target)
            done.append(Migrated(migration=migration, changed=changed))
        await prepare(self._database)
        return done

    async def _require_idle(self) -> None:
        slots = {"$filter": {"input": "$slots", "as": "slot", "cond": LIVE}}
        pipeline: list[Json] = [
            {"$match": {"status": TaskStatus.RUNNING.value}},
            {"$group": {"_id": None, "held": {"$sum": {"$size": slots}}}},
        ]
        cursor = await self._collection(TASK).aggregate(pipeline)
        found = await cursor.to_list()
        if found and found[0]["held"]:
            raise StoreError(
                f"samplers hold {found[0]['held']} leases on run {self._database.name!r}",
                hint=_STOP,
            )
        alive: Json = {
            "_id": TRAINER,
            "owner": {"$ne": None},
            "$expr": {"$gt": ["$lease_expires_at", "$$NOW"]},
        }
        for name in (RUN, LEASE):
            if (lease := await self._collection(name).find_one(alive)) is not None:
                raise StoreError(f"trainer {lease['owner']} holds run {self._database.name!r}", hint=_STOP)
