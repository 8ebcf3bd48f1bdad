"""Whatever a process of verifiers writes, the rollouts that wait for it end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentrl.worlds.verifiers import _Worker


class Process:
    """A process that wrote something else than an answer."""

    def __init__(self) -> None:
        self.was_killed = False

    def kill(self) -> None:
        self.was_killed = True


@pytest.mark.parametrize("line", ["not JSON", '{"other": 1}', "[1]", '{"id": []}'])
async def test_a_line_that_is_no_answer_fails_the_rollouts_that_wait(line: str) -> None:
    worker, lines, process = _Worker({"id": "any", "args": "{}"}), asyncio.StreamReader(), Process()
    waiting: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    worker._waiting[0] = waiting
    lines.feed_data(line.encode() + b"\n")
    await worker._read(process, lines)  # type: ignore[arg-type]
    assert "malformed answer" in waiting.result()["error"]
    assert process.was_killed
