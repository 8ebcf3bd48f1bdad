"""Find the training data that are ready, mark stale and bad data; plan, commit and revert optimizer steps.

The data of a step change with it, one chunk at a time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from pymongo import ASCENDING, DESCENDING, ReplaceOne, UpdateMany
from pymongo.errors import DuplicateKeyError

from agentrl.base.batches import batches
from agentrl.documents.document import is_finite, plain
from agentrl.documents.status import APPLIED_STEPS, DataStatus, StepStatus, values
from agentrl.documents.training import (
    DBRecordData,
    PendingCommit,
    TokenStatistics,
    TrainStep,
    statistics_key,
)
from agentrl.errors import StoreError, StoreUnavailableError
from agentrl.store.costs import SUMS
from agentrl.store.mechanics.blobs import Blobs, seal
from agentrl.store.mechanics.connection import (
    DATA,
    RECORD,
    STEP,
    TASK,
    TOKEN_STATISTICS,
    Connection,
    Json,
    Repository,
    database_call,
)
from agentrl.store.policy_versions import fenced
from agentrl.store.records import WITHOUT_BRANCHES

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
    async def spent(self, tasks: Sequence[str]) -> dict[str, float]:
        """Return what the Records of ``tasks`` took, and the share of their prompts that was cached."""
        query = {"task": {"$in": list(tasks)}, **WITHOUT_BRANCHES}
        for sums in await self._aggregate(RECORD, {"$match": query}, {"$group": {"_id": None, **SUMS}}):
            names = ("generate_seconds", "tool_seconds", "judge_seconds")
            rate = sums["cached_tokens"] / sums["input_tokens"] if sums["input_tokens"] else None
            return {
                **{name: float(sums[name]) for name in names},
                **({"api_cost": float(cost)} if (cost := sums["api_cost"] + sums["judge_cost"]) else {}),
                **({} if rate is None else {"prefix_cache_hit_rate": rate}),
            }
        return {}

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


CHUNK = 100
"""Documents of one transaction: 50 MB if each holds 65,536 tokens."""


class StepChunk(NamedTuple):
    """The ids of the data and of the Tasks that one transaction changes."""

    data: Sequence[str]
    tasks: Sequence[str]
    is_first: bool
    is_last: bool


def chunks_of(data: Sequence[str], tasks: Sequence[str] = ()) -> Iterator[StepChunk]:
    """Cut both sequences into chunks of ``CHUNK`` ids; yield at least one chunk, which may be empty."""
    count = max(1, math.ceil(max(len(data), len(tasks)) / CHUNK))
    for number in range(count):
        ids = slice(number * CHUNK, (number + 1) * CHUNK)
        yield StepChunk(data[ids], tasks[ids], is_first=number == 0, is_last=number == count - 1)


class NotReadyError(StoreError):
    """Some data of a planned step are not ready."""


async def mark_data(connection: Connection, number: int, ids: Sequence[str]) -> None:
    """Change ready data to planned for step ``number``. Raises NotReadyError if some are not ready."""
    # Accept what this step has planned: after an interruption its chunks are marked again from the first.
    planned = {"status": DataStatus.PLANNED.value, "planned_step": number}
    allowed: Json = {"$or": [{"status": DataStatus.READY.value}, planned]}
    result = await connection.collection(DATA).update_many(
        {"_id": {"$in": list(ids)}, **allowed}, {"$set": planned}
    )
    if result.matched_count != len(ids):
        raise NotReadyError(
            f"step {number} names {len(ids)} documents, and only {result.matched_count} of them are ready",
            hint="is a second trainer running on this run? stop it",
        )


async def train_data(connection: Connection, number: int, pending: PendingCommit, ids: Sequence[str]) -> None:
    """Count step ``number`` in its data and their Records; data that were not trained become ready."""
    untrained = set(pending.untrained)
    trained = [key for key in ids if key not in untrained]
    planned = {"status": DataStatus.PLANNED.value, "planned_step": number}
    await connection.collection(DATA).update_many(
        {"_id": {"$in": trained}, **planned}, _trained(number, pending)
    )
    if len(trained) < len(ids):
        # Reopen all that are still planned: by the update before, what was trained no longer is.
        await connection.collection(DATA).update_many({"_id": {"$in": list(ids)}, **planned}, _REOPENED)
    await connection.collection(RECORD).update_many(
        # Skip Records that count this step: an interrupted commit begins again with its first chunk.
        {"_id": {"$in": trained}, "last_trained_step": {"$ne": number}},
        {"$inc": {"trained_count": 1}, "$set": {"last_trained_step": number}},
    )  # fmt: skip


async def count_groups(connection: Connection, number: int, tasks: Sequence[str]) -> None:
    """Mark the groups of ``tasks`` as counted by the metrics of step ``number``."""
    if tasks:
        await connection.collection(TASK).update_many(
            {"_id": {"$in": list(tasks)}, "group.counted_at_step": None},
            {"$set": {"group.counted_at_step": number}},
        )  # fmt: skip


async def uncount_some(connection: Connection, after: int) -> int:
    """Clear the mark of one chunk of groups that a step above ``after`` counted; return how many."""
    counted = {"group.counted_at_step": {"$gt": after}}
    cursor = connection.collection(TASK).find(counted, {"_id": 1}, limit=CHUNK)
    ids = [task["_id"] async for task in cursor]
    if ids:
        await connection.collection(TASK).update_many(
            {"_id": {"$in": ids}}, {"$set": {"group.counted_at_step": None}}
        )
    return len(ids)


async def restore_data(connection: Connection, after: int, ids: Sequence[str]) -> None:
    """Restore data and their Records to their state after step ``after``."""
    later = {"$or": [{"planned_step": {"$gt": after}}, {"trained_at_steps": {"$gt": after}}]}
    chosen = {"_id": {"$in": list(ids)}}
    await connection.collection(DATA).update_many({**chosen, **later}, _restored(after))
    cursor = connection.collection(DATA).find(chosen, {"record": 1, "trained_at_steps": 1})
    records: dict[tuple[int, ...], list[str]] = {}
    async for data in cursor:
        records.setdefault(tuple(data["trained_at_steps"]), []).append(data["record"])
    updates = [
        UpdateMany(
            {"_id": {"$in": keys}},
            {"$set": {"trained_count": len(at), "last_trained_step": max(at, default=None)}},
        )
        for at, keys in records.items()
    ]
    if updates:
        await connection.collection(RECORD).bulk_write(updates)


_REOPENED: Json = {"$set": {"status": DataStatus.READY.value, "planned_step": None}}


def _trained(number: int, pending: PendingCommit) -> list[Json]:
    done = {"$gte": ["$trained_count", pending.max_trained_count]}
    return [
        {
            "$set": {
                "trained_count": {"$add": ["$trained_count", 1]},
                "trained_at_steps": {"$concatArrays": ["$trained_at_steps", [number]]},
                "planned_step": None,
                "not_before_step": number + pending.retrained_interval,
            }
        },
        {"$set": {"status": {"$cond": [done, DataStatus.TRAINED.value, DataStatus.READY.value]}}},
    ]


def _restored(step: int) -> list[Json]:
    kept = {"$filter": {"input": "$trained_at_steps", "cond": {"$lte": ["$$this", step]}}}
    quarantined = DataStatus.QUARANTINED.value
    # Open stale data too: what went stale since was fresh for its step, which is done again.
    status = {"$cond": [{"$eq": ["$status", quarantined]}, quarantined, DataStatus.READY.value]}
    return [
        {"$set": {"trained_at_steps": kept, "planned_step": None, "status": status}},
        {
            "$set": {
                "trained_count": {"$size": "$trained_at_steps"},
                "not_before_step": {"$min": ["$not_before_step", step + 1]},
            }
        },
    ]


_APPLIED = values(APPLIED_STEPS)
_PLANS = values((StepStatus.PLANNING, StepStatus.PLANNED))


class Steps(Repository):
    """The calls on optimizer steps. A change is applied in chunks, so that a step may have any size.

    Each chunk is one transaction. The first one also decides: after it, the step counts or is reverted. The
    last one also ends the change. An interrupted change continues when the call is repeated, or in
    ``revert_after``, which each trainer calls first.

    ``attempt`` is the return value of ``TrainerLeases.acquire``. A trainer that has been replaced gets a
    LeaseLostError, and nothing is written.
    """

    @database_call
    async def plan(self, step: TrainStep, *, attempt: int | None = None) -> None:
        """Insert the next step and change its data to PLANNED. Idempotent.

        Raises StoreError, with all data unchanged, if some data are not READY or the step exists.
        """
        try:
            for chunk in chunks_of(step.own_data):
                if not await fenced(self._connection, attempt, partial(self._plan_chunk, step, chunk)):
                    return
        except DuplicateKeyError as error:
            raise StoreError(
                f"step {step.step} has been planned already", hint="is a second trainer running? stop it"
            ) from error
        except NotReadyError:
            await self._give_up_plan(step, attempt)
            raise

    async def _plan_chunk(self, step: TrainStep, chunk: StepChunk) -> bool:
        """Plan one chunk, in a transaction; return False if the step is planned already."""
        if chunk.is_first:
            stored = await self._collection(STEP).find_one({"_id": step.id})
            if stored is None or tuple(stored["data"]) != step.data or stored["status"] not in _PLANS:
                document = step.to_document() | {"status": StepStatus.PLANNING.value}
                await self._collection(STEP).insert_one(document)
            elif stored["status"] != StepStatus.PLANNING:
                return False
        await mark_data(self._connection, step.step, chunk.data)
        if chunk.is_last:
            await self._end(step, StepStatus.PLANNING, StepStatus.PLANNED)
        return True

    async def _give_up_plan(self, step: TrainStep, attempt: int | None) -> None:
        """Undo the chunks of a plan that are already marked."""
        steps, begun = self._collection(STEP), {"_id": step.id, "status": StepStatus.PLANNING.value}
        undone = {"$set": {"status": StepStatus.REVERTING.value}}
        decided = await fenced(self._connection, attempt, lambda: steps.update_one(begun, undone))
        if decided.matched_count:
            await self._revert(step, step.step - 1, attempt)

    @database_call
    async def commit(
        self, step_id: str, metrics: Mapping[str, Any], trained_ids: Sequence[str],
        max_trained_count: int = 1, retrained_interval: int = 1, *, attempt: int | None = None,
        counted: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Record that the optimizer has stepped and that ``trained_ids`` were trained. Idempotent.

        Data below ``max_trained_count`` become ready again ``retrained_interval`` steps later; planned data
        that were not trained become ready at once. ``counted`` are the Tasks whose groups the metrics count;
        ``Groups.uncounted`` excludes them from then on.
        """
        step = await self._step(step_id)
        if step is None:
            raise _cannot_commit(step_id)
        trained = set(trained_ids)
        # Go on with the stored arguments: some chunks of an interrupted commit are written by them.
        pending = step.pending or PendingCommit(
            max_trained_count=max_trained_count,
            retrained_interval=retrained_interval,
            counted=tuple(counted),
            untrained=tuple(key for key in step.data if key not in trained),
        )
        await self._commit(step, pending, plain(dict(metrics)), attempt)

    async def _commit(
        self, step: TrainStep, pending: PendingCommit, metrics: Json, attempt: int | None
    ) -> None:
        for chunk in chunks_of(step.own_data, pending.counted):
            commit = partial(self._commit_chunk, step, pending, metrics, chunk)
            if not await fenced(self._connection, attempt, commit):
                return

    async def _commit_chunk(
        self, step: TrainStep, pending: PendingCommit, metrics: Json, chunk: StepChunk
    ) -> bool:
        """Commit one chunk, in a transaction; return False if the step is committed already."""
        if chunk.is_first:
            decided = await self._collection(STEP).update_one(
                {"_id": step.id, "status": StepStatus.PLANNED.value},
                {
                    "$set": {
                        "status": StepStatus.COMMITTING.value, "metrics": metrics, "pending": plain(pending),
                        **seal(STEP, "metrics", {"metrics": metrics}),
                    },
                    "$currentDate": {"committed_at": True},
                },
            )  # fmt: skip
            if not decided.matched_count:
                now = await self._collection(STEP).find_one({"_id": step.id}, {"status": 1})
                if now is None or now["status"] not in _APPLIED:
                    raise _cannot_commit(step.id)
                if now["status"] != StepStatus.COMMITTING:
                    return False
        await train_data(self._connection, step.step, pending, chunk.data)
        await count_groups(self._connection, step.step, chunk.tasks)
        if chunk.is_last:
            await self._end(step, StepStatus.COMMITTING, StepStatus.COMMITTED)
        return True

    @database_call
    async def revert_after(self, step: int, *, attempt: int | None = None) -> int:
        """Revert every step above ``step`` and every uncommitted plan; return how many.

        Their data become READY, as before these steps. Also finishes interrupted changes. Raises StoreError,
        and reverts nothing, if data that one of these steps trained have been pruned.
        """

        async def decide() -> int:
            steps = self._collection(STEP)
            later = {"status": {"$in": _APPLIED}, "step": {"$gt": step}}
            query = {"$or": [later, {"status": {"$in": _PLANS}}]}
            fields = {"step": 1, "pruned_at": 1}
            undone = await steps.find(query, fields, sort=[("step", DESCENDING)]).to_list()
            for document in undone:
                if document.get("pruned_at") is not None:
                    raise StoreError(
                        f"step {document['step']} cannot be undone: data that it trained have been pruned",
                        hint="resume from a checkpoint that contains it, or begin another run",
                    )
            await steps.update_many(
                {"_id": {"$in": [document["_id"] for document in undone]}},
                {"$set": {"status": StepStatus.REVERTING.value, "pending": None}},
            )  # fmt: skip
            return await steps.count_documents({"status": StepStatus.REVERTING.value})

        undone = await fenced(self._connection, attempt, decide)
        for interrupted in await self._all(TrainStep, STEP, {"status": StepStatus.COMMITTING.value}):
            if interrupted.pending is not None:
                # Pass no metrics: the transaction that made the step COMMITTING has stored them.
                await self._commit(interrupted, interrupted.pending, {}, attempt)
        await self._finish_reverts(attempt)
        return undone

    async def _finish_reverts(self, attempt: int | None) -> None:
        """Revert each REVERTING step, the last step first, to the state before the lowest of them."""
        query = {"status": StepStatus.REVERTING.value}
        cursor = self._collection(STEP).find(query, {"step": 1}, sort=[("step", DESCENDING)])
        undone = [(document["_id"], document["step"]) async for document in cursor]
        if not undone:
            return
        after = undone[-1][1] - 1

        # Clear the marks while the steps are REVERTING: after an interruption that says to go on here.
        uncount = partial(uncount_some, self._connection, after)
        while await fenced(self._connection, attempt, uncount):
            continue
        for step_id, _ in undone:
            step = await self._step(step_id)
            if step is not None:
                await self._revert(step, after, attempt)

    async def _revert(self, step: TrainStep, after: int, attempt: int | None) -> None:
        for chunk in chunks_of(step.own_data):
            await fenced(self._connection, attempt, partial(self._revert_chunk, step, after, chunk))

    async def _revert_chunk(self, step: TrainStep, after: int, chunk: StepChunk) -> None:
        """Revert one chunk, in a transaction."""
        await restore_data(self._connection, after, chunk.data)
        if chunk.is_last:
            await self._end(step, StepStatus.REVERTING, StepStatus.REVERTED)

    async def _end(self, step: TrainStep, old: StepStatus, new: StepStatus) -> None:
        """Move a step on in the transaction of its last chunk."""
        moved = await self._collection(STEP).update_one(
            {"_id": step.id, "status": old.value}, {"$set": {"status": new.value, "pending": None}}
        )
        if not moved.matched_count:
            raise StoreError(
                f"step {step.id} is no longer {old}", hint="is a second trainer running? stop it"
            )

    async def _step(self, step_id: str) -> TrainStep | None:
        return await self._one(TrainStep, STEP, {"_id": step_id})

    @database_call
    async def find(self, after: int = 0, status: StepStatus | None = StepStatus.COMMITTED) -> list[TrainStep]:
        """Return the steps above ``after`` in order; only those of ``status``, or all if it is None."""
        query: Json = {"step": {"$gt": after}}
        if status is not None:
            query["status"] = status.value
        return await self._all(TrainStep, STEP, query, sort=[("step", ASCENDING)])

    @database_call
    async def metrics(self, last: int | None = None) -> dict[int, dict[str, float]]:
        """Return the metrics of the committed steps by number, in order; of the ``last`` ones only.

        It reads a step without its data, whose ids fill the memory in a long run.
        """
        query, fields = {"status": StepStatus.COMMITTED.value}, {"step": 1, "metrics": 1}
        newest = self._collection(STEP).find(query, fields, sort=[("step", DESCENDING)], limit=last or 0)
        steps = await newest.to_list()
        return {step["step"]: _numbers(step.get("metrics", {})) for step in reversed(steps)}

    @database_call
    async def last(self) -> TrainStep | None:
        """Return the last step whose update is in the weights: committing or committed."""
        return await self._one(TrainStep, STEP, {"status": {"$in": _APPLIED}}, sort=[("step", DESCENDING)])


def _numbers(metrics: Json) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.items()
        if is_finite(value) and not isinstance(value, bool)
    }


def _cannot_commit(step_id: str) -> StoreError:
    return StoreError(f"step {step_id} is not planned, so it cannot be committed")
