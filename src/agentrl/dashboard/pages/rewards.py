"""The page about rewards: signs that a policy games its score, and the trajectories to read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.dashboard.render import render
from agentrl.dashboard.stores import cache_of, open_run
from agentrl.dashboard.views.rewards import VALUES, dependence, disagreements, edges, repeated_answers
from agentrl.store.views.rewards import ScoredTrajectory

_POINTS = 600
_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Point:
    """A trajectory in the drawing, in its units."""

    row: ScoredTrajectory
    x: float
    y: float


async def _rewards(request: Request) -> Response:
    async with open_run(request) as store:
        splits = await store.rewards.splits()
        default = "train" if "train" in splits or not splits else splits[0]
        split = request.query_params.get("split", default)

        async def read() -> dict[str, Any]:
            return await asyncio.to_thread(_analyse, await store.rewards.newest(split))

        key = ("rewards", store.run_name, split)
        analysis = await cache_of(request).get(key, _SECONDS, read)
    return render(
        request, "rewards.html", run=store.run_name, section="rewards", split=split, splits=splits, **analysis
    )


def _analyse(rows: Sequence[ScoredTrajectory]) -> dict[str, Any]:
    scores = [row.score for row in rows] or [0.0]
    lowest, spread = min(scores), (max(scores) - min(scores)) or 1.0
    longest = max([row.generated_tokens for row in rows], default=0) or 1
    return {
        "rows": len(rows),
        "dependences": [dependence(name, rows) for name in VALUES],
        "repeated": repeated_answers(rows),
        "pairs": disagreements(rows),
        "edges": edges(rows),
        "lowest": lowest,
        "spread": spread,
        "longest": longest,
        "points": [
            _Point(
                row=row,
                x=round(60 + 740 * row.generated_tokens / longest, 1),
                y=round(300 - 280 * (row.score - lowest) / spread, 1),
            )
            for row in rows[:_POINTS]
        ],
    }


routes = [Route("/runs/{run}/rewards", _rewards)]
