"""The vision example: its tasks are sampled on a real engine, and ``agentrl train`` makes two steps."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from example_training import train_steps
from rollout_fakes import FakeTools
from served_engine import Served, serve_locally
from tiny_vision import save_vision_model

from agentrl.chat.open_format import open_chat_format
from agentrl.config.load import parse
from agentrl.config.schema import (
    AgentConfig,
    ClaimConfig,
    GroupConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
)
from agentrl.data.finalize_group import explain_difference
from agentrl.documents.run import InferenceService
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import RecordStatus, ServiceStatus
from agentrl.documents.task_file import read_tasks
from agentrl.inference.session import EngineRouter
from agentrl.rollout.housekeeping import GroupFinalizer
from agentrl.rollout.load_tasks import store_tasks
from agentrl.rollout.worker import Worker
from agentrl.store.client import Store

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.usefixtures("starts_warm")]

EXAMPLE = Path(__file__).parents[3] / "assets" / "examples" / "vision"
TASKS, GROUP = 4, 2
SMALL = (
    "--num_generations", "2", "--groups_per_step", "2", "--max_staleness", "9", "--max_steps", "2",
    "--max_tokens", "4096", "--publish_steps", "2", "--data_wait_seconds", "60",
    "--drop_zero_advantage", "false", "--min_score_spread", "0", "--advantage", "reward",
)  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = save_vision_model(tmp_path_factory.mktemp("vision-example"))
    with serve_locally(folder, max_total_tokens=8192) as engine:
        yield engine


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_tasks", EXAMPLE / "make_tasks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def sample(store: Store, folder: Path, url: str, agent: AgentConfig) -> None:
    service = InferenceService(
        id="engine", url=url, engine="local", model=str(folder), host="h", pid=1,
        status=ServiceStatus.READY, policy_version=0, context_length=2048,
    )  # fmt: skip

    async def live() -> list[InferenceService]:
        return [service]

    chat_format = open_chat_format(folder, ModelConfig())
    router = EngineRouter(live, tokens=chat_format)
    worker = Worker(
        store=store, router=router, tools=FakeTools(), chat_format=chat_format,
        params=SamplingParams(max_new_tokens=8, stop_token_ids=tuple(sorted(chat_format.stop_ids))), seed=7,
        agent=agent, sampling=SamplingConfig(), claims=ClaimConfig(),
    )  # fmt: skip
    try:
        claims = [
            await store.claims.claim(split="train", owner="me", lease_seconds=600)
            for _ in range(TASKS * GROUP)
        ]
        done = await asyncio.gather(*(worker.run(claim) for claim in claims if claim is not None))
    finally:
        await router.close()
    assert done == [True] * TASKS * GROUP


async def test_the_example_samples_and_trains_two_steps(
    store: Store, run_config: RunConfig, tmp_path: Path, served: Served
) -> None:
    folder = served.folder
    path = example().make_tasks(tmp_path / "squares", TASKS)
    await store_tasks(store, read_tasks(path, num_generations=GROUP))
    flags = ["--config", str(EXAMPLE / "run.yml"), "--run_name", run_config.run_name, *SMALL]
    configs = parse(flags, command="agentrl sample", description="", shown=())
    await sample(store, folder, served.url, configs[AgentConfig])
    rules = configs[GroupConfig]
    await GroupFinalizer(store, rules, split="train", seed=0).run_waiting()
    tasks = await store.tasks.find("train")
    records = [record for task in tasks for record in await store.records.by_task(task.id)]
    assert {record.status for record in records} == {RecordStatus.READY}
    for item in await store.training.fetch([record.id for record in records]):
        assert len(item.images) == 1
        assert explain_difference(item, await store.model_calls.by_record(item.record), rules) is None
    await train_steps(store, run_config, flags, folder)
    latest = await store.policy_versions.latest()
    assert latest is not None
    assert (Path(latest.location) / "preprocessor_config.json").is_file()
