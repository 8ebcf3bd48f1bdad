"""What the store notes of the files that trajectories keep, and whose files nobody needs any more."""

from __future__ import annotations

import pytest
from db_command import violations
from made_documents import open_task
from model_calls import model_call

from agentrl.documents.record import Failure
from agentrl.documents.status import RecordStatus
from agentrl.documents.task import Claim
from agentrl.store.client import Store

pytestmark = pytest.mark.integration


async def begun(store: Store) -> Claim:
    """A claim that samples the only slot."""
    claim = await store.claims.claim(split="train", owner="me", lease_seconds=60)
    assert claim is not None
    await store.records.create(claim)
    await store.records.advance(claim, RecordStatus.RUNNING)
    return claim


async def test_a_snapshot_is_noted_with_its_call_and_not_with_the_one_in_its_place(store: Store) -> None:
    await store.tasks.load([open_task("a", 1)])
    claim = await begun(store)
    call = model_call(claim.record_id, 0, context=[1], output=[2], attempt=claim.attempt, prompt_tokens=1)
    await store.model_calls.add(claim, call)
    await store.model_calls.note_snapshot(call.id, claim.attempt, "1-1.tar")
    await store.model_calls.note_snapshot(call.id, claim.attempt + 1, "2-1.tar")
    await store.model_calls.note_snapshot(f"{claim.record_id}/7", claim.attempt, "1-2.tar")
    (stored,) = await store.model_calls.by_record(claim.record_id)
    assert stored.snapshot == "1-1.tar"
    assert await violations(store) == [], "its checksum is that of the whole document"


async def test_files_are_needed_while_their_trajectory_may_be_gone_on_with(store: Store) -> None:
    await store.tasks.load([open_task("a", 1)])
    claim = await begun(store)
    other = "train/0/gone/0/1"

    async def needed() -> set[str]:
        return await store.tasks.unfinished_records([claim.record_id, other])

    assert await needed() == {claim.record_id}
    await store.attempts.release(claim)
    assert await needed() == {claim.record_id}, "the next claim goes on with it"
    again = await begun(store)
    assert again.record_id == claim.record_id
    await store.attempts.fail(again, Failure(kind="tool", message="?"), max_attempts=3, backoff_seconds=0)
    assert await needed() == set(), "the next attempt begins another"
