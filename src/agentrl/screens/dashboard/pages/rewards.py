"""The page about rewards: what the score goes with, repeated answers, scorers that disagree, the edges."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.screens.dashboard.render import render
from agentrl.screens.dashboard.stores import cache_of, open_run
from agentrl.screens.views.scores import Rewards, ScoredRow

_POINTS = 600
_SECONDS = 10.0
BINS = 8
SHOWN = 10
DISAGREES = 0.5
"""Two scorers disagree on a trajectory if their scores differ by at least this much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Trajectories with ``low ≤ value ≤ high``."""

    low: float
    high: float
    count: int
    mean_score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependence:
    """How the score goes with one value."""

    name: str
    bins: Sequence[Bin]
    correlation: float | None
    """Pearson's, over all trajectories; None if one of them does not vary."""
    within_groups: float | None
    """The same, of the differences from the mean of the group: the difficulty of tasks does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedAnswer:
    """An answer that trajectories of several tasks gave."""

    answer: str
    trajectories: Sequence[ScoredRow]
    tasks: int
    mean_score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """Two scorers on the trajectories that both scored; ``apart`` has those with the largest difference."""

    one: str
    other: str
    count: int
    one_mean: float
    other_mean: float
    disagree: int
    apart: Sequence[ScoredRow]
    with_judge: bool
    """Whether one of them asked a model and the other did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Trajectories at one edge, each worth reading."""

    what: str
    why: str
    trajectories: Sequence[ScoredRow]


VALUES: dict[str, Callable[[ScoredRow], float]] = {
    "generated tokens": lambda row: row.generated_tokens,
    "tool calls": lambda row: row.tool_calls,
    "turns": lambda row: row.turns,
    "characters of the answer": lambda row: len(row.answer or ""),
}


def dependence(name: str, rows: Sequence[ScoredRow]) -> Dependence:
    """Return how the score goes with one of ``VALUES``, in bins of about equal size."""
    value = VALUES[name]
    ordered = sorted(rows, key=value)
    bins: list[Bin] = []
    size = max(1, math.ceil(len(ordered) / BINS))
    start = 0
    while start < len(ordered):
        end = min(start + size, len(ordered))
        while end < len(ordered) and value(ordered[end]) == value(ordered[end - 1]):
            end += 1
        part = ordered[start:end]
        bins.append(
            Bin(low=value(part[0]), high=value(part[-1]), count=len(part),
                mean_score=fmean(row.score for row in part))
        )  # fmt: skip
        start = end
    return Dependence(
        name=name,
        bins=bins,
        correlation=_correlation([(value(row), row.score) for row in rows]),
        within_groups=_correlation(_within_groups(rows, value)),
    )


def _within_groups(
    rows: Sequence[ScoredRow], value: Callable[[ScoredRow], float]
) -> list[tuple[float, float]]:
    groups: dict[str, list[ScoredRow]] = defaultdict(list)
    for row in rows:
        groups[row.task].append(row)
    pairs = []
    for group in groups.values():
        if len(group) > 1:
            mean_value, mean_score = fmean(map(value, group)), fmean(row.score for row in group)
            pairs += [(value(row) - mean_value, row.score - mean_score) for row in group]
    return pairs


def _correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    if len(pairs) < 3:
        return None
    mean_x, mean_y = fmean(x for x, _ in pairs), fmean(y for _, y in pairs)
    spread_x = sum((x - mean_x) ** 2 for x, _ in pairs)
    spread_y = sum((y - mean_y) ** 2 for _, y in pairs)
    if spread_x * spread_y <= 1e-12:
        return None
    return sum((x - mean_x) * (y - mean_y) for x, y in pairs) / math.sqrt(spread_x * spread_y)


def repeated_answers(rows: Sequence[ScoredRow]) -> list[RepeatedAnswer]:
    """Return the answers that at least two tasks got, those of the most tasks first."""
    by_answer: dict[str, list[ScoredRow]] = defaultdict(list)
    for row in rows:
        if row.answer is not None and row.answer.strip():
            by_answer[" ".join(row.answer.lower().split())].append(row)
    repeated = [
        RepeatedAnswer(
            answer=answer, trajectories=given, tasks=len({row.task for row in given}),
            mean_score=fmean(row.score for row in given),
        )
        for answer, given in by_answer.items()
    ]  # fmt: skip
    several = [item for item in repeated if item.tasks > 1]
    return sorted(several, key=lambda item: (-item.tasks, -item.mean_score))[:SHOWN]


def disagreements(rows: Sequence[ScoredRow]) -> list[Disagreement]:
    """Compare every two scorers that scored the same trajectories; a judge against another kind first."""
    pairs: dict[tuple[str, str], list[ScoredRow]] = defaultdict(list)
    judges = {name for row in rows for name in row.judges}
    for row in rows:
        for pair in combinations(sorted(row.opinions), 2):
            pairs[pair].append(row)
    compared = [_disagreement(*pair, both, judges) for pair, both in pairs.items()]
    compared.sort(key=lambda item: (not item.with_judge, -item.disagree, item.one, item.other))
    return compared[:SHOWN]


def _disagreement(one: str, other: str, rows: Sequence[ScoredRow], judges: set[str]) -> Disagreement:
    def difference(row: ScoredRow) -> float:
        return abs(row.opinions[one] - row.opinions[other])

    apart = sorted(rows, key=difference, reverse=True)[:SHOWN]
    return Disagreement(
        one=one, other=other, count=len(rows),
        one_mean=fmean(row.opinions[one] for row in rows),
        other_mean=fmean(row.opinions[other] for row in rows),
        disagree=sum(difference(row) >= DISAGREES for row in rows),
        apart=[row for row in apart if difference(row) >= DISAGREES],
        with_judge=(one in judges) != (other in judges),
    )  # fmt: skip


def edges(rows: Sequence[ScoredRow]) -> list[Edge]:
    """Return the trajectories at the edges: what a policy that games its reward would leave there."""
    if not rows:
        return []
    best = max(row.score for row in rows)
    worst = min(row.score for row in rows)
    high = [row for row in rows if row.score >= best - 0.05 * (best - worst)]
    low = [row for row in rows if row.score <= worst + 0.05 * (best - worst)]
    with_tools = {row.task for row in rows if row.tool_calls}
    return [
        Edge(what="shortest with a high score", why="an answer without the work?",
             trajectories=sorted(high, key=lambda row: row.generated_tokens)[:SHOWN]),
        Edge(what="longest with a high score", why="does length itself pay?",
             trajectories=sorted(high, key=lambda row: -row.generated_tokens)[:SHOWN]),
        Edge(what="high score without a tool, where others of the group used one",
             why="guessed, or read from the prompt?",
             trajectories=[row for row in high if not row.tool_calls and row.task in with_tools][:SHOWN]),
        Edge(what="most tool calls with a high score", why="are calls rewarded for themselves?",
             trajectories=sorted((row for row in high if row.tool_calls),
                                 key=lambda row: -row.tool_calls)[:SHOWN]),
        Edge(what="longest with a low score", why="cut off, or lost?",
             trajectories=sorted(low, key=lambda row: -row.generated_tokens)[:SHOWN]),
    ]  # fmt: skip


async def _rewards(request: Request) -> Response:
    async with open_run(request) as store:
        rewards = Rewards(store.connection)
        splits = await rewards.sampled_splits()
        default = "train" if "train" in splits or not splits else splits[0]
        split = request.query_params.get("split", default)

        async def read() -> dict[str, Any]:
            return await asyncio.to_thread(_analyse, await rewards.newest(split))

        key = ("rewards", store.run_name, split)
        analysis = await cache_of(request).get(key, _SECONDS, read)
    return render(
        request, "rewards.html", run=store.run_name, section="rewards", split=split, splits=splits, **analysis
    )


def _analyse(rows: Sequence[ScoredRow]) -> dict[str, Any]:
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
            {
                "row": row,
                "x": round(60 + 740 * row.generated_tokens / longest, 1),
                "y": round(300 - 280 * (row.score - lowest) / spread, 1),
            }
            for row in rows[:_POINTS]
        ],
    }


routes = [Route("/runs/{run}/rewards", _rewards)]
