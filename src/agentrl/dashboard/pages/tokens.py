"""The token view: each generated token of a model call, coloured by a stored value, also one of a step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.dashboard.failures import BadQueryError, NotFoundError
from agentrl.dashboard.query import no_trajectory, whole
from agentrl.dashboard.render import link, render
from agentrl.dashboard.stores import open_run
from agentrl.dashboard.views.tokens import PAGE, Colour, decoder, legend_of, token_views
from agentrl.store.views.tokens import CallTokens, TrajectoryTokens


async def _tokens(request: Request) -> Response:
    record_id = request.path_params["record"]
    given = request.query_params.get("colour", Colour.LOGPROB.value)
    if given not in {colour.value for colour in Colour}:
        raise BadQueryError(f"colour is {given[:80]!r}: choose one of {', '.join(Colour)}")
    colour = Colour(given)
    start, named_step = whole(request, "start") or 0, whole(request, "step")
    async with open_run(request) as store:
        trajectory = await store.tokens.trajectory(record_id)
    if trajectory is None:
        raise no_trajectory(store.run_name, record_id)
    chosen = _chosen(request, trajectory)
    stored = sorted({step for each in trajectory.calls for step in each.values})
    step = named_step if named_step is not None else max(stored, default=None)

    def here(**changes: Any) -> str:
        index = chosen.call.index if chosen else None
        kept: dict[str, Any] = {"colour": colour.value, "call": index, "step": named_step, **changes}
        return link("runs", store.run_name, "tokens", record_id, **kept)

    page = await asyncio.to_thread(_page, trajectory, chosen, colour, start, step)
    return render(
        request, "tokens.html", run=store.run_name, section="trajectories", record=trajectory.record,
        colour=colour, colours=list(Colour), here=here, calls=[each.call for each in trajectory.calls],
        call=chosen.call if chosen else None, steps=trajectory.steps, data_status=trajectory.data_status,
        start=start, page_size=PAGE, stored_steps=stored, step=step, **page,
    )  # fmt: skip


def _chosen(request: Request, trajectory: TrajectoryTokens) -> CallTokens | None:
    """Return the tokens of the turn that the address names; of the first turn with tokens without one."""
    if "call" in request.query_params:
        index = whole(request, "call") or 0
        found = next((each for each in trajectory.calls if each.call.index == index), None)
        if found is None:
            raise NotFoundError(f"trajectory {trajectory.record.id!r} has no turn {index + 1}")
        return found
    return next((each for each in trajectory.calls if len(each.ids)), None)


def _page(
    trajectory: TrajectoryTokens, chosen: CallTokens | None, colour: Colour, start: int, step: int | None
) -> dict[str, Any]:
    """Return what the template shows of the chosen turn, with the values that ``step`` stored."""
    if chosen is None:
        return {"tokens": (), "total": 0, "trained": 0, "has_text": True, "legend": ()}
    decode = _decode(trajectory, chosen)
    return {
        "tokens": token_views(chosen, colour, decode, start, chosen.values.get(-1 if step is None else step)),
        "total": len(chosen.ids),
        "trained": int(np.isfinite(chosen.advantages).sum()),
        "has_text": decode is not None,
        "legend": legend_of(chosen, colour),
    }


def _decode(trajectory: TrajectoryTokens, chosen: CallTokens) -> Callable[[int], str] | None:
    versions: Sequence[int] = [span.version for span in chosen.call.versions]
    folders = [trajectory.locations[version] for version in versions if version in trajectory.locations]
    return next((found for folder in folders if (found := decoder(folder)) is not None), None)


routes = [Route("/runs/{run}/tokens/{record:path}", _tokens)]
