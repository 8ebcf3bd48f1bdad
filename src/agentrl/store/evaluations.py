"""Store evaluations, read their trajectories, and say which versions they need; store checks of judges."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from pymongo import ASCENDING, DESCENDING
from pymongo.errors import DuplicateKeyError

from agentrl.documents.document import now, plain
from agentrl.documents.run import Evaluation, GoldScore, JudgeCheck
from agentrl.documents.status import EvaluationStatus, SlotStatus, VersionStatus
from agentrl.documents.task import CONTENT, Task
from agentrl.scoring.evaluation import EvaluatedTask
from agentrl.store.epochs import BY_ORDER
from agentrl.store.mechanics.connection import (
    EVALUATION,
    JUDGE_CHECK,
    RECORD,
    TASK,
    VERSION,
    Json,
    Repository,
    database_call,
)
from agentrl.store.mechanics.lease import after
from agentrl.store.records import WITHOUT_BRANCHES

SEEN_SECONDS = 600.0
"""An evaluation whose process has not written for this long keeps no weights."""

RECORD_FIELDS = {
    "task": 1, "score": 1, "failure.kind": 1, "turns": 1, "input_tokens": 1, "cached_tokens": 1,
    "generated_tokens": 1, "created_at": 1, "completed_at": 1,
}  # fmt: skip
_UNFINISHED = [EvaluationStatus.WAITING.value, EvaluationStatus.RUNNING.value]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotCounts:
    """How far the trajectories of a split are."""

    total: int
    scored: int
    failed: int
    running: int
    """Slots that some process holds."""

    @property
    def left(self) -> int:
        """Return how many have neither a score nor failed for good."""
        return self.total - self.scored - self.failed


class Evaluations(Repository):
    """The calls on evaluations. Times are the server's."""

    @database_call
    async def begin(self, evaluation: Evaluation) -> None:
        """Store the evaluation with its status; one that exists keeps its results and its beginning."""
        fields = evaluation.to_document()
        status, by = fields.pop("status"), fields.pop("by")
        for name in ("_id", "seen_at", "results", "finished_at"):
            fields.pop(name)
        update: Json = {
            "$setOnInsert": {**fields, "results": None, "finished_at": None},
            "$set": {"status": status, "by": by},
            "$currentDate": {"seen_at": True},
        }
        await self._collection(EVALUATION).update_one({"_id": evaluation.id}, update, upsert=True)

    @database_call
    async def beat(self, ids: Sequence[str]) -> None:
        """Record that the process of unfinished evaluations is alive."""
        query = {"_id": {"$in": list(ids)}, "status": {"$in": _UNFINISHED}}
        await self._collection(EVALUATION).update_many(query, {"$currentDate": {"seen_at": True}})

    @database_call
    async def end(self, evaluation_id: str, results: Mapping[str, Any] | None) -> None:
        """Store the results; with None, that the evaluation stopped before its end."""
        changes: Json = {
            "$set": {"status": EvaluationStatus.STOPPED.value},
            "$currentDate": {"seen_at": True},
        }
        if results is not None:
            changes["$set"] = {"status": EvaluationStatus.FINISHED.value, "results": dict(results)}
            changes["$currentDate"]["finished_at"] = True
        await self._collection(EVALUATION).update_one({"_id": evaluation_id}, changes)

    @database_call
    async def stop_waiting(self, ids: Sequence[str]) -> None:
        """Stop evaluations that have not begun: their process ends."""
        query = {"_id": {"$in": list(ids)}, "status": EvaluationStatus.WAITING.value}
        stopped = {"$set": {"status": EvaluationStatus.STOPPED.value}}
        await self._collection(EVALUATION).update_many(query, stopped)

    @database_call
    async def get(self, evaluation_id: str) -> Evaluation | None:
        """Return one evaluation; None if it does not exist."""
        return await self._one(Evaluation, EVALUATION, {"_id": evaluation_id})

    @database_call
    async def all(self) -> list[Evaluation]:
        """Return every evaluation, oldest first."""
        return await self._all(Evaluation, EVALUATION, {}, sort=[("began_at", ASCENDING), ("_id", ASCENDING)])

    @database_call
    async def tasks(self, split: str, default_agent: str, right_threshold: float) -> list[EvaluatedTask]:
        """Return the scores and the usage of every task of an evaluation, in order."""
        of_task: dict[str, list[Json]] = defaultdict(list)
        async for record in self._collection(RECORD).find(
            {"split": split, **WITHOUT_BRANCHES}, RECORD_FIELDS
        ):
            of_task[record["task"]].append(record)
        return [
            evaluated_task(task, of_task[task.id], default_agent, right_threshold)
            for task in await self._all(Task, TASK, {"split": split}, sort=BY_ORDER)
        ]

    @database_call
    async def counts(self, split: str) -> SlotCounts:
        """Return how far the trajectories of a split are."""
        counted = {"$group": {"_id": "$slots.status", "count": {"$sum": 1}}}
        groups = await self._aggregate(TASK, {"$match": {"split": split}}, {"$unwind": "$slots"}, counted)
        counts = Counter({group["_id"]: int(group["count"]) for group in groups})
        return SlotCounts(
            total=counts.total(), scored=counts[SlotStatus.SCORED], failed=counts[SlotStatus.FAILED],
            running=counts[SlotStatus.RUNNING],
        )  # fmt: skip

    @database_call
    async def needed_versions(self) -> set[int]:
        """Return the versions whose weights evaluations need: those being evaluated, and the best ones."""
        recent = {"$and": [{"$gte": ["$seen_at", after(-SEEN_SECONDS)]}, {"$lte": ["$seen_at", "$$NOW"]}]}
        query: Json = {"status": {"$in": _UNFINISHED}, "version": {"$ne": None}, "$expr": recent}
        cursor = self._collection(EVALUATION).find(query, {"version": 1})
        return {document["version"] async for document in cursor} | set((await self.best_versions()).values())

    @database_call
    async def best_versions(self) -> dict[tuple[str, str], int]:
        """Return (tasks digest, settings digest) → the published version with the highest mean score.

        Of equal versions, the newest is the best.
        """
        query: Json = {
            "status": EvaluationStatus.FINISHED.value, "version": {"$ne": None},
            "results.total.score.value": {"$exists": True},
        }  # fmt: skip
        fields = {"version": 1, "tasks_digest": 1, "settings_digest": 1, "results.total.score.value": 1}
        order = [("results.total.score.value", DESCENDING), ("version", DESCENDING)]
        finished = await self._collection(EVALUATION).find(query, fields, sort=order).to_list()
        published = {
            "_id": {"$in": [item["version"] for item in finished]},
            "status": VersionStatus.PUBLISHED.value, "pruned_at": None,
        }  # fmt: skip
        alive = set(await self._ids(VERSION, published))
        best: dict[tuple[str, str], int] = {}
        for item in finished:
            if item["version"] in alive:
                best.setdefault((item["tasks_digest"], item["settings_digest"]), item["version"])
        return best


def evaluated_task(
    task: Task, records: Sequence[Json], default_agent: str, right_threshold: float
) -> EvaluatedTask:
    """Return the scores and the usage of a Task from its Records."""
    scored = [record for record in records if record.get("score") is not None]
    return EvaluatedTask(
        task_id=task.task_id,
        digest=content_digest(task),
        scorer=task.scorer,
        agent=task.agent_name or default_agent,
        environment=task.environment,
        tags=task_tags(task),
        scores=tuple(record["score"] for record in scored),
        failed=sum(slot.status is SlotStatus.FAILED for slot in task.slots),
        failures=tuple(record["failure"]["kind"] for record in records if record.get("failure")),
        turns=tuple(record.get("turns", 0) for record in scored),
        input_tokens=sum(record.get("input_tokens", 0) for record in records),
        cached_tokens=sum(record.get("cached_tokens", 0) for record in records),
        generated_tokens=sum(record.get("generated_tokens", 0) for record in records),
        seconds=tuple(
            (record["completed_at"] - record["created_at"]).total_seconds()
            for record in scored
            if record.get("completed_at") is not None
        ),
        right_threshold=right_threshold,
    )


def content_digest(task: Task) -> str:
    """Return a hash of what a task file says about a task; a field without a value does not count."""
    content = {name: plain(getattr(task, name)) for name in CONTENT}
    return digest({name: value for name, value in content.items() if value not in (None, [], {})})


def digest(content: Any) -> str:
    """Return a hash of a JSON value; the order of keys does not matter."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def task_tags(task: Task) -> tuple[str, ...]:
    """Return the field ``tags`` of a task: a text or a list of texts."""
    tags = task.meta.get("tags")
    named = [tags] if isinstance(tags, str) else tags if isinstance(tags, (list, tuple)) else []
    return tuple(str(tag) for tag in named)


class JudgeChecks(Repository):
    """The calls on judgings of the gold slice."""

    @database_call
    async def begin(self, key: str, digest: str, step: int, *, owner: str, lease_seconds: float) -> bool:
        """Return whether ``owner`` shall judge the slice for ``step``: nobody has, or does under a lease."""
        at = now()
        fields = {
            "digest": digest, "step": step, "owner": owner, "began_at": at,
            "lease_expires_at": at + timedelta(seconds=lease_seconds),
        }  # fmt: skip
        # Compare with a value: an upsert takes no expression in its filter.
        is_free: Json = {"_id": key, "finished_at": None, "lease_expires_at": {"$lt": at}}
        try:
            await self._collection(JUDGE_CHECK).update_one(is_free, {"$set": fields}, upsert=True)
        except DuplicateKeyError:
            return False
        return True

    @database_call
    async def finish(self, key: str, owner: str, scores: Sequence[GoldScore]) -> None:
        """Store the scores, unless another process has taken the judging over."""
        changes: Json = {"$set": {"scores": plain(scores)}, "$currentDate": {"finished_at": True}}
        await self._collection(JUDGE_CHECK).update_one({"_id": key, "owner": owner}, changes)

    @database_call
    async def finished(self) -> list[JudgeCheck]:
        """Return the judgings that have ended, oldest first."""
        return await self._all(
            JudgeCheck, JUDGE_CHECK, {"finished_at": {"$ne": None}}, sort=[("began_at", ASCENDING)]
        )
