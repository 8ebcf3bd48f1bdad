"""Environments of OpenEnv servers: episodes by messages and by tools, limits, and a server that is killed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import small_run as run
from db_command import violations
from loaded_tasks import load_tasks
from openenv_server import ROBOT, TOOLS, OpenEnvServer, needs_openenv, serving
from test_sampling import Setting, quick
from waiting import until

from agentrl.columns import outages
from agentrl.config.schema import RunConfig, TaskConfig, ToolConfig
from agentrl.documents.record import Record
from agentrl.errors import TaskFileError
from agentrl.rollout.load_tasks import generate
from agentrl.store.client import Store
from agentrl.tools.pool import ToolPool

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("quick"), needs_openenv]

__all__ = ["quick"]

SEEN = re.compile(r"robot at \d+ \d+, goal (\d (left|right|up|down).*|here)")


@pytest.fixture(scope="module")
def robot() -> Iterator[OpenEnvServer]:
    with serving(ROBOT, "--sessions", "3") as server:
        yield server


@pytest.fixture
async def tools(store: Store, tmp_path: Path) -> AsyncIterator[ToolPool]:
    """Tools of no server, and a published version."""
    await run.publish(store, tmp_path, 0, step=0, train_step=None)
    async with ToolPool(ToolConfig()) as pool:
        yield pool


def nearer(prompt: str) -> str:
    """Move towards the goal that the prompt shows last."""
    return str(SEEN.findall(prompt)[-1][1])


async def play(
    store: Store, config: RunConfig, tools: ToolPool, address: str, *script: object
) -> list[Record]:
    """Load the tasks of an address, run them to their end, and return their Records."""
    await load_tasks(store, config, TaskConfig(), address, split="train", num_generations=2)
    setting = Setting(store, *script, tools=tools)
    setting.engine.version = 0
    await setting.run()
    assert await violations(store) == []
    return [
        record for task in await store.tasks.find("train") for record in await store.records.by_task(task.id)
    ]


async def test_episodes_are_played_by_messages_within_the_sessions_that_the_server_has(
    store: Store, run_config: RunConfig, tools: ToolPool, robot: OpenEnvServer
) -> None:
    records = await play(store, run_config, tools, f"env:openenv?url={robot.url}&n=4", nearer)
    assert [round(record.score or 0, 6) for record in records] == [1.0] * 8
    queries = {task.query for task in await store.tasks.find("train")}
    assert all(SEEN.fullmatch(query) for query in queries)


async def test_an_action_by_a_tool_ends_the_episode_and_the_last_reward_may_be_the_score(
    store: Store, run_config: RunConfig, tools: ToolPool, robot: OpenEnvServer
) -> None:
    def call(prompt: str) -> str:
        return f'<tool_call>{{"name": "step", "arguments": {{"move": "{nearer(prompt)}"}}}}</tool_call>'

    address = f"env:openenv?url={robot.url}&n=2&seed=1&action=tool&reward=last&max_turns=5"
    records = await play(store, run_config, tools, address, call)
    turns = {record.turns for record in records}
    assert {round(record.score * record.turns, 6) for record in records if record.score} == {1.0}, turns


async def test_tools_of_mcp_are_listed_by_the_server(
    store: Store, run_config: RunConfig, tools: ToolPool
) -> None:
    def add(prompt: str) -> str:
        number = 3 if "only counts up" in prompt else -1
        return f'<tool_call>{{"name": "add", "arguments": {{"number": {number}}}}}</tool_call>'

    with serving(TOOLS) as server:
        with pytest.raises(TaskFileError, match="the first observation has no text"):
            await asyncio.to_thread(generate, f"env:openenv?url={server.url}&n=1", "train")
        records = await play(store, run_config, tools, f"env:openenv?url={server.url}&n=1&query=Count", add)
    assert [record.score for record in records] == [1.0, 1.0]
    assert {record.turns for record in records} == {2}


async def test_a_killed_server_uses_no_attempt(
    store: Store, run_config: RunConfig, tools: ToolPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outages, "FIRST_PROBE_SECONDS", 0.1)
    monkeypatch.setattr(outages, "LONGEST_PROBE_SECONDS", 0.2)
    with serving(ROBOT) as server:
        moves = 0

        def move(prompt: str) -> str:
            nonlocal moves
            moves += 1
            if moves == 9:
                server.kill()
            return nearer(prompt)

        await load_tasks(
            store, run_config, TaskConfig(), f"env:openenv?url={server.url}&n=6", split="train",
            num_generations=2,
        )  # fmt: skip
        setting = Setting(store, move, tools=tools)
        setting.engine.version = 0
        running = asyncio.create_task(setting.run())
        await until(lambda: bool(setting.worker.outages.open))
        (down,) = setting.worker.outages.open
        assert str(down.dependency) == f"environment {server.url}"
        await asyncio.to_thread(server.start)
        await running
    tasks = await store.tasks.find("train")
    records = [record for task in tasks for record in await store.records.by_task(task.id)]
    assert [round(record.score or 0, 6) for record in records] == [1.0] * 12
    assert any(owner.ended == "released" for record in records for owner in record.owners)
    assert not any(record.failure for record in records)
    assert all(slot.attempt - slot.released == 1 for task in tasks for slot in task.slots)
    assert await violations(store) == []


def test_a_server_that_is_away_or_another_one_is_named_when_tasks_are_loaded(robot: OpenEnvServer) -> None:
    with serving(TOOLS) as other:
        away = other.url
        with pytest.raises(TaskFileError, match="lists no tools: move: Field required"):
            generate(f"env:openenv?url={robot.url}&action=mcp", "train")
    for address, problem in {
        f"env:openenv?url={away}": r"cannot be reached: GET .*/schema: ConnectError",
        f"env:openenv?url={robot.url}/reset": "answered 404",
        f"env:openenv?url={robot.url}&observation_field=board": "no field 'board'; it has",
        f"env:openenv?url={robot.url}&action_field=go": "the action has move",
        f"env:openenv?url={robot.url}&reward=mean": "reward is 'mean'; it must be 'sum' or 'last'",
        "env:openenv?url=robot": "not an http:// or https:// address",
    }.items():
        with pytest.raises(TaskFileError, match=problem):
            generate(address, "train")
