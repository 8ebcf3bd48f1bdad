"""Store conversations that no task asked for, and the feedback that people give to trajectories."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pymongo import ReturnDocument

from agentrl.documents.base import plain
from agentrl.documents.gateway import GatewaySession, ReportedReward
from agentrl.documents.status import RecordStatus, SlotStatus, TaskStatus, values
from agentrl.documents.task import CONVERSATIONS, FEEDBACK, Claim, Slot, Task, task_key
from agentrl.errors import StoreError
from agentrl.store.mechanics import slots
from agentrl.store.mechanics.blobs import sealed
from agentrl.store.mechanics.connection import Json, Repository, database_call
from agentrl.store.mechanics.lease import after
from agentrl.store.names import GATEWAY_SESSION, RECORD, TASK
from agentrl.store.records import new_record

_CLOSE_SECONDS = 60.0
"""Lease of a process that ends a conversation; another one ends it if that process dies."""
_TAKES_FEEDBACK = values((RecordStatus.RUNNING, RecordStatus.COMPLETED))


class Conversations(Repository):
    """The calls on conversations and on feedback.

    A conversation is a Task of the epoch ``CONVERSATIONS`` with one slot, which is running while the
    conversation is: its owner is the conversation itself, not a process, and its lease is the time that a
    user may be silent. So any gateway serves it, and none has to live as long. Samplers leave it alone.
    """

    @database_call
    async def open(
        self, name: str, session: GatewaySession, *, query: str, meta: dict[str, Any], train: str,
        order: int, idle_seconds: float,
    ) -> Claim:  # fmt: skip
        """Store a conversation with its base URL, and return its claim. ``order`` sorts conversations."""
        task = Task(
            id=session.task, task_id=name, split=session.task.partition("/")[0], epoch=CONVERSATIONS,
            order=order, query=query, scorer=FEEDBACK, meta=meta, slots=(Slot(traj_id=session.traj_id),),
        )  # fmt: skip

        async def write() -> Claim:
            document = sealed(TASK, task.to_document(), "content")
            await self._collection(TASK).insert_one(document)
            claimed = await self._collection(TASK).find_one_and_update(
                {"_id": task.id}, slots.claim_slots(slots.OPEN, [session.owner], idle_seconds),
                return_document=ReturnDocument.AFTER,
            )  # fmt: skip
            assert claimed is not None  # the same transaction inserted it
            (claim,) = slots.new_claims(claimed, [session.owner])
            record = replace(new_record(claim), status=RecordStatus.RUNNING, train_rule=train)
            await self._collection(RECORD).insert_one(record.to_document())
            await self._collection(GATEWAY_SESSION).insert_one(session.to_document())
            return claim

        return await self._connection.transaction(write)

    @database_call
    async def running(self, split: str, name: str) -> Claim | None:
        """Return the claim of a conversation that has not ended; None if it has, or never was."""
        task = await self._one(Task, TASK, {"_id": task_key(split, CONVERSATIONS, name)})
        return None if task is None else _running(task)

    @database_call
    async def take_silent(self, split: str) -> Claim | None:
        """Return the claim of a conversation whose user has been silent for too long; None if there is none.

        The caller ends it. If it dies, the conversation is returned again after a minute.
        """
        query = {
            "split": split, "status": TaskStatus.RUNNING.value, "epoch": CONVERSATIONS,
            **slots.overdue(slots.EXPIRED),
        }  # fmt: skip
        update = slots.change_slots(slots.EXPIRED, {"lease_expires_at": after(_CLOSE_SECONDS)})
        found = await self._collection(TASK).find_one_and_update(
            query, update, return_document=ReturnDocument.AFTER
        )
        return None if found is None else _running(Task.from_document(found))

    @database_call
    async def give_feedback(self, record_id: str, reward: ReportedReward) -> RecordStatus | None:
        """Store the feedback for a trajectory without a score; the last one counts.

        A running one is scored when it ends, a sampled one now. Return None; or the status of a Record that
        takes none, because it has a score or has failed. Raises StoreError if there is no such Record, and if
        its task is not scored by feedback.
        """
        unread = {"status": RecordStatus.SCORING.value, "reported_reward": None}
        query = {"_id": record_id, "$or": [{"status": {"$in": _TAKES_FEEDBACK}}, unread]}
        waits: Json = {"$and": [slots.SAMPLED, {"$eq": ["$$slot.record_id", {"$literal": record_id}]}]}

        async def write() -> Json | None:
            found = await self._collection(RECORD).find_one({"_id": record_id}, {"task": 1}) or {}
            task = await self._collection(TASK).find_one({"_id": found.get("task")}, {"scorer": 1}) or {}
            if task.get("scorer", FEEDBACK) != FEEDBACK:
                raise StoreError(
                    f"{record_id[:200]} is scored by {task['scorer']}: it takes no feedback",
                    hint="a Label with a score and `agentrl db rescore --from_labels` change a score",
                )
            record = await self._collection(RECORD).find_one_and_update(
                query, {"$set": {"reported_reward": plain(reward)}}, {"task": 1, "status": 1}
            )
            if record is not None and record["status"] == RecordStatus.COMPLETED.value:
                await self._collection(TASK).update_one(
                    {"_id": record["task"], **slots.any_slot(waits)},
                    slots.change_slots(waits, {"not_before": None}),
                )
            return record

        if await self._connection.transaction(write) is not None:
            return None
        found = await self._collection(RECORD).find_one({"_id": record_id}, {"status": 1})
        if found is None:
            raise StoreError(
                f"there is no trajectory {record_id[:200]!r} that could get feedback",
                hint="give the id of a conversation, or the _id of a Record",
            )
        return RecordStatus(found["status"])


def _running(task: Task) -> Claim | None:
    """Return the claim of the conversation ``task``."""
    slot = task.slots[0]
    if slot.status is not SlotStatus.RUNNING or slot.owner is None:
        return None
    return Claim(task=task, traj_id=slot.traj_id, attempt=slot.attempt, owner=slot.owner)
