"""The pages that compare two runs, and two policy versions of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.dashboard.cache import cache_of
from agentrl.dashboard.curves import overlaid
from agentrl.dashboard.failures import BadQueryError, NotFoundError
from agentrl.dashboard.query import whole
from agentrl.dashboard.render import render
from agentrl.dashboard.run_data import TRAIN, read_runs, read_steps
from agentrl.dashboard.stores import open_run
from agentrl.documents.run import RunSettings
from agentrl.store.views.overview import StepPoint
from agentrl.store.views.versions import Versions, VersionSummary

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
    names = [run.name for run in await read_runs(request, _RUNS_SECONDS) if run.problem is None]
    a, b = (request.query_params.get(name, "").strip()[:200] for name in ("a", "b"))
    if not (a and b):
        return render(request, "compare_runs.html", names=names, a=a, b=b, figures=[], rows=[], flags=[])
    if a == b:
        raise BadQueryError(f"both runs are {a!r}: choose two")
    steps: dict[str, list[StepPoint]] = {}
    configurations: dict[str, Sequence[RunSettings]] = {}
    for name in (a, b):
        async with open_run(request, name) as store:
            steps[name] = await read_steps(request, store)
            configurations[name] = await store.settings.resolved()
    figures = overlaid(steps)
    return render(
        request,
        "compare_runs.html",
        charts=bool(figures),
        names=sorted({*names, a, b}),
        a=a,
        b=b,
        figures=figures,
        rows=_ends(steps[a], steps[b]),
        flags=_differences(configurations[a], configurations[b]),
    )


def _ends(a: Sequence[StepPoint], b: Sequence[StepPoint]) -> list[dict[str, Any]]:
    """Return the metrics at the last step of each run, and at the last step that both have."""
    common = min(a[-1].step, b[-1].step) if a and b else 0
    rows = []
    for key, name in _METRICS:
        values = [_mean_until(steps, key, until) for steps in (a, b) for until in (common, 2**31)]
        if any(value is not None for value in values):
            rows.append({"name": name, "values": values, "common": common})
    return rows


def _mean_until(steps: Sequence[StepPoint], key: str, until: int) -> float | None:
    """Return the mean of a metric over the last 5 steps up to ``until``; None without one."""
    values = [step.metrics.get(key) for step in steps if step.step <= until][-_SMOOTHED:]
    known = [value for value in values if isinstance(value, int | float)]
    return sum(known) / len(known) if known else None


def _differences(a: Sequence[RunSettings], b: Sequence[RunSettings]) -> list[tuple[str, str, Any, Any]]:
    """Return (role, flag, value in a, value in b) of each flag with two values."""
    roles = {item.role: item for item in b}
    return [
        (str(item.role), name, value, other.values[name])
        for item in a
        if (other := roles.get(item.role)) is not None
        for name, value in sorted(item.values.items())
        if name in other.values and other.values[name] != value
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
