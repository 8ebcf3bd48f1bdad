"""Environments and evaluations of a run as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from agentrl.documents.evaluation import Evaluation
from agentrl.documents.status import EvaluationStatus
from agentrl.observe.terminal import MISSING, age, excerpt, fixed, table
from agentrl.store.evaluations import SEEN_SECONDS
from agentrl.store.views.read import RunState


def environment_table(state: RunState) -> Table:
    """Return how far the tasks of each environment are, and their scores."""
    rows = [
        [
            excerpt(item.split, 40),
            excerpt(item.environment, 40),
            item.tasks,
            item.finalized,
            item.trajectories,
            fixed(item.score),
            fixed(item.pass_rate, 2),
        ]
        for item in state.environments
    ]
    columns = ["split", "environment", "tasks", "finalized", "scored", "mean score", "pass rate"]
    return table("Environments", columns, rows, text=2)


def evaluation_table(state: RunState) -> Table:
    """Return the newest evaluations with their scores and 95 % intervals."""
    rows = []
    for item in state.evaluations:
        total: Mapping[str, Any] = (item.results or {}).get("total") or {}
        rows.append(
            [
                excerpt(item.id, 40),
                _policy(item),
                MISSING if item.step is None else item.step,
                _status(item, state),
                excerpt(item.file, 40),
                item.samples,
                total.get("scored", MISSING),
                total.get("failed", MISSING),
                _interval(total.get("score")),
                _interval((total.get("pass_at") or {}).get("1")),
                age(item.finished_at or item.seen_at, state.at),
            ]
        )
    columns = [
        "evaluation", "policy", "step", "status", "tasks of", "samples", "scored", "failed", "score",
        "pass@1", "when",
    ]  # fmt: skip
    return table("Evaluations, newest first (agentrl eval report lists all)", columns, rows, text=5)


def _policy(item: Evaluation) -> str:
    return excerpt(item.model or MISSING, 40) if item.version is None else f"version {item.version}"


def _status(item: Evaluation, state: RunState) -> str:
    is_lost = (state.at - item.seen_at).total_seconds() > SEEN_SECONDS
    if item.status is EvaluationStatus.RUNNING and is_lost:
        return "lost: its process is silent"
    return str(item.status)


def _interval(value: Mapping[str, float] | None) -> str:
    if value is None or value.get("value") is None:
        return MISSING
    if value.get("low") is None or value.get("high") is None:
        return fixed(value["value"])
    return f"{value['value']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"
