"""An address of verifiers is checked; whatever its process writes, the rollouts that wait for it end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentrl.environments.environment import TaskRequest
from agentrl.errors import TaskFileError
from agentrl.worlds.verifiers import Verifiers, _Worker


@pytest.mark.parametrize("skip", ["1_000", "+1", " 1 ", "1.0", "-1", "many"])
def test_a_skip_that_is_no_number_of_tasks_is_refused(skip: str) -> None:
    request = TaskRequest(options={"id": "any", "skip": skip}, split="train", n=1, seed=0)
    with pytest.raises(TaskFileError, match=r"skip is .* it must be a whole number"):
        list(Verifiers.tasks(request))


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
