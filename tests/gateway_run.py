"""A trajectory on a real database whose agent talks to a real gateway server on a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from rollout_fakes import FakeTools, ScriptedEngine, format_of

from agentrl.config.sampling import GatewayConfig
from agentrl.config.schema import AgentConfig, ClaimConfig, GroupConfig, SamplingConfig
from agentrl.data.finalize_group import to_training_data
from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.record import Record
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import RecordStatus
from agentrl.documents.task import Claim, Slot, Task
from agentrl.documents.training import DBRecordData
from agentrl.gateway.answerer import Answerer
from agentrl.gateway.app import GatewayApp, GatewayHost, GatewayServer
from agentrl.rollout.agent_io import Endpoint
from agentrl.rollout.agents import AGENTS, Agent
from agentrl.rollout.worker import Worker
from agentrl.store.client import Store

ADD_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
ADD = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def gateway_task(name: str = "t", slots: int = 2) -> Task:
    """A task for trajectories through a gateway."""
    return Task(
        id=f"train/0/{name}", task_id=name, split="train", epoch=0, order=0, query="1+2?", answer="3",
        scorer="exact", slots=tuple(Slot(traj_id=i) for i in range(slots)),
    )  # fmt: skip


def answerer_of(store: Store, engine: ScriptedEngine, **agent: Any) -> Answerer:
    """An answerer on a scripted engine."""
    return Answerer(
        store=store, router=engine, chat_format=engine.chat_format, params=SamplingParams(max_new_tokens=512),
        agent=AgentConfig(**agent), seed=7,
    )  # type: ignore[arg-type]  # fmt: skip


class GatewayRun:
    """One claimed trajectory, and the gateways that serve it."""

    def __init__(self, store: Store, *script: str | BaseException | Callable[[str], str]) -> None:
        self.store = store
        self.engine = ScriptedEngine(format_of(), *script)
        self.config = GatewayConfig(gateway_port=0)
        self.claim: Claim
        self.endpoint: Endpoint
        self.closed = asyncio.Event()

    async def begin(self) -> Claim:
        """Claim a trajectory and let it run."""
        await self.store.tasks.load([gateway_task()])
        claim = await self.store.claims.claim(split="train", owner="me", lease_seconds=600)
        assert claim is not None
        await self.store.records.create(claim)
        await self.store.records.advance(claim, RecordStatus.RUNNING)
        self.claim = claim
        return claim

    @asynccontextmanager
    async def open(
        self, *, train: str = "main", max_calls: int = 50, config: GatewayConfig | None = None, **agent: Any
    ) -> AsyncIterator[Endpoint]:
        """Open the trajectory's endpoint; the trajectory is complete behind the block."""
        claim = await self.begin()
        host = GatewayHost(answerer_of(self.store, self.engine, **agent), config or self.config)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(host.close)
            async with host.open(claim, train=train, max_calls=max_calls) as endpoint:
                self.endpoint = endpoint
                yield endpoint
        await self.store.records.advance(claim, RecordStatus.COMPLETED)

    @asynccontextmanager
    async def second_gateway(self, engine: ScriptedEngine | None = None) -> AsyncIterator[str]:
        """Another gateway process, as far as the database can tell; yield its URL."""
        app = GatewayApp(answerer_of(self.store, engine or self.engine), self.config)
        server = GatewayServer(app, self.config)
        await server.start()
        try:
            yield server.url
        finally:
            await app.close()
            await server.close()

    async def calls(self) -> list[DispatchedSamplingTask]:
        """The stored model calls."""
        return await self.store.model_calls.by_record(self.claim.record_id)

    async def record(self) -> Record:
        """The stored Record."""
        record = await self.store.records.get(self.claim.record_id)
        assert record is not None
        return record

    async def converted(self, advantage: float = 0.5) -> DBRecordData:
        """The training data of the trajectory, as if its score were 1."""
        await self.store.records.advance(self.claim, RecordStatus.SCORING)
        await self.store.attempts.score(self.claim, 1.0)
        data = to_training_data(
            self.claim.task, await self.record(), await self.calls(), advantage, GroupConfig()
        )
        assert data is not None
        return data


def worker_of(store: Store, engine: ScriptedEngine, agent: Agent, host: GatewayHost, **flags: Any) -> Worker:
    """A worker whose agent is ``agent``."""
    AGENTS.add(agent, "gateway_agent")
    return Worker(
        store=store, router=engine, tools=FakeTools(), chat_format=engine.chat_format,
        params=SamplingParams(), seed=7, agent=AgentConfig(agent_name="gateway_agent", **flags),
        sampling=SamplingConfig(), claims=ClaimConfig(retry_backoff_seconds=0.01), gateway=host,
    )  # fmt: skip
