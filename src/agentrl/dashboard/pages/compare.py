"""The pages that compare runs, and two policy versions of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.dashboard.curves import SMOOTHINGS, overlaid
from agentrl.dashboard.failures import BadQueryError, NotFoundError
from agentrl.dashboard.query import choice, whole
from agentrl.dashboard.render import render
from agentrl.dashboard.stores import cache_of, open_run, read_runs, reader_of
from agentrl.documents.run import RunSettings
from agentrl.snapshot.snapshot import TRAIN
from agentrl.store.views.rows import StepRow
from agentrl.store.views.versions import Versions, VersionSummary

MAX_RUNS = 8
"""Runs whose curves are drawn over each other."""
_RUNS_SECONDS = 10.0
_VERSION_SECONDS = 120.0
_VERSIONS = 500
_TASKS = 20
_SMOOTHED = 5
_METRICS = (
    ("reward", "reward"), ("pass_rate", "pass rate"), ("entropy", "entropy"), ("kl_k3", "KL(μ‖π)"),
    ("grad_norm", "gradient norm"), ("staleness_mean", "staleness"), ("abandoned_groups", "abandoned groups"),
    ("tokens_per_second", "trained tokens/s"),
)  # fmt: skip
_ROWS = (
    ("trajectories", "trajectories"), ("scored", "scored"), ("failed", "failed"), ("score", "mean score"),
    ("right", "score above 0.5"), ("generated_tokens", "generated tokens"), ("turns", "turns"),
    ("tool_calls", "tool calls"), ("seconds", "seconds, claim to score"),
)  # fmt: skip


async def _runs(request: Request) -> Response:
    known = [run.name for run in await read_runs(request, _RUNS_SECONDS) if run.problem is None]
    smoothing = choice(request, "smoothing", SMOOTHINGS, "0")
    given = request.query_params.getlist("run")
    chosen = list(dict.fromkeys(name.strip()[:200] for name in given if name.strip()))
    if len(chosen) < len(given) or len(chosen) == 1 or len(chosen) > MAX_RUNS:
        raise BadQueryError(f"{len(chosen)} different runs are given: choose 2 to {MAX_RUNS}")
    steps: dict[str, list[StepRow]] = {}
    configurations: dict[str, Sequence[RunSettings]] = {}
    for name in chosen:
        async with open_run(request, name) as store:
            steps[name] = await reader_of(request, store).steps()
            configurations[name] = await store.settings.resolved()
    figures = overlaid(steps, SMOOTHINGS[smoothing])
    return render(
        request,
        "compare_runs.html",
        charts=bool(figures),
        names=sorted({*known, *chosen}),
        chosen=chosen,
        figures=figures,
        rows=_ends(list(steps.values())),
        common=_common(list(steps.values())),
        flags=_differences(list(configurations.values())),
        smoothing=smoothing,
        smoothings=SMOOTHINGS,
    )


def _common(runs: Sequence[Sequence[StepRow]]) -> int:
    """Return the last step that all runs have; 0 without one."""
    return min((steps[-1].step if steps else 0 for steps in runs), default=0)


def _ends(runs: Sequence[Sequence[StepRow]]) -> list[dict[str, Any]]:
    """Return the metrics of each run at the last step that all have, then those at its own last step."""
    common = _common(runs)
    rows = []
    for key, name in _METRICS:
        values = [_mean_until(steps, key, until) for until in (common, 2**31) for steps in runs]
        if any(value is not None for value in values):
            rows.append({"name": name, "values": values})
    return rows


def _mean_until(steps: Sequence[StepRow], key: str, until: int) -> float | None:
    """Return the mean of a metric over the last 5 steps up to ``until``; None without one."""
    values = [step.metrics.get(key) for step in steps if step.step <= until][-_SMOOTHED:]
    known = [value for value in values if isinstance(value, int | float)]
    return sum(known) / len(known) if known else None


def _differences(runs: Sequence[Sequence[RunSettings]]) -> list[tuple[str, str, list[Any]]]:
    """Return (role, flag, value in each run) of each flag that all runs have, with more than one value."""
    roles = [{str(item.role): item.values for item in settings} for settings in runs]
    shared = [role for role in (roles[0] if roles else ()) if all(role in each for each in roles)]
    return [
        (role, name, values)
        for role in shared
        for name in sorted(roles[0][role])
        if all(name in each[role] for each in roles)
        for values in [[each[role][name] for each in roles]]
        if any(value != values[0] for value in values)
    ]


async def _versions(request: Request) -> Response:
    split = request.query_params.get("split", TRAIN)
    async with open_run(request) as store:
        versions = Versions(store.connection)
        published = await versions.published(_VERSIONS)
        numbers = [version.id for version in published]
        sampled = await versions.newest_sampled(split)
        newest = sampled if sampled in numbers else next(iter(numbers), 0)
        b = whole(request, "b", newest) or 0
        a = whole(request, "a", max(0, newest - 10)) or 0
        summaries = [await _summary(request, versions, store.run_name, number, split) for number in (a, b)]
        if numbers and any(summary is None for summary in summaries):
            missing = a if summaries[0] is None else b
            raise NotFoundError(f"run {store.run_name!r} has no policy version {missing}")
        key = ("outcomes", store.run_name, a, b, split)
        tasks = await cache_of(request).get(
            key, _VERSION_SECONDS, lambda: versions.outcomes([a, b] if a != b else [], split)
        )
    changed = sorted(tasks.items(), key=lambda item: item[1][b] - item[1][a])
    return render(
        request,
        "compare_versions.html",
        run=store.run_name,
        section="compare",
        published=published,
        split=split,
        a=a,
        b=b,
        summaries=[summary for summary in summaries if summary is not None],
        rows=_ROWS,
        tasks=len(tasks),
        worse=[item for item in changed[:_TASKS] if item[1][b] < item[1][a]],
        better=[item for item in changed[::-1][:_TASKS] if item[1][b] > item[1][a]],
    )


async def _summary(
    request: Request, versions: Versions, run: str, number: int, split: str
) -> VersionSummary | None:
    key = ("version", run, number, split)
    return await cache_of(request).get(key, _VERSION_SECONDS, lambda: versions.summary(number, split))


routes = [Route("/compare", _runs), Route("/runs/{run}/compare", _versions)]
