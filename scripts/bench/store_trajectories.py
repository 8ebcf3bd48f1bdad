"""Compare whole trajectories, from claim to finalized group, with the way of the original system.

The original system uses counters, locks and whole-document saves. It runs on the same server with the same
write concern.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from harness import Row, alternate, median_ratio, stopwatch
from pymongo import ReturnDocument
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from store_fixtures import GENERATIONS, SPLIT, make_call, make_data, make_tasks, run_database

from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.status import RecordStatus, TaskStatus
from agentrl.documents.training import DBRecordData
from agentrl.scoring.groups import Decision
from agentrl.store.client import Store
from agentrl.store.groups import GroupOutcome, StoredGroup

Json = dict[str, Any]
_CONCURRENT = 64
_LEASE = 600.0
_MAX_GROUPS_OPEN = 100_000
_CALL = make_call("r", 0, context=1, output=1)
_DATA = make_data("r", "t", tokens=2, turns=1)
"""Made once: to make up texts and tokens takes as long as several writes, and belongs to neither variant."""
_OPEN = {"status": {"$in": ["created", "running"]}}


async def whole(uri: str, quick: bool) -> list[Row]:
    """Time 64 concurrent trajectories, and count the groups that end without a complete set of scores."""
    tasks = 2 if quick else 128
    missing = {"ours": 0, "original": 0}
    async with run_database(uri, "whole") as store, run_database(uri, "original") as other_store:
        original = Original(other_store.database, GENERATIONS)

        async def ours() -> float:
            for name in ("Task", "Record", "DispatchedSamplingTask", "DBRecordData"):
                await store.database[name].delete_many({})
            await store.tasks.load(make_tasks(tasks))
            seconds = await _drain(lambda: trajectory(store))
            missing["ours"] += await groups_with_a_score_missing(store)
            return seconds / (tasks * GENERATIONS)

        async def theirs() -> float:
            await original.prepare(tasks)
            seconds = await _drain(original.trajectory)
            missing["original"] += await original.groups_with_a_score_missing()
            return seconds / (tasks * GENERATIONS)

        rounds = 1 if quick else 6
        mine, other = await alternate(ours, theirs, rounds)
    groups = (rounds + 1) * tasks
    return [
        Row(
            what=f"empty trajectories/s, {_CONCURRENT} at a time : the original's way",
            ours=f"{1 / min(mine):.0f}/s", baseline=f"{1 / min(other):.0f}/s",
            ratio=1 / median_ratio(mine, other), target=8.0,
        ),
        Row(
            what=f"groups of {groups} with a score missing (ratio: share of ours)",
            ours=str(missing["ours"]), baseline=str(missing["original"]), ratio=missing["ours"] / groups,
            target=0.0, more=False,
        ),
    ]  # fmt: skip


async def trajectory(store: Store) -> bool:
    """Write one empty trajectory as a sampler does. Return False when no slot is left to claim."""
    claim = await store.claims.claim(
        split=SPLIT, owner="bench", lease_seconds=_LEASE, max_groups_open=_MAX_GROUPS_OPEN
    )
    if claim is None:
        return False
    await store.records.create(claim)
    await store.records.advance(claim, RecordStatus.RUNNING)
    await store.model_calls.add(claim, _call(claim.record_id))
    await store.records.advance(claim, RecordStatus.COMPLETED, final_answer="1889", stop_reason="answered")
    await store.records.advance(claim, RecordStatus.SCORING)
    if await store.attempts.score(claim, 1.0) is TaskStatus.WAITING:
        group = await store.groups.to_decide(claim.task.id)
        if group is not None:
            await store.groups.finalize(group, decide(group))
    return True


def decide(group: StoredGroup) -> GroupOutcome:
    """Make training data of two tokens from every Record."""
    return GroupOutcome(
        data=tuple(_data(record.id, group.task.id) for record in group.records),
        records=tuple(Decision(record_id=record.id, advantage=0.5) for record in group.records),
        summary={"scored": len(group.records), "failed": 0},
    )


async def groups_with_a_score_missing(store: Store) -> int:
    """Return the number of Tasks that lack a score, a Record, training data, or the status completed."""
    whole = await store.database["Task"].count_documents(
        {"status": TaskStatus.COMPLETED.value, "slots": {"$not": {"$elemMatch": {"score": None}}}}
    )
    counts = {
        name: await store.database[name].count_documents({"status": "ready"})
        for name in ("Record", "DBRecordData")
    }
    tasks = await store.database["Task"].count_documents({})
    short = max(tasks * GENERATIONS - count for count in counts.values())
    return tasks - whole + -(-short // GENERATIONS)


async def _drain(one: Callable[[], Awaitable[bool]]) -> float:
    """Return the seconds until ``_CONCURRENT`` coroutines have no work left."""

    async def worker() -> None:
        while await one():
            pass

    with stopwatch() as seconds:
        await asyncio.gather(*(worker() for _ in range(_CONCURRENT)))
        return seconds()


@dataclass(frozen=True)
class Original:
    """Trajectories as the original system stores them, in their own database.

    Every counter and every lock is a document. Each change reads a document by a query, changes it in memory
    and saves all of it. The scores of a group are pushed onto its Task.
    """

    database: AsyncDatabase[Json]
    generations: int

    async def prepare(self, tasks: int) -> None:
        """Insert the Tasks with their locks and their counters of claims left and samples done."""
        for name in ("tasks", "records", "calls", "data", "counters", "locks"):
            await self._of(name).drop()
        documents = []
        for task in make_tasks(tasks, generations=0):
            document = task.to_document()
            documents.append({**document, "scores": []})
        await self._of("tasks").insert_many(documents)
        await self._of("tasks").create_index([("status", 1), ("order", 1)])
        await self._of("records").create_index([("task", 1)])
        await self._of("calls").create_index([("record", 1)])
        for name, value in (("left", self.generations), ("done", 0)):
            counters = [{"_id": f"{document['_id']}/{name}", "value": value} for document in documents]
            await self._of("counters").insert_many(counters)
        await self._of("locks").insert_many(
            [{"_id": document["_id"], "held": False} for document in documents]
        )

    async def trajectory(self) -> bool:
        """Write one empty trajectory from claim to score. Return False when no Task is left."""
        task_id = await self._claim()
        if task_id is None:
            return False
        record_id = f"{task_id}/{uuid.uuid4().hex[:8]}"
        await self._of("records").insert_one(_record(record_id, task_id))
        await self._step("records", record_id, status="running")
        await self._turn(record_id)
        await self._step("records", record_id, status="completed", final_answer="1889")
        await self._step("records", record_id, status="scoring")
        await self._step("records", record_id, status="scored", score=1.0)
        await self._of("tasks").update_one({"_id": task_id}, {"$push": {"scores": 1.0}})
        done = await self._count(f"{task_id}/done", 1)
        if done == self.generations and await self._lock(task_id):
            await self._finalize(task_id)
            await self._unlock(task_id)
        return True

    async def groups_with_a_score_missing(self) -> int:
        """Return the number of completed Tasks with fewer scores than samples."""
        return await self._of("tasks").count_documents(
            {"status": "completed", f"scores.{self.generations - 1}": {"$exists": False}}
        )

    async def _claim(self) -> str | None:
        while True:
            task = await self._of("tasks").find_one(_OPEN, sort=[("order", 1)])
            if task is None:
                return None
            if await self._count(f"{task['_id']}/left", -1) is not None:
                await self._save("tasks", {**task, "status": "running"})
                return str(task["_id"])
            await self._save("tasks", {**task, "status": "waiting"})

    async def _turn(self, record_id: str) -> None:
        call = _call(record_id).to_document()
        await self._of("calls").insert_one({**call, "status": "created"})
        await self._step("calls", call["_id"], status="running")
        await self._step("calls", call["_id"], status="completed")
        await self._step("records", record_id, traj=[call["_id"]], turns=1)

    async def _finalize(self, task_id: str) -> None:
        task = await self._of("tasks").find_one({"_id": task_id})
        assert task is not None
        async for record in self._of("records").find({"task": task_id}):
            await self._of("calls").find({"record": record["_id"]}).to_list()
            data = _data(record["_id"], task_id)
            await self._of("data").insert_one(data.to_document())
            await self._save("records", {**record, "status": "ready", "advantage": 0.5})
        await self._save("tasks", {**task, "status": "completed"})

    async def _step(self, collection: str, key: str, **changes: Any) -> None:
        """Read a document, change it and save all of it."""
        document = await self._of(collection).find_one({"_id": key})
        assert document is not None
        await self._save(collection, {**document, **changes})

    async def _save(self, collection: str, document: Json) -> None:
        await self._of(collection).replace_one({"_id": document["_id"]}, document)

    async def _count(self, counter: str, change: int) -> int | None:
        """Add ``change`` to the counter. Return its new value, or None if it would fall below 0."""
        document = await self._of("counters").find_one_and_update(
            {"_id": counter, "value": {"$gte": -change}}, {"$inc": {"value": change}},
            return_document=ReturnDocument.AFTER,
        )  # fmt: skip
        return None if document is None else int(document["value"])

    async def _lock(self, name: str) -> bool:
        """Take a lock. Return False if it is held."""
        free = {"_id": name, "held": False}
        return await self._of("locks").find_one_and_update(free, {"$set": {"held": True}}) is not None

    async def _unlock(self, name: str) -> None:
        await self._of("locks").update_one({"_id": name}, {"$set": {"held": False}})

    def _of(self, collection: str) -> AsyncCollection[Json]:
        return self.database[f"original_{collection}"]


def _call(record_id: str) -> DispatchedSamplingTask:
    return replace(_CALL, id=f"{record_id}/0", record=record_id)


def _data(record_id: str, task_id: str) -> DBRecordData:
    return replace(_DATA, id=record_id, record=record_id, task=task_id)


def _record(record_id: str, task_id: str) -> Json:
    return {
        "_id": record_id, "task": task_id, "status": "created", "traj": [], "turns": 0, "score": None,
        "final_answer": None, "advantage": None, "meta_infos": {},
    }  # fmt: skip
