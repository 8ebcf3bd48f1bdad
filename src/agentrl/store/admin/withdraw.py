"""Delete what tombstones list, one group in one transaction, and decide the group anew without it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from pymongo import UpdateOne

from agentrl.batches import batches
from agentrl.documents.record import Record
from agentrl.documents.retraction import Retraction, Tombstone, Withdrawn
from agentrl.documents.status import (
    APPLIED_STEPS,
    DataStatus,
    EvaluationStatus,
    RecordStatus,
    SlotStatus,
    TaskStatus,
    values,
)
from agentrl.documents.task import record_task
from agentrl.scoring.groups import FAILED, summarize
from agentrl.store.admin.regroup import (
    Blocker,
    DecideTask,
    GroupChange,
    GroupChangedError,
    change_task,
    decide_anew,
    decided,
    regroup,
    retry_changed,
)
from agentrl.store.admin.retention import OF_RECORD, Retention, delete_records
from agentrl.store.admin.retract import BATCH
from agentrl.store.groups import GroupOutcome
from agentrl.store.mechanics import slots
from agentrl.store.mechanics.connection import Json, Repository, database_call
from agentrl.store.mechanics.lease import literal
from agentrl.store.names import (
    DATA,
    EPOCH,
    EVALUATION,
    MODEL_CALL,
    RETRACTION,
    STEP,
    TASK,
    TOMBSTONE,
)
from agentrl.store.records import read_records
from agentrl.store.trainer_lease import fenced

_APPLIED = values(APPLIED_STEPS)


class Withdrawing(Repository):
    """Deletes what is withdrawn. ``attempt`` is that of the trainer's lease, which the caller holds."""

    @database_call
    async def pending(self) -> list[str]:
        """Return the ``_id`` of the Tasks of what is withdrawn and not deleted yet."""
        return sorted(await self._collection(TOMBSTONE).distinct("task", {"deleted_at": None}))

    @database_call
    async def list_late_copies(self) -> None:
        """List copies of withdrawn tasks that a sampler inserted meanwhile, while it opened an epoch."""
        late: dict[str, Json] = {}
        stones = await self._collection(TOMBSTONE).find({"kind": Withdrawn.TASK.value}).to_list()
        listed = {stone["_id"] for stone in stones}
        for stone in stones:
            split, _, task_id = stone["_id"].split("/", 2)
            async for task in self._collection(TASK).find({"split": split, "task_id": task_id}):
                own = {"_id": task["_id"], "task": task["_id"], "created_at": task["created_at"]}
                if task["_id"] not in listed:
                    late[task["_id"]] = {**stone, **own, "deleted_at": None}
        if late:
            await self._collection(TOMBSTONE).insert_many(list(late.values()))

    @database_call
    async def kept_as_trained(self) -> list[str]:
        """Return the ``_id`` of the groups whose others keep the advantages that steps trained."""
        return await self._ids(TASK, {"group.kept_as_trained": True})

    @database_call
    async def withdraw(self, task_id: str, decide_by: DecideTask, attempt: int | None) -> None:
        """Delete what is withdrawn of one Task, in one transaction, and decide its group without it.

        A group of which a step trained something keeps its other data as they were trained, and is decided
        again once the step is undone (``kept_as_trained``). Idempotent. Raises StoreError if the group keeps
        changing.
        """
        await retry_changed(
            lambda: self._withdraw(task_id, decide_by, attempt), task_id, doing="withdrawn",
            hint="call agentrl retract again",
        )  # fmt: skip

    async def _withdraw(self, task_id: str, decide_by: DecideTask, attempt: int | None) -> None:
        stones = await self._all(Tombstone, TOMBSTONE, {"task": task_id})
        task = await self._collection(TASK).find_one({"_id": task_id})
        records = await read_records(self._connection, task_id)
        is_whole = any(stone.kind is Withdrawn.TASK for stone in stones)
        traj_ids = {int(stone.id.split("/")[-2]) for stone in stones if stone.kind is Withdrawn.RECORD}
        gone = [record for record in records if is_whole or record.traj_id in traj_ids]
        left = [record for record in records if record not in gone]
        ids = sorted({stone.id for stone in stones} | {record.id for record in gone})
        outcome = None
        if task is not None and not is_whole and task["status"] == TaskStatus.COMPLETED.value:
            others = [slot for slot in task["slots"] if slot["traj_id"] not in traj_ids]
            outcome = await self._decide({**task, "slots": others}, left, decide_by)

        async def write() -> None:
            await self._keep_images(task if is_whole else None, ids, stones[0].retraction)
            await delete_records(self._connection, ids)
            if task is not None and is_whole:
                await self._delete_task(task)
            elif task is not None:
                await self._regroup(task, traj_ids, left, outcome)
            if task is not None:
                await self._reopen_evaluation(task["split"])
            await self._mark_deleted(stones, gone)

        await fenced(self._connection, attempt, write)

    async def _decide(self, task: Json, left: Sequence[Record], decide_by: DecideTask) -> GroupOutcome | None:
        """Return the new decision on a finalized group; None if it keeps its own, or was given up."""
        if task["group"].get("outcome") == FAILED:
            return None
        outcome = await decide_anew(self._connection, task, left, decide_by)
        return None if isinstance(outcome, Blocker) else outcome

    async def _regroup(
        self, task: Json, traj_ids: Iterable[int], left: Sequence[Record], outcome: GroupOutcome | None
    ) -> None:
        """Remove the slots, and write the group as ``outcome`` decides it, or else its new summary."""
        is_completed = task["status"] == TaskStatus.COMPLETED.value
        change = slots.remove_slots(sorted(traj_ids), is_completed=is_completed)
        if not is_completed or outcome is not None:
            if outcome is not None:
                change = [*change, {"$set": decided(task, outcome)}]
            await regroup(self._connection, task, GroupChange(task=change, outcome=outcome))
            return
        trained = sum(each.status is RecordStatus.READY and each.advantage is not None for each in left)
        failed = sum(
            slot["status"] == SlotStatus.FAILED and slot["traj_id"] not in traj_ids for slot in task["slots"]
        )
        earlier = task["group"]
        group = {**earlier, **summarize(left, failed, trained, earlier.get("rules") or earlier)}
        group |= {"outcome": FAILED} if earlier.get("outcome") == FAILED else {"kept_as_trained": True}
        names = {record.id for record in left}
        if earlier.get("filtered"):
            group["filtered"] = [item for item in earlier["filtered"] if item["record"] in names]
        await change_task(self._connection, task, [*change, {"$set": {"group": literal(group)}}])
        quarantined = {
            "status": DataStatus.QUARANTINED.value,
            "problem": "trajectories of its group were withdrawn after a step trained it",
        }
        ready = {"task": task["_id"], "status": DataStatus.READY.value}
        await self._collection(DATA).update_many(ready, {"$set": quarantined})

    @database_call
    async def decide_again(self, task_id: str, decide_by: DecideTask, attempt: int | None) -> None:
        """Decide a group that was kept as it was trained, if nothing of it is trained any more."""
        await retry_changed(
            lambda: self._decide_again(task_id, decide_by, attempt), task_id, doing="decided again",
            hint="call agentrl retract again",
        )  # fmt: skip

    async def _decide_again(self, task_id: str, decide_by: DecideTask, attempt: int | None) -> None:
        task = await self._collection(TASK).find_one({"_id": task_id})
        if task is None:
            return
        records = await read_records(self._connection, task_id)
        outcome = await self._decide(task, records, decide_by)
        if outcome is not None:
            change = GroupChange(task=[{"$set": decided(task, outcome)}], outcome=outcome)
            await fenced(self._connection, attempt, lambda: regroup(self._connection, task, change))

    async def _delete_task(self, task: Json) -> None:
        unchanged = {"_id": task["_id"], "updated_at": task["updated_at"]}
        if not (await self._collection(TASK).delete_one(unchanged)).deleted_count:
            raise GroupChangedError
        epoch = {"_id": f"{task['split']}/{task['epoch']}", "tasks": {"$gt": 0}}
        await self._collection(EPOCH).update_one(epoch, {"$inc": {"tasks": -1}})

    async def _reopen_evaluation(self, split: str) -> None:
        """Take the results of an evaluation back: the same command computes them from what is left."""
        stopped = {"status": EvaluationStatus.STOPPED.value, "results": None, "finished_at": None}
        finished = {"_id": split, "status": EvaluationStatus.FINISHED.value}
        await self._collection(EVALUATION).update_one(finished, {"$set": stopped})

    async def _keep_images(self, task: Json | None, ids: Sequence[str], retraction: int) -> None:
        """Note which images the documents name, before they are deleted."""
        named = {image["sha256"] for image in (task or {}).get("images") or ()}
        for collection in (MODEL_CALL, DATA):
            fields = {"images.sha256": 1, "tool_executions.images.sha256": 1}
            shows = {"$or": [{name: {"$exists": True}} for name in fields]}
            cursor = self._collection(collection).find({OF_RECORD[collection]: {"$in": ids}, **shows}, fields)
            async for document in cursor:
                shown = [*document.get("images", ())]
                for execution in document.get("tool_executions", ()):
                    shown += execution.get("images", ())
                named |= {image["sha256"] for image in shown}
        if named:
            await self._collection(RETRACTION).update_one(
                {"_id": retraction}, {"$addToSet": {"images": {"$each": sorted(named)}}}
            )

    async def _mark_deleted(self, stones: Sequence[Tombstone], gone: Sequence[Record]) -> None:
        """Date the tombstones, and add those of attempts that began after the selection."""
        listed = {stone.id for stone in stones}
        later = [
            Tombstone(
                id=record.id, kind=Withdrawn.RECORD, task=record.task, retraction=stones[0].retraction,
                created_at=record.created_at,
            ).to_document()
            for record in gone
            if record.id not in listed
        ]  # fmt: skip
        if later:
            await self._collection(TOMBSTONE).insert_many(later)
        pending = {"task": stones[0].task, "deleted_at": None}
        await self._collection(TOMBSTONE).update_many(pending, {"$currentDate": {"deleted_at": True}})

    @database_call
    async def rewrite_steps(self, attempt: int | None) -> None:
        """Let TrainSteps name what is left: a committed one without what is withdrawn.

        A step that is undone and will be repeated names all data of the groups that were decided again.
        """
        stones = {stone["_id"]: stone["task"] async for stone in self._collection(TOMBSTONE).find({})}
        groups, cursor = set(stones.values()), self._collection(STEP).find({}, {"data": 1, "status": 1})
        updates: list[UpdateOne] = []
        async for step in cursor:
            data = [key for key in step["data"] if key not in stones]
            if step["status"] not in _APPLIED and groups.intersection(map(record_task, step["data"])):
                data = await self._with_groups(step["data"], groups)
            if data != step["data"]:
                same = {"_id": step["_id"], "data": step["data"]}
                updates.append(UpdateOne(same, {"$set": {"data": data}}))
        for batch in batches(updates, BATCH):
            await fenced(self._connection, attempt, partial(self._collection(STEP).bulk_write, batch))

    async def _with_groups(self, data: Sequence[str], groups: set[str]) -> list[str]:
        """Return ``data`` with the present data of each group among ``groups`` in place of the earlier."""
        renewed: list[str] = []
        seen: set[str] = set()
        for key in data:
            task = record_task(key)
            if task not in groups:
                renewed.append(key)
            elif task not in seen:
                seen.add(task)
                renewed += await self._ids(DATA, {"task": task}, sort=[("_id", 1)])
        return renewed

    @database_call
    async def sweep(self) -> None:
        """Delete what writers left of the withdrawn after it was deleted: files, late Records and Tasks."""
        for batch in batches(await self._ids(TOMBSTONE, {}), BATCH):

            async def write(batch: list[str] = batch) -> None:
                await delete_records(self._connection, batch)
                await self._collection(TASK).delete_many({"_id": {"$in": batch}})

            await self._connection.transaction(write)

    @database_call
    async def delete_images(self, retraction: Retraction, *, is_sampled: bool) -> int:
        """Delete the noted images that nobody else uses; return how many are left for later.

        While samplers live, those that were put in the last hour stay: the call that shows them may not be
        stored yet.
        """
        left = await Retention(self._connection).delete_unused(retraction.images, waits=is_sampled)
        await self._collection(RETRACTION).update_one({"_id": retraction.id}, {"$set": {"images": left}})
        return len(left)
