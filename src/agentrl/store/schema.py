"""Create the schema of a run's database: a validator for each collection, indexes and views.

A database of another schema version is refused. Validators are generated from the document classes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Awaitable, Iterator
from datetime import datetime
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pymongo import ASCENDING, DESCENDING, IndexModel
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import DuplicateKeyError, OperationFailure

from agentrl.base.concurrency import task_group
from agentrl.base.registry import Registry
from agentrl.documents.document import Document, Root, now
from agentrl.documents.images import Image
from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.record import Column, GatewayCall, GatewaySession, Label, Record
from agentrl.documents.run import (
    CHILD_PREFIX,
    FLAGS,
    IDENTITY,
    PARENT,
    REMARKS,
    SCHEMA,
    TRAIN_ROLE,
    TURN,
    EpochOpening,
    Evaluation,
    Gate,
    ImportList,
    InferenceService,
    JudgeCheck,
    Outage,
    PolicyVersion,
    Relative,
    Retraction,
    RunFact,
    RunSettings,
    SamplerProcess,
    Tombstone,
    TrainerLease,
    flags_key,
)
from agentrl.documents.run import SETTINGS as CONCERNS
from agentrl.documents.status import ACTIVE_STEPS, values
from agentrl.documents.task import Task
from agentrl.documents.training import DBRecordData, TokenStatistics, TrainStep
from agentrl.errors import SchemaVersionError, StoreError
from agentrl.scoring.evaluation import LIMIT
from agentrl.scoring.groups import FAILED
from agentrl.store.costs import ENDED, SUMMED
from agentrl.store.epochs import ANY_LEVEL, LEVEL, OF_SOURCES
from agentrl.store.mechanics import connection
from agentrl.store.mechanics.connection import Json, insert_if_missing
from agentrl.store.mechanics.lease import LEASE_DEADLINE

logger = logging.getLogger(__name__)

_NOT_ALLOWED = 13
_COLLECTION_EXISTS = 48
_LANES = 4
_UP, _DOWN = ASCENDING, DESCENDING

_PLAIN: dict[Any, tuple[str, list[str]]] = {
    str: ("text", ["string"]),
    bool: ("true or false", ["bool"]),
    int: ("a whole number", ["int", "long"]),
    float: ("a number", ["double", "int", "long"]),
    datetime: ("a date", ["date"]),
    bytes: ("packed bytes", ["binData"]),
}


def _schema_of(hint: Any, name: str) -> tuple[Json, str]:
    """Return the schema of a type hint, and its description for error messages."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        kinds = [_schema_of(kind, name) for kind in get_args(hint) if kind is not NoneType]
        if len(kinds) == 1:
            return _optional(*kinds[0])
        return {"anyOf": [schema for schema, _ in kinds]}, " or ".join(what for _, what in kinds)
    if origin is tuple:
        items, what = _schema_of(get_args(hint)[0], name)
        return {"bsonType": "array", "items": items}, f"a list, each: {what}"
    if origin is dict:
        return {"bsonType": "object"}, "an object"
    if origin is Literal:
        return {"enum": list(get_args(hint))}, f"one of {', '.join(get_args(hint))}"
    if hint in _PLAIN:
        what, types = _PLAIN[hint]
        return {"bsonType": types}, what
    if isinstance(hint, type) and issubclass(hint, Enum):
        states = [member.value for member in hint]
        return {"enum": states}, f"one of {', '.join(states)}"
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _object(hint), f"a {hint.__name__}"
    return {}, "anything"


def _optional(schema: Json, what: str) -> tuple[Json, str]:
    if "enum" in schema:
        # Add null as a value: an enum admits only what it lists, whatever the type beside it.
        return {**schema, "enum": [*schema["enum"], None]}, f"{what}, or null"
    if "bsonType" not in schema:
        return schema, what
    types = [schema["bsonType"]] if isinstance(schema["bsonType"], str) else schema["bsonType"]
    return {**schema, "bsonType": [*types, "null"]}, f"{what}, or null"


def _object(cls: type, **more: Json) -> Json:
    """Return the schema of a document that has the fields of ``cls`` and ``more``, and no others."""
    hints = get_type_hints(cls)
    properties: Json = {}
    required = []
    for field in dataclasses.fields(cls):
        stored = "_id" if field.name == "id" and issubclass(cls, Root) else field.name
        title = f"{cls.__name__}.{stored}"
        schema, what = _schema_of(hints[field.name], title)
        properties[stored] = {**schema, "title": title, "description": f"{title} is {what}"}
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            required.append(stored)
    return {
        # Require the id at least: MongoDB refuses a schema with an empty list of required fields.
        "bsonType": "object", "title": cls.__name__, "required": required or ["_id"],
        "additionalProperties": False, "properties": {**properties, **more},
    }  # fmt: skip


def _extra(title: str, description: str, **schema: Any) -> Json:
    return {"title": title, "description": f"{title} is {description}", **schema}


def _with_files(cls: type[Document]) -> Json:
    """Return the schema of a document whose large fields may lie in GridFS."""
    files = _extra(
        f"{cls.__name__}.packed_in_gridfs", "the fields that lie in GridFS, with the digests of their files",
        bsonType="array", items={"bsonType": "string"},
    )  # fmt: skip
    return _object(cls, packed_in_gridfs=files)


_LAST_CLAIM = _extra(
    "Task.last_claim",
    "the slots that were claimed last, and who held them before",
    bsonType="array",
    items={
        "bsonType": "object", "required": ["traj_id"], "additionalProperties": False,
        "properties": {
            "traj_id": {"bsonType": ["int", "long"]}, "previous_owner": {"bsonType": ["string", "null"]},
        },
    },
)  # fmt: skip
_LEASE_DEADLINE = _extra(
    f"Task.{LEASE_DEADLINE}", "when the first lease of its slots runs out", bsonType=["date", "null"]
)
_RUN = _object(Relative)["properties"] | {
    "_id": _extra(
        "Run._id", f"one of {SCHEMA}, {REMARKS}, {PARENT}, {CHILD_PREFIX}RUN",
        bsonType="string", pattern=f"^({SCHEMA}|{REMARKS}|{PARENT}|{CHILD_PREFIX}.+)$",
    ),
    "version": _extra(
        "Run.version", "the version of the database's shape", bsonType=["int", "long"], minimum=1
    ),
}  # fmt: skip
_SETTINGS_IDS = (*CONCERNS, IDENTITY, *map(flags_key, FLAGS), f"{flags_key(TRAIN_ROLE)}@[1-9][0-9]*")
_SETTINGS_ID = _extra(
    "Settings._id", f"a concern, {IDENTITY}, flags/ROLE, or {flags_key(TRAIN_ROLE)}@ATTEMPT",
    bsonType="string", pattern=f"^({'|'.join(_SETTINGS_IDS)})$",
)  # fmt: skip

VALIDATORS: dict[str, Json] = {
    name: {"$jsonSchema": schema}
    for name, schema in {
        connection.TASK: _object(Task, last_claim=_LAST_CLAIM, **{LEASE_DEADLINE: _LEASE_DEADLINE}),
        connection.RECORD: _object(Record),
        connection.MODEL_CALL: _with_files(DispatchedSamplingTask),
        connection.DATA: _with_files(DBRecordData),
        connection.VERSION: _object(PolicyVersion),
        connection.SERVICE: _object(InferenceService),
        connection.STEP: _object(TrainStep),
        connection.RUN: _object(RunFact, **_RUN),
        connection.SETTINGS: _object(RunSettings, _id=_SETTINGS_ID),
        connection.GATE: _object(Gate),
        connection.IMPORTS: _object(ImportList),
        connection.EPOCH: _object(EpochOpening),
        connection.LEASE: _object(TrainerLease),
        connection.SAMPLER: _object(SamplerProcess),
        connection.OUTAGE: _object(Outage),
        connection.EVALUATION: _object(Evaluation),
        connection.JUDGE_CHECK: _object(JudgeCheck),
        connection.IMAGE: _with_files(Image),
        connection.GATEWAY_SESSION: _object(GatewaySession),
        connection.GATEWAY_CALL: _object(GatewayCall),
        connection.LABEL: _object(Label),
        connection.TOKEN_STATISTICS: _object(TokenStatistics),
        connection.COLUMN: _with_files(Column),
        connection.RETRACTION: _object(Retraction),
        connection.TOMBSTONE: _object(Tombstone),
    }.items()
}
"""Every collection → its validator. Fields without a default are required; unknown fields are refused."""


def _index(*fields: str | tuple[str, int], unique: bool = False, where: Json | None = None) -> IndexModel:
    keys = [(field, _UP) if isinstance(field, str) else field for field in fields]
    if where is None:
        return IndexModel(keys, unique=unique)
    return IndexModel(keys, unique=unique, partialFilterExpression=where)


_ACTIVE_STEPS = {"status": {"$in": values(ACTIVE_STEPS)}}

INDEXES: dict[str, list[IndexModel]] = {
    connection.TASK: [
        _index("split", "status", "epoch", "order"),
        # Claims sort by it. Groups without a number are equal in it, and follow epoch and order.
        _index("split", "status", "slots.status", "begun.number", "epoch", "order"),
        _index("split", "status", LEASE_DEADLINE),
        _index("split", "epoch", "order"),
        _index("split", "admission.rank", where={"admission.rank": {"$gt": 0}}),
        _index("split", "ease", "_id", where={"ease": {"$gte": -LIMIT}}),
        _index("split", ("group.finalized_at", _DOWN), where={"begun.number": {"$gt": 0}}),
        _index("split", "status", LEVEL, "epoch", "order", where={LEVEL: ANY_LEVEL}),
        _index("split", LEVEL, ("group.finalized_at", _DOWN), where={LEVEL: ANY_LEVEL}),
        _index("split", "status", "source", "epoch", "order", where=OF_SOURCES),
        _index("split", "source", ("group.finalized_at", _DOWN), where=OF_SOURCES),
        _index("split", "status", "group.counted_at_step", "group.finalized_at"),
        # Index only what has images: a full index would hold a null for each task without any.
        _index("images.sha256", where={"images.sha256": {"$gt": ""}}),
        _index("group.counted_at_step", where={"group.counted_at_step": {"$gt": 0}}),
        _index("group.kept_as_trained", where={"group.kept_as_trained": True}),
        _index("group.outcome", where={"group.outcome": FAILED}),
        _index("split", "status", "group.trained", where={"group.trained": {"$gt": 0}}),
    ],
    connection.RECORD: [
        _index("task", "traj_id", "attempt"),
        _index("split", "status", ("created_at", _DOWN), ("_id", _DOWN), "trained_count"),
        _index("status", ("created_at", _DOWN), ("_id", _DOWN)),
        _index(("created_at", _DOWN), ("_id", _DOWN)),
        _index(("score", _DOWN), ("_id", _DOWN)),
        _index("split", "min_version", where={"min_version": {"$gte": 0}}),
        # Index only what has two owners: a screen sums up those that went on in another process.
        _index("owners.1.attempt", where={"owners.1.attempt": {"$gt": 0}}),
        _index("answer_seen_in", "_id", where={"answer_seen_in": {"$gt": ""}}),
        # Index only what no model call changes any more: else each call would write the index.
        _index("status", *SUMMED, where={"status": {"$in": ENDED}}),
    ],
    connection.MODEL_CALL: [
        _index("record", "index", unique=True),
        _index("images.sha256", where={"images.sha256": {"$gt": ""}}),
    ],
    connection.IMAGE: [_index("used_at")],
    connection.DATA: [
        _index("images.sha256", where={"images.sha256": {"$gt": ""}}),
        _index("split", "status", "created_at", "_id", "min_version"),
        _index("split", "status", "trained_count", "task"),
        _index(
            "split", "status", "task", "trained_count", "not_before_step", "min_version", "max_version", "_id"
        ),
        _index("task"),
    ],
    connection.VERSION: [_index("status", ("_id", _DOWN)), _index("status", "step", ("_id", _DOWN))],
    connection.SERVICE: [_index("status", "heartbeat")],
    connection.SAMPLER: [_index("ended_at", "heartbeat")],
    connection.OUTAGE: [_index("ended_at", "seen_at")],
    connection.EVALUATION: [_index("status", "seen_at"), _index("version")],
    connection.LABEL: [_index("record"), _index("label")],
    connection.TOKEN_STATISTICS: [_index("record")],
    connection.COLUMN: [
        _index("record", "name"),
        _index("status", "name", "created_at", "_id"),
        _index("task"),
    ],
    connection.TOMBSTONE: [_index("task", "deleted_at"), _index("deleted_at")],
    connection.GATEWAY_SESSION: [_index("record")],
    connection.GATEWAY_CALL: [
        _index("record", "digest", "number", unique=True),
        _index("record", "after"),
        _index("record", "answer_id"),
    ],
    connection.STEP: [
        _index("step", unique=True, where=_ACTIVE_STEPS),
        _index("status", "step"),
        _index("inherited", "metrics.gpu_seconds", where={"metrics.gpu_seconds": {"$gt": 0}}),
    ],
}


def _view(found: object) -> tuple[str, list[Json]]:
    match found:
        case (str(source), list(pipeline)):
            return source, pipeline
    raise TypeError("it is not a pair of a collection's name and a list of stages")


VIEWS: Registry[tuple[str, list[Json]]] = Registry(
    "audit view", group="agentrl.views", built_in=("agentrl.screens.views",), convert=_view
)
"""Every MongoDB view → (collection, pipeline). Compass shows them; no process needs one."""


def other_version(what: str, version: object) -> SchemaVersionError:
    """Return the error for ``what``, a run or an export, of another schema version; None: it has none."""
    return SchemaVersionError(
        f"{what} has schema version {version}, and this AgentRL reads version"
        f" {connection.SCHEMA_VERSION} only",
        hint="start a new run, or export it with the AgentRL that wrote it",
    )


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
            f"run {name!r} is not whole: the import or the fork that makes it did not finish",
            hint=f"repeat that command: it begins anew; or delete it: agentrl runs rm {name}",
        )
    return None


async def holds_run(database: AsyncDatabase[Json]) -> Json | None:
    """Return the schema document of the run of this schema version in the database; None without a run.

    Raises SchemaVersionError for a run of another one, and StoreError after an unfinished import or renaming,
    which is marked beside the version.
    """
    holds_tasks = bool(await database.list_collection_names(filter={"name": connection.TASK}))
    schema = await database.get_collection(connection.RUN).find_one({"_id": SCHEMA})
    if (problem := unfinished(database.name, schema or {})) is not None:
        raise problem
    version = None if schema is None else schema["version"]
    if version != connection.SCHEMA_VERSION and (holds_tasks or schema is not None):
        raise other_version(f"run {database.name!r}", version)
    return schema


def new_schema() -> Json:
    """Return what the schema document of a new run holds."""
    return {"version": connection.SCHEMA_VERSION, "made_at": now()}


async def open_schema(database: AsyncDatabase[Json]) -> Json:
    """Create the schema of a new run, or check that of an existing run and create what is missing.

    A new run gets its version before its collections, so that no process can mistake it for another's.
    Returns its schema document.
    """
    schema = await holds_run(database)
    while schema is None:
        with contextlib.suppress(DuplicateKeyError):  # another process opened the run at the same moment
            await database.get_collection(connection.RUN).insert_one({"_id": SCHEMA, **new_schema()})
        schema = await holds_run(database)
    await prepare(database)
    return schema


async def prepare(database: AsyncDatabase[Json]) -> None:
    """Create what is missing and update validators and views. Any number of processes may call it at once."""
    cursor = await database.list_collections()
    existing = {entry["name"]: entry["options"] async for entry in cursor}

    async def collection(name: str, validator: Json) -> None:
        missing = INDEXES.get(name, [])
        if name not in existing:
            await _create(database, name, validator=validator)
        else:
            # Compare first: collMod locks the collection, and each process that starts would lock it.
            if existing[name].get("validator") != validator:
                await _update(database, name, validator=validator)
            missing = await _missing_indexes(database, name) if missing else []
        if missing:
            await database[name].create_indexes(missing)

    async def view(name: str, source: str, pipeline: list[Json]) -> None:
        if name not in existing:
            await _create(database, name, viewOn=source, pipeline=pipeline)
        elif existing[name].get("pipeline") != pipeline:
            await _update(database, name, viewOn=source, pipeline=pipeline)

    await _side_by_side(collection(*item) for item in VALIDATORS.items())
    for gate in (Gate(), Gate(id=TURN)):
        await insert_if_missing(database[connection.GATE], gate)
    await _side_by_side(view(name, *found) for name, found in VIEWS.known().items())


async def _side_by_side(jobs: Iterator[Awaitable[None]]) -> None:
    """Await all ``jobs``, several at once: each waits for the server's journal."""

    async def some() -> None:
        for job in jobs:
            await job

    async with task_group() as lanes:
        for _ in range(_LANES):
            lanes.create_task(some())


async def _update(database: AsyncDatabase[Json], name: str, **options: Any) -> None:
    """Change a validator or a view; for a user who may not, it stays as an administrator left it."""
    try:
        await database.command("collMod", name, **options)
    except OperationFailure as error:
        if error.code != _NOT_ALLOWED:
            raise
        why = "%s in %r has another release's schema: an administrator renews it by agentrl db users --create"
        logger.warning(why, name, database.name)


async def _missing_indexes(database: AsyncDatabase[Json], collection: str) -> list[IndexModel]:
    """Return the missing indexes: a user who may not create indexes can open a complete database."""
    existing = {index["name"] async for index in await database[collection].list_indexes()}
    return [index for index in INDEXES[collection] if index.document["name"] not in existing]


async def _create(database: AsyncDatabase[Json], name: str, **options: Any) -> None:
    try:
        await database.command("create", name, **options)
    except OperationFailure as error:
        if error.code != _COLLECTION_EXISTS:
            raise
