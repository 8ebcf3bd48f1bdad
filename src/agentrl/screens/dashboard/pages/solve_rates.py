"""The page of a run's tasks: how often each is solved over the epochs, and which always or never agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.screens.dashboard.charts import Chart, Series
from agentrl.screens.dashboard.query import choice, page_of
from agentrl.screens.dashboard.render import render
from agentrl.screens.dashboard.stores import cache_of, open_run, reader_of
from agentrl.screens.snapshot import TRAIN
from agentrl.screens.views.pipelines import TaskRow
from agentrl.screens.views.read import Views

_SECONDS = 15.0
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
        rows = await cache_of(request).get(key, _SECONDS, lambda: views.tasks(split=split, excerpts=True))
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


routes = [Route("/runs/{run}/tasks", _tasks)]
