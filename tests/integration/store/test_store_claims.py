"""Claims on a real server: no double claim, leases, fencing, retries."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from agentrl.documents.record import Failure
from agentrl.documents.status import RecordStatus, SlotStatus, TaskStatus
from agentrl.documents.task import Claim, Slot, Task, task_key
from agentrl.errors import LeaseLostError, StoreError
from agentrl.store.client import Store

pytestmark = pytest.mark.integration


def make_tasks(count: int, generations: int = 2, epoch: int = 0) -> list[Task]:
    return [
        Task(
            id=task_key("train", epoch, str(number)), task_id=str(number), split="train", epoch=epoch,
            order=number, query="?", slots=tuple(Slot(traj_id=traj) for traj in range(generations)),
        )
        for number in range(count)
    ]  # fmt: skip


async def take(store: Store, owner: str = "a", lease: float = 60.0, limit: int | None = None) -> Claim | None:
    return await store.claims.claim(split="train", owner=owner, lease_seconds=lease, max_groups_open=limit)


async def take_one(store: Store, owner: str = "a", lease: float = 60.0) -> Claim:
    claim = await take(store, owner, lease)
    assert claim is not None
    return claim


async def take_soon(store: Store, owner: str) -> Claim:
    async with asyncio.timeout(20):
        while True:
            if claim := await take(store, owner):
                return claim
            await store.wait_for_change("Task", timeout=0.05)


async def score(store: Store, claim: Claim, value: float = 1.0) -> TaskStatus:
    await store.records.create(claim)
    for status in (RecordStatus.RUNNING, RecordStatus.COMPLETED, RecordStatus.SCORING):
        await store.records.advance(claim, status)
    return await store.claims.score(claim, value, {"why": "$test"})


async def slot_of(store: Store, claim: Claim) -> Slot:
    task = await store.tasks.get(claim.task.id)
    assert task is not None
    return task.slots[claim.traj_id]


async def test_32_claimers_get_each_slot_once(store: Store) -> None:
    await store.tasks.load(make_tasks(40, generations=4))
    claims: list[Claim] = []

    async def work(owner: str) -> None:
        while claim := await take(store, owner):
            claims.append(claim)

    await asyncio.gather(*(work(f"w{number}") for number in range(32)))
    taken = Counter((claim.task.id, claim.traj_id, claim.attempt) for claim in claims)
    assert len(taken) == 160
    assert set(taken.values()) == {1}
    for claim in claims[:8]:
        slot = await slot_of(store, claim)
        assert (slot.owner, slot.status, slot.record_id) == (claim.owner, SlotStatus.RUNNING, claim.record_id)


async def test_begun_groups_come_first_and_admission_limits_new_ones(store: Store) -> None:
    await store.tasks.load(make_tasks(3, generations=2))
    order = [await take(store, limit=1) for _ in range(3)]
    assert [claim and (claim.task.order, claim.traj_id) for claim in order] == [(0, 0), (0, 1), None]
    further = await take(store, limit=2)
    assert further is not None
    assert further.task.order == 1
    assert await store.training.open_groups("train") == 2


async def test_an_expired_lease_is_taken_over_and_the_old_owner_is_fenced(store: Store) -> None:
    await store.tasks.load(make_tasks(1, generations=1))
    old = await take_one(store, "old", lease=0.001)
    record = await store.records.create(old)
    await store.records.advance(old, RecordStatus.RUNNING)
    new = await take_soon(store, "new")
    assert (new.attempt, new.traj_id) == (2, old.traj_id)
    assert await store.claims.heartbeat([old, new], 60) == [old]
    with pytest.raises(LeaseLostError):
        await store.claims.score(old, 1.0)
    with pytest.raises(LeaseLostError):
        await store.records.advance(old, RecordStatus.COMPLETED)
    with pytest.raises(LeaseLostError):
        await store.claims.release(old)
    dead = await store.records.get(record.id)
    assert dead is not None
    assert dead.failure is not None
    assert (dead.status, dead.failure.kind, dead.score) == (RecordStatus.FAILED, "lease", None)
    assert await score(store, new) is TaskStatus.WAITING


async def test_heartbeat_keeps_a_lease(store: Store) -> None:
    await store.tasks.load(make_tasks(1, generations=1))
    claim = await take_one(store, lease=60)
    before = (await slot_of(store, claim)).lease_expires_at
    assert await store.claims.heartbeat([claim], 120) == []
    after = (await slot_of(store, claim)).lease_expires_at
    assert before is not None
    assert after is not None
    assert (after - before).total_seconds() > 50


async def test_release_hands_back_at_once_and_does_not_count(store: Store) -> None:
    await store.tasks.load(make_tasks(1, generations=1))
    for _ in range(5):
        claim = await take_one(store)
        await store.records.create(claim)
        await store.claims.release(claim)
    slot = await slot_of(store, claim)
    assert (slot.status, slot.attempt, slot.released, slot.owner) == (SlotStatus.OPEN, 5, 5, None)
    records = await store.records.of_task(claim.task.id)
    assert {record.failure.kind for record in records if record.failure} == {"released"}
    again = await take_one(store)
    outcome = await store.claims.fail(
        again, Failure(kind="engine", message="x"), max_attempts=2, backoff_seconds=0.001
    )
    assert outcome is SlotStatus.OPEN


async def test_failures_back_off_and_end_at_max_attempts(store: Store) -> None:
    await store.tasks.load(make_tasks(1, generations=1))
    failure = Failure(kind="scorer", message="it raised")
    claim = await take_one(store)
    await store.records.create(claim)
    status = await store.claims.fail(claim, failure, max_attempts=2, backoff_seconds=3600)
    assert status is SlotStatus.OPEN
    assert await take(store) is None
    slots = {"slots.0.not_before": None}
    await store.database["Task"].update_one({"_id": claim.task.id}, {"$set": slots})
    second = await take_one(store)
    await store.records.create(second)
    assert await store.claims.fail(second, failure, max_attempts=2, backoff_seconds=1) is SlotStatus.FAILED
    task = await store.tasks.get(claim.task.id)
    assert task is not None
    assert task.status is TaskStatus.WAITING
    records = await store.records.of_task(task.id)
    assert [record.status for record in records] == [RecordStatus.FAILED, RecordStatus.FAILED]
    assert all(record.score is None for record in records)
    assert await store.claims.reopen_failed("train") == 1
    assert (await take_one(store)).attempt == 3


async def test_reap_frees_dead_claims_and_fails_the_exhausted(store: Store) -> None:
    await store.tasks.load(make_tasks(1, generations=2))
    alive = await take_one(store, lease=60)
    dead = await take_one(store, lease=0.001)
    await store.records.create(dead)
    async with asyncio.timeout(20):
        while await store.claims.reap("train", max_attempts=1) == 0:
            await store.wait_for_change("Task", timeout=0.01)
    assert (await slot_of(store, dead)).status is SlotStatus.FAILED
    assert (await slot_of(store, alive)).status is SlotStatus.RUNNING
    assert await store.claims.reap("train", max_attempts=1) == 0
    record = await store.records.get(dead.record_id)
    assert record is not None
    assert record.status is RecordStatus.FAILED


async def test_a_group_waits_exactly_once_when_its_last_scores_race(store: Store) -> None:
    await store.tasks.load(make_tasks(1, generations=8))
    claims = [await take_one(store, f"w{number}") for number in range(8)]
    statuses = await asyncio.gather(*(score(store, claim) for claim in claims))
    assert sorted(status.value for status in statuses) == ["running"] * 7 + ["waiting"]
    assert await store.claims.score(claims[0], 1.0) is TaskStatus.WAITING
    assert await store.training.waiting_groups("train") == ["train/0/0"]


async def test_states_move_along_edges_only(store: Store) -> None:
    await store.tasks.load(make_tasks(1))
    claim = await take_one(store)
    await store.records.create(claim)
    with pytest.raises(StoreError, match="cannot become scoring"):
        await store.records.advance(claim, RecordStatus.SCORING)
    with pytest.raises(StoreError, match="is not being scored"):
        await store.claims.score(claim, 1.0)
    assert (await slot_of(store, claim)).status is SlotStatus.RUNNING
