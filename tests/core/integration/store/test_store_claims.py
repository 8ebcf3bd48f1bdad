"""Claims on a real server: no double claim, leases, fencing, retries."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pymongo.monitoring
import pytest
from made_documents import open_task
from ready_data import finalize

from agentrl.config.schema import RunConfig
from agentrl.documents import document
from agentrl.documents import record as document_record
from agentrl.documents import task as document_task
from agentrl.documents.record import Failure, Record
from agentrl.documents.status import RecordStatus, SlotStatus, TaskStatus
from agentrl.documents.task import Claim, Slot, Task
from agentrl.documents.training import TrainStep
from agentrl.errors import LeaseLostError, StoreError
from agentrl.store import claims
from agentrl.store.claims import GroupAdmission, GroupLimit
from agentrl.store.client import Store, open_store
from agentrl.store.groups import GroupOutcome
from agentrl.store.mechanics import lease

pytestmark = pytest.mark.integration


class Commands(pymongo.monitoring.CommandListener):
    """Counts the commands that are sent to one database."""

    def __init__(self) -> None:
        self.database: str | None = None
        self.count = 0

    def started(self, event: pymongo.monitoring.CommandStartedEvent) -> None:
        """Count the command."""
        self.count += event.database_name == self.database

    def succeeded(self, event: pymongo.monitoring.CommandSucceededEvent) -> None:
        """Answers are not counted."""

    def failed(self, event: pymongo.monitoring.CommandFailedEvent) -> None:
        """Answers are not counted."""


COMMANDS = Commands()
pymongo.monitoring.register(COMMANDS)


def make_tasks(count: int, generations: int = 2, epoch: int = 0) -> list[Task]:
    return [
        open_task(str(number), generations, id=f"train/{epoch}/{number}", epoch=epoch, order=number)
        for number in range(count)
    ]


async def take(
    store: Store, owner: str = "a", lease: float = 60.0, limit: int | GroupLimit | None = None
) -> Claim | None:
    return await store.claims.claim(split="train", owner=owner, lease_seconds=lease, max_groups_open=limit)


async def take_one(store: Store, owner: str = "a", lease: float = 60.0) -> Claim:
    claim = await take(store, owner, lease)
    assert claim is not None
    return claim


async def expire(store: Store, claim: Claim) -> None:
    """Let the lease end now, by the server's clock."""
    slots = {
        "$map": {
            "input": "$slots", "as": "slot",
            "in": {
                "$cond": [
                    {"$eq": ["$$slot.traj_id", claim.traj_id]},
                    {"$mergeObjects": ["$$slot", {"lease_expires_at": "$$NOW"}]}, "$$slot",
                ]
            },
        }
    }  # fmt: skip
    await store.database["Task"].update_one(
        {"_id": claim.task.id}, [{"$set": {"slots": slots, "lease_deadline": "$$NOW"}}]
    )


async def score(store: Store, claim: Claim, value: float = 1.0) -> TaskStatus:
    await store.records.create(claim)
    for status in (RecordStatus.RUNNING, RecordStatus.COMPLETED, RecordStatus.SCORING):
        await store.records.advance(claim, status)
    return await store.attempts.score(claim, value, {"why": "$test"})


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
    assert await store.groups.count_open("train") == 2


@pytest.mark.parametrize("is_reaped", [True, False])
async def test_a_dead_owners_trajectory_goes_before_groups_that_began_later(
    store: Store, is_reaped: bool
) -> None:
    await store.tasks.load(make_tasks(3, generations=2))
    first = [await take(store, limit=2) for _ in range(3)]
    assert [claim and claim.task.order for claim in first] == [0, 0, 1]
    assert first[0] is not None
    await expire(store, first[0])
    if is_reaped:
        assert await store.expired_leases.reap("train") == 1
    rest = [await take(store, "new", limit=3) for _ in range(4)]
    # A slot that is not reaped yet comes after the open ones, and before any group that begins now.
    begun = [0, 1] if is_reaped else [1, 0]
    assert [claim and claim.task.order for claim in rest] == [*begun, 2, 2]


@pytest.fixture
async def crowd(store: Store, run_config: RunConfig) -> AsyncIterator[list[Store]]:
    """Four connections to one run."""
    async with AsyncExitStack() as stack:
        others = [await stack.enter_async_context(await open_store(run_config)) for _ in range(3)]
        yield [store, *others]


async def test_a_limit_that_was_worked_out_before_a_step_admits_nothing_after_it(store: Store) -> None:
    await store.tasks.load(make_tasks(3, generations=1))
    step = TrainStep(id="1/1", step=1, policy_version=0, data=(), owner="t")
    await store.steps.plan(step)
    assert await take(store, limit=GroupLimit(1, after_step=0)) is not None
    await store.steps.commit(step.id, {}, ())
    assert await take(store, limit=GroupLimit(2, after_step=0)) is None
    assert await take(store, limit=GroupLimit(2, after_step=1)) is not None


async def commit(store: Store, step: int) -> None:
    """A step that trains nothing."""
    planned = TrainStep(id=f"1/{step}", step=step, policy_version=0, data=(), owner="t")
    await store.steps.plan(planned)
    await store.steps.commit(planned.id, {}, ())


async def unclaimed(store: Store) -> dict[str, int]:
    """The ranks of admitted groups that nobody has claimed."""
    tasks = await store.tasks.find("train", status=TaskStatus.RUNNING)
    return {task.task_id: task.admission.rank for task in tasks if task.admission is not None}


async def test_one_admission_takes_groups_up_to_the_limit(store: Store) -> None:
    await store.tasks.load(make_tasks(9, generations=2))
    assert await take(store, limit=6) is not None
    assert await unclaimed(store) == {"1": 2, "2": 3, "3": 4, "4": 5, "5": 6}
    assert await store.groups.count_open("train") == 6
    counts = await store.tasks.counts("train")
    assert (counts[TaskStatus.RUNNING], counts[TaskStatus.CREATED]) == (6, 3)


async def test_one_admission_takes_512_slots_at_most(store: Store) -> None:
    await store.tasks.load(make_tasks(9, generations=90))
    assert await take(store, limit=9) is not None
    assert await store.groups.count_open("train") == 6


async def test_claims_at_once_get_the_next_groups_in_order(store: Store) -> None:
    await store.tasks.load(make_tasks(6, generations=2))
    claims = await asyncio.gather(*(take(store, f"w{number}", limit=5) for number in range(12)))
    # The first is written alone; those that waited for it share the groups behind.
    assert [claim and (claim.owner, claim.task.order) for claim in claims] == [
        *((f"w{number}", number // 2) for number in range(10)), None, None
    ]  # fmt: skip


async def test_a_sampler_that_dies_in_its_turn_to_admit_holds_the_others_up_for_that_turn(
    crowd: list[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other, *_ = crowd
    monkeypatch.setattr("agentrl.store.claims._TURN_SECONDS", 1.0)
    await store.tasks.load(make_tasks(1, generations=2))
    has_turn = asyncio.Event()

    async def hang(*_: object) -> None:
        has_turn.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patched:
        patched.setattr(GroupAdmission, "_admit", hang)
        dead = asyncio.create_task(take(store, limit=1))
        await has_turn.wait()
    async with asyncio.timeout(30):
        assert await take(other, limit=1) is not None
    dead.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dead


async def test_a_claimer_with_a_lower_limit_claims_no_group_beyond_it(store: Store) -> None:
    await store.tasks.load(make_tasks(9, generations=1))
    first = await take(store, limit=GroupLimit(6, after_step=0))
    assert first is not None
    lagging = GroupLimit(2, after_step=0, engines_lag=True)
    second = await take(store, limit=lagging)
    assert second is not None
    assert second.task.order == 1
    assert await take(store, limit=lagging) is None
    assert await take(store, limit=0) is None
    assert len(await unclaimed(store)) == 4
    await score(store, first)
    await finalize(store, first.task.id, lambda group: GroupOutcome())
    third = await take(store, limit=lagging)
    assert third is not None
    assert third.task.order == 2
    assert await unclaimed(store) == {"3": 3, "4": 4, "5": 5}
    assert await take(store, limit=lagging) is None
    following = await take(store, limit=GroupLimit(6, after_step=0))
    assert following is not None
    assert following.task.order == 3


async def test_a_claimer_whose_limit_is_older_than_an_admission_does_not_claim_it(store: Store) -> None:
    await store.tasks.load(make_tasks(4, generations=1))
    await commit(store, 1)
    assert await take(store, limit=GroupLimit(4, after_step=1)) is not None
    assert await take(store, limit=GroupLimit(4, after_step=0)) is None
    assert await take(store, limit=GroupLimit(4, after_step=1)) is not None
    await commit(store, 2)
    assert await take(store, limit=GroupLimit(4, after_step=2)) is not None


async def test_a_group_that_was_claimed_once_is_open_to_every_claimer(store: Store) -> None:
    await store.tasks.load(make_tasks(1, generations=2))
    claim = await take(store, limit=GroupLimit(1, after_step=0))
    assert claim is not None
    await store.attempts.release(claim)
    assert await take(store, limit=0) is not None


async def test_several_clients_need_few_commands_a_claim(crowd: list[Store]) -> None:
    await crowd[0].tasks.load(make_tasks(128, generations=1))
    claimed = 0

    async def work(mine: Store, owner: str) -> None:
        nonlocal claimed
        while claimed < 128:
            claim = await take(mine, owner, limit=1000)
            claimed += claim is not None

    COMMANDS.count, COMMANDS.database = 0, crowd[0].run_name
    async with asyncio.timeout(90):
        await asyncio.gather(*(work(mine, f"w{number}") for number, mine in enumerate(crowd)))
    COMMANDS.database = None
    assert COMMANDS.count / claimed < 3
    gates = {gate["_id"]: gate async for gate in crowd[0].database["Admission"].find()}
    assert gates["admission"]["opened"] == 1
    assert gates["turn"]["turn_until"] is None


async def test_whoever_waits_for_a_turn_writes_nothing_that_an_admission_has_written(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the database tries its write again and again until the admission has ended."""
    await store.tasks.load(make_tasks(1))
    async with store.database.client.start_session() as session, await session.start_transaction():
        ours = {"_id": "admission"}
        await store.database["Admission"].update_one(ours, {"$inc": {"opened": 1}}, session=session)
        until = datetime.now(UTC) + timedelta(minutes=1)
        await store.database["Admission"].update_one({"_id": "turn"}, {"$set": {"turn_until": until}})
        monkeypatch.setattr(claims, "_ADMISSIONS", 2)
        async with asyncio.timeout(30):
            assert await take(store, limit=1) is None
        await session.abort_transaction()


async def test_an_admission_of_a_busy_machine_is_not_disturbed(
    crowd: list[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that admit at once fail both, and try again: of a hundred, none would succeed."""
    await crowd[0].tasks.load(make_tasks(8, generations=1))
    admit, admissions = claims.GroupAdmission._admit, 0

    async def slow(admission: claims.GroupAdmission, *request: Any) -> bool:
        nonlocal admissions
        admissions += 1
        await asyncio.sleep(1.5)
        return await admit(admission, *request)

    monkeypatch.setattr(claims.GroupAdmission, "_admit", slow)
    async with asyncio.timeout(60):
        taken = await asyncio.gather(
            *(take(mine, f"w{number}", limit=8) for number, mine in enumerate(crowd))
        )
    assert admissions == 1
    assert all(taken)


@pytest.mark.parametrize("limit", [1, 3])
async def test_16_claimers_never_open_more_groups_than_allowed(crowd: list[Store], limit: int) -> None:
    store = crowd[0]
    await store.tasks.load(make_tasks(24, generations=2))
    begun = {"status": {"$in": [TaskStatus.RUNNING.value, TaskStatus.WAITING.value]}}
    most_open, scored = 0, 0

    async def work(number: int) -> None:
        nonlocal most_open, scored
        mine = crowd[number % len(crowd)]
        while scored < 48:
            claim = await take(mine, f"w{number}", limit=limit)
            most_open = max(most_open, await store.database["Task"].count_documents(begun))
            if claim is None:
                await mine.wait_for_change("Task", timeout=0.02)
                continue
            if await score(mine, claim) is TaskStatus.WAITING:
                await finalize(mine, claim.task.id, lambda group: GroupOutcome())
            scored += 1

    async with asyncio.timeout(90):
        await asyncio.gather(*(work(number) for number in range(16)))
    assert most_open == limit
    assert (await store.tasks.counts("train"))[TaskStatus.COMPLETED] == 24


async def test_an_opening_that_dies_before_its_commit_leaves_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.tasks.load(make_tasks(1))

    async def die(*_: object) -> None:
        raise StoreError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(GroupAdmission, "_admit", die)
        with pytest.raises(StoreError, match="killed"):
            await take(store, limit=1)
    assert await store.groups.count_open("train") == 0
    assert await take(store, limit=1) is not None


async def lose(store: Store, *states: RecordStatus) -> Claim:
    """A claim whose owner got as far as ``states`` before its lease ran out."""
    old = await take_one(store, "old")
    await store.records.create(old)
    for status in states:
        await store.records.advance(old, status)
    await expire(store, old)
    return old


async def assert_fenced(store: Store, old: Claim) -> None:
    """Whatever the owner of a lost claim writes is refused."""
    failure = Failure(kind="engine", message="x")
    with pytest.raises(LeaseLostError):
        await store.attempts.score(old, 1.0)
    with pytest.raises(LeaseLostError):
        await store.attempts.fail(old, failure, max_attempts=3, backoff_seconds=1)
    with pytest.raises(LeaseLostError):
        await store.attempts.release(old)
    with pytest.raises(LeaseLostError):
        await store.records.advance(old, RecordStatus.SCORING)
    assert await store.claims.heartbeat([old], 60) == [old]


async def test_an_expired_lease_is_renewed_until_another_process_takes_the_slot_over(store: Store) -> None:
    await store.tasks.load(make_tasks(1, generations=1))
    old = await lose(store, RecordStatus.RUNNING)
    assert await store.claims.heartbeat([old], 60) == []
    assert await take(store, "new") is None
    await expire(store, old)
    assert await score(store, old, 0.5) is TaskStatus.WAITING


async def test_a_takeover_fences_the_old_owner_and_goes_on_with_its_record(store: Store) -> None:
    await store.tasks.load(make_tasks(1, generations=1))
    old = await lose(store, RecordStatus.RUNNING)
    new = await take_one(store, "new")
    assert (new.attempt, new.traj_id) == (2, old.traj_id)
    await assert_fenced(store, old)
    with pytest.raises(LeaseLostError):
        await store.records.create(old)
    assert await store.claims.heartbeat([old, new], 60) == [old]
    assert await score(store, new, 0.25) is TaskStatus.WAITING
    await assert_fenced(store, old)
    (record,) = await store.records.by_task(old.task.id)
    assert (record.id, record.status, record.score) == (old.record_id, RecordStatus.SCORED, 0.25)
    assert [(owner.owner, owner.attempt, owner.ended) for owner in record.owners] == [
        ("old", 1, "lease"), ("new", 2, None),
    ]  # fmt: skip
    assert (await slot_of(store, new)).score == 0.25


async def failures(store: Store, task_id: str) -> list[Record]:
    return [each for each in await store.records.by_task(task_id) if each.status is RecordStatus.FAILED]


async def test_a_takeover_is_all_or_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.tasks.load(make_tasks(1, generations=1))
    old = await lose(store, RecordStatus.RUNNING)

    async def die(*_: object) -> None:
        raise StoreError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(claims, "adopt_records", die)
        patched.setattr(claims, "end_records", die)
        with pytest.raises(StoreError, match="killed"):
            await take(store, "new")
        with pytest.raises(StoreError, match="killed"):
            await store.expired_leases.reap("train")
    slot = await slot_of(store, old)
    assert (slot.owner, slot.attempt, slot.status) == ("old", 1, SlotStatus.RUNNING)
    record = await store.records.get(old.record_id)
    assert record is not None
    assert record.status is RecordStatus.RUNNING


async def test_a_claim_without_a_record_gets_one_and_its_owner_cannot_make_another(store: Store) -> None:
    await store.tasks.load(make_tasks(1, generations=1))
    old = await take_one(store, "old")
    await expire(store, old)
    assert await store.expired_leases.reap("train") == 1
    with pytest.raises(LeaseLostError):
        await store.records.create(old)
    (record,) = await store.records.by_task(old.task.id)
    assert (record.id, record.owner, record.status) == (old.record_id, "old", RecordStatus.RELEASED)
    new = await take_one(store, "new")
    assert (await store.records.create(new)).status is RecordStatus.RUNNING
    with pytest.raises(LeaseLostError):
        await store.records.create(old)


async def test_an_owner_that_inserts_its_record_after_a_takeover_begins_nothing(store: Store) -> None:
    await store.tasks.load(make_tasks(1, generations=1))
    old = await take_one(store, "old")
    await expire(store, old)
    new = await take_one(store, "new")
    await store.records.create(old)
    with pytest.raises(LeaseLostError):
        await store.records.advance(old, RecordStatus.RUNNING)
    record = await store.records.create(new)
    assert (record.id, record.owner, record.status) == (old.record_id, "new", RecordStatus.CREATED)
    await store.records.advance(new, RecordStatus.RUNNING)
    with pytest.raises(LeaseLostError):
        await store.records.advance(old, RecordStatus.COMPLETED)


@pytest.mark.parametrize("skew", [timedelta(hours=-3), timedelta(hours=3)])
async def test_a_clock_that_is_wrong_neither_ends_nor_lengthens_a_lease(
    store: Store, monkeypatch: pytest.MonkeyPatch, skew: timedelta
) -> None:
    for module in (document, document_record, document_task):
        monkeypatch.setattr(module, "now", lambda: datetime.now(UTC) + skew)
    monkeypatch.setattr(time, "time", lambda: datetime.now(UTC).timestamp() + skew.total_seconds())
    await store.tasks.load(make_tasks(1, generations=1))
    claim = await take_one(store, "a", lease=60)
    server_now = (await store.database.command("hello"))["localTime"].replace(tzinfo=UTC)
    expires = (await slot_of(store, claim)).lease_expires_at
    assert expires is not None
    assert timedelta(seconds=30) < expires - server_now <= timedelta(seconds=60)
    assert await take(store, "b") is None
    assert await store.expired_leases.reap("train") == 0
    assert await store.claims.heartbeat([claim], 60) == []
    await expire(store, claim)
    assert (await take_one(store, "b")).attempt == 2


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
        await store.attempts.release(claim)
    slot = await slot_of(store, claim)
    assert (slot.status, slot.attempt, slot.released, slot.owner) == (SlotStatus.OPEN, 5, 5, None)
    (record,) = await store.records.by_task(claim.task.id)
    assert (record.status, record.failure, record.score) == (RecordStatus.RELEASED, None, None)
    assert [(each.attempt, each.ended) for each in record.owners] == [(n, "released") for n in range(1, 6)]
    assert await failures(store, claim.task.id) == []
    again = await take_one(store)
    outcome = await store.attempts.fail(
        again, Failure(kind="engine", message="x"), max_attempts=2, backoff_seconds=0.001
    )
    assert outcome is SlotStatus.OPEN


async def test_failures_back_off_and_end_at_max_attempts(store: Store) -> None:
    await store.tasks.load(make_tasks(1, generations=1))
    failure = Failure(kind="scorer", message="it raised")
    claim = await take_one(store)
    await store.records.create(claim)
    status = await store.attempts.fail(claim, failure, max_attempts=2, backoff_seconds=3600)
    assert status is SlotStatus.OPEN
    assert await take(store) is None
    slots = {"slots.0.not_before": None}
    await store.database["Task"].update_one({"_id": claim.task.id}, {"$set": slots})
    second = await take_one(store)
    await store.records.create(second)
    assert await store.attempts.fail(second, failure, max_attempts=2, backoff_seconds=1) is SlotStatus.FAILED
    task = await store.tasks.get(claim.task.id)
    assert task is not None
    assert task.status is TaskStatus.WAITING
    history = [each for each in await failures(store, task.id) if each.traj_id == claim.traj_id]
    assert [(record.attempt, record.status, record.score) for record in history] == [
        (1, RecordStatus.FAILED, None), (2, RecordStatus.FAILED, None),
    ]  # fmt: skip
    assert {record.failure.message for record in history if record.failure} == {"it raised"}
    assert await store.claims.reopen_failed("train") == 1
    assert (await take_one(store)).attempt == 3


async def test_the_wait_doubles_with_each_attempt_and_is_spread(store: Store) -> None:
    await store.tasks.load(make_tasks(1, generations=1))
    released = await take_one(store)
    await store.attempts.release(released)
    failure = Failure(kind="engine", message="x")
    waits = []
    for _ in range(4):
        claim = await take_one(store)
        await store.attempts.fail(claim, failure, max_attempts=9, backoff_seconds=100)
        task = await store.tasks.get(claim.task.id)
        assert task is not None
        due = task.slots[0].not_before
        assert due is not None
        waits.append((due - task.updated_at).total_seconds())
        slots = {"slots.0.not_before": None}
        await store.database["Task"].update_one({"_id": task.id}, {"$set": slots})
    for number, wait in enumerate(waits):
        assert 50 * 2**number <= wait <= 150 * 2**number
    assert len({wait / 2**number for number, wait in enumerate(waits)}) == 4


async def test_a_death_uses_no_attempt_and_three_at_one_entry_are_poison(store: Store) -> None:
    await store.tasks.load(make_tasks(1, generations=2))
    alive = await take_one(store, lease=60)
    for owner, turns, status in (
        ("a", 0, SlotStatus.OPEN), ("b", 0, SlotStatus.OPEN), ("c", 1, SlotStatus.OPEN),
        ("d", 1, SlotStatus.OPEN), ("e", 1, SlotStatus.FAILED),
    ):  # fmt: skip
        dead = await take_one(store, owner)
        await store.records.create(dead)
        await store.database["Record"].update_one({"_id": dead.record_id}, {"$set": {"turns": turns}})
        await expire(store, dead)
        assert await store.expired_leases.reap("train") == 1
        slot = await slot_of(store, dead)
        assert (slot.status, slot.released) == (status, min(slot.attempt, 4))
    assert (await slot_of(store, alive)).status is SlotStatus.RUNNING
    assert await store.expired_leases.reap("train") == 0
    (record,) = await failures(store, dead.task.id)
    assert record.failure is not None
    assert record.failure.kind == "poison"
    assert "3 samplers in a row died when it had 1 model calls and 0 tool calls" in record.failure.message
    assert [owner.owner for owner in record.owners] == ["a", "b", "c", "d", "e"]


async def test_a_trajectory_that_begins_anew_between_deaths_is_poison_too(store: Store) -> None:
    """Its tools answer otherwise when their calls are repeated, and its third call kills its samplers."""
    await store.tasks.load(make_tasks(1, generations=1))
    for death in range(claims.POISON_DEATHS):
        dead = await take_one(store, f"w{death}")
        await store.records.create(dead)
        await store.database["Record"].update_one({"_id": dead.record_id}, {"$set": {"turns": 3}})
        await expire(store, dead)
        assert await store.expired_leases.reap("train") == 1
        if death < claims.POISON_DEATHS - 1:
            next_owner = await take_one(store)
            await store.records.create(next_owner)
            await store.attempts.begin_anew(next_owner, Failure(kind="replay", message="differs"))
            assert (await slot_of(store, dead)).begun is None
    assert (await slot_of(store, dead)).status is SlotStatus.FAILED
    assert [record.id for record in await failures(store, dead.task.id)] == [dead.record_id]


async def reopen_all(store: Store) -> None:
    """Open every slot, as `agentrl db reopen` does by the kind of its failure."""
    await store.database["Task"].update_many({}, lease.change_slots({"$literal": True}, lease.REOPENED))


async def test_a_slot_fails_when_its_trajectories_have_begun_anew_three_times_in_a_row(store: Store) -> None:
    await store.tasks.load(make_tasks(1, generations=1))
    why = Failure(kind="replay", message="python answered otherwise")
    for status in (SlotStatus.OPEN, SlotStatus.OPEN, SlotStatus.FAILED):
        await store.attempts.release(await take_one(store))
        claim = await take_one(store)
        await store.records.create(claim)
        assert await store.attempts.begin_anew(claim, why) is status
        with pytest.raises(LeaseLostError):
            await store.attempts.begin_anew(claim, why)
    slot = await slot_of(store, claim)
    assert (slot.attempt - slot.released, slot.begun, slot.restarts) == (0, None, 3)
    first, second, last = await store.records.by_task(claim.task.id)
    assert [record.owners[-1].ended for record in (first, second)] == ["restarted"] * 2
    assert last.failure is not None
    assert (last.failure.kind, last.status) == ("replay", RecordStatus.FAILED)
    assert last.failure.message == "began anew 2 times, and cannot again: python answered otherwise"
    assert await store.groups.waiting("train") == [claim.task.id]
    assert await store.claims.reopen_failed("train") == 0
    await reopen_all(store)
    assert (await slot_of(store, claim)).restarts == 0


async def test_a_group_waits_exactly_once_when_its_last_scores_race(store: Store) -> None:
    await store.tasks.load(make_tasks(1, generations=8))
    claims = [await take_one(store, f"w{number}") for number in range(8)]
    statuses = await asyncio.gather(*(score(store, claim) for claim in claims))
    assert sorted(status.value for status in statuses) == ["running"] * 7 + ["waiting"]
    assert await store.attempts.score(claims[0], 1.0) is TaskStatus.WAITING
    assert await store.groups.waiting("train") == ["train/0/0"]


async def test_states_move_along_edges_only(store: Store) -> None:
    await store.tasks.load(make_tasks(1))
    claim = await take_one(store)
    await store.records.create(claim)
    with pytest.raises(StoreError, match="cannot become scoring"):
        await store.records.advance(claim, RecordStatus.SCORING)
    with pytest.raises(StoreError, match="is not being scored"):
        await store.attempts.score(claim, 1.0)
    assert (await slot_of(store, claim)).status is SlotStatus.RUNNING


async def test_a_slot_that_begins_anew_has_killed_nobody(store: Store) -> None:
    await store.tasks.load(make_tasks(1, generations=1))
    for death in range(claims.POISON_DEATHS):
        await expire(store, await take_one(store, f"w{death}"))
        assert await store.expired_leases.reap("train") == 1
    (task,) = await store.tasks.find("train")
    assert (task.slots[0].status, task.slots[0].deaths) == (SlotStatus.FAILED, claims.POISON_DEATHS)
    assert await store.claims.reopen_failed("train") == 0
    await reopen_all(store)
    claim = await take_one(store)
    await expire(store, claim)
    assert await store.expired_leases.reap("train") == 1
    assert (await slot_of(store, claim)).status is SlotStatus.OPEN
    again = await take_one(store)
    await store.records.create(again)
    await store.attempts.fail(again, Failure(kind="agent", message="x"), max_attempts=5, backoff_seconds=0.0)
    assert (await slot_of(store, again)).deaths == 0


async def test_a_claim_that_is_lost_adopts_no_record(store: Store) -> None:
    await store.tasks.load(make_tasks(1, generations=1))
    first = await take_one(store, "a")
    await store.records.create(first)
    await store.attempts.release(first)
    slow = await take_one(store, "b")
    await expire(store, slow)
    assert await store.expired_leases.reap("train") == 1
    with pytest.raises(LeaseLostError):
        await store.records.create(slow)
    record = await store.records.get(first.record_id)
    assert record is not None
    assert (record.status, record.owner, len(record.owners)) == (RecordStatus.RELEASED, "a", 1)


@pytest.mark.parametrize("is_sampled", [False, True])
async def test_a_takeover_from_a_sampler_of_an_older_version(store: Store, is_sampled: bool) -> None:
    """It has noted neither what it had begun nor who owns the Record."""
    await store.tasks.load(make_tasks(1, generations=1))
    old = await take_one(store, "old")
    await store.records.create(old)
    await store.records.advance(old, RecordStatus.RUNNING)
    if is_sampled:
        await store.records.advance(old, RecordStatus.COMPLETED)
    await store.database["Task"].update_one({}, {"$unset": {"slots.0.begun": 1, "slots.0.deaths": 1}})
    await store.database["Record"].update_one({}, {"$unset": {"fence": 1, "owners": 1}})
    await expire(store, old)
    new = await take(store, "new", 60.0)
    if is_sampled:
        assert new is None
        (queued,) = await store.claims.claim_sampled(split="train", owner="new", lease_seconds=60.0)
        assert queued.record_id == old.record_id
    else:
        assert new is not None
        assert new.record_id != old.record_id
        await store.records.create(new)
        record = await store.records.get(old.record_id)
        assert record is not None
        assert record.status is RecordStatus.RELEASED
