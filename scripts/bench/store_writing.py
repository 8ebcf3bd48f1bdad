"""Writing trajectories turn by turn and reading training data against bare inserts and reads; their size."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import bson
from rows import Row
from store_data import (
    SPLIT,
    make_data,
    make_tasks,
    make_trajectory,
    with_plain_arrays,
    with_whole_conversations,
)  # fmt: skip
from store_measure import in_turn, ratio, run_database, stopwatch

from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.record import Record
from agentrl.documents.status import RecordStatus
from agentrl.documents.task import Claim
from agentrl.store.client import Store

Json = dict[str, Any]
_LEASE = 3600.0
_FETCHED = 64


async def writing(uri: str, quick: bool) -> list[Row]:
    """20-turn trajectories, each call written when it happens, against one bare insert for each document."""
    rows = []
    for concurrent, rounds, target in ((64, 6, 1.3), (1, 24, None)):
        async with run_database(uri, "writing") as store:
            mine, other = await in_turn(
                lambda: _written(store, concurrent, _write_ours),  # noqa: B023
                lambda: _written(store, concurrent, _write_bare),  # noqa: B023
                2 if quick else rounds,
            )
        rows.append(
            Row(
                what=f"writing 20 turns, 20k tokens ({concurrent} at a time) : bare inserts",
                ours=f"{1000 * min(mine):.1f} ms", baseline=f"{1000 * min(other):.1f} ms",
                ratio=ratio(mine, other), target=target, more=False,
            )
        )  # fmt: skip
    return rows


async def reading(uri: str, quick: bool) -> list[Row]:
    """``Training.fetch`` of 20k-token documents against a bare find of the same."""
    async with run_database(uri, "reading") as store:
        data = [make_data(f"r{number}", "t", seed=number) for number in range(_FETCHED)]
        collection = store.database["DBRecordData"]
        await collection.insert_many([item.to_document() for item in data])
        ids = [item.id for item in data]

        async def ours() -> float:
            with stopwatch() as seconds:
                await store.training.fetch(ids)
                return seconds() / _FETCHED

        async def bare() -> float:
            with stopwatch() as seconds:
                await collection.find({"_id": {"$in": ids}}).to_list()
                return seconds() / _FETCHED

        mine, other = await in_turn(ours, bare, 10 if quick else 60)
    return [
        Row(
            what="reading training data, 20k tokens : bare reads",
            ours=f"{1 / min(mine):.0f}/s", baseline=f"{1 / min(other):.0f}/s",
            ratio=1 / ratio(mine, other), target=0.8,
        )
    ]  # fmt: skip


def size() -> list[Row]:
    """Bytes of a 20-turn trajectory: its calls as stored, with plain arrays, as the original has them."""
    calls = make_trajectory("train/0/q1/0/1")
    ours = _bytes([call.to_document() for call in calls])
    plain = _bytes([with_plain_arrays(call) for call in calls])
    whole = _bytes(with_whole_conversations(calls))
    return [
        Row(
            what=what, ours=f"{ours / 1024:.0f} KiB", baseline=f"{other / 1024:.0f} KiB", ratio=ours / other,
            target=target, more=False,
        )
        for what, other, target in (
            ("size of 20 turns, 20k tokens : plain arrays, no repetition", plain, 0.55),
            ("size of 20 turns, 20k tokens : the conversation in every call", whole, 0.1),
        )
    ]  # fmt: skip


def _bytes(documents: Sequence[Json]) -> int:
    return sum(len(bson.encode(document)) for document in documents)


Write = Callable[[Store, Claim, list[DispatchedSamplingTask]], Awaitable[None]]


async def _written(store: Store, concurrent: int, write: Write) -> float:
    """Seconds a trajectory when ``concurrent`` are written at the same time."""
    await store.database["Task"].delete_many({})
    for name in ("Record", "DispatchedSamplingTask"):
        await store.database[name].delete_many({})
    await store.tasks.load(make_tasks(concurrent, generations=1))
    claims = [await _claim(store) for _ in range(concurrent)]
    trajectories = [make_trajectory(claim.record_id, seed=place % 4) for place, claim in enumerate(claims)]
    with stopwatch() as seconds:
        await asyncio.gather(*(write(store, *pair) for pair in zip(claims, trajectories, strict=True)))
        return seconds() / concurrent


async def _claim(store: Store) -> Claim:
    claim = await store.claims.claim(split=SPLIT, owner="bench", lease_seconds=_LEASE)
    assert claim is not None
    return claim


async def _write_ours(store: Store, claim: Claim, calls: list[DispatchedSamplingTask]) -> None:
    await store.records.create(claim)
    await store.records.advance(claim, RecordStatus.RUNNING)
    for call in calls:
        await store.model_calls.add(claim, call)
    await store.records.advance(claim, RecordStatus.COMPLETED, final_answer="1889", stop_reason="answered")


async def _write_bare(store: Store, claim: Claim, calls: list[DispatchedSamplingTask]) -> None:
    record = Record(
        id=claim.record_id, task=claim.task.id, traj_id=claim.traj_id, attempt=1, split=SPLIT, epoch=0,
        query=claim.task.query, answer=claim.task.answer, owner=claim.owner,
    )  # fmt: skip
    await store.database["Record"].insert_one(record.to_document())
    for call in calls:
        await store.database["DispatchedSamplingTask"].insert_one(call.to_document())
