"""Count what a run holds: its tasks, Records, training data and failures; its rates and its size."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import OperationFailure

from agentrl.documents.status import TRAINED, DataStatus, RecordStatus, TaskStatus
from agentrl.scoring.groups import FAILED
from agentrl.store.mechanics.connection import Json, Repository, database_call
from agentrl.store.names import DATA, RECORD, TASK
from agentrl.store.selection import ORDER
from agentrl.store.views.aggregation import as_is
from agentrl.store.views.rows import (
    DataCount,
    Disk,
    EnvironmentCount,
    FailureCount,
    GroupCount,
    LengthBias,
    PromptTokens,
    Rates,
)

RATE_SECONDS = 300.0
"""Rates are those of the trajectories that were begun within this time."""
_RATE_RECORDS = 10_000
_ANY_SPLIT: Json = {"split": {"$gte": ""}}
"""The indexes begin with the split."""
_BY_ID: Json = {"$sort": {"_id": 1}}


class Counts(Repository):
    """The counts behind the picture of a run. It never writes.

    ``tasks``, ``records`` and ``data`` read only indexes. ``groups``, ``stored``, ``lengths``, ``prompts``
    and ``environments`` read whole collections.
    """

    @database_call
    async def tasks(self) -> dict[tuple[str, int], dict[str, int]]:
        """Return (split, epoch) → status → Tasks."""
        counts: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)
        for (split, status, epoch), number in (await self._count(TASK, "split", "status", "epoch")).items():
            counts[split, epoch][status] = number
        return dict(sorted(counts.items()))

    @database_call
    async def records(self) -> dict[str, dict[str, int]]:
        """Return split → status as people read it (``SHOWN_STATUSES``) → Records."""
        counts = _by_split(await self._count(RECORD, "split", "status"))
        ready = RecordStatus.READY.value
        for split, found in counts.items():
            query = {"split": split, "status": ready, "trained_count": {"$gt": 0}}
            trained = await self._collection(RECORD).count_documents(query) if ready in found else 0
            if trained:
                found[TRAINED] = trained
                found[ready] = max(0, found[ready] - trained)
        return counts

    @database_call
    async def data(self) -> dict[str, dict[str, int]]:
        """Return split → status → training data."""
        return _by_split(await self._count(DATA, "split", "status"))

    @database_call
    async def quarantined_because(self) -> str | None:
        """Return why one of the quarantined training data must not be trained; None without one."""
        document = await self._collection(DATA).find_one(
            {**_ANY_SPLIT, "status": DataStatus.QUARANTINED.value}, {"problem": 1}
        )
        return None if document is None else document["problem"]

    @database_call
    async def failures(self) -> list[FailureCount]:
        """Count failed attempts by kind, the most frequent first, then groups that cannot be finalized."""
        attempts = await self._aggregate(
            RECORD,
            {"$match": {"status": RecordStatus.FAILED.value}},
            {"$sort": {"created_at": -1}},
            {"$project": {"failure": 1}},
            {
                "$group": {
                    "_id": {"$ifNull": ["$failure.kind", "unknown"]},
                    "count": {"$sum": 1},
                    "message": {"$first": "$failure.message"},
                    "record": {"$first": "$_id"},
                }
            },
            {"$sort": {"count": -1, "_id": 1}},
        )
        groups = await self._aggregate(
            TASK,
            {"$match": {**_ANY_SPLIT, "status": TaskStatus.COMPLETED.value}},
            {"$match": {"group.outcome": FAILED}},
            {"$group": {"_id": "group", "count": {"$sum": 1}, "message": {"$last": "$group.problem"}}},
        )
        return [
            FailureCount(kind=group.pop("_id"), message=group.pop("message") or "", **group)
            for group in (*attempts, *groups)
        ]

    @database_call
    async def rates(self, at: datetime) -> Rates:
        """Return the rates at the server's time ``at``, over less time if 10,000 trajectories are newer."""
        is_failed = {"$eq": ["$status", RecordStatus.FAILED.value]}
        found = await self._aggregate(
            RECORD,
            {"$match": {"created_at": {"$gte": at - timedelta(seconds=RATE_SECONDS)}}},
            {"$sort": {"created_at": -1}},
            {"$limit": _RATE_RECORDS},
            {"$project": as_is("status", "score", "generated_tokens", "created_at")},
            {
                "$group": {
                    "_id": None,
                    "trajectories": {"$sum": 1},
                    "scored": {"$sum": {"$cond": [{"$isNumber": "$score"}, 1, 0]}},
                    "failed": {"$sum": {"$cond": [is_failed, 1, 0]}},
                    "generated_tokens": {"$sum": "$generated_tokens"},
                    "mean_score": {"$avg": "$score"},
                    "oldest": {"$min": "$created_at"},
                }
            },
            {"$unset": "_id"},
        )
        if not found:
            return Rates(seconds=RATE_SECONDS)
        (group,) = found
        oldest = group.pop("oldest")
        is_cut = group["trajectories"] == _RATE_RECORDS
        seconds = max(1.0, (at - oldest).total_seconds()) if is_cut else RATE_SECONDS
        return Rates(seconds=seconds, **group)

    @database_call
    async def disk(self) -> Disk:
        """Return the sizes; without the right to read them, none."""
        return await read_disk(self._connection.database)

    @database_call
    async def groups(self) -> list[GroupCount]:
        """Count the finalized groups of the train split: those begun by order, those begun by pass rate."""
        abandoned = {"$cond": [{"$eq": ["$group.trained", 0]}, 1, 0]}
        groups = await self._aggregate(
            TASK,
            {"$match": {"split": "train", "status": TaskStatus.COMPLETED.value}},
            {
                "$group": {
                    "_id": {"$ifNull": ["$begun.by", ORDER]},
                    "groups": {"$sum": 1},
                    "abandoned_groups": {"$sum": abandoned},
                    "trajectories": {"$sum": "$group.scored"},
                    "trained": {"$sum": "$group.trained"},
                    "pass_rate": {"$avg": "$group.pass_rate"},
                }
            },
            _BY_ID,
        )
        return [GroupCount(by=group.pop("_id"), **group) for group in groups]

    @database_call
    async def stored(self) -> list[DataCount]:
        """Count the training data of each status, and their tokens."""
        fields = {
            "count": {"$sum": 1},
            "tokens": {"$sum": "$tokens"},
            "trainable_tokens": {"$sum": "$trainable_tokens"},
            "because": {"$max": "$problem"},
        }
        groups = await self._aggregate(DATA, {"$group": {"_id": "$status", **fields}})
        return [DataCount(status=group.pop("_id"), **group) for group in groups]

    @database_call
    async def lengths(self) -> list[LengthBias]:
        """Compare the lengths of the scored trajectories of each split with those of the trained ones."""
        trained = {"$gt": ["$trained_count", 0]}
        groups = await self._aggregate(
            RECORD,
            {"$match": {"score": {"$ne": None}}},
            {
                "$group": {
                    "_id": "$split",
                    "sampled": {"$sum": 1},
                    "sampled_tokens": {"$avg": "$generated_tokens"},
                    "trained": {"$sum": {"$cond": [trained, 1, 0]}},
                    "trained_tokens": {"$avg": {"$cond": [trained, "$generated_tokens", None]}},
                }
            },
            _BY_ID,
        )
        return [LengthBias(split=group.pop("_id"), **group) for group in groups]

    @database_call
    async def prompts(self) -> list[PromptTokens]:
        """Add up the prompts of each split, and what engines had cached of them."""
        fields = {"tokens": {"$sum": "$input_tokens"}, "cached": {"$sum": "$cached_tokens"}}
        groups = await self._aggregate(
            RECORD, {"$group": {"_id": "$split", **fields}}, {"$match": {"tokens": {"$gt": 0}}}, _BY_ID
        )
        return [PromptTokens(split=group.pop("_id"), **group) for group in groups]

    @database_call
    async def environments(self) -> list[EnvironmentCount]:
        """Count the tasks of each environment, and average the scores of its finalized groups."""
        is_done = {"$cond": [{"$eq": ["$status", TaskStatus.COMPLETED.value]}, 1, 0]}
        groups = await self._aggregate(
            TASK,
            {"$match": {"environment": {"$ne": None}}},
            {
                "$group": {
                    "_id": {"split": "$split", "environment": "$environment"},
                    "tasks": {"$sum": 1},
                    "finalized": {"$sum": is_done},
                    "trajectories": {"$sum": "$group.scored"},
                    "score": {"$avg": "$group.mean_score"},
                    "pass_rate": {"$avg": "$group.pass_rate"},
                }
            },
            _BY_ID,
        )
        return [EnvironmentCount(**group.pop("_id"), **group) for group in groups]

    async def _count(self, name: str, *fields: str) -> dict[tuple[Any, ...], int]:
        """Return the values of ``fields`` → documents. An index begins with them, in any order.

        The server skips through it for the distinct values, and counts its keys.
        """
        collection, keys = self._collection(name), [dict[str, Any]()]
        for field in fields:
            values = await asyncio.gather(*(collection.distinct(field, key) for key in keys))
            keys = [{**key, field: value} for key, of in zip(keys, values, strict=True) for value in of]
        numbers = await asyncio.gather(*(collection.count_documents(key) for key in keys))
        return {tuple(key.values()): number for key, number in zip(keys, numbers, strict=True)}

    async def _aggregate(self, name: str, *stages: Json) -> list[Json]:
        return await (await self._collection(name).aggregate(list(stages))).to_list()


def _by_split(numbers: Mapping[tuple[Any, ...], int]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    for (split, status), number in numbers.items():
        counts[split][status] = number
    return dict(counts)


async def read_disk(database: AsyncDatabase[Json]) -> Disk:
    """Return the sizes of a database and of its server's file system; without the right, none."""
    try:
        stats = await database.command("dbStats")
    except OperationFailure:
        return Disk()
    total, used = stats.get("fsTotalSize"), stats.get("fsUsedSize")
    return Disk(
        run=int(stats.get("totalSize", stats["storageSize"])),
        free=None if total is None or used is None else int(total - used),
        total=None if total is None else int(total),
    )
