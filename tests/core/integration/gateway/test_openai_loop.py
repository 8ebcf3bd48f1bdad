"""The example of an OpenAI client loop, on a real engine: recorded exactly, and trained on-policy."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rollout_fakes import FakeTools
from served_engine import Served, serve_locally
from unmoved.train_dump import make_model

from agentrl.chat.open_format import open_chat_format
from agentrl.config.sampling import GatewayConfig
from agentrl.config.schema import AgentConfig, ClaimConfig, GroupConfig, ModelConfig, SamplingConfig
from agentrl.data.finalize_group import explain_difference
from agentrl.data.planner import build_micro_batches
from agentrl.distributed.parallel_model import ParallelModel
from agentrl.documents.run import InferenceService
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import RecordStatus, ServiceStatus
from agentrl.documents.task import Slot, Task
from agentrl.documents.training import DBRecordData
from agentrl.gateway.answerer import Answerer
from agentrl.gateway.app import GatewayHost
from agentrl.inference.session import EngineRouter
from agentrl.losses.settings import LossSettings
from agentrl.model.load import load_policy
from agentrl.rollout.housekeeping import GroupFinalizer
from agentrl.rollout.worker import Worker
from agentrl.store.client import Store
from agentrl.train.step import forward_backward

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

EXAMPLE = Path(__file__).parents[4] / "assets" / "examples" / "openai_loop"
GROUP = 8
SEED = 1
"""The seeds of model calls follow from it: two of the eight first answers call the tool."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = make_model(tmp_path_factory.mktemp("openai-loop") / "policy")
    with serve_locally(folder, max_total_tokens=8192) as served:
        yield served


@asynccontextmanager
async def opened_worker(store: Store, served: Served) -> AsyncIterator[Worker]:
    """A worker as ``agentrl sample`` has it, with a gateway in this process."""
    service = InferenceService(
        id="engine", url=served.url, engine="local", model=str(served.folder), host="h", pid=1,
        status=ServiceStatus.READY, policy_version=0, context_length=512,
    )  # fmt: skip

    async def live() -> list[InferenceService]:
        return [service]

    chat_format = open_chat_format(served.folder, ModelConfig(), with_tools=True)
    router = EngineRouter(live, tokens=chat_format)
    agent = AgentConfig(agent_name="openai_loop:openai_loop", max_turns=4)
    params = SamplingParams(max_new_tokens=40, stop_token_ids=tuple(sorted(chat_format.stop_ids)))
    host = GatewayHost(
        Answerer(
            store=store, router=router, chat_format=chat_format, params=params, agent=agent, seed=SEED,
        ),
        GatewayConfig(),
    )  # fmt: skip
    try:
        yield Worker(
            store=store, router=router, tools=FakeTools(), chat_format=chat_format, params=params, seed=7,
            agent=agent, sampling=SamplingConfig(), claims=ClaimConfig(), gateway=host,
        )  # fmt: skip
    finally:
        await host.close()
        await router.close()


async def sample_group(store: Store, served: Served) -> None:
    task = Task(
        id="train/0/t", task_id="t", split="train", epoch=0, order=0, query="What is 51 + 97?", answer="148",
        scorer="exact", slots=tuple(Slot(traj_id=number) for number in range(GROUP)),
    )  # fmt: skip
    await store.tasks.load([task])
    async with opened_worker(store, served) as worker:
        claims = [
            await store.claims.claim(split="train", owner="me", lease_seconds=600) for _ in range(GROUP)
        ]
        done = await asyncio.gather(*(worker.run(claim) for claim in claims if claim is not None))
    assert done == [True] * GROUP


async def test_the_loop_is_recorded_exactly_and_trains_on_policy(
    store: Store, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.delitem(sys.modules, "openai_loop", raising=False)
    await sample_group(store, served)
    rules = GroupConfig(min_score_spread=0.0, drop_zero_advantage=False)
    assert await GroupFinalizer(store, rules, split="train", seed=0).run_waiting() == 1
    records = await store.records.by_task("train/0/t")
    assert {record.status for record in records} == {RecordStatus.READY}
    assert {record.train_rule for record in records} == {"main"}
    found = await store.database["DBRecordData"].find({}).to_list()
    data = [DBRecordData.from_document(document) for document in found]
    assert len(data) == GROUP
    for item in data:
        calls = await store.model_calls.by_record(item.record)
        assert explain_difference(item, calls, rules) is None
        assert [call.parent for call in calls[1:]] == [call.id for call in calls[:-1]]
        assert len(item.nodes) == 1
    assert any(item.turns > 1 for item in data), "no trajectory used the tool"
    model = load_policy(ModelConfig(model_name_or_path=str(served.folder))).model
    forests = build_micro_batches(data, 4096, vocab_size=model.config.get_text_config().vocab_size)
    report = forward_backward(ParallelModel(model), forests, LossSettings())
    assert report["trainable_tokens"] == sum(item.trainable_tokens for item in data)
    assert report["ratio_mean"] == pytest.approx(1.0, abs=1e-3)
    assert report["ratio_max"] == pytest.approx(1.0, abs=2e-3)
    assert any(bool(weight.grad.abs().sum() > 0) for weight in model.parameters() if weight.grad is not None)
