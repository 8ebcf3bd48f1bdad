"""Plan, commit and revert optimizer steps; their data change with them, one chunk at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

from pymongo import ASCENDING, DESCENDING, UpdateMany
from pymongo.errors import DuplicateKeyError

from agentrl.base.batches import batches
from agentrl.documents.document import is_finite, plain
from agentrl.documents.status import APPLIED_STEPS, DataStatus, StepStatus, values
from agentrl.documents.training import PendingCommit, TrainStep
from agentrl.errors import StoreError
from agentrl.store.mechanics.blobs import seal
from agentrl.store.mechanics.connection import (
    DATA,
    RECORD,
    STEP,
    TASK,
    Connection,
    Json,
    Repository,
    database_call,
)
from agentrl.store.policy_versions import fenced

CHUNK = 100
"""Documents of one transaction: 50 MB if each holds 65,536 tokens."""


class StepChunk(NamedTuple):
    """The ids of the data and of the Tasks that one transaction changes."""

    data: Sequence[str]
    tasks: Sequence[str]


def chunks_of(data: Sequence[str], tasks: Sequence[str] = ()) -> list[StepChunk]:
    """Return both sequences cut into chunks of ``CHUNK`` ids; at least one chunk, which may be empty."""
    cut = zip_longest(batches(data, CHUNK), batches(tasks, CHUNK), fillvalue=())
    return [StepChunk(*ids) for ids in cut] or [StepChunk((), ())]


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

    The first transaction decides: after it, the step counts or is reverted. An interrupted change continues
    when the call is repeated, or in ``revert_after``, which each trainer calls first.

    ``attempt`` is the return value of ``TrainerLeases.acquire``. A trainer that has been replaced gets a
    LeaseLostError, and nothing is written.
    """

    @database_call
    async def plan(self, step: TrainStep, *, attempt: int | None = None) -> None:
        """Insert the next step and change its data to PLANNED. Idempotent.

        Raises StoreError, with all data unchanged, if some data are not READY or the step exists.
        """

        async def begin() -> bool:
            stored = await self._collection(STEP).find_one({"_id": step.id})
            if stored is not None and tuple(stored["data"]) == step.data and stored["status"] in _PLANS:
                return bool(stored["status"] == StepStatus.PLANNING)
            document = step.to_document() | {"status": StepStatus.PLANNING.value}
            await self._collection(STEP).insert_one(document)
            return True

        async def mark(chunk: StepChunk) -> None:
            await mark_data(self._connection, step.step, chunk.data)

        states = StepStatus.PLANNING, StepStatus.PLANNED
        try:
            await self._apply(step, states, mark, attempt, begin=begin)
        except DuplicateKeyError as error:
            raise StoreError(
                f"step {step.step} has been planned already", hint="is a second trainer running? stop it"
            ) from error
        except NotReadyError:
            await self._give_up_plan(step, attempt)
            raise

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
        async def begin() -> bool:
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
            if decided.matched_count:
                return True
            now = await self._collection(STEP).find_one({"_id": step.id}, {"status": 1})
            if now is None or now["status"] not in _APPLIED:
                raise _cannot_commit(step.id)
            return bool(now["status"] == StepStatus.COMMITTING)

        async def train(chunk: StepChunk) -> None:
            await train_data(self._connection, step.step, pending, chunk.data)
            await count_groups(self._connection, step.step, chunk.tasks)

        states = StepStatus.COMMITTING, StepStatus.COMMITTED
        await self._apply(step, states, train, attempt, begin=begin, tasks=pending.counted)

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
        await self._finish_commits(attempt)
        await self._finish_reverts(attempt)
        return undone

    async def _finish_commits(self, attempt: int | None) -> None:
        """Finish the commits that were interrupted between two chunks."""
        for step in await self._all(TrainStep, STEP, {"status": StepStatus.COMMITTING.value}):
            if step.pending is not None:
                # Pass no metrics: the transaction that made the step COMMITTING has stored them.
                await self._commit(step, step.pending, {}, attempt)

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
        async def restore(chunk: StepChunk) -> None:
            await restore_data(self._connection, after, chunk.data)

        await self._apply(step, (StepStatus.REVERTING, StepStatus.REVERTED), restore, attempt)

    async def _apply(
        self, step: TrainStep, states: tuple[StepStatus, StepStatus],
        write: Callable[[StepChunk], Awaitable[None]], attempt: int | None, *,
        begin: Callable[[], Awaitable[bool]] | None = None, tasks: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Change ``step`` and ``tasks`` in chunks, one transaction each; the last one moves its status.

        ``begin`` runs in the first transaction; if it returns False, the change is done already.
        """
        chunks, (old, new) = chunks_of(step.own_data, tasks), states
        for number, chunk in enumerate(chunks, 1):

            async def change(number: int = number, chunk: StepChunk = chunk) -> bool:
                if number == 1 and begin is not None and not await begin():
                    return False
                await write(chunk)
                if number < len(chunks):
                    return True
                moved = await self._collection(STEP).update_one(
                    {"_id": step.id, "status": old.value}, {"$set": {"status": new.value, "pending": None}}
                )
                if not moved.matched_count:
                    raise StoreError(
                        f"step {step.id} is no longer {old}", hint="is a second trainer running? stop it"
                    )
                return True

            if not await fenced(self._connection, attempt, change):
                return

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
