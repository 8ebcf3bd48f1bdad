"""A finalized group taken up again while nothing of it is trained: what rescoring and reopening share."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from pymongo.asynchronous.client_session import AsyncClientSession

from agentrl.documents.record import Record
from agentrl.documents.status import DataStatus
from agentrl.documents.training import DBRecordData
from agentrl.store.blobs import Blobs
from agentrl.store.connection import Connection
from agentrl.store.names import DATA, RECORD


class Blocker(StrEnum):
    """Why a finalized group stays as it is."""

    TRAINED = "trained"  # a step has trained, or is about to train, some of its data
    PRUNED = "pruned"  # model calls of its scored trajectories have been deleted
    NO_RULES = "no rules"  # it does not say by which rules it was decided


_CONSUMED = [DataStatus.PLANNED.value, DataStatus.TRAINED.value]


async def blocker(
    connection: Connection, task_id: str, session: AsyncClientSession | None = None
) -> Blocker | None:
    """What forbids to change the group; None where nothing does."""
    consumed = {"$or": [{"status": {"$in": _CONSUMED}}, {"trained_count": {"$gt": 0}}]}
    data = connection.collection(DATA)
    if await data.find_one({"task": task_id, **consumed}, {"_id": 1}, session=session):
        return Blocker.TRAINED
    pruned = {"task": task_id, "score": {"$ne": None}, "pruned_at": {"$ne": None}}
    if await connection.collection(RECORD).find_one(pruned, {"_id": 1}, session=session):
        return Blocker.PRUNED
    return None


async def drop_data(connection: Connection, task_id: str, session: AsyncClientSession) -> int:
    """Delete the group's training data with their files; returns how many documents.

    A step that is planned at the same moment writes the same documents: one of the two starts over.
    """
    data = connection.collection(DATA)
    ids = [item["_id"] async for item in data.find({"task": task_id}, {"_id": 1}, session=session)]
    if ids:
        await data.delete_many({"_id": {"$in": ids}}, session=session)
        await Blobs(connection, DATA).delete(ids, session)
    return len(ids)


async def insert_data(
    connection: Connection, items: Sequence[DBRecordData], session: AsyncClientSession
) -> None:
    """Insert training data, large arrays as files, all in the transaction."""
    blobs = Blobs(connection, DATA)
    for item in items:
        document = await blobs.rewrite(item.to_document(), session)
        await connection.collection(DATA).insert_one(document, session=session)


async def read_records(
    connection: Connection, task_id: str, session: AsyncClientSession | None = None
) -> list[Record]:
    """Every attempt at every trajectory of a Task, by trajectory and attempt."""
    cursor = connection.collection(RECORD).find(
        {"task": task_id}, sort=[("traj_id", 1), ("attempt", 1)], session=session
    )
    return [Record.from_document(document) async for document in cursor]
