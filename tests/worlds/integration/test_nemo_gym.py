"""Rows of NeMo-Gym: tools and the reward of a resources server, its sessions, its outages, and bad rows."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import small_run as run
from db_command import violations
from loaded_tasks import load_tasks
from nemo_gym_server import CounterServer, row
from test_sampling import Setting, quick

from agentrl.columns import outages
from agentrl.config.schema import RunConfig, TaskConfig, ToolConfig
from agentrl.errors import TaskFileError
from agentrl.rollout.load_tasks import generate
from agentrl.store.client import Store
from agentrl.tools.pool import ToolPool

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("quick")]

__all__ = ["quick"]


@pytest.fixture
async def server() -> AsyncIterator[CounterServer]:
    async with CounterServer().serving() as served:
        yield served


@pytest.fixture
async def tools(store: Store, tmp_path: Path) -> AsyncIterator[ToolPool]:
    """Tools of no server, and a published version."""
    await run.publish(store, tmp_path, 0, step=0, train_step=None)
    async with ToolPool(ToolConfig()) as pool:
        yield pool


def add(prompt: str) -> str:
    """Add -1, which the server refuses, then 2, then answer."""
    if "valid integer" not in prompt:
        return '<tool_call>{"name": "add", "arguments": {"count": -1}}</tool_call>'
    if '"count":5' not in prompt:
        return '<tool_call>{"name": "add", "arguments": {"count": 2}}</tool_call>'
    return "It is 5."


async def load(store: Store, config: RunConfig, server: CounterServer, folder: Path, *goals: int) -> None:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row(goal)) + "\n" for goal in goals), encoding="utf-8")
    address = f"env:nemo_gym?url={server.url}&data={file}&max_turns=6"
    await load_tasks(store, config, TaskConfig(), address, split="train", num_generations=2)


async def test_the_tools_and_the_reward_of_a_row_are_the_servers(
    store: Store, run_config: RunConfig, tools: ToolPool, server: CounterServer, tmp_path: Path
) -> None:
    await load(store, run_config, server, tmp_path, 5, 6)
    (task,) = [each for each in await store.tasks.find("train") if each.query == "Add up to 5."]
    assert (task.system_prompt, [m["content"] for m in task.messages]) == ("Use the tool.", ["one", "1"])
    setting = Setting(store, add, tools=tools)
    setting.engine.version = 0
    await setting.run()
    for each in await store.tasks.find("train"):
        expected = float(each.query == "Add up to 5.")
        assert [record.score for record in await setting.records(each.id)] == [expected] * 2
    output = server.verified[0]["response"]["output"]
    assert [item["type"] for item in output] == ["function_call", "function_call_output"] * 2 + ["message"]
    assert output[-1]["content"][0]["text"] == "It is 5."
    assert json.loads(output[2]["arguments"]) == {"count": 2}
    assert await violations(store) == []


async def test_a_server_that_is_away_uses_no_attempt(
    store: Store, run_config: RunConfig, tools: ToolPool, server: CounterServer, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(outages, "FIRST_PROBE_SECONDS", 0.05)
    await load(store, run_config, server, tmp_path, 5)
    server.away = Counter({"/seed_session": 2, "/verify": 1})  # two beginnings, and one end after a tool call
    setting = Setting(store, add, tools=tools)
    setting.engine.version = 0
    await setting.run()
    (task,) = await store.tasks.find("train")
    assert all(slot.attempt - slot.released == 1 for slot in task.slots)
    records = await setting.records(task.id)
    assert [record.score for record in records] == [1.0, 1.0]
    lost = [owner for record in records for owner in record.owners if owner.ended == "released"]
    assert len(lost) == 1  # one lost its session after a tool call
    assert await violations(store) == []


async def test_bad_rows_and_other_servers_are_named(server: CounterServer, tmp_path: Path) -> None:
    good = row(5)
    bad = {
        "no responses_create_params": {"input": []},
        "no responses_create_params.input": {"responses_create_params": {}},
        "does not end with a message of the user": {
            "responses_create_params": {"input": [{"role": "assistant", "content": "hi"}]}
        },
        "tool of type 'web_search'": {
            "responses_create_params": {**good["responses_create_params"], "tools": [{"type": "web_search"}]}
        },
        "content other than text": {
            "responses_create_params": {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}
        },
    }
    for problem, item in bad.items():
        file = tmp_path / "bad.jsonl"
        file.write_text(json.dumps(good) + "\n" + json.dumps(item) + "\n", encoding="utf-8")
        with pytest.raises(TaskFileError, match=f"bad.jsonl:2: .*{problem}"):
            await asyncio.to_thread(generate, f"env:nemo_gym?url={server.url}&data={file}", "train")
    with pytest.raises(TaskFileError, match=r"NeMo-Gym resources server cannot be reached"):
        await asyncio.to_thread(generate, "env:nemo_gym?url=http://127.0.0.1:9&data=x", "train")
