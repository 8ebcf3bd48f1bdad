"""The pages of optimizer steps: the list, and one step with its data, histograms and outliers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from agentrl.screens.dashboard.charts import Chart, Series
from agentrl.screens.dashboard.query import PAGE_ROWS, NotFoundError, page_of, skipped
from agentrl.screens.dashboard.render import link, render
from agentrl.screens.dashboard.stores import open_run
from agentrl.screens.views.pipelines import StepRow, TrajectoryRow
from agentrl.screens.views.read import Views

_OUTLIERS = 5
_BINS = 24
_SHOWN = 200
_MAX_DIGITS = 9


async def _steps(request: Request) -> Response:
    skip = skipped(request)
    async with open_run(request) as store:
        steps, total = await Views(store.connection).steps_page(skip=skip, limit=PAGE_ROWS)
    return render(
        request, "steps.html", run=store.run_name, section="steps", live=True, steps=steps,
        page=page_of(request, total),
    )  # fmt: skip


async def _step(request: Request) -> Response:
    text = request.path_params["number"]
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise NotFoundError(f"{text[:80]!r} is not the number of a step")
    async with open_run(request) as store:
        views = Views(store.connection)
        step = await views.step(int(text))
        if step is None:
            raise NotFoundError(f"run {store.run_name!r} has no step {int(text)}")
        parent = await store.ancestry.parent() if step.inherited else None
        if parent is not None and step.step <= parent.step:
            return RedirectResponse(link("runs", parent.run, "steps", str(step.step)))
        rows = await views.trajectories_of(step.id)
    metrics = [item for item in sorted(step.metrics.items()) if not isinstance(item[1], Mapping)]
    figures = [figure for figure in _histograms(step, rows) if not figure.empty]
    return render(
        request, "step.html", run=store.run_name, section="steps", live=True, charts=bool(figures), step=step,
        rows=rows[:_SHOWN], trajectories=len(rows), groups=len({row.task for row in rows}), figures=figures,
        outliers=_outliers(rows, step), metrics=metrics,
    )  # fmt: skip


def _age(row: TrajectoryRow, step: StepRow) -> int | None:
    return None if row.min_version is None else step.policy_version - row.min_version


def _outliers(rows: Sequence[TrajectoryRow], step: StepRow) -> list[dict[str, Any]]:
    """Return lists of the trajectories that stand out, each with the value that makes it do so."""
    kinds: list[tuple[str, str, Callable[[TrajectoryRow], float | int | None], bool]] = [
        ("Lowest score", "score", lambda row: row.score, False),
        ("Highest score", "score", lambda row: row.score, True),
        ("Longest", "generated tokens", lambda row: row.generated_tokens, True),
        ("Largest advantage", "advantage", lambda row: row.advantage, True),
        ("Smallest advantage", "advantage", lambda row: row.advantage, False),
        ("Oldest policy", "versions behind", lambda row: _age(row, step), True),
        ("Most turns", "turns", lambda row: row.turns, True),
    ]
    outliers = []
    for title, unit, value_of, highest in kinds:
        values = [(value, row) for row in rows if (value := value_of(row)) is not None]
        if len({value for value, _ in values}) > 1:
            ranked = sorted(values, key=lambda item: item[0], reverse=highest)[:_OUTLIERS]
            outliers.append({"title": title, "unit": unit, "rows": ranked})
    return outliers


def _histograms(step: StepRow, rows: Sequence[TrajectoryRow]) -> list[Chart]:
    ages = {int(age): count for age, count in step.metrics.get("staleness_histogram", {}).items()}
    shares = {int(version): part for version, part in step.metrics.get("version_fractions", {}).items()}
    return [
        _counted("scores", "Scores of the trained trajectories", "score", [row.score for row in rows]),
        _counted("advantages", "Advantages", "advantage", [row.advantage for row in rows]),
        _counted("lengths", "Generated tokens", "tokens", [row.generated_tokens for row in rows]),
        _counted("turns", "Turns", "turns", [row.turns for row in rows]),
        Chart(
            id="staleness", title="Staleness", kind="bar", x_title="optimizer steps", y_title="tokens",
            help="Age of the trained tokens.",
            series=[Series(name="tokens", x=sorted(ages), y=[ages[age] for age in sorted(ages)])],
        ),
        Chart(
            id="versions", title="Policy versions", kind="bar", x_title="version", y_title="share of tokens",
            help="Which policy wrote the trained tokens.",
            series=[Series(name="share", x=sorted(shares), y=[shares[key] for key in sorted(shares)])],
        ),
    ]  # fmt: skip


def _counted(name: str, title: str, x_title: str, values: Sequence[float | int | None]) -> Chart:
    """Return the histogram of values: one bar per value if there are few, else bins of equal width."""
    known = [value for value in values if value is not None]
    different = sorted(set(known))
    if len(different) <= _BINS:
        counts = Counter(known)
        x: list[float | int] = list(different)
        y = [counts[value] for value in different]
    else:
        low, high = different[0], different[-1]
        width = (high - low) / _BINS
        binned = Counter(min(int((value - low) / width), _BINS - 1) for value in known)
        x = [float(f"{low + (index + 0.5) * width:.4g}") for index in range(_BINS)]
        y = [binned[index] for index in range(_BINS)]
    return Chart(
        id=name, title=title, kind="histogram", x_title=x_title, y_title="trajectories",
        series=[Series(name="trajectories", x=x, y=y)],
    )  # fmt: skip


routes = [Route("/runs/{run}/steps", _steps), Route("/runs/{run}/steps/{number}", _step)]
