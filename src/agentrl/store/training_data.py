"""Find the training data that are ready, mark stale and bad data, and fetch the data of a step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal

from pymongo import ReplaceOne

from agentrl.base.batches import batches
from agentrl.documents.status import DataStatus
from agentrl.documents.training import DBRecordData, TokenStatistics, TrainStep, statistics_key
from agentrl.errors import StoreError, StoreUnavailableError
from agentrl.store.mechanics.blobs import Blobs
from agentrl.store.mechanics.connection import DATA, RECORD, TOKEN_STATISTICS, Json, Repository, database_call
from agentrl.store.policy_versions import fenced

Spans = Literal["any", "all"]

_FETCHED_PER_QUERY = 16
"""Documents of one query; the server reads the next ones while these are decoded."""
_GROUPS_PER_UPDATE = 50
_DATA_PER_UPDATE = 1000
_UNTRAINED = [DataStatus.READY.value, DataStatus.PLANNED.value]


@dataclass(frozen=True, slots=True)
class StaleVersions:
    """Policy versions that are too old. Data are stale if ``any`` or ``all`` of their ``spans`` are too old.

    ``ranges`` are inclusive and ascending. A run that was never resumed has one range, from version 0; then
    the minimum or maximum version of a document decides, and an index answers the query. After a resume, a
    version of the reverted steps can be fresher than a higher version. Then the indexed bound excludes most
    documents, and the spans decide.
    """

    ranges: tuple[tuple[int, int], ...]
    spans: Spans = "any"

    @property
    def query(self) -> Json:
        """Return a filter for stale data. Requires at least one range."""
        bound: Json = {self._bound: {"$lte": self.ranges[-1][1]}}
        if self._is_prefix:
            return bound
        old = [{"version": {"$gte": low, "$lte": high}} for low, high in self.ranges]
        any_old: Json = {"$elemMatch": {"$or": old}}
        return {**bound, "spans": any_old if self.spans == "any" else {"$not": {"$elemMatch": {"$nor": old}}}}

    @property
    def expression(self) -> Json:
        """Return ``query`` as an aggregation expression."""
        bound: Json = {"$lte": [f"${self._bound}", self.ranges[-1][1]]}
        if self._is_prefix:
            return bound
        old = [{"$and": [{"$gte": ["$$version", low]}, {"$lte": ["$$version", high]}]}
               for low, high in self.ranges]  # fmt: skip
        each = {"$map": {"input": "$spans.version", "as": "version", "in": {"$or": old}}}
        quantifier = "$anyElementTrue" if self.spans == "any" else "$allElementsTrue"
        return {"$and": [bound, {quantifier: [each]}]}

    @property
    def _bound(self) -> str:
        """Return the indexed field to compare with the newest stale version."""
        return "min_version" if self.spans == "any" else "max_version"

    @property
    def _is_prefix(self) -> bool:
        """Return whether every version up to the newest stale one is stale: the run was never resumed."""
        return len(self.ranges) == 1 and self.ranges[0][0] <= 0


@dataclass(frozen=True, slots=True)
class ReadyMember:
    """One ready DBRecordData of a group whose members a step may all train."""

    id: str
    task: str
    trained_count: int
    """The highest count among the members of its group."""


class Training(Repository):
    """The trainer's calls on training data; ``Groups`` makes them, and ``Steps`` trains them."""

    @database_call
    async def ready_members(
        self, split: str, *, step: int, max_trained_count: int = 1, old: StaleVersions | None = None,
        untrained: bool = False,
    ) -> list[ReadyMember]:  # fmt: skip
        """Return the ready data of every group that ``step`` may train; a group is whole or absent.

        Excludes groups with a member that is planned, must not be trained before a later step, or was trained
        ``max_trained_count`` times. If ``old.spans`` is "any", excludes groups with a stale member; if "all",
        excludes only the stale members. ``untrained`` restricts the result to groups that were never trained.
        """
        is_stale: Json | bool = old.expression if old is not None and old.ranges else False
        whole: Json = {
            "is_planned": False, "rests_until": {"$lte": step}, "trained_count": {"$lt": max_trained_count},
        }  # fmt: skip
        if old is not None and old.spans == "any":
            whole["is_stale"] = False
        if untrained:
            whole["trained_count"] = 0
        by_task: Json = {
            "_id": "$task",
            "members": {"$push": {"$cond": [is_stale, "$$REMOVE", "$_id"]}},
            "is_planned": {"$max": {"$eq": ["$status", DataStatus.PLANNED.value]}},
            "rests_until": {"$max": "$not_before_step"},
            "is_stale": {"$max": is_stale},
            "trained_count": {"$max": "$trained_count"},
        }
        groups = await self._aggregate(
            DATA,
            {"$match": {"split": split, "status": {"$in": _UNTRAINED}}},
            {"$group": by_task},
            {"$match": whole},
            {"$project": {"members": 1, "trained_count": 1}},
        )
        return [
            ReadyMember(id=id, task=group["_id"], trained_count=group["trained_count"])
            for group in sorted(groups, key=itemgetter("_id"))
            for id in group["members"]
        ]

    @database_call
    async def mark_stale(self, split: str, old: StaleVersions, *, attempt: int | None = None) -> int:
        """Change the status of stale ready data to STALE; return how many.

        If ``old.spans`` is "any", mark every group with a stale member as a whole, because its advantages
        compare all its trajectories. If "all", mark single data, of which no token would be trained. The
        stale members of a group come last, so that a repeated call finds an interrupted one. Raises
        LeaseLostError if ``attempt`` is not the current trainer's.
        """
        if not old.ranges:
            return 0
        ready: Json = {"split": split, "status": DataStatus.READY.value}
        stale = {"$set": {"status": DataStatus.STALE.value}}
        data, marked = self._collection(DATA), 0
        tasks = await data.distinct("task", {**ready, **old.query}) if old.spans == "any" else []
        # Bound each transaction: after a pause of the trainer thousands of groups may be stale at once.
        for some in batches(tasks, _GROUPS_PER_UPDATE):
            group = {**ready, "task": {"$in": some}}
            others = {**group, "$nor": [old.query]}
            for query in (others, group):
                marked += await self._update(query, stale, attempt)
        while old.spans == "all":
            ids = await self._ids(DATA, {**ready, **old.query}, limit=_DATA_PER_UPDATE)
            if not ids:
                break
            marked += await self._update({**ready, "_id": {"$in": ids}}, stale, attempt)
        return marked

    async def _update(self, query: Json, change: Json, attempt: int | None) -> int:
        """Update data in one transaction that the trainer's lease fences; return how many."""
        data = self._collection(DATA)
        updated = await fenced(self._connection, attempt, lambda: data.update_many(query, change))
        return updated.modified_count

    @database_call
    async def quarantine(self, query: Json, problem: str, *, attempt: int | None = None) -> int:
        """Quarantine ready data because of ``problem``: they are never trained. Return how many.

        ``query`` selects the data: ``{"task": …}`` for a group, ``{"_id": …}`` for one. Raises LeaseLostError
        as ``mark_stale``.
        """
        return await self._update(
            {**query, "status": DataStatus.READY.value},
            {"$set": {"status": DataStatus.QUARANTINED.value, "problem": problem}},
            attempt,
        )

    @database_call
    async def present(self, ids: Sequence[str]) -> set[str]:
        """Return those of ``ids`` that exist."""
        return set(await self._ids(DATA, {"_id": {"$in": list(ids)}}))

    async def fetch(self, ids: Sequence[str]) -> list[DBRecordData]:
        """Return whole documents in the order of ``ids``. Raises StoreError if one cannot be read."""
        data, unreadable = await self.fetch_readable(ids)
        missing = [key for key in ids if key not in data]
        if missing:
            why = unreadable.get(missing[0], "it does not exist")
            raise StoreError(f"{len(missing)} training documents are missing, {missing[0]} among them: {why}")
        return [data[key] for key in ids]

    @database_call
    async def fetch_readable(self, ids: Sequence[str]) -> tuple[dict[str, DBRecordData], dict[str, str]]:
        """Return {id: whole document} and {id: reason} of unreadable ones; missing ids are in neither."""
        unreadable: dict[str, str] = {}
        parts = batches(ids, _FETCHED_PER_QUERY)
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
                # Raise an outage: it says nothing of the document, which would be quarantined for good.
                raise
            except (StoreError, ValueError, TypeError, KeyError) as error:
                why = error.message if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
                unreadable[document["_id"]] = f"it cannot be read: {why}"
        return read

    @database_call
    async def mean_generated_tokens(
        self, *, tasks: Sequence[str] | None = None, records: Sequence[str] | None = None
    ) -> float | None:
        """Return the mean generated tokens of the scored Records among ``tasks`` or ``records``."""
        field, keys = ("_id", records or ()) if tasks is None else ("task", tasks)
        query: Json = {field: {"$in": list(keys)}}
        mean = {"$group": {"_id": None, "mean": {"$avg": "$generated_tokens"}}}
        groups = await self._aggregate(RECORD, {"$match": {**query, "score": {"$ne": None}}}, mean)
        return float(groups[0]["mean"]) if groups else None

    @database_call
    async def prefix_cache_hit_rate(self, tasks: Sequence[str]) -> float | None:
        """Return the fraction of prompt tokens of the Records of ``tasks`` that engines had cached."""
        sums = {"_id": None, "input": {"$sum": "$input_tokens"}, "cached": {"$sum": "$cached_tokens"}}
        groups = await self._aggregate(RECORD, {"$match": {"task": {"$in": list(tasks)}}}, {"$group": sums})
        return float(groups[0]["cached"] / groups[0]["input"]) if groups and groups[0]["input"] else None

    @database_call
    async def token_statistics(self, step: TrainStep) -> dict[str, TokenStatistics]:
        """Return the statistics that a step stored, by Record."""
        keys = [statistics_key(record, step.id) for record in step.data]
        found = await self._all(TokenStatistics, TOKEN_STATISTICS, {"_id": {"$in": keys}})
        return {item.record: item for item in found}

    @database_call
    async def put_token_statistics(self, items: Sequence[TokenStatistics]) -> None:
        """Store the statistics of a step, and replace those that exist. Idempotent."""
        writes = [ReplaceOne({"_id": item.id}, item.to_document(), upsert=True) for item in items]
        if writes:
            await self._collection(TOKEN_STATISTICS).bulk_write(writes, ordered=False)
