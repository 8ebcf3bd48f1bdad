"""The pages of all runs, of one, of its optimizer steps; its curves as files; managing it."""

from __future__ import annotations

import csv
import io
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from itertools import pairwise
from typing import Any, NamedTuple, TypeGuard
from urllib.parse import urlencode

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from agentrl.base.processes import user_name
from agentrl.config.run import EngineListConfig
from agentrl.documents.run import RunSettings
from agentrl.documents.status import SHOWN_STATUSES, RecordStatus, ServiceStatus, TaskStatus
from agentrl.errors import ConfigError, RunMissingError, StoreDeniedError, StoreError, StoreUnavailableError
from agentrl.lab.manage_runs import RunAdmin, rename_run
from agentrl.lab.transfer import write_parquet
from agentrl.observe.metric_definitions import definition_of
from agentrl.screens.dashboard.charts import (
    SMOOTHINGS,
    Chart,
    Series,
    curves,
    evaluation_chart,
    flag_changes,
)
from agentrl.screens.dashboard.pages.compare import MAX_RUNS
from agentrl.screens.dashboard.query import (
    PAGE_ROWS,
    BadQueryError,
    NotFoundError,
    checked_query,
    choice,
    give_token,
    page_of,
    posted_form,
    set_cookie,
    skipped,
)
from agentrl.screens.dashboard.render import link, render
from agentrl.screens.dashboard.stores import cache_of, open_run, pool_of, read_runs, reader_of, shared
from agentrl.screens.snapshot import TRAIN, RunSnapshot, findings, mean_of_last, seconds_since_step, state
from agentrl.screens.views.pipelines import StepRow, TrajectoryRow
from agentrl.screens.views.read import Views
from agentrl.store.client import Store
from agentrl.store.run_list import Runs

_RUNS_SECONDS = 2.0
_EVALUATIONS = 8
_WORKING = (RecordStatus.CREATED, RecordStatus.RUNNING, RecordStatus.COMPLETED, RecordStatus.SCORING)


@shared
async def _run(request: Request) -> Response:
    smoothing = choice(request.query_params, "smoothing", SMOOTHINGS, "0")
    async with open_run(request) as store:
        run = await reader_of(request, store).read()
    wrong = findings(run)
    word, color = state(run)
    changes = flag_changes(run.steps, run.starts)
    charts = curves(store.run_name, run.steps, SMOOTHINGS[smoothing], changes)
    evaluated = evaluation_chart(run.evaluations)
    if not evaluated.empty:
        charts.insert(1, evaluated)
    return render(
        request,
        "run.html",
        run=store.run_name,
        section="",
        live=True,
        charts=bool(charts),
        data=run,
        family=_family(run),
        at=run.at,
        word=word,
        color=color,
        findings=wrong,
        tiles=_tiles(run),
        step_limit=_step_limit(run),
        figures=charts,
        changes=changes,
        smoothing=smoothing,
        smoothings=SMOOTHINGS,
        task_rows=_status_rows(run.tasks_by_split, [str(status) for status in TaskStatus]),
        task_statuses=[str(status) for status in TaskStatus],
        record_rows=_status_rows(run.records, SHOWN_STATUSES),
        record_statuses=SHOWN_STATUSES,
        engines=[
            {"row": engine, "word": str(engine.status) if alive else "silent", "alive": alive}
            for engine in run.engines
            if engine.status is not ServiceStatus.STOPPED
            for alive in [run.is_alive(engine)]
        ],
        evaluations=[
            {"item": item, "score": item.total.get("score") or {}, "word": run.state_of(item)}
            for item in reversed(run.evaluations[-_EVALUATIONS:])
        ],
        configurations=[_configuration(item) for item in run.configurations],
    )


def _family(run: RunSnapshot) -> str:
    """Return the query of the page that compares the run with its parent and its children."""
    relatives = ([] if run.parent is None else [run.parent.run]) + [child.run for child in run.children]
    return urlencode([("run", name) for name in [run.run_name, *relatives][:MAX_RUNS]])


class _Tile(NamedTuple):
    """One number at the top of the page; ``kind`` is the filter that shows it."""

    name: str
    value: Any
    note: str = ""
    kind: str = "number"
    help: str = ""


def _tiles(run: RunSnapshot) -> list[_Tile]:
    last = run.steps[-1] if run.steps else None
    metrics: Mapping[str, Any] = last.metrics if last else {}
    records, claims = run.records.get(TRAIN, {}), sum(run.liveness.claims.values())
    holders = (f"hold {claims:,}" if claims else "", run.liveness.ending)
    running = sum(records.get(status.value, 0) for status in _WORKING)
    pass_rate = metrics.get("pass_rate")
    return [
        _Tile("Reward", metrics.get("reward"), "last step", help=definition_of("reward")),
        _Tile("Pass rate", pass_rate, "last step", kind="percent", help=definition_of("pass_rate")),
        _Tile("Step", last.step if last else 0, _step_limit(run)),
        _Tile("Since the last step", seconds_since_step(run), kind="duration"),
        _Tile("KL(μ‖π)", mean_of_last(run.steps, "kl_k3"), "last 5 steps"),
        _Tile("Tokens/s", mean_of_last(run.steps, "tokens_per_second"), "trainer"),
        _Tile("Samplers", len(run.liveness.samplers), ", ".join(filter(None, holders))),
        _Tile("Engines", len(run.liveness.live_engines), "alive"),
        _Tile("Trajectories", sum(records.values()), f"{running:,} running"),
        _Tile("Wait for a score", run.liveness.waiting_for_score),
    ]


def _step_limit(run: RunSnapshot) -> str:
    limit = run.flag("max_steps")
    return f"of {limit:,}" if isinstance(limit, int) and limit > 0 else ""


def _status_rows(counts: Mapping[str, Mapping[str, int]], statuses: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "split": split,
            "counts": [by_status.get(status, 0) for status in statuses],
            "total": sum(by_status.values()),
        }
        for split, by_status in sorted(counts.items())
    ]


def _configuration(item: RunSettings) -> dict[str, Any]:
    rest = [(name, value) for name, value in sorted(item.values.items()) if name not in item.given]
    packages = sorted((item.packages or {}).items())
    return {"item": item, "given": item.given_values, "rest": rest, "packages": packages}


@shared
async def _runs(request: Request) -> Response:
    runs = await read_runs(request, _RUNS_SECONDS)
    return render(request, "runs.html", live=True, runs=runs, alive=sum(run.alive for run in runs))


def rows_of(steps: Sequence[StepRow]) -> list[dict[str, Any]]:
    """Return a row per step with equal keys: its number, time, trajectories, and each metric as a float.

    A metric that a step does not have is None. Metrics with keys of their own are left out.
    """
    names = sorted({name for step in steps for name, value in step.metrics.items() if _is_number(value)})
    return [
        {
            "step": step.step,
            "committed_at": None if step.committed_at is None else step.committed_at.isoformat(),
            "policy_version": step.policy_version,
            "trajectories": step.trajectories,
            **{name: float(value) if _is_number(value := step.metrics.get(name)) else None for name in names},
        }
        for step in steps
    ]


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


async def _csv(request: Request) -> Response:
    async with open_run(request) as store:
        rows = rows_of(await reader_of(request, store).steps())
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else ["step"])
    writer.writeheader()
    writer.writerows(rows)
    return _file(text.getvalue().encode(), "text/csv; charset=utf-8", f"{store.run_name}.csv")


async def _parquet(request: Request) -> Response:
    async with open_run(request) as store:
        rows = rows_of(await reader_of(request, store).steps())
    content = io.BytesIO()
    try:
        await run_in_threadpool(write_parquet, rows, content)
    except ConfigError as error:
        raise HTTPException(HTTPStatus.NOT_IMPLEMENTED, f"{error.message}: {error.hint}") from error
    return _file(content.getvalue(), "application/vnd.apache.parquet", f"{store.run_name}.parquet")


def _file(content: bytes, media_type: str, name: str) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="{name}"', "Cache-Control": "no-store"}
    return Response(content, media_type=media_type, headers=headers)


_ALIVE_SECONDS = EngineListConfig().alive_seconds


async def _manage(request: Request) -> Response:
    async with open_run(request) as store:
        admin = RunAdmin(store.connection)
        remarks = await admin.remarks()
        holders = await Runs(store.connection).holders(store.run_name, _ALIVE_SECONDS)
        samplers = await store.samplers.all()
        try:
            folder, why_not = await admin.output_folder(), None
        except ConfigError as error:
            folder, why_not = None, error.message
    token, cookie = give_token(request)
    response = render(
        request, "manage.html", run=store.run_name, section="", csrf=token, remarks=remarks, holders=holders,
        samplers=samplers, folder=folder, why_not=why_not,
    )  # fmt: skip
    set_cookie(request, response, cookie)
    return response


async def _change(request: Request) -> Response:
    form = await posted_form(request)
    action = choice(form, "action", ("describe", "drain", "rename", "delete"), "describe")
    name = request.path_params["run"]
    with checked_query(), _conflicts():
        if action == "rename":
            new = form.get("new_name", "").strip()
            await rename_run(replace(pool_of(request).run, run_name=name), new, _ALIVE_SECONDS)
            await pool_of(request).forget(name)
            target = link("runs", new)
        elif action == "delete":
            async with open_run(request) as store:
                await _delete(store, form)
            await pool_of(request).forget(name)
            target = link()
        elif action == "drain":
            async with open_run(request) as store:
                await _drain(store, form.get("sampler", ""))
            target = link("runs", name, "manage")
        else:
            async with open_run(request) as store:
                await _describe(store, form)
            target = link("runs", name)
    cache_of(request).clear()
    return RedirectResponse(target, HTTPStatus.SEE_OTHER)


async def _describe(store: Store, form: Mapping[str, str]) -> None:
    """Give the run the tags and the note of the form. Raises ConfigError."""
    admin, wanted = RunAdmin(store.connection), set(form.get("tags", "").replace(",", " ").split())
    tags = set((await admin.remarks()).tags)
    await admin.tag(wanted - tags, tags - wanted)
    await admin.note(form.get("note", ""))


async def _drain(store: Store, sampler: str) -> None:
    """Ask a sampler to drain. Raises StoreError if it has ended."""
    by = f"{user_name()} on {socket.gethostname()}, by the dashboard"
    if not await store.samplers.ask_to_drain(sampler, by):
        raise StoreError(f"no sampler {sampler[:200]!r} is running", hint="load the page again")


async def _delete(store: Store, form: Mapping[str, str]) -> None:
    """Delete the run whose name the form repeats."""
    if form.get("name", "") != store.run_name:
        raise BadQueryError(f"to delete run {store.run_name!r}, write its name into the field")
    admin = RunAdmin(store.connection)
    await admin.require_ended(_ALIVE_SECONDS)
    await admin.delete(await admin.output_folder() if form.get("folder") else None, _ALIVE_SECONDS)


@contextmanager
def _conflicts() -> Iterator[None]:
    """Answer 409 where the state of a run forbids a change: it is live, or the name is taken."""
    try:
        yield
    except (RunMissingError, StoreDeniedError, StoreUnavailableError):
        raise
    except StoreError as error:
        raise HTTPException(HTTPStatus.CONFLICT, f"{error.message}: {error.hint}") from error


_OUTLIERS = 5
_BINS = 24
_THINNEST = 100
"""Bars side by side in the width of a histogram of single values; thinner ones would be hard to see."""
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
        histogram("scores", "Scores of the trained trajectories", "score", [row.score for row in rows]),
        histogram("advantages", "Advantages", "advantage", [row.advantage for row in rows]),
        histogram("lengths", "Generated tokens", "tokens", [row.generated_tokens for row in rows]),
        histogram("turns", "Turns", "turns", [row.turns for row in rows]),
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


def histogram(name: str, title: str, x_title: str, values: Sequence[float | int | None]) -> Chart:
    """Return the histogram of values: a bar per value if they are few and apart, else bins of equal width."""
    known = [value for value in values if value is not None]
    different = sorted(set(known))
    gaps = [high - low for low, high in pairwise(different)]
    if len(different) <= _BINS and sum(gaps) <= _THINNEST * min(gaps, default=0):
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


routes = [
    Route("/", _runs),
    Route("/runs/{run}", _run),
    Route("/runs/{run}/curves.csv", _csv),
    Route("/runs/{run}/curves.parquet", _parquet),
    Route("/runs/{run}/manage", _manage),
    Route("/runs/{run}/manage", _change, methods=["POST"]),
    Route("/runs/{run}/steps", _steps),
    Route("/runs/{run}/steps/{number}", _step),
]
