"""Write new scores of Records, and decide their groups anew while nothing of them is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pymongo import UpdateOne

from agentrl.documents.base import plain
from agentrl.documents.record import ROLE_REWARDS, TURN_REWARDS, Record
from agentrl.documents.status import RecordStatus, SlotStatus, TaskStatus, values
from agentrl.documents.task import Task
from agentrl.errors import StoreError
from agentrl.store.admin.regroup import (
    Blocker,
    DecideTask,
    GroupChange,
    decide_anew,
    decided,
    regroup,
    retry_changed,
    selection,
)
from agentrl.store.groups import GroupOutcome, StoredGroup
from agentrl.store.mechanics.blobs import seal
from agentrl.store.mechanics.connection import Json, Repository, database_call
from agentrl.store.mechanics.lease import literal
from agentrl.store.mechanics.slots import set_slots
from agentrl.store.model_calls import read_model_calls
from agentrl.store.names import RECORD, TASK
from agentrl.store.records import read_records

_SETTLED = (RecordStatus.READY, RecordStatus.ABANDONED)
SCORED = (RecordStatus.SCORED, *_SETTLED)
"""The statuses of a Record with a score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewScore:
    """A new score of a Record that has one."""

    score: float
    details: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """The result of rescoring one group.

    ``kept_because``: why the Records keep their scores; the new ones are stored beside them in ``rescored``.
    ``decided_again``: the group was finalized, and its advantages and training data are new.
    """

    changed: int
    decided_again: bool = False
    kept_because: Blocker | None = None


class Rescoring(Repository):
    """Reads the Records to score again, and writes their new scores."""

    @database_call
    async def tasks(
        self, *, split: str | None = None, tasks: Sequence[str] = (), records: Sequence[str] = (),
        statuses: Sequence[RecordStatus] = SCORED,
    ) -> list[str]:  # fmt: skip
        """Return the ``_id`` of the Tasks with Records to score; without a filter, of all."""
        query = _query(split, tasks, records, statuses)
        return sorted(await self._collection(RECORD).distinct("task", query))

    @database_call
    async def group(
        self, task_id: str, *, records: Sequence[str] = (), statuses: Sequence[RecordStatus] = SCORED
    ) -> StoredGroup:
        """Return the Records of one Task to score, with their model calls unless they were pruned."""
        document = await self._collection(TASK).find_one({"_id": task_id})
        if document is None:
            raise StoreError(f"there is no Task {task_id}")
        chosen = await self._all(Record, RECORD, _query(None, [task_id], records, statuses))
        calls = await read_model_calls(self._connection, [record.id for record in chosen])
        return StoredGroup(task=Task.from_document(document), records=chosen, calls=calls)

    @database_call
    async def apply(
        self, task_id: str, scores: Mapping[str, NewScore], decide_by: DecideTask, *, dry_run: bool = False
    ) -> Rescored:
        """Write the new scores of one group in one transaction.

        A group that is not finalized is decided by them later. A finalized group is decided anew at once if
        nothing of it has been trained; otherwise the new scores are stored beside the old ones.
        """
        return await retry_changed(
            lambda: self._apply(task_id, scores, decide_by, dry_run), task_id, doing="rescored",
            hint="rescore it when its samplers are done",
        )  # fmt: skip

    async def _apply(
        self, task_id: str, scores: Mapping[str, NewScore], decide_by: DecideTask, dry_run: bool
    ) -> Rescored:
        document = await self._collection(TASK).find_one({"_id": task_id})
        if document is None:
            raise StoreError(f"there is no Task {task_id}")
        records = await read_records(self._connection, task_id)
        renewed = [_with_score(record, scores.get(record.id)) for record in records]
        earlier = [old for old, new in zip(records, renewed, strict=True) if old is not new]
        if not earlier:
            return Rescored(changed=0)
        if document["status"] != TaskStatus.COMPLETED.value:
            if not dry_run:
                await self._write(document, earlier, scores, None)
            return Rescored(changed=len(earlier))
        outcome = await decide_anew(self._connection, document, renewed, decide_by)
        if isinstance(outcome, Blocker):
            if not dry_run:
                await self._note(earlier, scores)
            return Rescored(changed=len(earlier), kept_because=outcome)
        if not dry_run:
            await self._write(document, earlier, scores, outcome)
        return Rescored(changed=len(earlier), decided_again=True)

    async def _write(
        self, task: Json, earlier: Sequence[Record], scores: Mapping[str, NewScore],
        outcome: GroupOutcome | None,
    ) -> None:  # fmt: skip
        """Write the new scores, and the group as ``outcome`` decides it."""
        change = GroupChange(
            task=_new_task(earlier, scores, task, outcome),
            records=[_new_record(record, scores[record.id]) for record in earlier],
            outcome=outcome,
        )
        await self._connection.transaction(lambda: regroup(self._connection, task, change))

    async def _note(self, records: Sequence[Record], scores: Mapping[str, NewScore]) -> None:
        notes = []
        for record in records:
            new = scores[record.id]
            stored = literal({"score": new.score, "details": plain(new.details)})
            note: list[Json] = [{"$set": {"rescored": stored}}, {"$set": {"rescored.at": "$$NOW"}}]
            notes.append(UpdateOne({"_id": record.id}, note))
        await self._collection(RECORD).bulk_write(notes)


def _query(
    split: str | None, tasks: Sequence[str], records: Sequence[str], statuses: Sequence[RecordStatus]
) -> Json:
    scored: Json = {"status": {"$in": values(statuses)}, "score": {"$ne": None}}
    return scored | selection(split, tasks, records)


def _with_score(record: Record, new: NewScore | None) -> Record:
    """Return the Record with its new score; the Record itself if nothing of the score changed."""
    if new is None or record.score is None:
        return record
    compared = ("scorer", TURN_REWARDS, ROLE_REWARDS)
    is_same = all(record.score_details.get(key) == new.details.get(key) for key in compared)
    if record.score == new.score and is_same:
        return record
    return dataclasses.replace(record, score=new.score, score_details=new.details)


def _new_record(record: Record, new: NewScore) -> UpdateOne:
    earlier = {"score": record.score, "details": record.score_details, "scored_at": record.scored_at}
    scored = {"score": new.score, "score_details": plain(new.details)}
    return UpdateOne(
        {"_id": record.id, "status": record.status.value, "score": record.score},
        {
            "$set": {**scored, **seal(RECORD, "score", scored)},
            "$push": {"score_history": plain(earlier)},
            "$currentDate": {"scored_at": True},
        },
    )


def _new_task(
    earlier: Sequence[Record], scores: Mapping[str, NewScore], task: Json, outcome: GroupOutcome | None
) -> list[Json]:
    branches = [
        {"case": {"$eq": ["$$slot.record_id", literal(record.id)]}, "then": scores[record.id].score}
        for record in earlier
    ]
    score = {"$switch": {"branches": branches, "default": "$$slot.score"}}
    is_scored = {"$eq": ["$$slot.status", SlotStatus.SCORED.value]}
    scored = set_slots(is_scored, {"score": score})
    if outcome is None:
        return [scored, {"$set": {"updated_at": "$$NOW"}}]
    return [scored, {"$set": decided(task, outcome)}, {"$set": {"group.rescored_at": "$$NOW"}}]
