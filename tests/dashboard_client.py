"""A client of the dashboard's pages, without a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
from starlette.applications import Starlette

from agentrl.config.schema import RunConfig
from agentrl.screens.dashboard.serve import DashboardOptions, create_app

HOST = "http://127.0.0.1"
OWN = {"Origin": HOST}
"""The headers of a form that the dashboard itself has sent."""


@asynccontextmanager
async def opened(config: RunConfig, below: str = "") -> AsyncIterator[tuple[Starlette, httpx2.AsyncClient]]:
    """Yield the application for the server of ``config``, and a client whose paths begin with ``below``."""
    app = create_app(DashboardOptions(run=config))
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url=HOST + below) as client,
    ):
        yield app, client
