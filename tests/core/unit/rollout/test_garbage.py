"""Garbage is collected while the process is idle, and not while it is busy."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Iterator

import pytest

from agentrl.rollout.housekeeping import collect_while_idle


class Node:
    """An object that only a garbage collection frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def no_automatic_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def garbage() -> weakref.ref[Node]:
    nodes = [Node() for _ in range(5000)]
    return weakref.ref(nodes[0])


async def test_an_idle_process_collects() -> None:
    found = garbage()
    collecting = asyncio.create_task(collect_while_idle())
    for _ in range(600):
        if found() is None:
            break
        await asyncio.sleep(0.1)
    assert found() is None
    collecting.cancel()


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
