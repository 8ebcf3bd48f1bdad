"""The example of verifiers: its rollouts and rubric, through a gateway, then two steps of a tiny model."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from gateway_run import answerer_of
from loaded_tasks import load_tasks
from rollout_fakes import ScriptedEngine, format_of
from tiny_policy import write_tiny_policy

from agentrl.config.agent import GatewayConfig
from agentrl.config.load import parse
from agentrl.config.schema import (
    AgentConfig,
    ClaimConfig,
    GroupConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    ToolConfig,
)
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import RecordStatus, StepStatus
from agentrl.gateway.host import GatewayHost
from agentrl.rollout.finalizer import GroupFinalizer
from agentrl.rollout.worker import Worker
from agentrl.store.client import Store
from agentrl.tools.pool import ToolPool

REPOSITORY = Path(__file__).parents[3]
EXAMPLE = REPOSITORY / "assets" / "examples" / "verifiers"

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        not (REPOSITORY / ".venv-verifiers/bin/python").is_file(),
        reason="verifiers is not installed (bash scripts/setup_verifiers.sh)",
    ),
]

FLAGS = (
    "--config", str(EXAMPLE / "run.yml"), "--num_generations", "2", "--groups_per_step", "2",
    "--max_steps", "2", "--max_staleness", "9", "--publish_steps", "2", "--data_wait_seconds", "60",
    "--min_score_spread", "0",
)  # fmt: skip
GIVEN = '{"gym": [{"name": "leg_counting", "weight": 1, "config": {"min_animals": 1, "max_animals": 1}}]}'


def answer_or_not() -> Callable[[str], str]:
    """Answer in the environment's format, with a number that may be right; the second sample never is."""
    count = itertools.count()
    return lambda prompt: (
        f"<answer>{re.findall(r'[0-9]+', prompt)[-1] if next(count) % 2 else 'none'}</answer>"
    )


async def sample(store: Store, count: int) -> None:
    """Run all trajectories as a sampler does, with a gateway in this process."""
    engine = ScriptedEngine(format_of(), answer_or_not())
    engine.version = 0
    host = GatewayHost(answerer_of(store, engine), GatewayConfig())
    try:
        async with ToolPool(ToolConfig()) as tools:
            worker = Worker(
                store=store, router=engine, tools=tools, chat_format=engine.chat_format,
                params=SamplingParams(), seed=7, agent=AgentConfig(), sampling=SamplingConfig(),
                claims=ClaimConfig(), gateway=host,
            )  # type: ignore[arg-type]  # fmt: skip
            claims = [
                await store.claims.claim(split="train", owner="me", lease_seconds=600) for _ in range(count)
            ]
            await asyncio.gather(*(worker.run(claim) for claim in claims if claim is not None))
    finally:
        await host.close()
    rules = GroupConfig(min_score_spread=0.0, drop_zero_advantage=False)
    await GroupFinalizer(store, rules, split="train", seed=0).run_waiting()


async def test_an_unmodified_environment_is_sampled_scored_and_trained(
    store: Store, run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    tasks = parse([*FLAGS, "--run_name", "x"], command="agentrl sample", description="", shown=())[TaskConfig]
    address = f"env:verifiers_env:Verifiers?args={GIVEN}&n=5"
    options = replace(tasks, train_file=address)
    await load_tasks(store, run_config, options, address, split="train", num_generations=2)
    *good, broken = await store.tasks.find("train")
    no_prompt = {"$unset": {"meta.row.prompt": 1}}
    await store.database["Task"].update_one({"_id": broken.id}, no_prompt)
    await sample(store, 10)
    for record in await store.records.by_task(broken.id):
        assert record.failure is not None
        assert record.failure.kind == "environment"
    records = [record for task in good for record in await store.records.by_task(task.id)]
    assert len(records) == 8
    assert [(record.failure, record.turns) for record in records] == [(None, 1)] * 8
    assert all(record.status is RecordStatus.READY for record in records)
    for record in records:
        details = record.score_details["metrics"]
        assert details["check_answer_reward_func"] == record.score
        assert details["format_reward_func"] > 0
        (call,) = await store.model_calls.by_record(record.id)
        assert call.messages[0]["role"] == "system"
    command = [
        sys.executable, "-m", "agentrl", "train", *FLAGS, "--drop_zero_advantage", "false",
        "--run_name", run_config.run_name, "--model_name_or_path", str(write_tiny_policy(tmp_path / "model")),
        "--db_connection_string", str(run_config.db_connection_string),
        "--output_dir", str(run_config.output_dir), "--log_dir", run_config.log_dir,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(EXAMPLE)}
    done = await asyncio.to_thread(
        subprocess.run, command, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(await store.steps.find(status=StepStatus.COMMITTED)) == 2


def test_its_page_is_short() -> None:
    lines = (EXAMPLE / "README.md").read_text(encoding="utf-8").splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 14
