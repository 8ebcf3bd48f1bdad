"""Make the dashboard's ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.middleware import Middleware

from agentrl.dashboard import live, render
from agentrl.dashboard.failures import HANDLERS
from agentrl.dashboard.live import LiveUpdates
from agentrl.dashboard.options import DashboardOptions
from agentrl.dashboard.pages import all_routes
from agentrl.dashboard.security import Guard
from agentrl.dashboard.stores import StorePool
from agentrl.errors import AgentRLError
from agentrl.snapshot.cache import Cache


def create_app(options: DashboardOptions) -> Starlette:
    """Return the application. It connects to MongoDB when it starts, and closes when it shuts down.

    ``app.state`` has its StorePool as ``stores``, its Cache as ``cache`` and its LiveUpdates as ``updates``.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        connecting = asyncio.create_task(_connect(app.state.stores), name="dashboard-connect")
        render.compile_templates()
        yield
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        await app.state.updates.close()
        await app.state.cache.close()
        await app.state.stores.close()

    app = Starlette(
        routes=[*render.routes, *live.routes, *all_routes()],
        middleware=[Middleware(Guard, options)],
        exception_handlers=HANDLERS,
        lifespan=lifespan,
    )
    app.state.options = options
    app.state.cache = Cache()
    app.state.stores = StorePool(options.run)
    app.state.updates = LiveUpdates(app.state.stores)
    return app


async def _connect(stores: StorePool) -> None:
    """Connect before the first request. A request to a server that does not answer connects again."""
    with contextlib.suppress(AgentRLError):
        await stores.server()
