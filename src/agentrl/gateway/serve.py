"""Run one gateway process for the trajectories of a run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from agentrl.config.agent import GatewayConfig
from agentrl.config.load import Configs
from agentrl.config.schema import (
    AgentConfig,
    ClaimConfig,
    EngineConfig,
    GroupConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
)
from agentrl.data.finalize_group import TRAIN_SPLIT
from agentrl.gateway.answerer import Answerer
from agentrl.gateway.app import GatewayApp
from agentrl.gateway.conversations import Conversations, require_key
from agentrl.gateway.host import GatewayServer
from agentrl.observe.begin_run import begin_model, begin_run
from agentrl.permissions import allow
from agentrl.processes import stop_on_signals
from agentrl.rollout.finalizer import GroupFinalizer
from agentrl.rollout.outages import Outages
from agentrl.rollout.scoring import Scoring
from agentrl.rollout.setup import live_engines, model_folder, open_format, open_router, sampling_params
from agentrl.store.client import open_store
from agentrl.store.mechanics.retry import retry_outages
from agentrl.weights.folder import require_folder

if TYPE_CHECKING:
    from agentrl.store.client import Store


async def serve_gateway(configs: Configs) -> None:
    """Serve until a signal."""
    run = configs[RunConfig]
    require_folder(configs[ModelConfig])
    stop = stop_on_signals()
    with retry_outages(run.db_wait_seconds, stop):
        async with await open_store(run) as store, _answerer(store, configs) as answerer:
            conversations = await _conversations(store, configs)
            app = GatewayApp(
                answerer, configs[GatewayConfig], () if conversations is None else conversations.routes()
            )
            server = GatewayServer(app, configs[GatewayConfig])
            await server.start()
            try:
                await (stop.wait() if conversations is None else conversations.run(stop))
            finally:
                await app.close()
                await server.close()


async def _conversations(store: Store, configs: Configs) -> Conversations | None:
    """Return the conversations of ``--gateway_train feedback``; None if the gateway serves tasks alone."""
    config = configs[GatewayConfig]
    if config.gateway_train == "tasks":
        return None
    key = require_key(config)
    allow(configs[TaskConfig].allowed_names)
    await begin_run(store, configs, "gateway", {})
    await begin_model(store, configs[ModelConfig].model_name_or_path, "gateway")
    sampling = configs[SamplingConfig]
    outages = Outages(sampling.outage_wait_seconds)
    return Conversations(
        store=store,
        config=config,
        agent=configs[AgentConfig],
        scoring=Scoring(store=store, outages=outages, sampling=sampling, claims=configs[ClaimConfig]),
        finalizer=GroupFinalizer(
            store, configs[GroupConfig], split=TRAIN_SPLIT, seed=configs[RunConfig].seed
        ),
        key=key,
    )


@asynccontextmanager
async def _answerer(store: Store, configs: Configs) -> AsyncIterator[Answerer]:
    chat_format = await open_format(store, configs)
    folder = await model_folder(store, configs)
    engine = configs[EngineConfig]
    router = open_router(lambda: live_engines(store, engine), configs, chat_format, folder)
    try:
        await router.engines.refresh()
        yield Answerer(
            store=store,
            router=router,
            chat_format=chat_format,
            params=sampling_params(configs[SamplingConfig], chat_format),
            agent=configs[AgentConfig],
            seed=configs[RunConfig].seed,
        )
    finally:
        await router.close()
