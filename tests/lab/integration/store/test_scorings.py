"""The queue of sampled trajectories: claimed for a score under a lease, handed back, never sampled again."""

from __future__ import annotations

import pytest
from db_command import violations

from agentrl.documents.record import Failure
from agentrl.documents.status import RecordStatus, SlotStatus, StopReason, TaskStatus
from agentrl.documents.task import Claim, Slot, Task
from agentrl.errors import LeaseLostError
from agentrl.store.claims import Needs
from agentrl.store.client import Store

pytestmark = pytest.mark.integration

WHY = Failure(kind="scorer", message="no verdict")


async def load(store: Store, *names: str, **fields: object) -> None:
    """One slot per task."""
    tasks = [
        Task(
            id=f"train/0/{name}", task_id=name, split="train", epoch=0, order=place, query="1+2?",
            slots=(Slot(traj_id=0),), **{"scorer": "agentcpm", **fields},  # type: ignore[arg-type]
        )
        for place, name in enumerate(names)
    ]  # fmt: skip
    await store.tasks.load(tasks)


async def sampled(store: Store, owner: str = "sampler") -> Claim:
    """A claim whose trajectory is complete."""
    claim = await store.claims.claim(split="train", owner=owner, lease_seconds=60)
    assert claim is not None
    await store.records.create(claim)
    await store.records.advance(claim, RecordStatus.RUNNING)
    await store.records.advance(
        claim, RecordStatus.COMPLETED, final_answer="3", stop_reason=StopReason.ANSWERED
    )
    return claim


async def slot(store: Store, claim: Claim) -> Slot:
    task = await store.tasks.get(claim.task.id)
    return task.slots[0]


async def status(store: Store, claim: Claim) -> RecordStatus:
    record = await store.records.get(claim.record_id)
    return record.status


async def expire(store: Store, claim: Claim) -> None:
    await store.database["Task"].update_one(
        {"_id": claim.task.id},
        [{"$set": {"slots": {"$map": {"input": "$slots", "as": "slot", "in": {"$mergeObjects": [
            "$$slot", {"lease_expires_at": {"$subtract": ["$$NOW", 1]}}]}}},
            "lease_deadline": {"$subtract": ["$$NOW", 1]}}}],
    )  # fmt: skip


async def test_a_failed_score_leaves_the_trajectory_sampled_and_another_process_scores_it(
    store: Store,
) -> None:
    await load(store, "a")
    first = await sampled(store)
    await store.records.advance(first, RecordStatus.SCORING)
    assert await store.attempts.postpone(first, WHY, max_scorings=3, backoff_seconds=0) is SlotStatus.SAMPLED
    assert await status(store, first) is RecordStatus.COMPLETED
    assert await violations(store, compare_tokens=lambda *_: None) == []
    assert await store.claims.unscored("train") == 1
    assert await store.claims.claim(split="train", owner="other", lease_seconds=60) is None
    (second,) = await store.claims.claim_sampled(split="train", owner="scorer", lease_seconds=60)
    assert (second.record_id, second.attempt) == (first.record_id, 1)
    assert await violations(store, compare_tokens=lambda *_: None) == []
    with pytest.raises(LeaseLostError):
        await store.records.advance(first, RecordStatus.SCORING)
    await store.records.advance(second, RecordStatus.SCORING)
    assert await store.attempts.score(second, 1.0, {"scorer": "agentcpm"}) is TaskStatus.WAITING
    assert (await slot(store, second)).score == 1.0
    assert await store.claims.unscored("train") == 0


async def test_outages_use_up_no_attempt_to_score_and_failures_do(store: Store) -> None:
    await load(store, "a")
    claim = await sampled(store)
    for counts, scorings, expected in (
        (False, 0, SlotStatus.SAMPLED), (True, 1, SlotStatus.SAMPLED), (False, 1, SlotStatus.SAMPLED),
        (True, 2, SlotStatus.FAILED),
    ):  # fmt: skip
        await store.records.advance(claim, RecordStatus.SCORING)
        found = await store.attempts.postpone(claim, WHY, max_scorings=2, backoff_seconds=0, counts=counts)
        assert found is expected
        assert (await slot(store, claim)).scorings == scorings
        if expected is SlotStatus.SAMPLED:
            (claim,) = await store.claims.claim_sampled(split="train", owner="scorer", lease_seconds=60)
    record = await store.records.get(claim.record_id)
    assert (record.status, record.failure.kind) == (RecordStatus.FAILED, "scorer")
    assert store.attempts.completed.take("train") == [claim.task.id]
    assert await violations(store, compare_tokens=lambda *_: None) == []


@pytest.mark.parametrize("scoring", [False, True])
async def test_a_sampled_trajectory_is_not_sampled_again_when_its_process_dies(
    store: Store, scoring: bool
) -> None:
    await load(store, "a", "b", "c")
    released, reaped, taken = [await sampled(store) for _ in range(3)]
    for claim in (released, reaped, taken):
        if scoring:
            await store.records.advance(claim, RecordStatus.SCORING)
    await store.attempts.release(released)
    await expire(store, reaped)
    assert await store.expired_leases.reap("train") == 1
    await expire(store, taken)
    assert await store.claims.claim(split="train", owner="other", lease_seconds=60) is None
    for claim in (released, reaped, taken):
        assert await status(store, claim) is RecordStatus.COMPLETED
        found = await slot(store, claim)
        assert (found.status, found.attempt, found.released, found.owner) == (SlotStatus.SAMPLED, 1, 0, None)
    assert await violations(store, compare_tokens=lambda *_: None) == []
    queued = [
        claim
        for _ in range(3)
        for claim in await store.claims.claim_sampled(split="train", owner="scorer", lease_seconds=60)
    ]
    assert {claim.record_id for claim in queued} == {item.record_id for item in (released, reaped, taken)}


async def test_a_former_owner_cannot_say_that_it_scores(store: Store) -> None:
    """It does not look at its slot: what took its claim away has written the Record."""
    await load(store, "a")
    claim = await sampled(store)
    await expire(store, claim)
    assert await store.expired_leases.reap("train") == 1
    with pytest.raises(LeaseLostError):
        await store.records.advance(claim, RecordStatus.SCORING)
    assert await status(store, claim) is RecordStatus.COMPLETED
    assert await violations(store, compare_tokens=lambda *_: None) == []
    (queued,) = await store.claims.claim_sampled(split="train", owner="scorer", lease_seconds=60)
    assert queued.record_id == claim.record_id


async def test_nothing_is_claimed_that_needs_what_is_down(store: Store) -> None:
    await load(store, "a", tools=("search",), scorer="agentcpm")
    await store.tasks.load([
        Task(id="train/0/b", task_id="b", split="train", epoch=0, order=1, query="?", scorer="exact",
             slots=(Slot(traj_id=0),), tools=("python",)),
        Task(id="train/0/c", task_id="c", split="train", epoch=0, order=2, query="?", scorer="exact",
             slots=(Slot(traj_id=0),)),
    ])  # fmt: skip

    async def claimed(needs: Needs) -> str | None:
        claim = await store.claims.claim(
            split="train", owner="o", lease_seconds=60, max_groups_open=3, without=needs
        )
        return None if claim is None else claim.task.task_id

    search = Needs(frozenset({"search"}), frozenset())
    assert await claimed(search) == "b"
    assert await claimed(search) is None  # c offers every server, search too
    assert await claimed(Needs(frozenset(), frozenset({"agentcpm"}))) == "c"
    assert await claimed(Needs(frozenset(), frozenset({"agentcpm"}))) is None
    assert await claimed(Needs()) == "a"


async def test_scores_of_a_scorer_that_is_down_are_left_in_the_queue(store: Store) -> None:
    await load(store, "a")
    await store.attempts.release(await sampled(store))
    down = {"without_scorers": ["agentcpm"]}
    assert await store.claims.claim_sampled(split="train", owner="s", lease_seconds=60, **down) == []  # type: ignore[arg-type]
    assert len(await store.claims.claim_sampled(split="train", owner="s", lease_seconds=60)) == 1


async def test_nothing_is_taken_over_within_a_lease_after_an_outage_of_the_database(store: Store) -> None:
    await load(store, "a")
    claim = await store.claims.claim(split="train", owner="o", lease_seconds=60)
    assert claim is not None
    await expire(store, claim)
    store.connection.outage.call_failed("gone", 1.0)
    store.connection.outage.call_succeeded()
    assert await store.expired_leases.reap("train", grace_seconds=60) == 0
    assert await store.claims.claim(split="train", owner="other", lease_seconds=60) is None
    assert await store.claims.heartbeat([claim], 60) == []
    assert (await slot(store, claim)).attempt == 1
