"""What an attempt leaves behind when its slot passes on: a Record in a terminal state, always."""

from __future__ import annotations

from collections.abc import Sequence

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
    """End the Record of one claim; see ``end_records``."""
    await end_records(connection, [claim], failure, session)


async def end_records(
    connection: Connection, claims: Sequence[Claim], failure: Failure | None, session: AsyncClientSession
) -> None:
    """End the Records of ``claims``: FAILED because of ``failure``, or RELEASED without one.

    Belongs into the transaction that changes the slots. An attempt that had no Record yet gets one: the
    history is whole, and its owner, should it wake up, cannot insert another.
    """
    status = RecordStatus.RELEASED if failure is None else RecordStatus.FAILED
    changes = {"status": status.value, "failure": plain(failure)}
    records = connection.collection(RECORD)
    ids = [claim.record_id for claim in claims]
    ended = await records.update_many(
        {"_id": {"$in": ids}, "status": {"$in": _UNFINISHED}}, {"$set": changes}, session=session
    )
    if ended.matched_count == len(claims):
        return
    there = {
        record["_id"]
        for record in await records.find({"_id": {"$in": ids}}, {"_id": 1}, session=session).to_list()
    }
    missing = [claim for claim in claims if claim.record_id not in there]
    if missing:
        await records.insert_many(
            [record_of(claim).to_document() | changes for claim in missing], session=session
        )
