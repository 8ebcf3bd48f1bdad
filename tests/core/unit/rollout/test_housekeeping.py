"""What finalizing a group logs and writes; garbage is collected while the process is idle, and only then."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import weakref
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from made_documents import made_call, made_record, made_task

from agentrl.config.schema import GroupConfig
from agentrl.rollout.housekeeping import GroupFinalizer, collect_while_idle
from agentrl.store.client import Store
from agentrl.store.groups import GroupOutcome, StoredGroup


def group(name: str, params: dict[str, Any]) -> StoredGroup:
    """A right and a wrong trajectory of one call each."""
    task = made_task(name, id=name)
    records = [made_record(task, place, float(place), turns=1) for place in (0, 1)]
    calls = {record.id: [made_call(record.id, 0, sampling_params=params)] for record in records}
    return StoredGroup(task=task, records=records, calls=calls)


class Groups:
    """Decides the groups that it was given, and keeps their summaries."""

    def __init__(self, groups: Sequence[StoredGroup]) -> None:
        self.groups = {group.task.id: group for group in groups}
        self.summaries: dict[str, Any] = {}

    async def to_decide(self, task_id: str, columns: Any) -> StoredGroup:
        """As the store's."""
        return self.groups[task_id]

    async def finalize(self, group: StoredGroup, outcome: GroupOutcome) -> bool:
        """As the store's."""
        self.summaries[group.task.id] = outcome.summary
        return True


async def test_a_parameter_that_masks_calls_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    penalized = {"temperature": 0.5, "presence_penalty": 1.5}
    params = {"a": {"temperature": 0.5}, "b": penalized, "c": penalized, "d": {"top_p": 0.9}}
    groups = Groups([group(*item) for item in params.items()])
    store = cast("Store", SimpleNamespace(groups=groups))
    finalizer = GroupFinalizer(store, GroupConfig(), split="train", seed=0)
    with caplog.at_level(logging.WARNING):
        for name in "abcd":
            assert await finalizer.finalize(name)
    masked = [summary["masked_calls"] for summary in groups.summaries.values()]
    reasons = ("presence_penalty 1.5", "presence_penalty 1.5", "top_p 0.9")
    assert masked == [[], *([{"because": reason, "calls": 2}] for reason in reasons)]
    assert [record.getMessage().partition(" are recorded")[0] for record in caplog.records] == [
        "model calls sampled with presence_penalty 1.5", "model calls sampled with top_p 0.9",
    ]  # fmt: skip


class Node:
    """An object that only a garbage collection frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def no_automatic_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def garbage() -> weakref.ref[Node]:
    nodes = [Node() for _ in range(5000)]
    return weakref.ref(nodes[0])


@pytest.mark.usefixtures("no_automatic_collections")
async def test_an_idle_process_collects() -> None:
    found = garbage()
    collecting = asyncio.create_task(collect_while_idle())
    for _ in range(600):
        if found() is None:
            break
        await asyncio.sleep(0.1)
    assert found() is None
    collecting.cancel()


@pytest.mark.usefixtures("no_automatic_collections")
async def test_a_busy_process_does_not_collect() -> None:
    collecting = asyncio.create_task(collect_while_idle())
    await asyncio.sleep(0)
    found = garbage()
    began = time.monotonic()
    while time.monotonic() - began < 0.5:
        time.sleep(0.15)  # noqa: ASYNC251  the timer of the collections is late each time
        await asyncio.sleep(0)
    assert found() is not None
    collecting.cancel()
