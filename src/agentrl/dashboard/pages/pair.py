"""The page of two trajectories side by side: their facts, and where they part."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.dashboard.failures import BadQueryError
from agentrl.dashboard.query import no_trajectory
from agentrl.dashboard.render import render
from agentrl.dashboard.stores import open_run
from agentrl.dashboard.views.compare import pair_turns
from agentrl.observe.terminal import number
from agentrl.store.views.read import WholeTrajectory

_TURNS = 60


async def _pair(request: Request) -> Response:
    query = request.query_params
    ids = query.getlist("id") or [query[name] for name in ("a", "b") if name in query]
    if len(ids) != 2 or ids[0] == ids[1]:
        raise BadQueryError(f"{len(set(ids))} trajectories are marked: mark two on the page of trajectories")
    both: list[WholeTrajectory] = []
    async with open_run(request) as store:
        for record_id in ids:
            found = await store.views.whole_trajectory(record_id)
            if found is None:
                raise no_trajectory(store.run_name, record_id)
            both.append(found)
    pairs = pair_turns(both[0].calls, both[1].calls)
    return render(
        request, "compare_trajectories.html", run=store.run_name, section="trajectories",
        records=[each.record for each in both], facts=_facts(both), pairs=pairs[:_TURNS],
        parted=next((pair for pair in pairs if pair.parts_here), None), cut=max(0, len(pairs) - _TURNS),
    )  # fmt: skip


def _facts(both: list[WholeTrajectory]) -> list[tuple[str, list[str]]]:
    records = [each.record for each in both]
    rows: list[tuple[str, list[object]]] = [
        ("Status", [record.status for record in records]),
        ("Score", [number(record.score) for record in records]),
        ("Advantage", [number(record.advantage) for record in records]),
        ("Answer", ["–" if record.final_answer is None else record.final_answer for record in records]),
        ("Stopped", [record.stop_reason or "–" for record in records]),
        ("Turns", [record.turns for record in records]),
        ("Tool calls", [record.tool_calls for record in records]),
        ("Generated tokens", [number(record.generated_tokens) for record in records]),
        ("Policy versions", [f"{record.min_version} to {record.max_version}" for record in records]),
        ("Trained at steps", [", ".join(map(str, each.trained_at_steps)) or "none" for each in both]),
    ]
    return [(name, [str(value) for value in values]) for name, values in rows]


routes = [Route("/runs/{run}/pair", _pair)]
