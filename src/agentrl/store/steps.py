"""TrainSteps: planned, committed, reverted; the data that they consume move with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pymongo import ASCENDING, DESCENDING
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.errors import DuplicateKeyError

from agentrl.documents.base import plain
from agentrl.documents.status import DataStatus, StepStatus
from agentrl.documents.training import TrainStep
from agentrl.errors import StoreError
from agentrl.store.connection import Json, Part, database_call
from agentrl.store.names import DATA, RECORD, STEP, TASK
from agentrl.store.runs import guard


class Steps(Part):
    """One transaction each: a step and its data never disagree.

    ``attempt`` is what ``Runs.acquire_trainer`` returned: a trainer that has been replaced gets a
    LeaseLostError, and nothing is written.
    """

    @database_call
    async def plan_step(self, step: TrainStep, *, attempt: int | None = None) -> None:
        """Name the data of the next step and mark them PLANNED; repeating the call is harmless.

        Raises StoreError, and changes nothing, if some of them are not READY or the step exists.
        """
        ready = {"_id": {"$in": list(step.data)}, "status": DataStatus.READY.value}
        marks = {"$set": {"status": DataStatus.PLANNED.value, "planned_step": step.step}}

        async def write(session: AsyncClientSession) -> None:
            await guard(self._connection, attempt, session)
            stored = await self._collection(STEP).find_one({"_id": step.id}, session=session)
            if stored is not None and tuple(stored["data"]) == step.data and stored["status"] == step.status:
                return
            await self._collection(STEP).insert_one(step.to_document(), session=session)
            result = await self._collection(DATA).update_many(ready, marks, session=session)
            if result.matched_count != len(step.data):
                raise StoreError(
                    f"step {step.step} names {len(step.data)} documents, and only {result.matched_count}"
                    " of them are ready",
                    cure="is a second trainer running on this run? stop it",
                )

        try:
            await self._connection.transaction(write)
        except DuplicateKeyError as error:
            raise StoreError(
                f"step {step.step} has been planned already", cure="is a second trainer running? stop it"
            ) from error

    @database_call
    async def commit_step(
        self, step_id: str, metrics: Mapping[str, Any], trained_ids: Sequence[str],
        max_trained_count: int = 1, retrained_interval: int = 1, *, attempt: int | None = None,
        counted: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Say that the optimizer has stepped: ``trained_ids`` are trained once more.

        Data below ``max_trained_count`` are ready again ``retrained_interval`` steps later; planned data
        that were not trained are ready at once. ``counted`` are the Tasks whose groups the metrics count:
        ``Training.uncounted_groups`` leaves them out from then on. Repeating the call changes nothing.
        """

        async def write(session: AsyncClientSession) -> None:
            await guard(self._connection, attempt, session)
            step = await self._collection(STEP).find_one({"_id": step_id}, session=session)
            if step is None or step["status"] == StepStatus.REVERTED.value:
                raise StoreError(f"step {step_id} is not planned, so it cannot be committed")
            if step["status"] == StepStatus.COMMITTED.value:
                return
            number = step["step"]
            await self._collection(STEP).update_one(
                {"_id": step_id, "status": StepStatus.PLANNED.value},
                {
                    "$set": {"status": StepStatus.COMMITTED.value, "metrics": plain(dict(metrics))},
                    "$currentDate": {"committed_at": True},
                },
                session=session,
            )
            planned = {"status": DataStatus.PLANNED.value, "planned_step": number}
            await self._collection(DATA).update_many(
                {"_id": {"$in": list(trained_ids)}, **planned},
                _trained(number, max_trained_count, retrained_interval), session=session,
            )  # fmt: skip
            await self._collection(DATA).update_many(
                {"_id": {"$in": step["data"]}, **planned}, _REOPENED, session=session
            )
            await self._collection(RECORD).update_many(
                {"_id": {"$in": list(trained_ids)}},
                {"$inc": {"trained_count": 1}, "$set": {"last_trained_step": number}}, session=session,
            )  # fmt: skip
            await self._collection(TASK).update_many(
                {"_id": {"$in": list(counted)}, "group.counted_at_step": None},
                {"$set": {"group.counted_at_step": number}}, session=session,
            )  # fmt: skip

        await self._connection.transaction(write)

    @database_call
    async def revert_after(self, step: int, *, attempt: int | None = None) -> int:
        """Undo every step above ``step`` and every plan that never committed; returns how many steps.

        Their data are READY again, as if those steps had not been. StoreError, and nothing is undone, where
        data that one of them trained have been pruned.
        """

        async def write(session: AsyncClientSession) -> int:
            await guard(self._connection, attempt, session)
            later = {"status": StepStatus.COMMITTED.value, "step": {"$gt": step}}
            query = {"$or": [later, {"status": StepStatus.PLANNED.value}]}
            cursor = self._collection(STEP).find(query, {"data": 1}, session=session)
            undone = [document async for document in cursor]
            data = sorted({key for document in undone for key in document["data"]})
            await self._require_unpruned(step, data, session)
            await self._collection(STEP).update_many(
                {"_id": {"$in": [document["_id"] for document in undone]}},
                {"$set": {"status": StepStatus.REVERTED.value}}, session=session,
            )  # fmt: skip
            consumed = {
                "_id": {"$in": data},
                "status": {
                    "$in": [DataStatus.PLANNED.value, DataStatus.TRAINED.value, DataStatus.READY.value]
                },
            }
            await self._collection(DATA).update_many(consumed, _as_of(step), session=session)
            restored = self._collection(DATA).find(
                {"_id": {"$in": data}}, {"record": 1, "trained_at_steps": 1}, session=session
            )
            async for document in restored:
                trained_at = document["trained_at_steps"]
                await self._collection(RECORD).update_one(
                    {"_id": document["record"]},
                    {
                        "$set": {
                            "trained_count": len(trained_at),
                            "last_trained_step": max(trained_at, default=None),
                        }
                    },
                    session=session,
                )
            await self._collection(TASK).update_many(
                {"group.counted_at_step": {"$gt": step}},
                {"$set": {"group.counted_at_step": None}}, session=session,
            )  # fmt: skip
            return len(undone)

        return await self._connection.transaction(write)

    async def _require_unpruned(self, step: int, data: Sequence[str], session: AsyncClientSession) -> None:
        query = {"_id": {"$in": data}, "pruned_at": {"$ne": None}, "last_trained_step": {"$gt": step}}
        pruned = await self._collection(RECORD).find_one(
            query, {"last_trained_step": 1}, sort=[("last_trained_step", DESCENDING)], session=session
        )
        if pruned is not None:
            raise StoreError(
                f"step {pruned['last_trained_step']} cannot be undone: data that it trained have been pruned",
                cure="resume from a checkpoint that contains it, or begin another run",
            )

    @database_call
    async def steps(
        self, after: int = 0, status: StepStatus | None = StepStatus.COMMITTED
    ) -> list[TrainStep]:
        """Steps above ``after`` in order; committed ones, or those of ``status`` (None: all)."""
        query: Json = {"step": {"$gt": after}}
        if status is not None:
            query["status"] = status.value
        cursor = self._collection(STEP).find(query, sort=[("step", ASCENDING)])
        return [TrainStep.from_document(document) async for document in cursor]

    @database_call
    async def last_step(self) -> TrainStep | None:
        """The last committed step."""
        document = await self._collection(STEP).find_one(
            {"status": StepStatus.COMMITTED.value}, sort=[("step", DESCENDING)]
        )
        return None if document is None else TrainStep.from_document(document)


_REOPENED: Json = {"$set": {"status": DataStatus.READY.value, "planned_step": None}}


def _trained(step: int, max_trained_count: int, interval: int) -> list[Json]:
    done = {"$gte": ["$trained_count", max_trained_count]}
    return [
        {
            "$set": {
                "trained_count": {"$add": ["$trained_count", 1]},
                "trained_at_steps": {"$concatArrays": ["$trained_at_steps", [step]]},
                "planned_step": None,
                "not_before_step": step + interval,
            }
        },
        {"$set": {"status": {"$cond": [done, DataStatus.TRAINED.value, DataStatus.READY.value]}}},
    ]


def _as_of(step: int) -> list[Json]:
    kept = {"$filter": {"input": "$trained_at_steps", "cond": {"$lte": ["$$this", step]}}}
    return [
        {"$set": {"trained_at_steps": kept, "planned_step": None, "status": DataStatus.READY.value}},
        {
            "$set": {
                "trained_count": {"$size": "$trained_at_steps"},
                "not_before_step": {"$min": ["$not_before_step", step + 1]},
            }
        },
    ]
