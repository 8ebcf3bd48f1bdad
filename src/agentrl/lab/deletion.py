"""Delete from a run what nothing needs any more, and what ``agentrl retract`` withdraws.

``agentrl db prune`` deletes model calls, training data and images, and keeps the audit trail. A retraction
lists tombstones first and deletes what they list, group by group: a killed call is finished by the next one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from pymongo import UpdateOne

from agentrl.base.batches import batches
from agentrl.documents.document import now, plain
from agentrl.documents.record import Record
from agentrl.documents.run import Rebuilt, Retraction, Tombstone, Withdrawn, epoch_key
from agentrl.documents.status import (
    APPLIED_STEPS,
    DataStatus,
    EvaluationStatus,
    RecordStatus,
    SlotStatus,
    TaskStatus,
    VersionStatus,
    values,
)
from agentrl.documents.task import record_task, scorer_weights
from agentrl.errors import StoreError
from agentrl.lab.regroup import (
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
from agentrl.scoring.groups import FAILED, summarize
from agentrl.store.epochs import Epochs
from agentrl.store.groups import GroupOutcome
from agentrl.store.mechanics import lease
from agentrl.store.mechanics.blobs import PACKED, Blobs
from agentrl.store.mechanics.connection import (
    COLUMN,
    DATA,
    EPOCH,
    EVALUATION,
    GATEWAY_CALL,
    GATEWAY_SESSION,
    IMAGE,
    LABEL,
    MODEL_CALL,
    RECORD,
    RETRACTION,
    STEP,
    TASK,
    TOKEN_STATISTICS,
    TOMBSTONE,
    VERSION,
    Connection,
    Json,
    Repository,
    database_call,
)
from agentrl.store.mechanics.lease import literal
from agentrl.store.policy_versions import fenced
from agentrl.store.records import read_records
from agentrl.store.settings import Ancestry, Withdrawals
from agentrl.store.tasks import Tasks

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

        A trajectory is finished if it is trained, stale, quarantined, failed, abandoned, or released and no
        slot goes on with it. Data that wait to be trained or are planned stay, and those of steps after
        ``last_step``, which a resume may train again. ``older_than_days`` keeps trajectories begun later, by
        the server's clock. ``before_step`` keeps what that step or a later one trained, and what was never
        trained and begun after that step was planned. The groups of steps that a child trains again stay,
        with what failed in them. Records, Tasks and TrainSteps get ``pruned_at``. Raises StoreError if
        ``before_step`` is not committed.
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
            committed = {"step": before_step, "status": {"$in": values(APPLIED_STEPS)}}
            step = await self._collection(STEP).find_one(committed, {"planned_at": 1})
            if step is None:
                raise StoreError(
                    f"step {before_step} is not committed", hint="`agentrl audit run` shows the last steps"
                )
            begun = {"$lt": min(step["planned_at"], begun.get("$lt", step["planned_at"]))}
        untrained = {"status": {"$in": _UNTRAINED}, "trained_count": 0, **_created(begun), **others}
        used: Json = {"$or": [untrained, trained]}
        dead: Json = {"status": {"$in": _DEAD}, "pruned_at": None, **_created(begun), **others}
        going_on = Tasks(self._connection, Epochs(self._connection))
        total = Pruned()
        for collection, query in ((DATA, used), (RECORD, dead)):
            async for page in self._pages(collection, query, _BATCH, {"_id": 1}):
                found = {document["_id"] for document in page}
                # Ask after the read: a released Record that no slot goes on with stays so for good.
                batch = sorted(found - await going_on.unfinished_records(found))
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
        for collection, key in OF_RECORD.items():
            counts[collection], size = await self._size(collection, {key: {"$in": list(ids)}})
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
    for collection, key in OF_RECORD.items():
        await connection.collection(collection).delete_many({key: {"$in": list(ids)}})
        if collection in PACKED:
            await Blobs(connection, collection).delete(ids)


async def delete_records(connection: Connection, ids: Sequence[str]) -> None:
    """Delete Records with everything that belongs to them."""
    await _delete_beside(connection, ids)
    for collection, key in ((LABEL, "record"), (RECORD, "_id")):
        await connection.collection(collection).delete_many({key: {"$in": list(ids)}})


def _created(bound: Json) -> Json:
    return {"created_at": bound} if bound else {}


BATCH = 100
"""Records of one query or transaction."""
_APPLIED = values(APPLIED_STEPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetractSelection:
    """What would be withdrawn, and where it went."""

    tombstones: Sequence[Tombstone]
    first_step: int | None
    """The first step in the weights that trained some of it."""
    versions: tuple[int, ...]
    """The first and the last published version with its influence; empty without any."""

    def of(self, kind: Withdrawn) -> list[Tombstone]:
        """Return the Records or the Tasks."""
        return [stone for stone in self.tombstones if stone.kind is kind]

    @property
    def steps(self) -> list[str]:
        """The TrainSteps that trained some of it, undone ones included, in order."""
        return sorted({step for stone in self.tombstones for step in stone.steps}, key=_step_order)


@dataclass(slots=True)
class _Chosen:
    """Records by id, and Tasks that go as a whole."""

    records: dict[str, Json] = field(default_factory=dict)
    tasks: dict[str, Json] = field(default_factory=dict)


_RECORD_FIELDS: Json = {"task": 1, "traj_id": 1, "created_at": 1}


class Retractions(Withdrawals):
    """Chooses what to withdraw, and keeps the list of it."""

    @database_call
    async def select(
        self, *, scorers: Sequence[str] = (), tasks: Sequence[str] = (), records: Sequence[str] = ()
    ) -> RetractSelection:
        """Return what ``scorers`` scored, the ``tasks`` as a whole and the ``records``.

        A task is named by ``_id`` or by the ``id`` in its file, and goes in every epoch. All attempts at a
        trajectory go with it: a later attempt may continue the tokens of an earlier one. What was withdrawn
        before is left out. Raises StoreError for a name that the run does not have.
        """
        chosen = _Chosen()
        for name in tasks:
            await self._choose_task(name, chosen)
        missing = set(records)
        named: list[Json] = []
        for batch in batches(list(records), BATCH):
            named += await self._records({"_id": {"$in": batch}})
        missing -= {record["_id"] for record in named}
        if scorers:
            known = await self._collection(RECORD).distinct("score_details.scorer")
            given = [text for text in known if any(_names(text, scorer) for scorer in scorers)]
            scored = await self._records({"score_details.scorer": {"$in": given}, "score": {"$ne": None}})
            if not scored:
                raise StoreError(
                    f"no trajectory of run {self._connection.database.name!r} has a score of"
                    f" {' or '.join(scorers)}",
                    hint=f"its scorers are: {', '.join(sorted(map(str, known))) or 'none'}",
                )
            named += scored
        for stone in await self._stones(list(missing)):
            missing.discard(stone.id)
        if missing:
            raise StoreError(
                f"run {self._connection.database.name!r} has no Record {min(missing)!r}",
                hint="`agentrl audit records` lists Records",
            )
        await self._add_attempts(named, chosen)
        return await self._located(chosen)

    @database_call
    async def select_of_parent(self, stones: Sequence[Tombstone], *, reads: bool) -> RetractSelection:
        """Return what a child holds of its parent's ``stones``: copies of tasks, with its samples of them.

        With ``reads`` (a what-if), also the trajectories that its steps read.
        """
        chosen = _Chosen()
        for stone in stones:
            is_task = stone.kind is Withdrawn.TASK
            if is_task and await self._collection(TASK).find_one({"_id": stone.id}, {"_id": 1}):
                await self._choose_task(stone.id, chosen)
        parents = {stone.id: stone for stone in stones if reads and stone.kind is Withdrawn.RECORD}
        async for step in self._collection(STEP).find({}, {"data": 1}):
            for stone in (parents[key] for key in step["data"] if key in parents):
                chosen.records[stone.id] = {"task": stone.task, "created_at": stone.created_at}
        return await self._located(chosen)

    async def _choose_task(self, name: str, chosen: _Chosen) -> None:
        collection = self._collection(TASK)
        found = await collection.find_one({"_id": name}, {"split": 1, "task_id": 1})
        query = {"task_id": name} if found is None else {"split": found["split"], "task_id": found["task_id"]}
        copies = await collection.find(query, {"created_at": 1}).to_list()
        if not copies:
            gone = {"kind": Withdrawn.TASK.value, "$or": [{"_id": name}, {"_id": f"train/0/{name}"}]}
            if await self._collection(TOMBSTONE).find_one(gone, {"_id": 1}) is None:
                raise StoreError(
                    f"run {self._connection.database.name!r} has no task {name!r}",
                    hint="give its _id (split/epoch/id) or the id of the task file; `agentrl tasks list`",
                )
        for task in copies:
            chosen.tasks[task["_id"]] = task
            for record in await self._records({"task": task["_id"]}):
                chosen.records[record["_id"]] = record

    async def _records(self, query: Json) -> list[Json]:
        return await self._collection(RECORD).find(query, _RECORD_FIELDS).to_list()

    async def _add_attempts(self, named: Iterable[Json], chosen: _Chosen) -> None:
        """Add every attempt at the slots of the named Records."""
        of_task: dict[str, set[int]] = defaultdict(set)
        for record in named:
            of_task[record["task"]].add(record["traj_id"])
        for task, traj_ids in of_task.items():
            for record in await self._records({"task": task, "traj_id": {"$in": sorted(traj_ids)}}):
                chosen.records[record["_id"]] = record

    async def _located(self, chosen: _Chosen) -> RetractSelection:
        """Return tombstones of what is chosen and has none yet, with the steps that trained it."""
        for documents in (chosen.tasks, chosen.records):
            for batch in batches(list(documents), BATCH):
                for stone in await self._stones(batch):
                    del documents[stone.id]
        trained: dict[str, list[str]] = defaultdict(list)
        first: int | None = None
        fields = {"data": 1, "step": 1, "status": 1}
        async for step in self._collection(STEP).find(
            {"committed_at": {"$ne": None}}, fields, sort=[("step", 1)]
        ):
            held = [key for key in step["data"] if key in chosen.records]
            for key in held:
                trained[key].append(step["_id"])
            if held and first is None and step["status"] in _APPLIED:
                first = step["step"]
        stones = [
            Tombstone(
                id=key, kind=kind, task=document.get("task", key), retraction=0,
                created_at=document["created_at"], steps=tuple(trained.get(key, ())),
            )
            for kind, documents in ((Withdrawn.TASK, chosen.tasks), (Withdrawn.RECORD, chosen.records))
            for key, document in sorted(documents.items())
        ]  # fmt: skip
        return RetractSelection(tombstones=stones, first_step=first, versions=await self._versions(first))

    async def _versions(self, first: int | None) -> tuple[int, ...]:
        if first is None:
            return ()
        ids = await self._ids(VERSION, {"step": {"$gte": first}, "status": VersionStatus.PUBLISHED.value})
        return (min(ids), max(ids)) if ids else ()

    async def _stones(self, ids: Sequence[str]) -> list[Tombstone]:
        return await self._all(Tombstone, TOMBSTONE, {"_id": {"$in": list(ids)}})

    @database_call
    async def begin(
        self,
        selection: RetractSelection,
        because: str,
        by: str,
        *,
        rebuilds: bool = False,
        family: bool = False,
        archives: Sequence[str] = (),
    ) -> Retraction:
        """Store the retraction with its tombstones, in one transaction."""

        async def write() -> Retraction:
            newest = await self._collection(RETRACTION).find_one({}, sort=[("_id", -1)])
            retraction = Retraction(
                id=1 if newest is None else newest["_id"] + 1, because=because, by=by,
                records=len(selection.of(Withdrawn.RECORD)), tasks=len(selection.of(Withdrawn.TASK)),
                first_step=selection.first_step, rebuilds=rebuilds and selection.first_step is not None,
                family=family, archives=tuple(archives),
            )  # fmt: skip
            await self._collection(RETRACTION).insert_one(retraction.to_document())
            stones = [replace(stone, retraction=retraction.id) for stone in selection.tombstones]
            await self._collection(TOMBSTONE).insert_many([stone.to_document() for stone in stones])
            return retraction

        return await self._connection.transaction(write)

    @database_call
    async def set_deleted(self) -> None:
        """Store that the run holds nothing any more of what is withdrawn, images apart."""
        query = {"deleted_at": None}
        await self._collection(RETRACTION).update_many(query, {"$currentDate": {"deleted_at": True}})

    @database_call
    async def unrebuilt(self) -> list[Retraction]:
        """Return the retractions of what is still in the weights, oldest first."""
        query = {"rebuilt": None, "first_step": {"$ne": None}}
        return await self._all(Retraction, RETRACTION, query, sort=[("_id", 1)])

    @database_call
    async def tainted(
        self, retractions: Sequence[Retraction], more: Sequence[str] = ()
    ) -> dict[str, int | None]:
        """Return the TrainSteps that trained them, and ``more``: {_id: number if it is in the weights}."""
        of = {"retraction": {"$in": [retraction.id for retraction in retractions]}}
        ids = [*await self._collection(TOMBSTONE).distinct("steps", of), *more]
        steps = self._collection(STEP).find({"_id": {"$in": ids}}, {"step": 1, "status": 1})
        return {step["_id"]: step["step"] if step["status"] in _APPLIED else None async for step in steps}

    @database_call
    async def withdrawn(self) -> dict[str, Tombstone]:
        """Return every tombstone by its ``_id``."""
        return {stone.id: stone for stone in await self._all(Tombstone, TOMBSTONE, {})}

    @database_call
    async def newest(self, limit: int, ids: int) -> list[tuple[Retraction, list[str]]]:
        """Return the newest retractions, each with the first ``ids`` ids of its tombstones."""
        found = await self._all(Retraction, RETRACTION, {}, sort=[("_id", -1)], limit=limit)
        stones = self._collection(TOMBSTONE)
        return [
            (
                item,
                [stone["_id"] async for stone in stones.find({"retraction": item.id}, {"_id": 1}, limit=ids)],
            )
            for item in found
        ]

    @database_call
    async def plan_rebuild(self, retractions: Sequence[Retraction]) -> None:
        """Store that the run is to go back for ``retractions``: a later call does it after a kill."""
        for retraction in retractions:
            await self._set(retraction, {"rebuilds": True, "finished_at": None})

    @database_call
    async def plan_family(self, *, family: bool) -> None:
        """Store whether everything withdrawn is still to be withdrawn from the run's children."""
        changes = {"family": True, "finished_at": None} if family else {"family": False}
        await self._collection(RETRACTION).update_many({}, {"$set": changes})

    @database_call
    async def set_rebuilt(self, retractions: Sequence[Retraction], rebuilt: Rebuilt) -> None:
        """Store that the run went back for ``retractions``."""
        for retraction in retractions:
            await self._set(retraction, {"rebuilt": plain(rebuilt)})

    @database_call
    async def end_archive(self, archive: str) -> None:
        """Store that everything withdrawn is taken out of the export ``archive``, or that it is gone."""
        await self._collection(RETRACTION).update_many({}, {"$pull": {"archives": archive}})

    @database_call
    async def finish(self, retraction: Retraction) -> None:
        """Store that nothing is left to do."""
        await self._set(retraction, {"finished_at": now()})

    async def _set(self, retraction: Retraction, fields: Mapping[str, object]) -> None:
        await self._collection(RETRACTION).update_one({"_id": retraction.id}, {"$set": fields})


def _names(scorers: str, name: str) -> bool:
    """Return whether a Record's scorer is ``name``, or a weighted sum with it."""
    return scorers == name or name in scorer_weights(str(scorers))


def _step_order(step_id: str) -> tuple[int, ...]:
    return tuple(int(part) for part in step_id.split("/") if part.isdecimal())[::-1]


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
                # Take the results of an evaluation back: the same command computes them from what is left.
                stopped = {"status": EvaluationStatus.STOPPED.value, "results": None, "finished_at": None}
                finished = {"_id": task["split"], "status": EvaluationStatus.FINISHED.value}
                await self._collection(EVALUATION).update_one(finished, {"$set": stopped})
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
        change = lease.remove_slots(sorted(traj_ids), is_completed=is_completed)
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
        keys = [epoch_key(task["split"], task["epoch"], name) for name in {None, task.get("source")}]
        epochs = {"_id": {"$in": keys}, "tasks": {"$gt": 0}}
        await self._collection(EPOCH).update_many(epochs, {"$inc": {"tasks": -1}})

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
