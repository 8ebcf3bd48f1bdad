"""Whole empty trajectories: claim, Record, one turn, score, group finalized; against the original's way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from rows import Row
from store_data import GENERATIONS, SPLIT, make_call, make_data, make_tasks
from store_measure import in_turn, ratio, run_database, stopwatch
from store_original import Original

from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.record import Record
from agentrl.documents.status import RecordStatus, TaskStatus
from agentrl.documents.task import Task
from agentrl.store.client import Store
from agentrl.store.groups import GroupOutcome, RecordOutcome

_CONCURRENT = 64
_LEASE = 600.0
_ADMITTED = 100_000


async def whole(uri: str, quick: bool) -> list[Row]:
    """Trajectories a second at 64 concurrent, and the groups that end with a score missing."""
    tasks = 64 if quick else 128
    missing = {"ours": 0, "original": 0}
    async with run_database(uri, "whole") as store, run_database(uri, "original") as other_store:
        original = Original(other_store.database, GENERATIONS)

        async def ours() -> float:
            for name in ("Task", "Record", "DispatchedSamplingTask", "DBRecordData"):
                await store.database[name].delete_many({})
            await store.tasks.load(make_tasks(tasks))
            seconds = await _all(lambda: trajectory(store))
            missing["ours"] += await groups_with_a_score_missing(store)
            return seconds / (tasks * GENERATIONS)

        async def theirs() -> float:
            await original.prepare(tasks)
            seconds = await _all(original.trajectory)
            missing["original"] += await original.groups_with_a_score_missing()
            return seconds / (tasks * GENERATIONS)

        rounds = 2 if quick else 6
        mine, other = await in_turn(ours, theirs, rounds)
    groups = (rounds + 1) * tasks
    return [
        Row(
            what=f"empty trajectories/s, {_CONCURRENT} at a time : the original's way",
            ours=f"{1 / min(mine):.0f}/s", baseline=f"{1 / min(other):.0f}/s",
            ratio=1 / ratio(mine, other), target=3.0,
        ),
        Row(
            what=f"groups of {groups} with a score missing (ratio: share of ours)",
            ours=str(missing["ours"]), baseline=str(missing["original"]), ratio=missing["ours"] / groups,
            target=0.0, more=False,
        ),
    ]  # fmt: skip


async def trajectory(store: Store) -> bool:
    """One empty trajectory by the calls that a sampler makes; False where no slot is left to claim."""
    claim = await store.claims.claim(
        split=SPLIT, owner="bench", lease_seconds=_LEASE, max_groups_open=_ADMITTED
    )
    if claim is None:
        return False
    await store.records.create(claim)
    await store.records.advance(claim, RecordStatus.RUNNING)
    await store.model_calls.add(claim, make_call(claim.record_id, 0, context=1, output=1))
    await store.records.advance(claim, RecordStatus.COMPLETED, final_answer="1889", stop_reason="answered")
    await store.records.advance(claim, RecordStatus.SCORING)
    if await store.claims.score(claim, 1.0) is TaskStatus.WAITING:
        await store.training.finalize_group(claim.task.id, decide)
    return True


def decide(
    task: Task, records: list[Record], calls: Mapping[str, list[DispatchedSamplingTask]]
) -> GroupOutcome:
    """Every Record becomes training data of two tokens."""
    return GroupOutcome(
        data=tuple(make_data(record.id, task.id, tokens=2, turns=1) for record in records),
        records=tuple(
            RecordOutcome(record_id=record.id, status=RecordStatus.READY, advantage=0.5) for record in records
        ),
        summary={"scored": len(records), "failed": 0},
    )


async def groups_with_a_score_missing(store: Store) -> int:
    """Tasks that are not completed with a score in every slot, or lack a Record or training data."""
    whole = await store.database["Task"].count_documents(
        {"status": TaskStatus.COMPLETED.value, "slots": {"$not": {"$elemMatch": {"score": None}}}}
    )
    counts = {
        name: await store.database[name].count_documents({"status": "ready"})
        for name in ("Record", "DBRecordData")
    }
    tasks = await store.database["Task"].count_documents({})
    short = max(tasks * GENERATIONS - count for count in counts.values())
    return tasks - whole + -(-short // GENERATIONS)


async def _all(one: Callable[[], Awaitable[bool]]) -> float:
    """Seconds until ``_CONCURRENT`` coroutines have found nothing left to do."""

    async def worker() -> None:
        while await one():
            pass

    with stopwatch() as seconds:
        await asyncio.gather(*(worker() for _ in range(_CONCURRENT)))
        return seconds()
