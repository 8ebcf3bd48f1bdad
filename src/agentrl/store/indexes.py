"""The schema of a run's database: collections with their validators, indexes and views, made once."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pymongo import ASCENDING, DESCENDING, IndexModel
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import OperationFailure

from agentrl.documents.status import (
    CallStatus,
    DataStatus,
    RecordStatus,
    ServiceStatus,
    SlotStatus,
    StepStatus,
    TaskStatus,
    VersionStatus,
)  # fmt: skip
from agentrl.store.connection import Json
from agentrl.store.names import CALL, DATA, RECORD, RUN, SERVICE, STEP, TASK, VERSION
from agentrl.store.runs import prepare_run
from agentrl.store.views import VIEWS

_EXISTS = 48
_UP, _DOWN = ASCENDING, DESCENDING


def _index(*fields: str | tuple[str, int], unique: bool = False, where: Json | None = None) -> IndexModel:
    keys = [(field, _UP) if isinstance(field, str) else field for field in fields]
    if where is None:
        return IndexModel(keys, unique=unique)
    return IndexModel(keys, unique=unique, partialFilterExpression=where)


_LIVING_STEPS = {"status": {"$in": [StepStatus.PLANNED.value, StepStatus.COMMITTED.value]}}

INDEXES: dict[str, list[IndexModel]] = {
    TASK: [
        _index("split", "status", "epoch", "order"),
        _index("split", "epoch", "order"),
        _index("split", "status", "group.finalised_at"),
    ],
    RECORD: [
        _index("task", "traj_id", "attempt"),
        _index("split", "status", ("created_at", _DOWN)),
        _index("status", ("created_at", _DOWN)),
        _index(("created_at", _DOWN)),
    ],
    CALL: [_index("record", "index", unique=True)],
    DATA: [
        _index("split", "status", "created_at", "_id", "min_version"),
        _index("split", "status", "trained_count", "task"),
        _index("task"),
    ],
    VERSION: [_index("status", ("_id", _DOWN))],
    SERVICE: [_index("status", "heartbeat")],
    STEP: [_index("step", unique=True, where=_LIVING_STEPS), _index("status", "step")],
}


def _schema(states: type[StrEnum], required: list[str], **properties: Json) -> Json:
    status = {"enum": [state.value for state in states]}
    return {
        "$jsonSchema": {
            "bsonType": "object",
            "required": ["_id", "status", *required],
            "properties": {"status": status, **properties},
        }
    }


_SLOT = {
    "bsonType": "object",
    "required": ["traj_id", "status", "attempt"],
    "properties": {
        "status": {"enum": [state.value for state in SlotStatus]},
        "attempt": {"bsonType": ["int", "long"], "minimum": 0},
        "score": {"bsonType": ["double", "null"]},
    },
}
_NUMBER_OR_NULL = {"bsonType": ["double", "int", "long", "null"]}

VALIDATORS: dict[str, Json] = {
    TASK: _schema(
        TaskStatus, ["task_id", "split", "epoch", "order", "query", "slots"],
        query={"bsonType": "string"}, slots={"bsonType": "array", "items": _SLOT},
    ),
    RECORD: _schema(
        RecordStatus, ["task", "traj_id", "attempt", "split", "query"], score=_NUMBER_OR_NULL
    ),
    CALL: _schema(CallStatus, ["record", "index", "messages", "response", "output_ids", "logprobs"]),
    DATA: _schema(DataStatus, ["record", "task", "split", "min_version", "input_ids", "nodes", "spans"]),
    VERSION: _schema(VersionStatus, ["step", "location", "files"]),
    SERVICE: _schema(ServiceStatus, ["url", "engine", "heartbeat"]),
    STEP: _schema(StepStatus, ["step", "policy_version", "data"]),
    RUN: {"$jsonSchema": {"bsonType": "object", "required": ["_id"]}},
}  # fmt: skip


async def prepare(database: AsyncDatabase[Json]) -> None:
    """Make what is missing and bring validators up to date. Safe for any number of processes at once."""
    cursor = await database.list_collections()
    existing = {entry["name"]: entry["options"] async for entry in cursor}
    for name, validator in VALIDATORS.items():
        if name not in existing:
            await _create(database, name, validator=validator)
        elif existing[name].get("validator") != validator:
            await database.command("collMod", name, validator=validator)
        if name in INDEXES:
            await database[name].create_indexes(INDEXES[name])
    await prepare_run(database)
    for name, (source, pipeline) in VIEWS.items():
        if name not in existing:
            await _create(database, name, viewOn=source, pipeline=pipeline)
        elif existing[name].get("pipeline") != pipeline:
            await database.command("collMod", name, viewOn=source, pipeline=pipeline)


async def _create(database: AsyncDatabase[Json], name: str, **options: Any) -> None:
    try:
        await database.command("create", name, **options)
    except OperationFailure as error:
        if error.code != _EXISTS:
            raise
