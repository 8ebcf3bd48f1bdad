"""Idle nodes of the MCP manager are ended, also after one that cannot be ended."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from waiting import until

from agentrl.base.concurrency import background
from agentrl.config.schema import ToolConfig
from agentrl.worlds.manager_server import Nodes, _Node


class Session:
    """A session that closes, or fails to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.was_closed = False

    async def close(self) -> None:
        self.was_closed = True
        if self.error is not None:
            raise self.error


async def opened(session: Any) -> Any:
    return session


async def test_the_watch_goes_on_after_a_node_that_fails_to_end(caplog: pytest.LogCaptureFixture) -> None:
    nodes = Nodes([], ToolConfig(), idle_seconds=0.02, most=9)
    bad, good = Session(ValueError("stuck")), Session()
    nodes._nodes["a", "1"] = _Node(bad, asyncio.create_task(opened(bad)))  # type: ignore[arg-type]
    async with background(nodes.watch()):
        await until(lambda: bad.was_closed)
        nodes._nodes["a", "2"] = _Node(good, asyncio.create_task(opened(good)))  # type: ignore[arg-type]
        await until(lambda: good.was_closed)
    assert "stuck" in caplog.text
