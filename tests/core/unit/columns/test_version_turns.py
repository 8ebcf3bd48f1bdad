"""``agentrl teach --self``: who gets the model next, and where the values of a Record's tokens are."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from model_calls import TASK, model_call, record

from agentrl.columns import version_logprobs
from agentrl.columns.version_logprobs import VersionTurns, _trained_tokens
from agentrl.documents.model_call import unpack_ids
from agentrl.documents.status import CallStatus


class Order:
    """Takes turns, and keeps the order in which they came."""

    def __init__(self) -> None:
        self.turns, self.order = VersionTurns(), list[int]()
        self.is_open = asyncio.Event()

    async def take(self, version: int) -> None:
        async with self.turns.of(version):
            self.order.append(version)
            await self.is_open.wait()

    async def begin(self, *versions: int) -> list[asyncio.Task[None]]:
        """Begin to wait for a turn of each version."""
        tasks = [asyncio.create_task(self.take(version)) for version in versions]
        await asyncio.sleep(0)
        return tasks


async def test_turns_go_up_and_then_begin_again_with_the_lowest() -> None:
    order = Order()
    tasks = await order.begin(5, 3, 7, 5, 4, 7)
    order.is_open.set()
    await asyncio.gather(*tasks)
    assert order.order == [5, 5, 7, 7, 3, 4]


async def test_whoever_has_waited_long_is_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_logprobs, "_MOST_TURNS", 3)
    order = Order()
    tasks = await order.begin(5, 4, 5, 5, 5, 5)
    order.is_open.set()
    await asyncio.gather(*tasks)
    assert order.order == [5, 5, 5, 5, 4, 5]


async def test_a_cancelled_turn_passes_on() -> None:
    order = Order()
    first, waiting, chosen, last = await order.begin(1, 2, 3, 4)
    # The first ends before the second learns that it is cancelled.
    first.cancel()
    waiting.cancel()
    await asyncio.sleep(0)
    # The third has the turn then, and is cancelled before it wakes.
    chosen.cancel()
    order.is_open.set()
    await asyncio.wait_for(last, 5)
    assert order.order == [1, 4]
    assert [task.cancelled() for task in (first, waiting, chosen)] == [True] * 3


def test_each_trained_token_has_the_place_of_its_call_in_the_column() -> None:
    owner = record()
    calls = [
        model_call(owner.id, 0, None, (1, 2), (3, 4)),
        model_call(owner.id, 1, 0, (5,), (6, 7, 8), versions=[(0, 0, 1), (1, 1, 3)]),
        model_call(owner.id, 2, None, (9,), (10, 11), status=CallStatus.FAILED),
        model_call(owner.id, 3, 0, (12,), (13,), versions=[(1, 0, 1)]),
    ]
    found = _trained_tokens(TASK, owner, calls)
    assert found is not None
    data, places = found
    generated = np.concatenate([unpack_ids(call.output_ids) for call in calls])
    ids = unpack_ids(data.input_ids)
    trained = np.concatenate([ids[span.start : span.end] for span in data.spans])
    assert generated[places].tolist() == trained.tolist()
    assert sorted(trained.tolist()) == [3, 4, 6, 7, 8, 13]  # not those of the call that failed
    # No token predicts the first one.
    found = _trained_tokens(TASK, owner, [model_call(owner.id, 0, None, (), (14, 15))])
    assert found is not None
    assert found[1].tolist() == [1]
    assert _trained_tokens(TASK, owner, calls[2:3]) is None
