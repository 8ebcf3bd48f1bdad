"""Scores: attempts that end with one. The slot and its Record change in one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pymongo import ReturnDocument, UpdateOne
from pymongo.asynchronous.client_session import AsyncClientSession

from agentrl.documents.base import plain
from agentrl.documents.status import RECORD_EDGES, RecordStatus, SlotStatus, TaskStatus, sources
from agentrl.documents.task import Claim
from agentrl.errors import LeaseLostError, StoreError
from agentrl.store import slots
from agentrl.store.completed import CompletedGroups
from agentrl.store.connection import Connection, Json, Repository, database_call
from agentrl.store.leases import lease_lost
from agentrl.store.names import RECORD, TASK
from agentrl.store.write_coalescer import WriteCoalescer


@dataclass(frozen=True, slots=True)
class _Score:
    """A score for the claim's attempt, as two updates."""

    claim: Claim
    score: float
    details: Json

    @property
    def slot(self) -> UpdateOne:
        """The slot that the claim holds is scored."""
        return UpdateOne(slots.held(self.claim), self.slot_update)

    @property
    def slot_update(self) -> list[Json]:
        """The update of the Task."""
        fields = {
            "status": SlotStatus.SCORED.value, "score": self.score, "lease_expires_at": None,
            "owner": slots.literal(self.claim.owner),
        }  # fmt: skip
        return slots.change_slot(self.claim, fields)

    @property
    def record(self) -> UpdateOne:
        """The Record that is being scored has its score."""
        query = {
            "_id": self.claim.record_id,
            "status": {"$in": sources(RECORD_EDGES, RecordStatus.SCORED)},
        }
        changes = {
            "$set": {
                "status": RecordStatus.SCORED.value, "score": self.score, "score_details": self.details,
            },
            "$currentDate": {"scored_at": True},
        }  # fmt: skip
        return UpdateOne(query, changes)


class Scores(Repository):
    """The call that ends an attempt well. Scores that come at the same time share a transaction."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._scoring = WriteCoalescer(self._score_together, self._score)
        self.completed = CompletedGroups()
        """The groups that scores and failures of this process completed."""

    @database_call
    async def score(self, claim: Claim, score: float, details: dict[str, Any] | None = None) -> TaskStatus:
        """End the attempt with a score; returns the Task's status (WAITING: the group is complete).

        Repeating the call after it succeeded changes nothing.
        """
        return await self._scoring.write(_Score(claim, float(score), plain(details or {})))

    async def _score(self, score: _Score) -> TaskStatus:
        claim = score.claim

        async def write(session: AsyncClientSession) -> TaskStatus:
            task = await self._collection(TASK).find_one_and_update(
                slots.held(claim), score.slot_update, {"status": 1}, session=session,
                return_document=ReturnDocument.AFTER,
            )  # fmt: skip
            if task is None:
                raise lease_lost(claim)
            result = await self._collection(RECORD).bulk_write([score.record], session=session)
            if result.matched_count != 1:
                raise StoreError(f"Record {claim.record_id} is not being scored: it takes no score")
            return TaskStatus(task["status"])

        try:
            status = await self._connection.transaction(write)
        except LeaseLostError:
            scored = await self._scored_already(claim)
            if scored is None:
                raise
            status = scored
        self.completed.note(claim.task.split, claim.task.id, status)
        return status

    async def _score_together(self, scores: Sequence[_Score]) -> list[TaskStatus] | None:
        slots_scored, records_scored = [score.slot for score in scores], [score.record for score in scores]
        ids = {score.claim.task.id for score in scores}

        async def write(session: AsyncClientSession) -> dict[str, TaskStatus] | None:
            for collection, updates in ((TASK, slots_scored), (RECORD, records_scored)):
                result = await self._collection(collection).bulk_write(updates, session=session)
                if result.matched_count < len(updates):
                    await session.abort_transaction()
                    return None
            cursor = self._collection(TASK).find({"_id": {"$in": list(ids)}}, {"status": 1}, session=session)
            return {task["_id"]: TaskStatus(task["status"]) for task in await cursor.to_list()}

        statuses = await self._connection.transaction(write)
        if statuses is None:
            return None
        for task in {score.claim.task.id: score.claim.task for score in scores}.values():
            self.completed.note(task.split, task.id, statuses[task.id])
        last = {score.claim.task.id: place for place, score in enumerate(scores)}
        return [
            statuses[task] if place == last[task] else TaskStatus.RUNNING
            for place, task in enumerate(score.claim.task.id for score in scores)
        ]

    async def _scored_already(self, claim: Claim) -> TaskStatus | None:
        slot = {
            "traj_id": claim.traj_id, "attempt": claim.attempt, "owner": claim.owner,
            "status": SlotStatus.SCORED.value,
        }  # fmt: skip
        task = await self._collection(TASK).find_one(
            {"_id": claim.task.id, "slots": {"$elemMatch": slot}}, {"status": 1}
        )
        return None if task is None else TaskStatus(task["status"])
