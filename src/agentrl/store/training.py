"""Training data: what is ready, what is stale, what a step takes; the groups and steps they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from pymongo import ASCENDING

from agentrl.documents.base import Root
from agentrl.documents.status import DataStatus
from agentrl.documents.training import DBRecordData
from agentrl.errors import StoreError
from agentrl.store.blobs import Blobs
from agentrl.store.claims import Claims
from agentrl.store.connection import Json, database_call
from agentrl.store.groups import Decide, GroupOutcome, Groups, RecordOutcome
from agentrl.store.names import DATA
from agentrl.store.steps import Steps

__all__ = ["DataMeta", "Decide", "GroupOutcome", "RecordOutcome", "Training"]


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


_META = dict.fromkeys(
    ("record", "task", "status", "score", "advantage", "min_version", "max_version", "tokens",
     "trainable_tokens", "turns", "trained_count", "created_at"), 1,
)  # fmt: skip


class Training(Groups, Steps):
    """What the trainer reads and writes."""

    @database_call
    async def ready(
        self, split: str, *, min_version: int = 0, limit: int = 0, step: int | None = None
    ) -> list[DataMeta]:
        """Data to train, oldest first, none with a token older than ``min_version``; ``limit`` 0 is all.

        With ``step``, those are left out that an earlier step trained and that must rest until later.
        """
        query: Json = {
            "split": split, "status": DataStatus.READY.value, "min_version": {"$gte": min_version},
        }  # fmt: skip
        if step is not None:
            query["not_before_step"] = {"$lte": step}
        cursor = self._collection(DATA).find(
            query, _META, sort=[("created_at", ASCENDING), ("_id", ASCENDING)], limit=limit
        )
        return [DataMeta.from_document(document) async for document in cursor]

    @database_call
    async def mark_stale(self, split: str, below_version: int) -> int:
        """Set aside ready data that hold a token older than ``below_version``; returns how many."""
        result = await self._collection(DATA).update_many(
            {"split": split, "status": DataStatus.READY.value, "min_version": {"$lt": below_version}},
            {"$set": {"status": DataStatus.STALE.value}},
        )
        return result.modified_count

    @database_call
    async def fetch(self, ids: Sequence[str]) -> list[DBRecordData]:
        """Whole documents, in the order of ``ids``. StoreError if one is missing."""
        blobs = Blobs(self._connection, DATA)
        found = {
            document["_id"]: DBRecordData.from_document(await blobs.restore(document))
            async for document in self._collection(DATA).find({"_id": {"$in": list(ids)}})
        }
        missing = [key for key in ids if key not in found]
        if missing:
            raise StoreError(f"{len(missing)} training documents are missing, {missing[0]} among them")
        return [found[key] for key in ids]

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
