"""Change a step's data, Records and Tasks in chunks, each idempotent and in one bounded transaction."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from pymongo import UpdateMany

from agentrl.batches import batches
from agentrl.documents.status import DataStatus
from agentrl.documents.training import PendingCommit
from agentrl.errors import StoreError
from agentrl.store.mechanics.connection import Connection, Json
from agentrl.store.names import DATA, RECORD, TASK

CHUNK = 100
"""Documents of one transaction: 50 MB if each holds 65,536 tokens."""


class StepChunk(NamedTuple):
    """The ids of the data and of the Tasks that one transaction changes."""

    data: Sequence[str]
    tasks: Sequence[str]


def chunks_of(data: Sequence[str], tasks: Sequence[str] = ()) -> list[StepChunk]:
    """Return both sequences cut into chunks of ``CHUNK`` ids; at least one chunk, which may be empty."""
    cut = zip_longest(batches(data, CHUNK), batches(tasks, CHUNK), fillvalue=())
    return [StepChunk(*ids) for ids in cut] or [StepChunk((), ())]


class NotReadyError(StoreError):
    """Some data of a planned step are not ready."""


async def mark(connection: Connection, number: int, ids: Sequence[str]) -> None:
    """Change ready data to planned for step ``number``. Raises NotReadyError if some are not ready."""
    planned = {"status": DataStatus.PLANNED.value, "planned_step": number}
    allowed: Json = {"$or": [{"status": DataStatus.READY.value}, planned]}
    result = await connection.collection(DATA).update_many(
        {"_id": {"$in": list(ids)}, **allowed}, {"$set": planned}
    )
    if result.matched_count != len(ids):
        raise NotReadyError(
            f"step {number} names {len(ids)} documents, and only {result.matched_count} of them are ready",
            hint="is a second trainer running on this run? stop it",
        )


async def train(connection: Connection, number: int, pending: PendingCommit, ids: Sequence[str]) -> None:
    """Count step ``number`` in its data and their Records; data that were not trained become ready."""
    untrained = set(pending.untrained)
    trained = [key for key in ids if key not in untrained]
    planned = {"status": DataStatus.PLANNED.value, "planned_step": number}
    await connection.collection(DATA).update_many(
        {"_id": {"$in": trained}, **planned}, _trained(number, pending)
    )
    if len(trained) < len(ids):
        await connection.collection(DATA).update_many({"_id": {"$in": list(ids)}, **planned}, _REOPENED)
    await connection.collection(RECORD).update_many(
        {"_id": {"$in": trained}, "last_trained_step": {"$ne": number}},
        {"$inc": {"trained_count": 1}, "$set": {"last_trained_step": number}},
    )  # fmt: skip


async def count_groups(connection: Connection, number: int, tasks: Sequence[str]) -> None:
    """Mark the groups of ``tasks`` as counted by the metrics of step ``number``."""
    if tasks:
        await connection.collection(TASK).update_many(
            {"_id": {"$in": list(tasks)}, "group.counted_at_step": None},
            {"$set": {"group.counted_at_step": number}},
        )  # fmt: skip


async def uncount_some(connection: Connection, after: int) -> int:
    """Clear the mark of one chunk of groups that a step above ``after`` counted; return how many."""
    counted = {"group.counted_at_step": {"$gt": after}}
    cursor = connection.collection(TASK).find(counted, {"_id": 1}, limit=CHUNK)
    ids = [task["_id"] async for task in cursor]
    if ids:
        await connection.collection(TASK).update_many(
            {"_id": {"$in": ids}}, {"$set": {"group.counted_at_step": None}}
        )
    return len(ids)


async def restore(connection: Connection, after: int, ids: Sequence[str]) -> None:
    """Restore data and their Records to their state after step ``after``."""
    later = {"$or": [{"planned_step": {"$gt": after}}, {"trained_at_steps": {"$gt": after}}]}
    chosen = {"_id": {"$in": list(ids)}}
    await connection.collection(DATA).update_many({**chosen, **later}, _restored(after))
    cursor = connection.collection(DATA).find(chosen, {"record": 1, "trained_at_steps": 1})
    records: dict[tuple[int, ...], list[str]] = {}
    async for data in cursor:
        records.setdefault(tuple(data["trained_at_steps"]), []).append(data["record"])
    updates = [
        UpdateMany(
            {"_id": {"$in": keys}},
            {"$set": {"trained_count": len(at), "last_trained_step": max(at, default=None)}},
        )
        for at, keys in records.items()
    ]
    if updates:
        await connection.collection(RECORD).bulk_write(updates)


_REOPENED: Json = {"$set": {"status": DataStatus.READY.value, "planned_step": None}}


def _trained(number: int, pending: PendingCommit) -> list[Json]:
    done = {"$gte": ["$trained_count", pending.max_trained_count]}
    return [
        {
            "$set": {
                "trained_count": {"$add": ["$trained_count", 1]},
                "trained_at_steps": {"$concatArrays": ["$trained_at_steps", [number]]},
                "planned_step": None,
                "not_before_step": number + pending.retrained_interval,
            }
        },
        {"$set": {"status": {"$cond": [done, DataStatus.TRAINED.value, DataStatus.READY.value]}}},
    ]


def _restored(step: int) -> list[Json]:
    kept = {"$filter": {"input": "$trained_at_steps", "cond": {"$lte": ["$$this", step]}}}
    quarantined = DataStatus.QUARANTINED.value
    status = {"$cond": [{"$eq": ["$status", quarantined]}, quarantined, DataStatus.READY.value]}
    return [
        {"$set": {"trained_at_steps": kept, "planned_step": None, "status": status}},
        {
            "$set": {
                "trained_count": {"$size": "$trained_at_steps"},
                "not_before_step": {"$min": ["$not_before_step", step + 1]},
            }
        },
    ]
