"""Check that model calls are stored in order, in the background, and bounded, and that errors surface."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from trajectories import Trajectory
from waiting import cancel

from agentrl.calls import trajectory_calls
from agentrl.calls.trajectory_calls import CallWriter
from agentrl.calls.turns import Turn
from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.task import Claim, Task
from agentrl.errors import LeaseLostError

CLAIM = Claim(
    task=Task(id="train/0/t", task_id="t", split="train", epoch=0, order=0, query="q"),
    traj_id=0, attempt=1, owner="o",
)  # fmt: skip


class SlowCalls:
    """A store whose writes wait for ``opened``; ``error`` fails the write of a call with this index."""

    def __init__(self, failing: int | None = None) -> None:
        self.begun = asyncio.Event()
        self.opened = asyncio.Event()
        self.failing = failing
        self.stored: list[int] = []

    async def add(self, claim: Claim, *calls: DispatchedSamplingTask) -> None:
        """Store calls."""
        self.begun.set()
        await self.opened.wait()
        for call in calls:
            if call.index == self.failing:
                raise LeaseLostError("the claim is lost")
            self.stored.append(call.index)


def writer_of(calls: SlowCalls) -> CallWriter:
    return CallWriter(cast(Any, SimpleNamespace(model_calls=calls)), CLAIM)


@pytest.fixture
async def pending() -> list[Turn]:
    """The calls of a trajectory, as its Rollout hands them over."""
    trajectory = Trajectory(*"abcdefghijklmnopq", max_turns=17)
    await trajectory.run()
    return trajectory.pending


async def test_calls_are_stored_in_order_and_nobody_waits_for_the_database(
    pending: list[Turn],
) -> None:
    calls = SlowCalls()
    async with asyncio.timeout(10), writer_of(calls) as writer:
        for call in pending[:4]:
            await writer.write(call)
        assert calls.stored == []
        calls.opened.set()
        await writer.flush()
        assert calls.stored == [0, 1, 2, 3]
        assert not any(call.prompt.ids for call in pending[:4]), "an agent that keeps its turns keeps prompts"
        await writer.flush()


async def test_a_trajectory_waits_for_a_database_that_is_too_slow(pending: list[Turn]) -> None:
    calls = SlowCalls()
    async with asyncio.timeout(10), writer_of(calls) as writer:
        for call in pending[:16]:
            await writer.write(call)
        last = asyncio.create_task(writer.write(pending[16]))
        done, _ = await asyncio.wait([last], timeout=0.2)
        assert not done
        calls.opened.set()
        await last
        await writer.flush()
    assert calls.stored == [*range(17)]


async def test_a_busy_process_writes_later_but_not_never(
    pending: list[Turn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectory_calls, "_BUSY_SECONDS", -1.0)  # every timer is late
    monkeypatch.setattr(trajectory_calls, "_LONGEST_SECONDS", 0.3)
    calls = SlowCalls()
    async with asyncio.timeout(20), writer_of(calls) as writer:
        started = time.monotonic()
        await writer.write(pending[0])
        await calls.begun.wait()
        assert time.monotonic() - started >= 0.3
        calls.opened.set()
        await writer.flush()
    assert calls.stored == [0]


async def test_many_queued_calls_are_written_by_a_busy_process(
    pending: list[Turn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectory_calls, "_INTERVAL_SECONDS", 60.0)
    calls = SlowCalls()
    calls.opened.set()
    async with asyncio.timeout(20), writer_of(calls) as writer:
        for call in pending[:12]:
            assert not calls.begun.is_set()
            await writer.write(call)
        await calls.begun.wait()


async def test_an_error_surfaces_before_the_score_and_nothing_is_stored_after_it(
    pending: list[Turn],
) -> None:
    calls = SlowCalls(failing=1)
    calls.opened.set()
    async with asyncio.timeout(10), writer_of(calls) as writer:
        for call in pending[:3]:
            await writer.write(call)
        for _ in range(2):
            with pytest.raises(LeaseLostError):
                await writer.flush()
        with pytest.raises(LeaseLostError):
            await writer.write(pending[3])
    assert calls.stored == [0]


async def test_a_cancelled_trajectory_still_stores_what_is_queued(pending: list[Turn]) -> None:
    calls = SlowCalls()
    calls.opened.set()

    async def run() -> None:
        async with writer_of(calls) as writer:
            await writer.write(pending[0])
            await asyncio.Event().wait()

    async with asyncio.timeout(10):
        task = asyncio.create_task(run())
        await asyncio.sleep(0)
        await cancel(task)
    assert calls.stored == [0]
