"""Download the curves of a run: every number of its committed steps, as CSV or Parquet."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, TypeGuard

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.dashboard.stores import open_run, reader_of
from agentrl.errors import ConfigError
from agentrl.store.admin.dataset import write_parquet
from agentrl.store.views.rows import StepRow


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


routes = [Route("/runs/{run}/curves.csv", _csv), Route("/runs/{run}/curves.parquet", _parquet)]
