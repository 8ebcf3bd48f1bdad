"""Compare store operations with bare database operations: claims, writes, reads and document size."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

import bson
from harness import Row, alternate, median_ratio, percentile, stopwatch
from pymongo import ReturnDocument, WriteConcern
from store_fixtures import (
    GENERATIONS,
    SPLIT,
    make_data,
    make_tasks,
    make_trajectory,
    run_database,
    with_plain_arrays,
    with_whole_conversations,
)

from agentrl.documents.document import now
from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.record import Record
from agentrl.documents.status import RecordStatus
from agentrl.documents.task import Claim, record_key
from agentrl.store.client import Store

Json = dict[str, Any]
Write = Callable[[Store, Claim, list[DispatchedSamplingTask]], Awaitable[None]]
_CLAIMERS = 64
_LATENCY_CLAIMERS = 8
_LEASE = 600.0
_WRITING_LEASE = 3600.0
_MAX_GROUPS_OPEN = 100_000
_RUNNING = 64
_BATCH = 1000
_FETCHED = 64
_INDEX = [("status", 1), ("epoch", 1), ("order", 1)]


async def claim_rate(uri: str, quick: bool) -> list[Row]:
    """Time 64 concurrent claimers against bare findOneAndUpdate, by queue order and by ``_id``."""
    claims = 16 if quick else 64 * 32
    async with run_database(uri, "claims") as store:
        bare = store.database["bare"]
        await bare.create_index(_INDEX)
        documents = [task.to_document() for task in make_tasks(claims)]

        async def ours() -> float:
            await store.database["Task"].delete_many({})
            await store.tasks.load(make_tasks(claims // GENERATIONS))
            return await _timed(claims, lambda _: _claim(store))

        async def queue() -> float:
            await bare.delete_many({})
            await bare.insert_many(documents)
            return await _timed(claims, lambda number: _bare_claim(store, {"status": "created"}, number))

        async def by_id() -> float:
            await bare.delete_many({})
            await bare.insert_many(documents)
            return await _timed(
                claims, lambda number: _bare_claim(store, {"_id": documents[number]["_id"]}, number)
            )

        rounds = 1 if quick else 6
        rows = []
        for what, baseline, target in (
            ("claims/s, 64 claimers : findOneAndUpdate on a sorted queue", queue, 4.0),
            ("claims/s, 64 claimers : findOneAndUpdate by _id, no conflicts", by_id, 1.2),
        ):
            mine, other = await alternate(ours, baseline, rounds)
            rows.append(
                Row(
                    what=what, ours=f"{1 / min(mine):.0f}/s", baseline=f"{1 / min(other):.0f}/s",
                    ratio=1 / median_ratio(mine, other), target=target,
                )
            )  # fmt: skip
        return rows


async def claim_latency(uri: str, quick: bool) -> list[Row]:
    """Compare the 99th percentile of claim latency among 1,000,000 Tasks and among 1,000."""
    many, fewer = (400, 200) if quick else (1_000_000, 1000)
    async with run_database(uri, "many") as large, run_database(uri, "few") as small:
        await _fill(large, many)
        await _fill(small, fewer)
        latencies: dict[str, list[float]] = {"large": [], "small": []}

        async def sample(store: Store, name: str) -> float:
            values = await _latencies(store, (2 if quick else 25) * _LATENCY_CLAIMERS)
            latencies[name] += values
            return percentile(values, 0.99)

        rounds = 1 if quick else 20
        mine, other = await alternate(lambda: sample(large, "large"), lambda: sample(small, "small"), rounds)
        p99 = {name: percentile(values, 0.99) for name, values in latencies.items()}
        return [
            Row(
                what=f"claim p99, {many:,} Tasks : {fewer:,} Tasks ({_LATENCY_CLAIMERS} claimers)",
                ours=f"{1000 * p99['large']:.1f} ms", baseline=f"{1000 * p99['small']:.1f} ms",
                ratio=median_ratio(mine, other), target=1.5, more=False,
            )
        ]  # fmt: skip


async def _timed(claims: int, claim: Any) -> float:
    """Return the seconds per claim when ``_CLAIMERS`` coroutines make ``claims`` claims."""

    async def claimer(first: int) -> None:
        for number in range(first, claims, _CLAIMERS):
            await claim(number)

    with stopwatch() as seconds:
        await asyncio.gather(*(claimer(first) for first in range(_CLAIMERS)))
        return seconds() / claims


async def _claim(store: Store, lease_seconds: float = _LEASE) -> Claim:
    """Claim a slot. Retry when none is free, which can happen while the last groups are being opened."""
    for _ in range(100):
        claim = await store.claims.claim(
            split=SPLIT, owner="bench", lease_seconds=lease_seconds, max_groups_open=_MAX_GROUPS_OPEN
        )
        if claim is not None:
            return claim
    raise RuntimeError("no slot could be claimed in 100 attempts")


async def _bare_claim(store: Store, query: Json, number: int) -> None:
    found = await store.database["bare"].find_one_and_update(
        query,
        {"$set": {"status": "running", "owner": f"bench-{number}", "lease_expires_at": now()}},
        sort=[("epoch", 1), ("order", 1)] if "status" in query else None,
        return_document=ReturnDocument.AFTER,
    )
    assert found is not None


async def _latencies(store: Store, claims: int) -> list[float]:
    """Return the seconds of each of ``claims`` claims. The claimed Tasks are released afterwards."""
    taken: set[str] = set()
    values: list[float] = []

    async def claimer() -> None:
        for _ in range(claims // _LATENCY_CLAIMERS):
            began = time.perf_counter()
            claim = await _claim(store)
            values.append(time.perf_counter() - began)
            taken.add(claim.task.id)

    await asyncio.gather(*(claimer() for _ in range(_LATENCY_CLAIMERS)))
    tasks = store.database["Task"]
    fresh = make_tasks(1)[0].to_document()
    released = {"status": "created", "slots": fresh["slots"]}
    derived = {name: value for name, value in fresh.items() if name.startswith("claimable")}
    await tasks.update_many(
        {"_id": {"$in": list(taken)}}, {"$set": {**released, **derived}, "$unset": {"last_claim": ""}}
    )
    return values


async def _fill(store: Store, count: int) -> None:
    """Insert ``count`` Tasks: 64 fully claimed, 1 % (at least 50) new, the others completed."""
    created = max(50, count // 100)
    seeds = make_tasks(min(count, _BATCH))
    documents = [task.to_document() for task in seeds]
    tasks = store.database["Task"].with_options(write_concern=WriteConcern(w=1))
    for start in range(0, count, _BATCH):
        batch = []
        for place, document in enumerate(documents):
            order = start + place
            task_id = f"q{order}"
            state = (
                "completed"
                if order < count - created - _RUNNING
                else "running"
                if order < count - created
                else "created"
            )
            batch.append(
                {
                    **document,
                    "_id": f"{SPLIT}/0/{task_id}",
                    "task_id": task_id,
                    "order": order,
                    **_fields_of(state, task_id, document),
                }
            )
        await tasks.insert_many(batch, ordered=False)


def _fields_of(state: str, task_id: str, document: Json) -> Json:
    """Return the fields in which a Task in ``state`` differs from a new one."""
    if state == "created":
        return {}
    key = f"{SPLIT}/0/{task_id}"
    done = state == "completed"
    slots = [
        {
            **slot, "status": "scored" if done else "running", "attempt": 1, "owner": "sampler-1",
            "lease_expires_at": None if done else now() + timedelta(hours=12),
            "record_id": record_key(key, slot["traj_id"], 1),
            "score": float(slot["traj_id"] % 2) if done else None,
        }
        for slot in document["slots"]
    ]  # fmt: skip
    group = {"scored": GENERATIONS, "failed": 0, "mean_score": 0.5, "finalized_at": now()} if done else None
    return {"status": state, "slots": slots, "group": group}


async def writing(uri: str, quick: bool) -> list[Row]:
    """Time 20-turn trajectories, one write per model call, against one bare insert per document."""
    rows = []
    for concurrent, rounds, target in ((2, 1, None),) if quick else ((64, 6, 1.3), (1, 24, 1.5)):
        async with run_database(uri, "writing") as store:
            mine, other = await alternate(
                lambda: _written(store, concurrent, _write_ours),  # noqa: B023
                lambda: _written(store, concurrent, _write_bare),  # noqa: B023
                rounds,
            )
        rows.append(
            Row(
                what=f"writing 20 turns, 20k tokens ({concurrent} at a time) : bare inserts",
                ours=f"{1000 * min(mine):.1f} ms", baseline=f"{1000 * min(other):.1f} ms",
                ratio=median_ratio(mine, other), target=target, more=False,
            )
        )  # fmt: skip
    return rows


async def reading(uri: str, quick: bool) -> list[Row]:
    """Time ``Training.fetch`` of 20k-token documents against a bare find of the same documents."""
    fetched = 4 if quick else _FETCHED
    async with run_database(uri, "reading") as store:
        data = [make_data(f"r{number}", "t", seed=number) for number in range(fetched)]
        collection = store.database["DBRecordData"]
        await collection.insert_many([item.to_document() for item in data])
        ids = [item.id for item in data]

        async def ours() -> float:
            with stopwatch() as seconds:
                await store.training.fetch(ids)
                return seconds() / fetched

        async def bare() -> float:
            with stopwatch() as seconds:
                await collection.find({"_id": {"$in": ids}}).to_list()
                return seconds() / fetched

        mine, other = await alternate(ours, bare, 2 if quick else 60)
    return [
        Row(
            what="reading training data, 20k tokens : bare reads",
            ours=f"{1 / min(mine):.0f}/s", baseline=f"{1 / min(other):.0f}/s",
            ratio=1 / median_ratio(mine, other), target=0.9,
        )
    ]  # fmt: skip


async def size(uri: str, quick: bool) -> list[Row]:
    """Compare the size of a 20-turn trajectory as stored with plain arrays and repeated conversations."""
    calls = make_trajectory("train/0/q1/0/1")
    ours = _bytes([call.to_document() for call in calls])
    plain = _bytes([with_plain_arrays(call) for call in calls])
    repeated = _bytes(with_whole_conversations(calls))
    return [
        Row(
            what=what, ours=f"{ours / 1024:.0f} KiB", baseline=f"{other / 1024:.0f} KiB", ratio=ours / other,
            target=target, more=False,
        )
        for what, other, target in (
            ("size of 20 turns, 20k tokens : plain arrays, no repetition", plain, 0.55),
            ("size of 20 turns, 20k tokens : the conversation in every call", repeated, 0.1),
        )
    ]  # fmt: skip


def _bytes(documents: Sequence[Json]) -> int:
    return sum(len(bson.encode(document)) for document in documents)


async def _written(store: Store, concurrent: int, write: Write) -> float:
    """Return the seconds per trajectory when ``concurrent`` are written at the same time."""
    await store.database["Task"].delete_many({})
    for name in ("Record", "DispatchedSamplingTask"):
        await store.database[name].delete_many({})
    await store.tasks.load(make_tasks(concurrent, generations=1))
    claims = [await _claim(store, _WRITING_LEASE) for _ in range(concurrent)]
    trajectories = [make_trajectory(claim.record_id, seed=place % 4) for place, claim in enumerate(claims)]
    with stopwatch() as seconds:
        await asyncio.gather(*(write(store, *pair) for pair in zip(claims, trajectories, strict=True)))
        return seconds() / concurrent


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
