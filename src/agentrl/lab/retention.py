"""Delete model calls, gateway requests, training data and images that nothing needs; keep the audit trail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from agentrl.documents.status import APPLIED_STEPS, DataStatus, RecordStatus, values
from agentrl.errors import StoreError
from agentrl.store.mechanics.blobs import PACKED, Blobs
from agentrl.store.mechanics.connection import (
    COLUMN,
    DATA,
    GATEWAY_CALL,
    GATEWAY_SESSION,
    IMAGE,
    LABEL,
    MODEL_CALL,
    RECORD,
    STEP,
    TASK,
    TOKEN_STATISTICS,
    Connection,
    Json,
    Repository,
    database_call,
)
from agentrl.store.settings import Ancestry

_BATCH = 100
_DEAD = [RecordStatus.FAILED.value, RecordStatus.RELEASED.value, RecordStatus.ABANDONED.value]
_UNTRAINED = [DataStatus.STALE.value, DataStatus.QUARANTINED.value]
_USED = [DataStatus.TRAINED.value, *_UNTRAINED]
_GRACE = timedelta(hours=1)
"""Images that were put more recently stay: the call that shows them may not be stored yet."""
OF_RECORD: Final = {
    GATEWAY_CALL: "record", GATEWAY_SESSION: "record", TOKEN_STATISTICS: "record", COLUMN: "record",
    MODEL_CALL: "record", DATA: "_id",
}  # fmt: skip
"""Collections of what belongs to one Record → the field with the Record's ``_id``."""


@dataclass(slots=True, kw_only=True)
class Pruned:
    """Counts of what was deleted. ``bytes`` is the size of documents and files; the server reuses it."""

    trajectories: int = 0
    calls: int = 0
    data: int = 0
    files: int = 0
    bytes: int = 0

    def add(self, other: Pruned) -> None:
        """Add the counts of another batch."""
        self.trajectories += other.trajectories
        self.calls += other.calls
        self.data += other.data
        self.files += other.files
        self.bytes += other.bytes


class Retention(Repository):
    """Deletes what a run no longer needs."""

    @database_call
    async def prune(
        self, *, last_step: int, older_than_days: float | None = None, before_step: int | None = None,
        dry_run: bool = False,
    ) -> Pruned:  # fmt: skip
        """Delete calls and data of finished trajectories, one transaction per batch.

        A trajectory is finished if it is trained, stale, quarantined, failed, released or abandoned. Data
        that wait to be trained or are planned stay, and those of steps after ``last_step``, which a resume
        may train again. ``older_than_days`` keeps trajectories begun later, by the server's clock.
        ``before_step`` keeps what that step or a later one trained, and what was never trained and begun
        after that step was planned. The groups of steps that a child trains again stay, with what failed in
        them. Records, Tasks and TrainSteps get ``pruned_at``. Raises StoreError if ``before_step`` is not
        committed.
        """
        others: Json = {"task": {"$nin": await self._needed_by_children()}}
        begun: Json = {}
        if older_than_days is not None:
            begun["$lt"] = await self._connection.server_time() - timedelta(days=older_than_days)
        trained = {
            "status": {"$in": _USED}, "trained_count": {"$gt": 0}, **_created(begun), **others,
            "trained_at_steps": {"$not": {"$gt": min(last_step, (before_step or last_step + 1) - 1)}},
        }  # fmt: skip
        if before_step is not None:
            planned = await self._planned_at(before_step)
            if planned is None:
                raise StoreError(
                    f"step {before_step} is not committed", hint="`agentrl audit run` shows the last steps"
                )
            begun = {"$lt": min(planned, begun.get("$lt", planned))}
        untrained = {"status": {"$in": _UNTRAINED}, "trained_count": 0, **_created(begun), **others}
        used: Json = {"$or": [untrained, trained]}
        dead: Json = {"status": {"$in": _DEAD}, "pruned_at": None, **_created(begun), **others}
        total = Pruned()
        for collection, query in ((DATA, used), (RECORD, dead)):
            async for page in self._pages(collection, query, _BATCH, {"_id": 1}):
                batch = [document["_id"] for document in page]
                total.add(await self._prune(batch, used, dead, dry_run))
        return total

    async def _needed_by_children(self) -> list[str]:
        """Return the Tasks of the steps that living children train again; forget the other children."""
        ancestry = Ancestry(self._connection)
        await ancestry.forget_dropped()
        needed: set[str] = set()
        for child in await ancestry.children():
            if child.steps:
                first = min(child.steps[0], child.step + 1)  # its checkpoint may lie before
                at = {"trained_at_steps": {"$elemMatch": {"$gte": first, "$lte": child.steps[-1]}}}
                needed.update(await self._collection(DATA).distinct("task", at))
        return sorted(needed)

    async def _planned_at(self, step: int) -> datetime | None:
        query = {"step": step, "status": {"$in": values(APPLIED_STEPS)}}
        document = await self._collection(STEP).find_one(query, {"planned_at": 1})
        return None if document is None else document["planned_at"]

    async def _prune(self, candidates: Sequence[str], used: Json, dead: Json, dry_run: bool) -> Pruned:
        async def write() -> Pruned:
            ids = {"_id": {"$in": list(candidates)}}
            chosen = await self._ids(DATA, {**ids, **used})
            chosen += await self._ids(RECORD, {**ids, **dead})
            if not chosen:
                return Pruned()
            freed = await self._measure(chosen)
            if not dry_run:
                await self._delete(chosen)
            return freed

        return await self._connection.transaction(write)

    async def _delete(self, ids: Sequence[str]) -> None:
        chosen = {"_id": {"$in": list(ids)}}
        stamp = {"$currentDate": {"pruned_at": True}}
        records = self._collection(RECORD)
        tasks = [item["task"] async for item in records.find(chosen, {"task": 1})]
        await _delete_beside(self._connection, ids)
        await records.update_many(chosen, stamp)
        await self._collection(TASK).update_many({"_id": {"$in": tasks}}, stamp)
        await self._collection(STEP).update_many({"data": {"$in": list(ids)}}, stamp)

    async def _measure(self, ids: Sequence[str]) -> Pruned:
        freed = Pruned(trajectories=len(ids))
        counts: dict[str, int] = {}
        for collection, field in OF_RECORD.items():
            counts[collection], size = await self._size(collection, {field: {"$in": list(ids)}})
            files = {}
            if collection in PACKED:
                files = await Blobs(self._connection, collection).sizes(ids)
            freed.files += len(files)
            freed.bytes += size + sum(files.values())
        freed.calls, freed.data = counts[MODEL_CALL], counts[DATA]
        return freed

    async def _size(self, collection: str, query: Json) -> tuple[int, int]:
        count = {"_id": None, "count": {"$sum": 1}, "bytes": {"$sum": {"$bsonSize": "$$ROOT"}}}
        groups = await self._aggregate(collection, {"$match": query}, {"$group": count})
        return (int(groups[0]["count"]), int(groups[0]["bytes"])) if groups else (0, 0)

    @database_call
    async def prune_images(self, *, dry_run: bool = False, grace: timedelta = _GRACE) -> tuple[int, int]:
        """Delete images that no task, call or datum names and that were last put before ``grace``.

        Return their number and bytes.
        """
        before = await self._connection.server_time() - grace
        fields: Json = {"bytes": {"$bsonSize": "$$ROOT"}}
        cursor = self._collection(IMAGE).find({"used_at": {"$lt": before}}, fields)
        unused: dict[str, int] = {}
        async for document in cursor:
            if not await self._is_image_used(document["_id"]):
                unused[document["_id"]] = document["bytes"]
        if dry_run:
            return len(unused), sum(unused.values())
        deleted = [image for image in unused if await self._delete_image(image, before)]
        return len(deleted), sum(unused[image] for image in deleted)

    @database_call
    async def delete_unused(self, images: Sequence[str], *, waits: bool) -> list[str]:
        """Delete those of ``images`` that nobody uses; return what is left.

        With ``waits``, those that were put within the last hour are left.
        """
        before = await self._connection.server_time() - (_GRACE if waits else timedelta())
        unused = [image for image in images if not await self._is_image_used(image)]
        fresh = [image for image in unused if not await self._delete_image(image, before)]
        return await self._ids(IMAGE, {"_id": {"$in": fresh}})

    async def _delete_image(self, image: str, before: datetime) -> bool:
        """Delete one image and its files unless it was put again meanwhile."""

        async def write() -> bool:
            query = {"_id": image, "used_at": {"$lt": before}}
            deleted = await self._collection(IMAGE).delete_one(query)
            if deleted.deleted_count:
                await Blobs(self._connection, IMAGE).delete([image])
            return bool(deleted.deleted_count)

        return await self._connection.transaction(write)

    async def _is_image_used(self, image: str) -> bool:
        for collection in (TASK, MODEL_CALL, DATA):
            if await self._collection(collection).find_one({"images.sha256": image}, {"_id": 1}):
                return True
        return False


async def _delete_beside(connection: Connection, ids: Sequence[str]) -> None:
    """Delete what belongs to Records, but neither them nor their labels."""
    for collection, field in OF_RECORD.items():
        await connection.collection(collection).delete_many({field: {"$in": list(ids)}})
        if collection in PACKED:
            await Blobs(connection, collection).delete(ids)


async def delete_records(connection: Connection, ids: Sequence[str]) -> None:
    """Delete Records with everything that belongs to them."""
    await _delete_beside(connection, ids)
    for collection, field in ((LABEL, "record"), (RECORD, "_id")):
        await connection.collection(collection).delete_many({field: {"$in": list(ids)}})


def _created(bound: Json) -> Json:
    return {"created_at": bound} if bound else {}
