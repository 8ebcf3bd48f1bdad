"""What an attempt leaves behind when its slot passes on: a Record in a terminal state, always."""

from __future__ import annotations

from pymongo.asynchronous.client_session import AsyncClientSession

from agentrl.documents.base import plain
from agentrl.documents.record import Failure, Record
from agentrl.documents.status import RECORD_EDGES, RecordStatus, sources
from agentrl.documents.task import Claim
from agentrl.store.connection import Connection
from agentrl.store.names import RECORD

_UNFINISHED = sources(RECORD_EDGES, RecordStatus.RELEASED)


def record_of(claim: Claim) -> Record:
    """The Record of a claim as it begins."""
    task = claim.task
    return Record(
        id=claim.record_id, task=task.id, traj_id=claim.traj_id, attempt=claim.attempt,
        split=task.split, epoch=task.epoch, query=task.query, answer=task.answer, owner=claim.owner,
    )  # fmt: skip


async def end_record(
    connection: Connection, claim: Claim, failure: Failure | None, session: AsyncClientSession
) -> None:
    """End the Record of ``claim``: FAILED because of ``failure``, or RELEASED without one.

    Belongs into the transaction that changes the slot. An attempt that had no Record yet gets one: the
    history is whole, and its owner, should it wake up, cannot insert another.
    """
    status = RecordStatus.RELEASED if failure is None else RecordStatus.FAILED
    changes = {"status": status.value, "failure": plain(failure)}
    records = connection.collection(RECORD)
    ended = await records.update_one(
        {"_id": claim.record_id, "status": {"$in": _UNFINISHED}}, {"$set": changes}, session=session
    )
    if ended.matched_count == 0 and await records.find_one(
        {"_id": claim.record_id}, {"_id": 1}, session=session
    ) is None:  # fmt: skip
        await records.insert_one(record_of(claim).to_document() | changes, session=session)
