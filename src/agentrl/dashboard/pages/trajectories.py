"""The page of trajectories: filtered by the address, sorted, page by page."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.dashboard.query import checked_query
from agentrl.dashboard.render import render
from agentrl.dashboard.stores import open_run
from agentrl.dashboard.views.filter_form import read_form
from agentrl.documents.status import SHOWN_STATUSES
from agentrl.store.views.trajectories import TrajectoryOrder

_ROWS = 50


async def _trajectories(request: Request) -> Response:
    after = request.query_params.get("after")
    with checked_query():
        form = read_form(request.query_params)
    async with open_run(request) as store:
        with checked_query():
            page, count, labels = await asyncio.gather(
                store.trajectories.page(form.wanted, order=form.order, limit=_ROWS, after=after),
                store.trajectories.count(form.wanted),
                store.labels.counts(),
            )
        labels_of = await store.labels.of_records([row.id for row in page.rows])
    return render(
        request,
        "trajectories.html",
        run=store.run_name,
        section="trajectories",
        form=form,
        page=page,
        count=count,
        given_after=after,
        labels=labels,
        labels_of=labels_of,
        statuses=SHOWN_STATUSES,
        orders=[order.value for order in TrajectoryOrder],
    )


routes = [Route("/runs/{run}/trajectories", _trajectories)]
