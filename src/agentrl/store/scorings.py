"""Queue sampled trajectories for a score: claim them, hand them back, count them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pymongo import ASCENDING, ReturnDocument, UpdateOne
from pymongo.asynchronous.client_session import AsyncClientSession

from agentrl.documents.base import plain
from agentrl.documents.record import Failure
from agentrl.documents.status import SAMPLED, RecordStatus, SlotStatus, TaskStatus, values
from agentrl.documents.task import Claim, Task
from agentrl.errors import StoreError
from agentrl.store.attempts import CompletedGroups
from agentrl.store.claims import new_claims
from agentrl.store.mechanics import slots
from agentrl.store.mechanics.connection import Connection, Json, Repository, database_call
from agentrl.store.mechanics.lease import FREE, after_backoff
from agentrl.store.names import RECORD, TASK

_IS_SAMPLED: Json = {"$eq": ["$$slot.status", SlotStatus.SAMPLED.value]}


class Scorings(Repository):
    """The calls on slots that are sampled and wait for a score.

    A scorer claims such a slot as a sampler claims an open one: under a lease, fenced by its owner. The
    attempt stays the same, so nothing is sampled again. The score ends it by ``Claims.score``.
    """

    def __init__(self, connection: Connection, completed: CompletedGroups) -> None:
        super().__init__(connection)
        self._completed = completed

    @database_call
    async def claim(
        self, *, split: str, owner: str, lease_seconds: float, limit: int = 1,
        without_scorers: Collection[str] = (),
    ) -> list[Claim]:  # fmt: skip
        """Claim up to ``limit`` sampled slots of one Task, the earliest group first; empty if there is none.

        Tasks whose scorer is in ``without_scorers`` are skipped.
        """
        excluded: Json = {"scorer": {"$nin": sorted(without_scorers)}} if without_scorers else {}
        query = {
            "split": split, "status": TaskStatus.RUNNING.value, "slots.status": SlotStatus.SAMPLED.value,
            **excluded, **slots.any_slot(slots.UNSCORED),
        }  # fmt: skip
        tasks = self._collection(TASK)
        if limit < 1 or await tasks.find_one(query, {"_id": 1}) is None:
            return []
        owners = [owner] * limit
        update = slots.claim_slots(slots.UNSCORED, owners, lease_seconds, new_attempt=False)

        async def write(session: AsyncClientSession) -> list[Claim]:
            found = await tasks.find_one_and_update(
                query, update, sort=[("epoch", ASCENDING), ("order", ASCENDING)],
                return_document=ReturnDocument.AFTER, session=session,
            )  # fmt: skip
            if found is None:
                return []
            claims = new_claims(found, owners)
            await self._own_records(claims, session)
            return claims

        return await self._connection.transaction(write)

    @database_call
    async def postpone(
        self, claim: Claim, why: Failure, *, max_scorings: int, backoff_seconds: float, counts: bool = True
    ) -> SlotStatus:
        """Hand a slot back without a score; return its status: SAMPLED, or FAILED at ``max_scorings``.

        The Record stays sampled and keeps ``why``. It may be scored again after a back-off, which doubles
        with each failed attempt to score and varies randomly by ±50 %. Without ``counts``, the scorer was not
        to blame: an outage. At ``max_scorings`` the Record fails; ``agentrl db rescore`` scores it again.
        """
        tried = {"$add": [{"$ifNull": ["$$slot.scorings", 0]}, int(counts)]}
        is_last = {"$and": [counts, {"$gte": [tried, max_scorings]}]}
        fields = {
            **FREE, "scorings": tried, "not_before": after_backoff(backoff_seconds / 2, tried),
            "status": {"$cond": [is_last, SlotStatus.FAILED.value, SlotStatus.SAMPLED.value]},
        }  # fmt: skip

        async def write(session: AsyncClientSession) -> Task:
            task = await slots.update_slot(self._connection, claim, fields, session)
            await self._hand_back(claim, why, _slot_status(task, claim), session)
            return task

        task = await self._connection.transaction(write)
        self._completed.note(task.split, task.id, task.status)
        return _slot_status(task, claim)

    @database_call
    async def waiting(self, split: str) -> int:
        """Return the number of sampled trajectories that wait for a score."""
        return await count_unscored(self._connection, split)

    async def _own_records(self, claims: Sequence[Claim], session: AsyncClientSession) -> None:
        """Make the Records of ``claims`` theirs. Raises StoreError unless all of them are completed."""
        updates = [
            UpdateOne(
                {"_id": claim.record_id, "status": RecordStatus.COMPLETED.value},
                {"$set": {"owner": claim.owner}},
            )
            for claim in claims
        ]
        written = await self._collection(RECORD).bulk_write(updates, session=session)
        if written.matched_count != len(updates):
            raise StoreError(
                f"a sampled slot of Task {claims[0].task.id} has no completed Record",
                hint="list all inconsistencies: agentrl db check",
            )

    async def _hand_back(
        self, claim: Claim, why: Failure, status: SlotStatus, session: AsyncClientSession
    ) -> None:
        changes: Json = {"unscored_because": plain(why)}
        if status is SlotStatus.FAILED:
            changes |= {"status": RecordStatus.FAILED.value, "failure": plain(why)}
        else:
            changes |= {"status": RecordStatus.COMPLETED.value}
        sampled = {"_id": claim.record_id, "status": {"$in": values(SAMPLED)}}
        result = await self._collection(RECORD).update_one(sampled, {"$set": changes}, session=session)
        if result.matched_count != 1:
            raise StoreError(f"Record {claim.record_id} is not sampled, so it cannot wait for a score")


def _slot_status(task: Task, claim: Claim) -> SlotStatus:
    return next(slot.status for slot in task.slots if slot.traj_id == claim.traj_id)


async def count_unscored(connection: Connection, split: str) -> int:
    """Return the number of sampled trajectories of a split that wait for a score."""
    waits = {"$filter": {"input": "$slots", "as": "slot", "cond": _IS_SAMPLED}}
    pipeline: list[Json] = [
        {
            "$match": {
                "split": split, "status": TaskStatus.RUNNING.value,
                "slots.status": SlotStatus.SAMPLED.value,
            }
        },
        {"$group": {"_id": None, "count": {"$sum": {"$size": waits}}}},
    ]  # fmt: skip
    found = await (await connection.collection(TASK).aggregate(pipeline)).to_list()
    return int(found[0]["count"]) if found else 0
