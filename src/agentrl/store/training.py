"""Training data: what is ready, what is stale, what a step takes; the groups and steps they belong to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter

from pymongo import ASCENDING
from pymongo.asynchronous.client_session import AsyncClientSession

from agentrl.documents.base import Root
from agentrl.documents.status import DataStatus
from agentrl.documents.training import DBRecordData
from agentrl.errors import StoreError, StoreUnavailableError
from agentrl.store.blobs import Blobs
from agentrl.store.claims import Claims
from agentrl.store.connection import Json, database_call
from agentrl.store.groups import Decide, GroupOutcome, Groups, RecordOutcome
from agentrl.store.names import DATA, RECORD
from agentrl.store.old_versions import OldVersions
from agentrl.store.runs import guard
from agentrl.store.steps import Steps

__all__ = ["DataMeta", "Decide", "GroupOutcome", "ReadyMember", "RecordOutcome", "Training"]


_FETCHED_TOGETHER = 16
"""Documents of one query: the server reads the next ones while these are decoded."""

_TASKS_TOGETHER = 50
_DATA_TOGETHER = 1000
"""Groups of one update."""

_WAITING = [DataStatus.READY.value, DataStatus.PLANNED.value]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataMeta(Root):
    """A DBRecordData without its tree and its packed arrays: enough to choose what to train."""

    id: str
    record: str
    task: str
    status: DataStatus
    score: float
    advantage: float
    min_version: int
    max_version: int
    tokens: int
    trainable_tokens: int
    turns: int
    trained_count: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class ReadyMember:
    """One DBRecordData of a group that a step may train whole."""

    id: str
    task: str
    trained_count: int
    """That of the member of its group that has been trained most often."""


_META = dict.fromkeys(
    ("record", "task", "status", "score", "advantage", "min_version", "max_version", "tokens",
     "trainable_tokens", "turns", "trained_count", "created_at"), 1,
)  # fmt: skip


class Training(Groups, Steps):
    """What the trainer reads and writes."""

    @database_call
    async def ready(self, split: str, *, limit: int = 0, step: int | None = None) -> list[DataMeta]:
        """Data to train, oldest first; ``limit`` 0 is all.

        With ``step``, those are left out that an earlier step trained and that must rest until later.
        """
        query: Json = {"split": split, "status": DataStatus.READY.value}
        if step is not None:
            query["not_before_step"] = {"$lte": step}
        cursor = self._collection(DATA).find(
            query, _META, sort=[("created_at", ASCENDING), ("_id", ASCENDING)], limit=limit
        )
        return [DataMeta.from_document(document) async for document in cursor]

    @database_call
    async def ready_members(
        self, split: str, *, step: int, old: OldVersions | None = None, untrained: bool = False
    ) -> list[ReadyMember]:
        """The ready data of every group that ``step`` may train; a group is here with all of them, or not.

        A group is left out while one of its members is planned, or rests until a later step. Where any span
        of ``old`` versions makes data stale, a group with a stale member is left out; where only all spans
        do, the stale members are. ``untrained``: groups never trained.
        """
        is_stale: Json | bool = old.expression if old is not None and old.ranges else False
        whole: Json = {"is_planned": False, "rests_until": {"$lte": step}}
        if old is not None and old.spans == "any":
            whole["is_stale"] = False
        if untrained:
            whole["trained_count"] = 0
        pipeline: list[Json] = [
            {"$match": {"split": split, "status": {"$in": _WAITING}}},
            {
                "$group": {
                    "_id": "$task",
                    "members": {"$push": {"$cond": [is_stale, "$$REMOVE", "$_id"]}},
                    "is_planned": {"$max": {"$eq": ["$status", DataStatus.PLANNED.value]}},
                    "rests_until": {"$max": "$not_before_step"},
                    "is_stale": {"$max": is_stale},
                    "trained_count": {"$max": "$trained_count"},
                }
            },
            {"$match": whole},
            {"$project": {"members": 1, "trained_count": 1}},
        ]
        groups = await (await self._collection(DATA).aggregate(pipeline)).to_list()
        return [
            ReadyMember(id=id, task=group["_id"], trained_count=group["trained_count"])
            for group in sorted(groups, key=itemgetter("_id"))
            for id in group["members"]
        ]

    @database_call
    async def mark_stale(self, split: str, old: OldVersions, *, attempt: int | None = None) -> int:
        """Mark the ready data that ``old`` makes stale; return how many.

        Where any old span does, that is every group with such a member: its advantages compare all of its
        trajectories, so that it is trained whole or not at all. Where only all spans do, single data are set
        aside: nothing of them would be trained. The members that are old come last: what is interrupted is
        found again. A trainer that has been replaced, which ``attempt`` tells, gets a LeaseLostError.
        """
        if not old.ranges:
            return 0
        ready: Json = {"split": split, "status": DataStatus.READY.value}
        stale = {"$set": {"status": DataStatus.STALE.value}}
        data, marked = self._collection(DATA), 0
        tasks = await data.distinct("task", {**ready, **old.query}) if old.spans == "any" else []
        for start in range(0, len(tasks), _TASKS_TOGETHER):
            group = {**ready, "task": {"$in": tasks[start : start + _TASKS_TOGETHER]}}
            others = {**group, "$nor": [old.query]}
            for query in (others, group):
                marked += await self._set_aside(query, stale, attempt)
        while old.spans == "all":
            found = data.find({**ready, **old.query}, {"_id": 1}, limit=_DATA_TOGETHER)
            ids = [item["_id"] async for item in found]
            if not ids:
                break
            marked += await self._set_aside({**ready, "_id": {"$in": ids}}, stale, attempt)
        return marked

    async def _set_aside(self, query: Json, change: Json, attempt: int | None) -> int:
        """Change data in one transaction with the trainer's lease; returns how many."""

        async def write(session: AsyncClientSession) -> int:
            await guard(self._connection, attempt, session)
            return (await self._collection(DATA).update_many(query, change, session=session)).modified_count

        return await self._connection.transaction(write)

    @database_call
    async def quarantine(self, query: Json, problem: str, *, attempt: int | None = None) -> int:
        """Set ready training data aside for good because of ``problem``; returns how many.

        ``query`` selects them: ``{"task": …}`` for a whole group, ``{"_id": …}`` for one. ``attempt`` as in
        ``mark_stale``.
        """
        return await self._set_aside(
            {**query, "status": DataStatus.READY.value},
            {"$set": {"status": DataStatus.QUARANTINED.value, "problem": problem}},
            attempt,
        )

    async def fetch(self, ids: Sequence[str]) -> list[DBRecordData]:
        """Whole documents, in the order of ``ids``. StoreError if one is missing or cannot be read."""
        found, unreadable = await self.fetch_readable(ids)
        missing = [key for key in ids if key not in found]
        if missing:
            why = unreadable.get(missing[0], "it is not there")
            raise StoreError(f"{len(missing)} training documents are missing, {missing[0]} among them: {why}")
        return [found[key] for key in ids]

    @database_call
    async def fetch_readable(self, ids: Sequence[str]) -> tuple[dict[str, DBRecordData], dict[str, str]]:
        """Whole documents, {id: document}, and why others cannot be read; some may not be there at all."""
        parts = [ids[start : start + _FETCHED_TOGETHER] for start in range(0, len(ids), _FETCHED_TOGETHER)]
        unreadable: dict[str, str] = {}
        read = await asyncio.gather(*(self._fetch(part, unreadable) for part in parts))
        return {item.id: item for part in read for item in part}, unreadable

    async def _fetch(self, ids: Sequence[str], unreadable: dict[str, str]) -> list[DBRecordData]:
        documents = await self._collection(DATA).find({"_id": {"$in": list(ids)}}).to_list()
        blobs = Blobs(self._connection, DATA)
        read = []
        for document in documents:
            try:
                read.append(DBRecordData.from_document(await blobs.restore(document)))
            except StoreUnavailableError:
                raise
            except (StoreError, ValueError, TypeError, KeyError) as error:
                why = error.message if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
                unreadable[document["_id"]] = f"it cannot be read: {why}"
        return read

    @database_call
    async def mean_generated_tokens(
        self, *, tasks: Sequence[str] | None = None, records: Sequence[str] | None = None
    ) -> float | None:
        """Mean generated tokens of the scored Records of ``tasks``, or of ``records``; None without any."""
        query: Json = (
            {"_id": {"$in": list(records or ())}} if tasks is None else {"task": {"$in": list(tasks)}}
        )
        pipeline: list[Json] = [
            {"$match": {**query, "score": {"$ne": None}}},
            {"$group": {"_id": None, "mean": {"$avg": "$generated_tokens"}}},
        ]
        async for group in await self._collection(RECORD).aggregate(pipeline):
            return float(group["mean"])
        return None

    @database_call
    async def counts(self, split: str) -> dict[DataStatus, int]:
        """How many DBRecordData are in each state; every state is a key."""
        counts = dict.fromkeys(DataStatus, 0)
        pipeline: list[Json] = [
            {"$match": {"split": split}},
            {"$group": {"_id": "$status", "count": {"$sum": 1}}},
        ]
        async for group in await self._collection(DATA).aggregate(pipeline):
            counts[DataStatus(group["_id"])] = group["count"]
        return counts

    async def open_groups(self, split: str) -> int:
        """Groups begun and not yet trained: what admission compares with its limit."""
        return await Claims(self._connection).groups_open(split)
