"""Queue trajectories again that were sampled and could not be scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pymongo import ASCENDING, UpdateOne
from pymongo.asynchronous.client_session import AsyncClientSession

from agentrl.documents.status import RecordStatus, SlotStatus
from agentrl.store.admin.regroup import (
    Blocker,
    GroupBlockedError,
    GroupChange,
    find_blocker,
    regroup,
    selection,
)
from agentrl.store.mechanics import slots
from agentrl.store.mechanics.connection import Json, Repository, database_call
from agentrl.store.names import RECORD, TASK

_SCORER = "scorer"


@dataclass(slots=True, kw_only=True)
class Requeued:
    """Counts of the trajectories that wait for a score again."""

    by_split: dict[str, int] = field(default_factory=dict)
    left: dict[Blocker, int] = field(default_factory=dict)
    """Groups left as they are, by reason."""


class Requeueing(Repository):
    """Moves failed Records whose conversation is complete back into the queue for a score."""

    @database_call
    async def requeue(
        self, *, split: str | None = None, tasks: Sequence[str] = (), records: Sequence[str] = (),
        dry_run: bool = False,
    ) -> Requeued:  # fmt: skip
        """Queue the Records that failed for good in scoring, with all attempts to score them.

        One transaction per group. A finalized group is taken back to running, unless a step has planned or
        trained some of its data.
        """
        query: Json = {
            "status": RecordStatus.FAILED.value, "failure.kind": _SCORER, "completed_at": {"$ne": None},
            "pruned_at": None,
        }  # fmt: skip
        query |= selection(split, tasks, records)
        done = Requeued()
        found = self._collection(RECORD).aggregate(
            [
                {"$match": query},
                {"$group": {"_id": "$task", "records": {"$push": "$_id"}}},
                {"$sort": {"_id": ASCENDING}},
            ]
        )
        async for group in await found:
            await self._requeue_group(group["_id"], group["records"], done, dry_run)
        return done

    async def _requeue_group(
        self, task_id: str, record_ids: Sequence[str], done: Requeued, dry_run: bool
    ) -> None:
        async def write(session: AsyncClientSession) -> tuple[str, int]:
            task = await self._collection(TASK).find_one({"_id": task_id}, session=session)
            chosen = [
                slot for slot in (task or {"slots": []})["slots"]
                if slot["status"] == SlotStatus.FAILED and slot.get("record_id") in record_ids
            ]  # fmt: skip
            if task is None or not chosen:
                return "", 0
            if not dry_run:
                await regroup(self._connection, task, _queueing(chosen), session)
            elif task["status"] == "completed" and (
                blocker := await find_blocker(self._connection, task_id, session)
            ):
                raise GroupBlockedError(blocker)
            return task["split"], len(chosen)

        try:
            split, count = await self._connection.transaction(write)
        except GroupBlockedError as error:
            done.left[error.blocker] = done.left.get(error.blocker, 0) + 1
            return
        if count:
            done.by_split[split] = done.by_split.get(split, 0) + count


def _queueing(failed: Sequence[Json]) -> GroupChange:
    """Return the change that queues failed slots; the group is undecided again."""
    chosen = {"$in": ["$$slot.traj_id", [slot["traj_id"] for slot in failed]]}
    records = [
        UpdateOne(
            {"_id": slot["record_id"], "status": RecordStatus.FAILED.value},
            {"$set": {"status": RecordStatus.COMPLETED.value, "failure": None}},
        )
        for slot in failed
    ]
    update = slots.change_slots(chosen, {**slots.QUEUED, "scorings": 0})
    return GroupChange(task=[*update, {"$set": {"group": None, "finalising": None}}], records=records)
