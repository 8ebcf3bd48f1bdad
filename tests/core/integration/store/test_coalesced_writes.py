"""Trajectories that write at the same time on a real server: one that lost its lease disturbs no other."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from made_documents import made_call
from test_store_claims import make_tasks

from agentrl.documents.model_call import (
    DispatchedSamplingTask,
    ToolExecution,
    pack_ids,
)
from agentrl.documents.record import Failure
from agentrl.documents.status import RecordStatus, TaskStatus
from agentrl.documents.task import Claim
from agentrl.errors import LeaseLostError, StoreError
from agentrl.store.client import Store

pytestmark = pytest.mark.integration
COUNT = 12


def make_call(claim: Claim, index: int) -> DispatchedSamplingTask:
    return made_call(
        claim.record_id, index, parent=index - 1 if index else None, context=(1, 2, 3), output=(4, 5),
        messages=({"role": "tool", "execution": 0},) if index else ({"role": "user", "content": "?"},),
        response={"content": "!"},
        tool_executions=(ToolExecution(name="add", arguments={}, result="3", error=True, seconds=0.1),),
    )  # fmt: skip


async def claim_all(store: Store) -> list[Claim]:
    """``COUNT`` claims on groups of two, made at the same time, with running Records."""
    await store.tasks.load(make_tasks(COUNT // 2))
    claims = await asyncio.gather(
        *(
            store.claims.claim(split="train", owner=f"w{number}", lease_seconds=60, max_groups_open=COUNT)
            for number in range(COUNT)
        )
    )
    held = [claim for claim in claims if claim is not None]
    assert len({claim.record_id for claim in held}) == COUNT
    assert sorted(claim.owner for claim in held) == sorted(f"w{number}" for number in range(COUNT))
    await asyncio.gather(*map(store.records.create, held))
    await asyncio.gather(*(store.records.advance(claim, RecordStatus.RUNNING) for claim in held))
    return held


async def test_all_that_was_written_together_is_there(store: Store) -> None:
    claims = await claim_all(store)
    for index in range(2):
        await asyncio.gather(*(store.model_calls.add(claim, make_call(claim, index)) for claim in claims))
    await asyncio.gather(*(store.model_calls.add(claim, make_call(claim, 1)) for claim in claims))
    for status in (RecordStatus.COMPLETED, RecordStatus.SCORING):
        await asyncio.gather(*(store.records.advance(claim, status) for claim in claims))
    statuses = await asyncio.gather(*(store.attempts.score(claim, 0.5) for claim in claims))
    assert sorted(statuses) == sorted([TaskStatus.RUNNING, TaskStatus.WAITING] * (COUNT // 2))
    for claim in claims:
        record = await store.records.get(claim.record_id)
        assert record is not None
        assert (record.status, record.score, record.turns) == (RecordStatus.SCORED, 0.5, 2)
        assert list(record.traj) == [call.id for call in await store.model_calls.by_record(record.id)]


async def test_one_that_lost_its_slot_is_refused_and_the_others_are_not(store: Store) -> None:
    claims = await claim_all(store)
    lost, others = claims[5], [*claims[:5], *claims[6:]]
    await store.attempts.fail(lost, Failure(kind="tool", message="x"), max_attempts=3, backoff_seconds=60)
    writes = (store.model_calls.add(claim, make_call(claim, 0)) for claim in claims)
    results = await asyncio.gather(*writes, return_exceptions=True)
    assert isinstance(results[5], LeaseLostError)
    assert results.count(None) == COUNT - 1
    assert await store.model_calls.by_record(lost.record_id) == []
    assert all([len(await store.model_calls.by_record(claim.record_id)) == 1 for claim in others])


async def test_one_that_the_server_refuses_fails_alone(store: Store) -> None:
    claims = await claim_all(store)
    calls = [make_call(claim, 0) for claim in claims]
    calls[3] = dataclasses.replace(calls[3], status="nonsense")  # type: ignore[arg-type]
    writes = (store.model_calls.add(claim, call) for claim, call in zip(claims, calls, strict=True))
    results = await asyncio.gather(*writes, return_exceptions=True)
    assert isinstance(results[3], StoreError)
    assert results.count(None) == COUNT - 1


async def test_calls_that_are_added_together_are_stored_once_and_in_order(store: Store) -> None:
    claims = await claim_all(store)
    large = pack_ids(range(300_000 // 4))
    for stop in (2, 5):  # the second addition repeats the first one
        calls = [[make_call(claim, index) for index in range(stop)] for claim in claims]
        calls[1] = [dataclasses.replace(call, context_ids=large) for call in calls[1]]
        await asyncio.gather(
            *(store.model_calls.add(claim, *own) for claim, own in zip(claims, calls, strict=True))
        )
    for claim in claims:
        stored = await store.model_calls.by_record(claim.record_id)
        assert [call.index for call in stored] == [0, 1, 2, 3, 4]
        record = await store.records.get(claim.record_id)
        assert record is not None
        assert (list(record.traj), record.turns) == ([call.id for call in stored], 5)


async def test_calls_before_one_that_cannot_be_stored_are_kept(store: Store) -> None:
    (claim, *_) = await claim_all(store)
    calls = [make_call(claim, index) for index in range(4)]
    calls[2] = dataclasses.replace(calls[2], error=object())  # type: ignore[arg-type]
    with pytest.raises(StoreError):
        await store.model_calls.add(claim, *calls)
    assert [call.index for call in await store.model_calls.by_record(claim.record_id)] == [0, 1]
