"""Which groups a step trains, chosen on a real server: whole ones, and fresh ones first."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from made_documents import open_task
from ready_data import statuses
from training_data import group, sampled_by
from waiting import until

from agentrl.data.stream import DataStream, Freshness, StepData, StreamSettings
from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import DataStatus
from agentrl.documents.task import task_key
from agentrl.store.client import Store
from agentrl.store.steps import StaleVersions

pytestmark = pytest.mark.integration

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def key(name: str) -> str:
    return task_key("train", 0, name)


@pytest.fixture(autouse=True)
async def _versions(store: Store) -> None:
    """Versions without files, each published at the step of its number."""
    for number in range(4):
        await store.policy_versions.publish(
            PolicyVersion(id=number, step=number, location=str(number), files=(), train_step=None)
        )


async def add(
    store: Store, name: str, order: int, minute: int, versions: Sequence[Sequence[int]], **fields: Any
) -> list[str]:
    """A group made at ``minute``, a trajectory for each of ``versions``; ``fields`` are those of each."""
    size = len(versions)
    await store.tasks.load([open_task(name, size, order=order)])
    moment = BEGIN + timedelta(minutes=minute)
    items = [
        replace(sampled_by(item, *sampled), created_at=moment, **fields)
        for item, sampled in zip(group(key(name), size=size), versions, strict=True)
    ]
    await store.database["DBRecordData"].insert_many([item.to_document() for item in items])
    return [item.id for item in items]


async def change(store: Store, ids: Sequence[str], **fields: Any) -> None:
    await store.database["DBRecordData"].update_many({"_id": {"$in": list(ids)}}, {"$set": fields})


async def take(store: Store, step: int, max_trained_count: int = 1, **freshness: Any) -> StepData:
    settings = StreamSettings(
        groups_per_step=1, num_epochs=1, wait_seconds=20.0, max_trained_count=max_trained_count,
        freshness=Freshness(**{"max_staleness": 1, "policy": "drop", **freshness}),
    )  # fmt: skip
    batch = await DataStream(store, settings).take(step)
    assert batch is not None
    return batch


async def test_a_group_is_trained_whole_however_much_is_ready(store: Store) -> None:
    for number in range(1, 6):
        await add(store, f"early{number}", order=number, minute=number, versions=[[0]] * 3)
    slow = await add(store, "slow", order=0, minute=9, versions=[[0]] * 8)
    assert [item.id for item in (await take(store, 1)).data] == slow


async def test_a_group_that_waited_for_one_long_trajectory_keeps_its_place(store: Store) -> None:
    slow = await add(store, "slow", order=0, minute=9, versions=[[0], [0], [0, 3]])
    for number in range(1, 4):
        await add(store, f"fast{number}", order=number, minute=number, versions=[[3]] * 3)
    batch = await take(store, 4, policy="keep")
    assert ([item.id for item in batch.data], batch.ages) == (slow, {0: 3, 3: 0})
    assert (await statuses(store))[DataStatus.STALE] == 0


async def test_fresh_groups_come_before_all_that_were_trained(store: Store) -> None:
    trained = {"trained_count": 1, "trained_at_steps": (1,), "not_before_step": 2}
    for number in range(40):
        await add(store, f"trained{number}", order=number, minute=number, versions=[[0]] * 2, **trained)
    fresh = await add(store, "fresh", order=99, minute=99, versions=[[0]] * 2)
    batch = await take(store, 2, max_trained_count=2)
    assert [item.id for item in batch.data] == fresh
    await change(store, fresh, status=DataStatus.TRAINED.value)
    assert (await take(store, 2, max_trained_count=2)).groups == (key("trained0"),)


@pytest.mark.parametrize(
    "fields", [{"not_before_step": 3}, {"status": "planned", "planned_step": 1}], ids=["rests", "planned"]
)
async def test_a_group_waits_for_all_of_its_members(store: Store, fields: dict[str, Any]) -> None:
    first, *_ = await add(store, "partly", order=0, minute=0, versions=[[0]] * 4)
    await add(store, "whole", order=1, minute=1, versions=[[0]] * 4)
    await change(store, [first], **fields)
    assert (await take(store, 2)).groups == (key("whole"),)


async def test_one_old_member_sets_its_group_aside(store: Store) -> None:
    await add(store, "old", order=0, minute=0, versions=[[1, 3], [3], [3], [3]])
    fresh = await add(store, "fresh", order=1, minute=1, versions=[[3]] * 4)
    ready = await store.training.ready_members("train", step=1, old=StaleVersions(((0, 1),)))
    assert sorted(member.id for member in ready) == fresh
    assert [item.id for item in (await take(store, 4)).data] == fresh
    assert (await statuses(store))[DataStatus.STALE] == 4


async def test_setting_a_group_aside_goes_on_where_it_was_interrupted(store: Store) -> None:
    _, second, *_ = await add(store, "old", order=0, minute=0, versions=[[1, 3], [3], [3], [3]])
    await change(store, [second], status=DataStatus.STALE.value)
    assert await store.training.mark_stale("train", StaleVersions(((0, 1),))) == 3
    assert await store.training.mark_stale("train", StaleVersions(((0, 1),))) == 0


@pytest.mark.parametrize("policy", ["drop", "mask"])
async def test_a_group_that_is_too_old_when_it_ends_keeps_no_other_from_beginning(
    store: Store, policy: str
) -> None:
    await add(store, "stale", order=0, minute=0, versions=[[0]])
    waiting = asyncio.create_task(take(store, 4, policy=policy))
    await until(lambda: is_stale(store, 1))
    await add(store, "ends_late", order=1, minute=1, versions=[[0], [1]])
    await until(lambda: is_stale(store, 3), 10)
    assert await store.groups.count_open("train") == 0
    fresh = await add(store, "fresh", order=2, minute=2, versions=[[3]])
    assert [item.id for item in (await waiting).data] == fresh


async def is_stale(store: Store, count: int) -> bool:
    return (await statuses(store))[DataStatus.STALE] == count


async def test_masking_leaves_out_what_would_train_nothing(store: Store) -> None:
    _, *others = await add(store, "old", order=0, minute=0, versions=[[1], [1, 3], [1, 3]])
    old = StaleVersions(((0, 1),), "all")
    ready = await store.training.ready_members("train", step=1, old=old)
    assert sorted(member.id for member in ready) == others
    assert await store.training.mark_stale("train", old) == 1


VERSIONS = [[1], [3], [6], [8], [1, 3], [3, 6], [6, 3], [6, 8], [1, 8], [3, 8], [1, 3, 6, 8]]
RANGES: list[tuple[tuple[int, int], ...]] = [
    (), ((0, 0),), ((0, 1),), ((0, 3),), ((0, 8),), ((3, 3),), ((0, 1), (6, 6)), ((1, 1), (6, 7)),
    ((3, 3), (8, 8)), ((0, 3), (8, 8)), ((1, 1), (3, 3), (6, 6)),
]  # fmt: skip


@pytest.mark.parametrize("spans", ["any", "all"])
async def test_old_versions_may_be_any_ranges(store: Store, spans: Any) -> None:
    """The query, and the expression of a group of one, find what the spans themselves say."""
    ids = await add(store, "a", order=0, minute=0, versions=VERSIONS)
    for number, id in enumerate(ids):
        await change(store, [id], task=f"group {number}")
    quantifier = any if spans == "any" else all
    for ranges in RANGES:
        old = StaleVersions(ranges, spans)
        stale = {
            id for id, versions in zip(ids, VERSIONS, strict=True)
            if quantifier(any(low <= version <= high for low, high in ranges) for version in versions)
        }  # fmt: skip
        ready = await store.training.ready_members("train", step=1, old=old)
        assert {member.id for member in ready} == set(ids) - stale, ranges
        assert await store.training.mark_stale("train", old) == len(stale), ranges
        documents = await store.training.fetch(ids)
        assert {item.id for item in documents if item.status is DataStatus.STALE} == stale, ranges
        await change(store, ids, status=DataStatus.READY.value)


async def test_choosing_reads_the_index_alone(store: Store) -> None:
    await add(store, "a", order=0, minute=0, versions=[[0]] * 2)
    match = {"split": "train", "status": {"$in": ["ready", "planned"]}}
    fields = ("task", "trained_count", "not_before_step", "min_version", "max_version", "status", "_id")
    find = {"find": "DBRecordData", "filter": match, "projection": dict.fromkeys(fields, 1)}
    plan = await store.database.command({"explain": find, "verbosity": "executionStats"})
    assert plan["executionStats"]["totalDocsExamined"] == 0
