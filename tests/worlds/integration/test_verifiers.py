"""Environments of verifiers, unmodified, in their own venv: rollouts through a gateway, rewards, faults."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from gateway_run import answerer_of
from loaded_tasks import load_tasks
from rollout_fakes import ScriptedEngine, format_of

from agentrl.config.sampling import GatewayConfig
from agentrl.config.schema import (
    AgentConfig,
    ClaimConfig,
    GroupConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    ToolConfig,
)
from agentrl.data.finalize_group import explain_difference
from agentrl.documents.record import Record
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import RecordStatus
from agentrl.documents.task import Slot, Task
from agentrl.documents.training import DBRecordData
from agentrl.errors import ENGINES, EngineError, TaskFileError
from agentrl.gateway.app import GatewayHost
from agentrl.rollout.housekeeping import GroupFinalizer
from agentrl.rollout.worker import Worker
from agentrl.store.client import Store
from agentrl.tools.pool import ToolPool
from agentrl.worlds import verifiers

REPOSITORY = Path(__file__).parents[3]
EXAMPLE = REPOSITORY / "assets" / "examples" / "verifiers"
PYTHON = Path(os.environ.get("AGENTRL_VERIFIERS_PYTHON", REPOSITORY / ".venv-verifiers/bin/python"))

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

ROWS = """
import verifiers as vf
from datasets import Dataset

def load_environment(count: int = 2) -> vf.Environment:
    rows = [{"question": f"{number} + 1 = ?", "answer": str(number + 1)} for number in range(count)]
    def right(completion, answer) -> float:
        return float(completion[-1]["content"] == answer)
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]))
"""


def installed_version() -> str:
    """The version of verifiers in its venv; empty without one."""
    if not PYTHON.is_file():
        return ""
    code = "from importlib.metadata import version; print(version('verifiers'))"
    return subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


VERSION = installed_version()
REASON = f"verifiers 0.4 is not installed in {PYTHON}: bash scripts/setup_verifiers.sh"
current = pytest.mark.skipif(not VERSION.startswith("0.4."), reason=REASON)


def right_or_not(prompt: str) -> str:
    """Answer a sum; those of an even number wrongly."""
    one, other = map(int, re.findall(r"(\d) \+ (\d) =", prompt)[-1])
    return str(one + other) if one % 2 else "no"


@asynccontextmanager
async def opened(store: Store, engine: ScriptedEngine, **agent: int) -> AsyncIterator[Worker]:
    """A sampler's worker, with a gateway in this process; the processes of verifiers end with it."""
    engine.version = 0
    host = GatewayHost(answerer_of(store, engine, **agent), GatewayConfig())
    try:
        async with ToolPool(ToolConfig()) as tools:
            yield Worker(
                store=store, router=engine, tools=tools, chat_format=engine.chat_format,
                params=SamplingParams(), seed=7, agent=AgentConfig(**agent), sampling=SamplingConfig(),
                claims=ClaimConfig(), gateway=host,
            )  # type: ignore[arg-type]  # fmt: skip
    finally:
        await host.close()
        for process in [found._process for found in verifiers._workers.values() if found._process]:
            assert process.stdin is not None
            process.stdin.close()
            await asyncio.wait_for(process.wait(), 20)
        verifiers._workers.clear()


async def load(store: Store, run_config: RunConfig, address: str, *, group: int = 1) -> None:
    options = TaskConfig(train_file=address)
    await load_tasks(store, run_config, options, address, split="train", num_generations=group)


def a_task(environment: str, name: str, row: dict[str, str]) -> Task:
    """A task as the environment's loader would store it."""
    return Task(
        id=f"train/0/{name}", task_id=name, split="train", epoch=0, order=0, query=row["prompt"],
        scorer="environment", environment="verifiers", agent_name="verifiers", slots=(Slot(traj_id=0),),
        meta={"id": environment, "args": "{}", "row": row},
    )  # fmt: skip


async def tasks_of(store: Store) -> list[Task]:
    return sorted(await store.tasks.find("train"), key=lambda task: task.id)


async def run_all(store: Store, worker: Worker) -> list[Record]:
    """Run what can be claimed once; return the records in the order of the tasks."""
    claims = []
    while (claim := await store.claims.claim(split="train", owner="me", lease_seconds=600)) is not None:
        claims.append(claim)
    await asyncio.gather(*(worker.run(claim) for claim in claims))
    return [record for task in await tasks_of(store) for record in await store.records.by_task(task.id)]


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Modules of the example and of a test are found in the venv."""
    monkeypatch.setenv("PYTHONPATH", f"{EXAMPLE}{os.pathsep}{tmp_path}")
    monkeypatch.setattr("agentrl.worlds.harness.agent.RETURN_SECONDS", 1.0)


@current
async def test_what_the_gateway_saw_is_trained_and_scored_by_the_environment(
    store: Store, run_config: RunConfig
) -> None:
    await load(store, run_config, 'env:verifiers?id=sums&args={"taskset": {"count": 4}}&skip=2', group=2)
    assert [task.query for task in await tasks_of(store)] == ["2 + 0 = ?", "3 + 0 = ?"]
    engine = ScriptedEngine(format_of(), right_or_not)
    async with opened(store, engine) as worker:
        records = await run_all(store, worker)
    rules = GroupConfig(min_score_spread=0.0, drop_zero_advantage=False)
    assert await GroupFinalizer(store, rules, split="train", seed=0).run_waiting() == 2
    assert [record.score for record in records] == [0.0, 0.0, 1.0, 1.0]
    assert {record.score_details["metrics"]["length"] for record in records} == {1.0, 2.0}
    assert all(record.score_details["metrics"]["right"] == record.score for record in records)
    found = await store.database["DBRecordData"].find({}).to_list()
    trained = [DBRecordData.from_document(document) for document in found]
    assert sorted(item.trainable_tokens for item in trained) == sorted(map(len, engine.outputs))
    for item in trained:
        calls = await store.model_calls.by_record(item.record)
        assert explain_difference(item, calls, rules) is None
        assert [message["role"] for message in calls[0].messages] == ["system", "user"]


@current
async def test_a_tool_is_called_through_the_gateway_and_a_reward_that_raises_fails_the_attempt(
    store: Store,
) -> None:
    await store.tasks.load(
        [
            a_task("prices", "pear", {"prompt": "What does a pear cost?", "item": "pear"}),
            a_task("prices", "coal", {"prompt": "What does coal cost?", "item": "coal"}),
        ]
    )
    call = '<tool_call>{"name": "price", "arguments": {"item": "pear"}}</tool_call>'
    engine = ScriptedEngine(format_of(), lambda prompt: "3" if "tool_call" in prompt else call)
    async with opened(store, engine) as worker:
        broken, record = await run_all(store, worker)
    assert broken.failure is not None
    assert broken.failure.kind == "environment"
    assert "KeyError" in broken.failure.message
    assert (record.failure, record.turns, record.score) == (None, 2, pytest.approx(1.1))
    assert record.score_details["metrics"] == {"right": 1.0, "asked": 1.0}
    first, second = await store.model_calls.by_record(record.id)
    assert second.parent == first.id


@current
async def test_a_killed_process_fails_its_attempts_and_an_outage_fails_none(store: Store) -> None:
    row = {"prompt": "1 + 1 = ?", "answer": "2"}

    def kill(prompt: str) -> str:
        (worker,) = verifiers._workers.values()
        if worker._process is not None:
            worker._process.kill()
        return "2"

    engine = ScriptedEngine(format_of(), EngineError("no engine is up", outage=ENGINES))
    async with opened(store, engine) as worker:
        await store.tasks.load([a_task("sums", "a", row)])
        (released,) = await run_all(store, worker)
        assert (released.failure, released.status) == (None, RecordStatus.RELEASED)
        engine.script = [kill]
        await store.tasks.load([a_task("sums", "b", row)])
        failed = (await run_all(store, worker))[-1]
        assert failed.failure is not None
        assert failed.failure.kind == "environment"
        assert "exit status -9" in failed.failure.message
        engine.script = ["2"]
        await store.tasks.load([a_task("sums", "c", row)])
        scored = (await run_all(store, worker))[-1]
    assert (scored.failure, scored.score) == (None, 1.0)


@current
@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("env:verifiers", "'id' is missing"),
        ("env:verifiers?id=sums&args=[1]", "it must be a JSON object"),
        ('env:verifiers?id=sums&args={"id": "user-sim"}', "give each other one a client"),
    ],
)
async def test_what_cannot_be_loaded_is_refused(
    store: Store, run_config: RunConfig, address: str, message: str
) -> None:
    with pytest.raises(TaskFileError, match=re.escape(message)):
        await load(store, run_config, address)


@pytest.mark.skipif(not VERSION.startswith("0.3."), reason="verifiers 0.3 is not installed in its venv")
async def test_an_environment_of_the_older_api(store: Store, run_config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "older_sums.py").write_text(ROWS)
    arguments = json.dumps({"count": 3})
    await load(store, run_config, f"env:verifiers?id=older_sums&args={arguments}&skip=1")
    async with opened(store, ScriptedEngine(format_of(), right_or_not)) as worker:
        records = await run_all(store, worker)
    assert [record.score for record in records] == [1.0, 0.0]
    assert records[0].score_details["metrics"]["right"] == 1.0


def test_its_page_is_short() -> None:
    lines = (EXAMPLE / "README.md").read_text(encoding="utf-8").splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 14
