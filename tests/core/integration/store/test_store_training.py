"""Groups, training data and steps on a real server: exactly once, revertible, atomic."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from made_documents import made_call, open_task
from ready_data import finalize, ready_data, statuses

from agentrl.base.processes import ProcessIdentity
from agentrl.documents.model_call import DispatchedSamplingTask, VersionSpan, pack_floats, pack_ids
from agentrl.documents.run import FileChecksum, LiveShare, LiveWeights, PolicyVersion
from agentrl.documents.status import DataStatus, RecordStatus, StepStatus, TaskStatus
from agentrl.documents.task import Claim, task_key
from agentrl.documents.training import DBRecordData, Node, TrainableSpan, TrainStep
from agentrl.errors import LeaseLostError, StoreError
from agentrl.scoring.groups import Decision
from agentrl.store.client import Store
from agentrl.store.groups import GroupOutcome, StoredGroup
from agentrl.store.steps import StaleVersions

pytestmark = pytest.mark.integration


def make_call(claim: Claim, index: int, size: int = 3, version: int = 1) -> DispatchedSamplingTask:
    return made_call(
        claim.record_id, index, parent=index - 1 if index else None, output=range(size),
        messages=({"role": "user", "content": "?"},), response={"content": "!", "tool_calls": []},
        versions=(VersionSpan(version=version, start=0, end=size),),
    )  # fmt: skip


def make_data(record_id: str, task: str, version: int = 1) -> DBRecordData:
    return DBRecordData(
        id=record_id, record=record_id, task=task, split="train", score=1.0, advantage=0.5,
        min_version=version, max_version=version, tokens=2, trainable_tokens=1, turns=1,
        nodes=(Node(start=0, end=2),),
        spans=(TrainableSpan(start=1, end=2, call=0, version=version, advantage=0.5, temperature=1.0),),
        input_ids=pack_ids([1, 2]), behavior_logprobs=pack_floats([-0.5]),
    )  # fmt: skip


def make_step(number: int, data: list[str], attempt: str = "a") -> TrainStep:
    return TrainStep(
        id=f"{attempt}/{number}", step=number, policy_version=number - 1, data=tuple(data), owner="t"
    )


async def begin(store: Store, number: int = 0, generations: int = 2) -> list[Claim]:
    await store.tasks.load([open_task(str(number), generations, order=number)])
    claims = []
    for _ in range(generations):
        claim = await store.claims.claim(split="train", owner="s", lease_seconds=60)
        assert claim is not None
        await store.records.create(claim)
        await store.records.advance(claim, RecordStatus.RUNNING)
        claims.append(claim)
    return claims


async def complete(store: Store, number: int = 0, generations: int = 2) -> str:
    for claim in await begin(store, number, generations):
        await store.model_calls.add(claim, make_call(claim, 0))
        await store.records.advance(claim, RecordStatus.COMPLETED, final_answer="4")
        await store.records.advance(claim, RecordStatus.SCORING)
        await store.attempts.score(claim, float(claim.traj_id))
    return task_key("train", 0, str(number))


def decide(group: StoredGroup) -> GroupOutcome:
    assert all(len(group.calls[record.id]) == 1 for record in group.records)
    first, *others = group.records
    return GroupOutcome(
        data=(make_data(first.id, group.task.id),),
        records=(
            Decision(record_id=first.id, advantage=0.5),
            *(Decision(record_id=other.id, abandoned_because="zero advantage") for other in others),
        ),
        summary={"scored": len(group.records), "mean_score": 0.5, "outcome": "trained"},
    )


async def finalized(store: Store, count: int) -> list[str]:
    for number in range(count):
        assert await finalize(store, await complete(store, number), decide)
    return [meta.id for meta in await ready_data(store, "train")]


async def test_calls_count_once_and_come_back_whole(store: Store) -> None:
    claim, _ = await begin(store)
    first, second = make_call(claim, 0, version=1), make_call(claim, 1, version=2)
    for call in (first, second, second):
        await store.model_calls.add(claim, call)
    record = await store.records.get(claim.record_id)
    assert record is not None
    assert (record.turns, record.generated_tokens, record.traj) == (2, 6, (first.id, second.id))
    assert (record.min_version, record.max_version, record.context_resets) == (1, 2, 0)
    assert await store.model_calls.by_record(record.id) == [first, second]
    branch = replace(make_call(claim, 2), parent=None, drops_thoughts=True)
    for call, resets in ((branch, 0), (replace(make_call(claim, 3), parent=None), 1)):
        await store.model_calls.add(claim, call)
        record = await store.records.get(claim.record_id)
        assert record is not None
        assert record.context_resets == resets
    await store.attempts.release(claim)
    with pytest.raises(LeaseLostError):
        await store.model_calls.add(claim, make_call(claim, 4))
    assert len(await store.model_calls.by_record(record.id)) == 4


async def test_a_call_larger_than_a_document_goes_to_gridfs(store: Store) -> None:
    claim, _ = await begin(store)
    call = make_call(claim, 0, size=2_200_000)
    await store.model_calls.add(claim, call)
    assert await store.model_calls.by_record(claim.record_id) == [call]


async def test_a_group_is_finalized_once_by_eight_racers(store: Store) -> None:
    task_id = await complete(store)
    outcomes = await asyncio.gather(*(finalize(store, task_id, decide) for _ in range(8)))
    assert sorted(outcomes) == [False] * 7 + [True]
    task = await store.tasks.get(task_id)
    assert task is not None
    assert task.group is not None
    assert (task.status, task.group["outcome"]) == (TaskStatus.COMPLETED, "trained")
    states = [record.status for record in await store.records.by_task(task_id)]
    assert states == [RecordStatus.READY, RecordStatus.ABANDONED]
    summaries = await store.groups.uncounted("train")
    assert [(summary["task"], summary["mean_score"]) for summary in summaries] == [(task_id, 0.5)]
    data = await store.training.fetch([meta.id for meta in await ready_data(store, "train")])
    assert data[0].input_ids == pack_ids([1, 2])
    assert await store.groups.count_open("train") == 1


async def test_an_abort_in_the_middle_leaves_nothing(store: Store) -> None:
    task_id = await complete(store)

    def wrong(group: StoredGroup) -> GroupOutcome:
        outcome = decide(group)
        unknown = Decision(record_id="nobody", abandoned_because="it does not exist")
        return GroupOutcome(data=outcome.data, records=(*outcome.records, unknown), summary={})

    with pytest.raises(StoreError, match="1 of 3 Records"):
        await finalize(store, task_id, wrong)
    assert await ready_data(store, "train") == []
    assert await store.groups.waiting("train") == [task_id]
    states = {record.status for record in await store.records.by_task(task_id)}
    assert states == {RecordStatus.SCORED}
    assert await finalize(store, task_id, decide)


async def test_steps_plan_commit_and_revert(store: Store) -> None:
    one, two, three = await finalized(store, 3)
    training = store.training
    await store.steps.plan(make_step(1, [one, two]))
    await store.steps.plan(make_step(1, [one, two]))
    assert [meta.id for meta in await ready_data(store, "train")] == [three]
    with pytest.raises(StoreError, match="planned already"):
        await store.steps.plan(make_step(1, [three], attempt="b"))
    with pytest.raises(StoreError, match="only 1 of them"):
        await store.steps.plan(make_step(2, [one, three]))
    assert (await statuses(store))[DataStatus.READY] == 1
    for _ in range(2):
        await store.steps.commit("a/1", {"loss": 0.1}, [one], 1, 1)
    assert [meta.id for meta in await ready_data(store, "train")] == [two, three]
    record = await store.records.get(one)
    assert record is not None
    assert (record.trained_count, record.last_trained_step) == (1, 1)
    await store.steps.plan(make_step(2, [two]))
    await store.steps.commit("a/2", {}, [two])
    await store.steps.plan(make_step(3, [three]))
    assert await store.steps.revert_after(1) == 2
    assert [meta.id for meta in await ready_data(store, "train")] == [two, three]
    assert (await training.fetch([two]))[0].trained_at_steps == ()
    last = await store.steps.last()
    assert last is not None
    assert (last.step, last.metrics) == (1, {"loss": 0.1})
    with pytest.raises(StoreError, match="cannot be committed"):
        await store.steps.commit("a/3", {}, [three])
    await store.steps.plan(make_step(2, [two, three], attempt="b"))
    assert [step.step for step in await store.steps.find(status=StepStatus.PLANNED)] == [2]


async def test_metrics_are_the_finite_numbers_of_committed_steps_in_order(store: Store) -> None:
    stored = {"loss": 0.5, "tokens": 7, "kl_k3": float("nan"), "is_last": True, "losses": [0.5]}
    for number in (1, 2, 3):
        await store.steps.plan(make_step(number, []))
        await store.steps.commit(f"a/{number}", stored if number == 2 else {}, [])
    await store.steps.plan(make_step(4, []))
    assert await store.steps.metrics() == {1: {}, 2: {"loss": 0.5, "tokens": 7.0}, 3: {}}
    assert list(await store.steps.metrics(last=2)) == [2, 3]
    await store.steps.revert_after(1)
    assert list(await store.steps.metrics()) == [1]


async def test_a_group_is_counted_by_one_step_even_if_it_is_seen_late(store: Store) -> None:
    async def uncounted() -> list[str]:
        return [group["task"] for group in await store.groups.uncounted("train")]

    async def commit(step: int, *counted: str) -> None:
        await store.steps.plan(make_step(step, []))
        await store.steps.commit(f"a/{step}", {}, [], counted=counted)

    early, late = [await complete(store, number) for number in range(2)]
    await finalize(store, early, decide)
    await commit(1, early)
    await finalize(store, late, decide)
    before = {"group.finalized_at": datetime(2020, 1, 1, tzinfo=UTC)}
    await store.database["Task"].update_one({"_id": late}, {"$set": before})
    assert await uncounted() == [late]
    await commit(2, early, late)
    assert await uncounted() == []
    await store.steps.revert_after(1)
    assert await uncounted() == [late]
    await store.steps.revert_after(0)
    assert await uncounted() == [late, early]


async def test_data_trained_twice_rest_in_between(store: Store) -> None:
    (one,) = await finalized(store, 1)
    await store.steps.plan(make_step(1, [one]))
    await store.steps.commit("a/1", {}, [one], max_trained_count=2, retrained_interval=2)
    assert await ready_data(store, "train", step=2) == []
    assert [meta.trained_count for meta in await ready_data(store, "train", step=3)] == [1]
    await store.steps.plan(make_step(3, [one]))
    await store.steps.commit("a/3", {}, [one], max_trained_count=2, retrained_interval=2)
    assert (await statuses(store))[DataStatus.TRAINED] == 1
    assert await store.steps.revert_after(1) == 1
    (data,) = await store.training.fetch([one])
    assert (data.status, data.trained_count, data.trained_at_steps) == (DataStatus.READY, 1, (1,))


async def test_stale_data_are_set_aside(store: Store) -> None:
    await finalized(store, 2)
    assert await store.training.mark_stale("train", StaleVersions(((0, 1),))) == 2
    assert (await statuses(store))[DataStatus.STALE] == 2


async def test_versions_only_grow(store: Store) -> None:
    def version(number: int, location: str = "/w") -> PolicyVersion:
        files = (FileChecksum(name="f", bytes=1, sha256="0"),)
        return PolicyVersion(id=number, step=number, location=location, files=files, train_step=None)

    for number in (0, 1, 2, 2):
        await store.policy_versions.publish(version(number))
    for wrong in (version(1, "/x"), version(2, "/x")):
        with pytest.raises(StoreError):
            await store.policy_versions.publish(wrong)
    assert await store.policy_versions.withdraw_after(0) == 2
    latest = await store.policy_versions.latest()
    assert latest is not None
    assert latest.id == 0
    for _ in range(2):
        await store.policy_versions.reinstate(replace(version(1, "/elsewhere"), train_step="2/1"))
    again = await store.policy_versions.latest()
    assert again is not None
    assert (again.id, again.train_step, again.location) == (1, "2/1", "/elsewhere")
    with pytest.raises(StoreError, match="version 9 cannot be published again"):
        await store.policy_versions.reinstate(version(9))
    await store.policy_versions.publish(version(3))
    assert [stored.id for stored in await store.policy_versions.all()] == [0, 1, 2, 3]


async def test_versions_above_the_newest_stored_one_are_withdrawn_with_their_trainers_memory(
    store: Store,
) -> None:
    process = ProcessIdentity(boot_id="b", pid_namespace="n", pid=7, started=9)
    live = LiveWeights(kind="tensor", shares=(LiveShare(name="s", host="h", process=process, file="/f"),))
    for number, location in enumerate(["/w", "", "/w", "", ""]):
        version = PolicyVersion(
            id=number, step=number, location=location, files=(), live=live, train_step=None
        )
        await store.policy_versions.publish(version)
        assert await store.policy_versions.get(number) == version
    assert await store.policy_versions.withdraw_after(3) == 2
    assert [item.id for item in await store.policy_versions.published(9)] == [2, 1, 0]
    assert await store.policy_versions.withdraw_after(1) == 2
    assert [item.id for item in await store.policy_versions.published(9)] == [0]


async def test_versions_are_found_without_reading_them_all(store: Store) -> None:
    files = (FileChecksum(name="f", bytes=1, sha256="0"),)
    assert await store.policy_versions.newest_id() is None
    for number, step in enumerate((0, 1, 2, 3)):
        await store.policy_versions.publish(
            PolicyVersion(id=number, step=step, location="/w", files=files, train_step=None)
        )
    await store.policy_versions.withdraw_after(1)
    for number in (4, 5):
        await store.policy_versions.publish(
            PolicyVersion(id=number, step=number - 2, location="/w", files=files, train_step=None)
        )
    assert await store.policy_versions.newest_id() == 5
    assert [version.id for version in await store.policy_versions.published(3)] == [5, 4, 1]
    assert [version.id for version in await store.policy_versions.published(3, below=4)] == [1, 0]
    assert [version.id for version in await store.policy_versions.withdrawn(3)] == [3]
    await store.policy_versions.withdraw_after(1)
    assert await store.policy_versions.newest_id() == 5
    assert [version.id for version in await store.policy_versions.withdrawn(3)] == [5, 3]
