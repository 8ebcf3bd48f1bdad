"""The example of the openai-agents SDK is sampled by its flags, then trains a tiny model."""

from __future__ import annotations

import asyncio
import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from example_training import train_steps
from gateway_run import answerer_of
from installed_harnesses import ROOT, call, require_harness
from loaded_tasks import load_tasks
from rollout_fakes import FakeTools, ScriptedEngine, format_of
from tiny_policy import write_tiny_policy

from agentrl.config.load import parse
from agentrl.config.sampling import GatewayConfig
from agentrl.config.schema import (
    AgentConfig,
    ClaimConfig,
    GroupConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
)
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import RecordStatus
from agentrl.gateway.app import GatewayHost
from agentrl.rollout.housekeeping import GroupFinalizer
from agentrl.rollout.worker import Worker
from agentrl.store.client import Store

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.usefixtures("starts_warm")]

FOLDER = ROOT / "assets" / "examples" / "openai_agents"
SMALL = (
    "--num_generations", "2", "--groups_per_step", "1", "--max_staleness", "9", "--max_steps", "1",
    "--data_wait_seconds", "60", "--task_selection", "order",
)  # fmt: skip


class Doubler:
    """Doubles right and wrong in turn: each trajectory keeps to one of them."""

    def __init__(self) -> None:
        self._count = itertools.count()

    def __call__(self, prompt: str) -> str:
        turns = prompt.count("<|im_start|>assistant")
        if turns == 1:
            return call("read_file", name="number.txt")
        if turns == 2:
            number = int(re.findall(r"number is (\d+)", prompt)[-1])
            return call("write_file", name="double.txt", text=str(2 * number + next(self._count) % 2))
        return "It is written."


async def sample(store: Store, run: RunConfig, flags: list[str]) -> None:
    """Sample a task twice by the example's flags."""
    configs = parse(flags, command="agentrl sample", description="", shown=())
    address = str(ROOT / str(configs[TaskConfig].train_file))
    await load_tasks(store, run, configs[TaskConfig], address, split="train", num_generations=2)
    path = ROOT / str(configs[AgentConfig].agent_cfg_path)
    agent = replace(configs[AgentConfig], agent_cfg_path=str(path))
    engine = ScriptedEngine(format_of(), Doubler())
    engine.version = 0
    answerer = replace(answerer_of(store, engine), agent=agent)
    host = GatewayHost(answerer, GatewayConfig())
    worker = Worker(
        store=store, router=engine, tools=FakeTools(), chat_format=engine.chat_format,
        params=SamplingParams(), seed=7, agent=agent, sampling=SamplingConfig(), claims=ClaimConfig(),
        gateway=host,
    )  # fmt: skip
    try:
        claims = [await store.claims.claim(split="train", owner="me", lease_seconds=600) for _ in "ab"]
        await asyncio.gather(*(worker.run(claim) for claim in claims if claim is not None))
    finally:
        await host.close()
    assert await GroupFinalizer(store, GroupConfig(), split="train", seed=0).run_waiting() == 1


async def test_the_example_samples_and_trains_a_step(
    store: Store, run_config: RunConfig, tmp_path: Path
) -> None:
    require_harness("openai-agents", "agents-python")
    flags = ["--config", str(FOLDER / "run.yml"), "--run_name", run_config.run_name, *SMALL]
    await sample(store, run_config, flags)
    records = [
        record for task in await store.tasks.find("train") for record in await store.records.by_task(task.id)
    ]
    assert [record.status for record in records] == [RecordStatus.READY] * 2, [
        record.failure for record in records
    ]
    assert sorted(record.score or 0.0 for record in records) == [0.0, 1.0]
    await train_steps(store, run_config, flags, write_tiny_policy(tmp_path / "model"), steps=1)


@pytest.mark.parametrize("example", ["openai_agents", "claude_code"])
def test_its_page_is_short(example: str) -> None:
    lines = (FOLDER.parent / example / "README.md").read_text(encoding="utf-8").splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 12
