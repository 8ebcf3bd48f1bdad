"""Rollouts with the sandbox's tool and a tool that gives rewards: what the Record and the scorer get."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from rollout_fakes import ScriptedEngine, format_of

from agentrl.config.schema import AgentConfig, ClaimConfig, SamplingConfig, ToolConfig
from agentrl.documents.record import Record
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import RecordStatus
from agentrl.documents.task import Slot, Task
from agentrl.rollout.worker import Worker
from agentrl.scoring.scorers import stored_context
from agentrl.store.client import Store
from agentrl.tools.pool import ToolPool
from agentrl.tools.python import StatefulTool

pytestmark = pytest.mark.integration

EXAMPLE = Path(__file__).parents[3] / "assets" / "examples" / "sandbox" / "tools.yml"


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Guess(StatefulTool):
    """Rewards a call by its distance, and the state by the last guess."""

    def get_openai_tool_schema(self) -> Any:
        parameters = {"type": "object", "properties": {"number": {"type": "string"}}, "required": ["number"]}
        return {"type": "function", "function": {"name": "guess", "parameters": parameters}}

    async def create(self, instance_id: str, truth: str = "", **kwargs: Any) -> str:
        self.truth, self.last = truth, ""
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.last = parameters["number"]
        return "noted", -0.25, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(self.last == self.truth)


async def _run(store: Store, tools: ToolConfig, script: list[str], **fields: Any) -> Record:
    """Run one trajectory of one task to its score."""
    slots = (Slot(traj_id=0),)
    task = Task(
        id="train/0/a", task_id="a", split="train", epoch=0, order=0, query="6*7?", slots=slots, **fields
    )
    await store.tasks.load([task])
    engine = ScriptedEngine(format_of(), *script)
    async with ToolPool(tools) as pool:
        worker = Worker(
            store=store,
            router=engine,
            tools=pool,
            chat_format=engine.chat_format,
            params=SamplingParams(),
            seed=7,
            agent=AgentConfig(),
            sampling=SamplingConfig(),
            claims=ClaimConfig(),
        )
        claim = await store.claims.claim(split="train", owner="me", lease_seconds=60)
        assert claim is not None
        assert await worker.run(claim)
    (record,) = await store.records.by_task("train/0/a")
    return record


async def test_a_model_computes_by_a_program_and_its_directory_is_deleted(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = [
        call("code_interpreter", code="open('n', 'w').write(str(6 * 7))"),
        call("code_interpreter", code="print(open('n').read())"),
        call("code_interpreter", code="while True: pass"),
        call("code_interpreter", code="import os; os.listdir('/root/.ssh')"),
        "<answer>42</answer>",
    ]
    record = await _run(store, ToolConfig(tool_config_path=str(EXAMPLE)), script, scorer="exact", answer="42")
    assert (record.status, record.score, record.tool_rewards) == (RecordStatus.SCORED, 1.0, {})
    calls = await store.model_calls.by_record(record.id)
    results = [model_call.tool_executions[0].result for model_call in calls[:4]]
    assert results[:3] == [
        "[the program printed nothing]",
        "42",
        "[the program was stopped: it took too long]",
    ]
    assert "Error" in results[3]
    assert not os.listdir(tmp_path)


async def test_the_rewards_of_tools_are_in_the_record_and_reach_the_scorer(store: Store) -> None:
    script = [call("guess", number="41"), call("guess", number="42"), "<answer>42</answer>"]
    meta = {"tools_kwargs": {"guess": {"create_kwargs": {"truth": "42"}}}}
    tools = ToolConfig(tools="test_sandbox_rollouts:Guess")
    record = await _run(store, tools, script, scorer="tool_rewards", meta=meta)
    assert record.tool_rewards == {"guess": {"calls": [-0.25, -0.25], "state": 1.0}}
    assert record.score == 0.5
    assert record.score_details["by_tool"] == {"guess": 0.5}
    calls = await store.model_calls.by_record(record.id)
    assert [model_call.tool_executions[0].reward for model_call in calls[:2]] == [-0.25, -0.25]
    task = await store.tasks.get("train/0/a")
    assert task is not None
    assert stored_context(task, record, calls, "none").tool_rewards == record.tool_rewards


async def test_a_program_is_scored_by_its_tests(store: Store) -> None:
    answer = [{"input": "6 7", "output": "42"}, {"input": "2 3", "output": "6"}]
    script = ["<answer>a, b = map(int, input().split()); print(a * b)</answer>"]
    record = await _run(store, ToolConfig(), script, scorer="code", answer=answer)
    assert record.score == 1.0
    assert record.score_details["passed"] == 2
