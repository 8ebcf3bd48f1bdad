"""The way that the benchmark compares with: counters, locks and whole documents saved after every step.

One document for each counter and each lock; a document is read by a query, changed in memory and saved whole;
the scores of a group are pushed onto its Task. It runs on the same server with the same write concern.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from pymongo import ReturnDocument
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from store_data import make_call, make_data, make_tasks

Json = dict[str, Any]
_OPEN = {"status": {"$in": ["created", "running"]}}


@dataclass(frozen=True)
class Original:
    """The baseline on a database of its own."""

    database: AsyncDatabase[Json]
    generations: int

    async def prepare(self, tasks: int) -> None:
        """Tasks, and a counter for each of claims left and of samples done."""
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
        """One empty trajectory from claim to score; False where no Task is left."""
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
        """Tasks that are completed with fewer scores than samples."""
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
        call = make_call(record_id, 0, context=1, output=1).to_document()
        await self._of("calls").insert_one({**call, "status": "created"})
        await self._step("calls", call["_id"], status="running")
        await self._step("calls", call["_id"], status="completed")
        await self._step("records", record_id, traj=[call["_id"]], turns=1)

    async def _finalize(self, task_id: str) -> None:
        task = await self._of("tasks").find_one({"_id": task_id})
        assert task is not None
        async for record in self._of("records").find({"task": task_id}):
            await self._of("calls").find({"record": record["_id"]}).to_list()
            data = make_data(record["_id"], task_id, tokens=2, turns=1)
            await self._of("data").insert_one(data.to_document())
            await self._save("records", {**record, "status": "ready", "advantage": 0.5})
        await self._save("tasks", {**task, "status": "completed"})

    async def _step(self, collection: str, key: str, **changes: Any) -> None:
        """Read a document, change it, save the whole of it."""
        document = await self._of(collection).find_one({"_id": key})
        assert document is not None
        await self._save(collection, {**document, **changes})

    async def _save(self, collection: str, document: Json) -> None:
        await self._of(collection).replace_one({"_id": document["_id"]}, document)

    async def _count(self, counter: str, change: int) -> int | None:
        """The counter's new value; None where it would fall below 0."""
        document = await self._of("counters").find_one_and_update(
            {"_id": counter, "value": {"$gte": -change}}, {"$inc": {"value": change}},
            return_document=ReturnDocument.AFTER,
        )  # fmt: skip
        return None if document is None else int(document["value"])

    async def _lock(self, name: str) -> bool:
        """Take a lock; False if it is held."""
        free = {"_id": name, "held": False}
        return await self._of("locks").find_one_and_update(free, {"$set": {"held": True}}) is not None

    async def _unlock(self, name: str) -> None:
        await self._of("locks").update_one({"_id": name}, {"$set": {"held": False}})

    def _of(self, collection: str) -> AsyncCollection[Json]:
        return self.database[f"original_{collection}"]


def _record(record_id: str, task_id: str) -> Json:
    return {
        "_id": record_id, "task": task_id, "status": "created", "traj": [], "turns": 0, "score": None,
        "final_answer": None, "advantage": None, "meta_infos": {},
    }  # fmt: skip
