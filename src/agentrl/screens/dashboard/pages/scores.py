"""The pages about scores: how often tasks are solved, and what rewards go with."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, zip_longest
from statistics import fmean
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.screens.dashboard.charts import Chart, Series
from agentrl.screens.dashboard.query import choice, page_of
from agentrl.screens.dashboard.render import render
from agentrl.screens.dashboard.stores import cache_of, open_run, reader_of
from agentrl.screens.snapshot import TRAIN
from agentrl.screens.views.counts import Rewards, ScoredRow
from agentrl.screens.views.pipelines import TaskRow
from agentrl.screens.views.read import Views

_TASKS_SECONDS = 15.0
_BINS = 20
_KINDS: Mapping[str, Callable[[TaskRow], bool]] = {
    "all": lambda row: True,
    "always agree": lambda row: row.agreement == "always agrees",
    "all right": lambda row: row.agreement == "always agrees" and (row.lowest_score or 0) >= 1,
    "all wrong": lambda row: row.agreement == "always agrees" and (row.best_score or 0) <= 0,
    "sometimes agree": lambda row: row.agreement == "sometimes agrees",
    "never agree": lambda row: row.agreement == "never agrees",
    "with failures": lambda row: row.failed > 0,
    "no scores": lambda row: row.agreement == "no scores",
}
_SORTS: Mapping[str, Callable[[TaskRow], Any]] = {
    "task": lambda row: row.task_id,
    "hardest": lambda row: (row.mean is None, row.mean or 0.0, row.task_id),
    "easiest": lambda row: (row.mean is None, -(row.mean or 0.0), row.task_id),
    "most improved": lambda row: (_change(row) is None, -(_change(row) or 0.0), row.task_id),
    "most worsened": lambda row: (_change(row) is None, _change(row) or 0.0, row.task_id),
    "most failures": lambda row: (-row.failed, row.task_id),
}


async def _tasks(request: Request) -> Response:
    kind = choice(request.query_params, "kind", _KINDS, "all")
    sort = choice(request.query_params, "sort", _SORTS, "hardest")
    wanted = request.query_params.get("q", "").strip()[:200]
    split = request.query_params.get("split", TRAIN)
    async with open_run(request) as store:
        views, key = Views(store.connection), ("questions", store.run_name, split)
        rows = await cache_of(request).get(
            key, _TASKS_SECONDS, lambda: views.tasks(split=split, excerpts=True)
        )
        splits = {name for name, _ in await reader_of(request, store).tasks()}
    chosen = [row for row in rows if _KINDS[kind](row) and wanted.lower() in row.task_id.lower()]
    page = page_of(request, len(chosen))
    shown = sorted(chosen, key=_SORTS[sort])[page.skip : page.skip + page.limit]
    return render(
        request,
        "tasks.html",
        run=store.run_name,
        section="tasks",
        live=True,
        charts=bool(rows),
        split=split,
        splits=sorted({*splits, split}),
        kind=kind,
        kinds=list(_KINDS),
        sort=sort,
        sorts=list(_SORTS),
        wanted=wanted,
        rows=[{"row": row, "change": _change(row), "bars": _bars(row)} for row in shown],
        page=page,
        all_rows=len(rows),
        counts=_counts(rows),
        figures=[_difficulty(rows), _over_epochs(rows)],
    )


def _change(row: TaskRow) -> float | None:
    """Return the change of the mean score; None without two epochs."""
    return row.change if len(row.known) > 1 else None


def _counts(rows: Sequence[TaskRow]) -> list[tuple[str, int, str]]:
    counted = Counter(name for row in rows for name, matches in _KINDS.items() if matches(row))
    return [
        ("all right", counted["all right"], "Every group agrees: nothing to learn, too easy."),
        ("all wrong", counted["all wrong"], "Every group agrees: nothing to learn, too hard."),
        ("sometimes agree", counted["sometimes agree"], ""),
        ("never agree", counted["never agree"], "Every group trains."),
        ("with failures", counted["with failures"], "An attempt has failed for good."),
    ]


def _bars(row: TaskRow) -> list[str]:
    """Return one character per epoch, whose height is the mean score in [0, 1]."""
    blocks = "▁▂▃▄▅▆▇█"
    return [
        "·" if mean is None else blocks[round(max(0.0, min(1.0, mean)) * (len(blocks) - 1))]
        for mean in row.mean_scores[-24:]
    ]


def _difficulty(rows: Sequence[TaskRow]) -> Chart:
    counts = Counter(min(int(row.mean * _BINS), _BINS - 1) for row in rows if row.mean is not None)
    low, high = min(counts, default=0), max(counts, default=-1)
    return Chart(
        id="difficulty",
        title="Difficulty",
        help="Tasks by their mean score over the epochs. Tasks in the middle train best.",
        kind="histogram",
        x_title="mean score",
        y_title="tasks",
        series=[
            Series(
                name="tasks",
                x=[round((index + 0.5) / _BINS, 4) for index in range(low, high + 1)],
                y=[counts[index] for index in range(low, high + 1)],
            )
        ],
    )


def _over_epochs(rows: Sequence[TaskRow]) -> Chart:
    times = list(zip_longest(*(row.mean_scores for row in rows)))
    known = [[mean for mean in means if mean is not None] for means in times]
    return Chart(
        id="epochs",
        title="Mean score over epochs",
        help="The n-th time that a task was sampled.",
        x_title="time sampled",
        series=[
            Series(
                name="mean score",
                x=range(1, len(known) + 1),
                y=[sum(means) / len(means) if means else None for means in known],
            )
        ],
    )


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


routes = [Route("/runs/{run}/tasks", _tasks), Route("/runs/{run}/rewards", _rewards)]
