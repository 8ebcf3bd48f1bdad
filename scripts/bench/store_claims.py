"""Claims against bare findOneAndUpdate, and against the same claims among a thousand times as many Tasks."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Any

from pymongo import ReturnDocument, WriteConcern
from rows import Row
from store_data import GENERATIONS, SPLIT, make_tasks
from store_measure import in_turn, percentile, ratio, run_database, stopwatch

from agentrl.documents.base import now
from agentrl.documents.task import record_key
from agentrl.store.client import Store

Json = dict[str, Any]
CLAIMERS = 64
_LEASE = 600.0
_ADMITTED = 100_000
_LATENCY_CLAIMERS = 8
_RUNNING = 64
_BATCH = 1000
_INDEX = [("status", 1), ("epoch", 1), ("order", 1)]


async def claim_rate(uri: str, quick: bool) -> list[Row]:
    """Claims a second of 64 concurrent claimers against bare findOneAndUpdate, on a queue and by ``_id``."""
    claims = 64 * (8 if quick else 32)
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

        rounds = 2 if quick else 6
        rows = []
        for what, baseline, target in (
            ("claims/s, 64 claimers : findOneAndUpdate on a sorted queue", queue, 0.6),
            ("claims/s, 64 claimers : findOneAndUpdate by _id, no conflicts", by_id, None),
        ):
            mine, other = await in_turn(ours, baseline, rounds)
            rows.append(
                Row(
                    what=what, ours=f"{1 / min(mine):.0f}/s", baseline=f"{1 / min(other):.0f}/s",
                    ratio=1 / ratio(mine, other), target=target,
                )
            )  # fmt: skip
        return rows


async def claim_latency(uri: str, quick: bool) -> list[Row]:
    """The 99th percentile of a claim's latency among 1,000,000 Tasks and among 1,000, taken in turn."""
    many = 50_000 if quick else 1_000_000
    async with run_database(uri, "many") as large, run_database(uri, "few") as small:
        await _fill(large, many)
        await _fill(small, 1000)
        latencies: dict[str, list[float]] = {"large": [], "small": []}

        async def sample(store: Store, name: str) -> float:
            values = await _latencies(store, 25 * _LATENCY_CLAIMERS)
            latencies[name] += values
            return percentile(values, 0.99)

        rounds = 4 if quick else 20
        mine, other = await in_turn(lambda: sample(large, "large"), lambda: sample(small, "small"), rounds)
        p99 = {name: percentile(values, 0.99) for name, values in latencies.items()}
        return [
            Row(
                what=f"claim p99, {many:,} Tasks : 1,000 Tasks ({_LATENCY_CLAIMERS} claimers)",
                ours=f"{1000 * p99['large']:.1f} ms", baseline=f"{1000 * p99['small']:.1f} ms",
                ratio=ratio(mine, other), target=1.5, more=False,
            )
        ]  # fmt: skip


async def _timed(claims: int, claim: Any) -> float:
    """Seconds a claim when ``CLAIMERS`` coroutines make ``claims`` of them."""

    async def claimer(first: int) -> None:
        for number in range(first, claims, CLAIMERS):
            await claim(number)

    with stopwatch() as seconds:
        await asyncio.gather(*(claimer(first) for first in range(CLAIMERS)))
        return seconds() / claims


async def _claim(store: Store) -> str:
    """The Task of a claim. While the last groups are being opened a claim may find none, and is repeated."""
    for _ in range(100):
        claim = await store.claims.claim(
            split=SPLIT, owner="bench", lease_seconds=_LEASE, max_groups_open=_ADMITTED
        )
        if claim is not None:
            return claim.task.id
    raise RuntimeError("there are slots left, and none could be claimed")


async def _bare_claim(store: Store, query: Json, number: int) -> None:
    found = await store.database["bare"].find_one_and_update(
        query,
        {"$set": {"status": "running", "owner": f"bench-{number}", "lease_expires_at": now()}},
        sort=[("epoch", 1), ("order", 1)] if "status" in query else None,
        return_document=ReturnDocument.AFTER,
    )
    assert found is not None


async def _latencies(store: Store, claims: int) -> list[float]:
    """Seconds of each of ``claims`` claims; the Tasks they take are put back afterwards."""
    taken: set[str] = set()
    values: list[float] = []

    async def claimer() -> None:
        for _ in range(claims // _LATENCY_CLAIMERS):
            began = time.perf_counter()
            taken.add(await _claim(store))
            values.append(time.perf_counter() - began)

    await asyncio.gather(*(claimer() for _ in range(_LATENCY_CLAIMERS)))
    tasks = store.database["Task"]
    fresh = make_tasks(1)[0].to_document()
    put_back = {"status": "created", "slots": fresh["slots"]}
    derived = {name: value for name, value in fresh.items() if name.startswith("claimable")}
    await tasks.update_many(
        {"_id": {"$in": list(taken)}}, {"$set": {**put_back, **derived}, "$unset": {"last_claim": ""}}
    )
    return values


async def _fill(store: Store, count: int) -> None:
    """``count`` Tasks: 64 whose slots are all claimed, 50 or 1 % that nobody began, the others completed."""
    created = max(50, count // 100)
    seeds = make_tasks(_BATCH)
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
                    **_as(state, task_id, document),
                }
            )
        await tasks.insert_many(batch, ordered=False)


def _as(state: str, task_id: str, document: Json) -> Json:
    """The fields in which a Task of that state differs from a new one."""
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
    group = {"scored": GENERATIONS, "failed": 0, "mean_score": 0.5, "finalised_at": now()} if done else None
    return {"status": state, "slots": slots, "group": group}
