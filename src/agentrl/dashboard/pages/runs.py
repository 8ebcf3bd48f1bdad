"""The page of all runs: every database of the server that holds one."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.dashboard.render import render
from agentrl.dashboard.stores import read_runs, shared

_SECONDS = 2.0


@shared(1.0)
async def _runs(request: Request) -> Response:
    runs = await read_runs(request, _SECONDS)
    return render(request, "runs.html", live=True, runs=runs, alive=sum(run.alive for run in runs))


routes = [Route("/", _runs)]
