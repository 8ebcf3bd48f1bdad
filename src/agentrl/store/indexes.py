"""The schema of a run's database: collections with their validators, indexes and views, made once."""

from __future__ import annotations

from typing import Any

from pymongo import ASCENDING, DESCENDING, IndexModel
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import OperationFailure

from agentrl.documents.status import STANDING, values
from agentrl.scoring.difficulty import LIMIT
from agentrl.store.connection import Json
from agentrl.store.names import CALL, DATA, RECORD, SERVICE, STEP, TASK, VERSION
from agentrl.store.runs import prepare_gate
from agentrl.store.schema import VALIDATORS
from agentrl.store.slots import LEASE_DEADLINE
from agentrl.store.views import VIEWS

__all__ = ["INDEXES", "VALIDATORS", "prepare"]

_EXISTS = 48
_UP, _DOWN = ASCENDING, DESCENDING


def _index(*fields: str | tuple[str, int], unique: bool = False, where: Json | None = None) -> IndexModel:
    keys = [(field, _UP) if isinstance(field, str) else field for field in fields]
    if where is None:
        return IndexModel(keys, unique=unique)
    return IndexModel(keys, unique=unique, partialFilterExpression=where)


_LIVING_STEPS = {"status": {"$in": values(STANDING)}}

INDEXES: dict[str, list[IndexModel]] = {
    TASK: [
        _index("split", "status", "epoch", "order"),
        _index("split", "status", "slots.status", "epoch", "order"),
        _index("split", "status", LEASE_DEADLINE),
        _index("split", "epoch", "order"),
        _index("split", "admission.rank", where={"admission.rank": {"$gt": 0}}),
        _index("split", "ease", "_id", where={"ease": {"$gte": -LIMIT}}),
        _index("split", ("group.finalised_at", _DOWN), where={"begun.number": {"$gt": 0}}),
        _index("split", "status", "group.counted_at_step", "group.finalised_at"),
        _index("group.counted_at_step", where={"group.counted_at_step": {"$gt": 0}}),
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
        _index(
            "split", "status", "task", "trained_count", "not_before_step", "min_version", "max_version", "_id"
        ),
        _index("task"),
    ],
    VERSION: [_index("status", ("_id", _DOWN)), _index("status", "step", ("_id", _DOWN))],
    SERVICE: [_index("status", "heartbeat")],
    STEP: [_index("step", unique=True, where=_LIVING_STEPS), _index("status", "step")],
}


async def prepare(database: AsyncDatabase[Json]) -> None:
    """Make what is missing and bring validators up to date. Safe for any number of processes at once."""
    cursor = await database.list_collections()
    existing = {entry["name"]: entry["options"] async for entry in cursor}
    for name, validator in VALIDATORS.items():
        if name not in existing:
            await _create(database, name, validator=validator)
        elif existing[name].get("validator") != validator:
            await database.command("collMod", name, validator=validator)
        missing = await _missing_indexes(database, name) if name in INDEXES else []
        if missing:
            await database[name].create_indexes(missing)
    await prepare_gate(database)
    for name, (source, pipeline) in VIEWS.items():
        if name not in existing:
            await _create(database, name, viewOn=source, pipeline=pipeline)
        elif existing[name].get("pipeline") != pipeline:
            await database.command("collMod", name, viewOn=source, pipeline=pipeline)


async def _missing_indexes(database: AsyncDatabase[Json], collection: str) -> list[IndexModel]:
    """Those that a user without the right to make indexes need not make."""
    existing = {index["name"] async for index in await database[collection].list_indexes()}
    return [index for index in INDEXES[collection] if index.document["name"] not in existing]


async def _create(database: AsyncDatabase[Json], name: str, **options: Any) -> None:
    try:
        await database.command("create", name, **options)
    except OperationFailure as error:
        if error.code != _EXISTS:
            raise
