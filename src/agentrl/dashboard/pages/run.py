"""The page of one run: whether it is healthy, its curves, its processes and its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.dashboard.curves import SMOOTHINGS, curves, evaluation_chart
from agentrl.dashboard.query import choice
from agentrl.dashboard.render import render
from agentrl.dashboard.stores import open_run, reader_of, shared
from agentrl.documents.run import RunSettings
from agentrl.documents.status import SHOWN_STATUSES, RecordStatus, ServiceStatus, TaskStatus
from agentrl.observe.metric_definitions import definition_of
from agentrl.snapshot.findings import findings, mean_of_last, seconds_since_step, state
from agentrl.snapshot.snapshot import TRAIN, RunSnapshot

_EVALUATIONS = 8
_WORKING = (RecordStatus.CREATED, RecordStatus.RUNNING, RecordStatus.COMPLETED, RecordStatus.SCORING)


@shared(1.0)
async def _run(request: Request) -> Response:
    smoothing = choice(request, "smoothing", SMOOTHINGS, "0")
    async with open_run(request) as store:
        run = await reader_of(request, store).read()
    found = findings(run)
    word, color = state(run)
    charts = curves(store.run_name, run.steps, SMOOTHINGS[smoothing])
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
        at=run.at,
        word=word,
        color=color,
        findings=found,
        tiles=_tiles(run),
        step_limit=_step_limit(run),
        figures=charts,
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
            {
                "item": item,
                "score": ((item.results or {}).get("total") or {}).get("score") or {},
                "word": run.state_of(item),
            }
            for item in reversed(run.evaluations[-_EVALUATIONS:])
        ],
        configurations=[_configuration(item) for item in run.configurations],
    )


def _tiles(run: RunSnapshot) -> list[dict[str, Any]]:
    last = run.steps[-1] if run.steps else None
    metrics: Mapping[str, Any] = last.metrics if last else {}
    records, claims = run.records.get(TRAIN, {}), sum(run.liveness.claims.values())
    return [
        {
            "name": "Reward",
            "value": metrics.get("reward"),
            "kind": "number",
            "note": "last step",
            "help": definition_of("reward"),
        },
        {
            "name": "Pass rate",
            "value": metrics.get("pass_rate"),
            "kind": "percent",
            "note": "last step",
            "help": definition_of("pass_rate"),
        },
        {"name": "Step", "value": last.step if last else 0, "kind": "number", "note": _step_limit(run)},
        {"name": "Since the last step", "value": seconds_since_step(run), "kind": "duration", "note": ""},
        {"name": "KL(μ‖π)", "value": mean_of_last(run, "kl_k3"), "kind": "number", "note": "last 5 steps"},
        {
            "name": "Tokens/s",
            "value": mean_of_last(run, "tokens_per_second"),
            "kind": "number",
            "note": "trainer",
        },
        {
            "name": "Samplers",
            "value": len(run.liveness.claims),
            "kind": "number",
            "note": f"hold {claims:,}" if claims else "",
        },
        {"name": "Engines", "value": len(run.liveness.live_engines), "kind": "number", "note": "alive"},
        {
            "name": "Trajectories",
            "value": sum(records.values()),
            "kind": "number",
            "note": f"{sum(records.get(status.value, 0) for status in _WORKING):,} running",
        },
        {"name": "Wait for a score", "value": run.liveness.waiting_for_score, "kind": "number", "note": ""},
    ]


def _step_limit(run: RunSnapshot) -> str:
    limit = run.flag("max_steps")
    return f"of {limit:,}" if isinstance(limit, int) and limit > 0 else ""


def _status_rows(counts: Mapping[str, Mapping[str, int]], statuses: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "split": split,
            "counts": [found.get(status, 0) for status in statuses],
            "total": sum(found.values()),
        }
        for split, found in sorted(counts.items())
    ]


def _configuration(item: RunSettings) -> dict[str, Any]:
    given = [(name, item.values.get(name, "***")) for name in item.given]
    rest = [(name, value) for name, value in sorted(item.values.items()) if name not in item.given]
    return {"item": item, "given": given, "rest": rest, "packages": sorted((item.packages or {}).items())}


routes = [Route("/runs/{run}", _run)]
