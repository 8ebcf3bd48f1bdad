"""The page of all runs: every database of the server that holds one."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.config.run import EngineListConfig
from agentrl.dashboard.cache import cache_of, shared
from agentrl.dashboard.render import render
from agentrl.dashboard.stores import pool_of
from agentrl.store.views.runs import Runs, RunSummary

_SECONDS = 2.0


@shared(1.0)
async def _runs(request: Request) -> Response:
    async def read() -> list[RunSummary]:
        connection = await pool_of(request).server()
        return await Runs(connection).all(EngineListConfig().alive_seconds)

    runs = await cache_of(request).get("runs", _SECONDS, read)
    return render(request, "runs.html", live=True, runs=runs, alive=sum(run.alive for run in runs))


routes = [Route("/", _runs)]
