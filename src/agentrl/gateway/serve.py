"""Run one gateway process for the trajectories of a run."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from agentrl.config.agent import GatewayConfig
from agentrl.config.load import Configs
from agentrl.config.schema import AgentConfig, EngineConfig, ModelConfig, RunConfig, SamplingConfig
from agentrl.gateway.answerer import Answerer
from agentrl.gateway.app import GatewayApp
from agentrl.gateway.host import GatewayServer
from agentrl.processes import stop_on_signals
from agentrl.rollout.setup import live_engines, model_folder, open_format, open_router, sampling_params
from agentrl.store.client import open_store
from agentrl.store.mechanics.retry import retry_outages
from agentrl.weights.folder import require_folder

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)


async def serve_gateway(configs: Configs) -> None:
    """Serve until a signal."""
    run = configs[RunConfig]
    require_folder(configs[ModelConfig])
    stop = stop_on_signals()
    with retry_outages(run.db_wait_seconds, stop):
        async with await open_store(run) as store, _answerer(store, configs) as answerer:
            app = GatewayApp(answerer, configs[GatewayConfig])
            server = GatewayServer(app, configs[GatewayConfig])
            await server.start()
            try:
                await stop.wait()
            finally:
                await app.close()
                await server.close()


@asynccontextmanager
async def _answerer(store: Store, configs: Configs) -> AsyncIterator[Answerer]:
    chat_format = await open_format(store, configs)
    folder = await model_folder(store, configs)
    engine = configs[EngineConfig]
    router = open_router(lambda: live_engines(store, engine), configs, chat_format, folder)
    try:
        await router.refresh()
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
