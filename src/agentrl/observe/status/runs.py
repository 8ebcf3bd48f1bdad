"""The runs of a database server as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from agentrl.observe.status.run import ACTIVITY_STYLES, amount
from agentrl.observe.terminal import MISSING, age, clean, excerpt, fixed, table
from agentrl.store.views.runs import RunSummary


def render_runs(host: str, runs: Sequence[RunSummary]) -> RenderableType:
    """Return a row per run of the server ``host``, as the caller ordered them."""
    if not runs:
        return Text(f"no run on MongoDB at {host}\n  → agentrl tasks load FILE.jsonl --run_name NAME")
    cells = [
        [
            clean(run.name),
            _state(run),
            run.steps or MISSING,
            fixed(run.reward),
            fixed(run.pass_rate, 2),
            f"{run.trajectories:,}",
            run.samplers,
            run.engines,
            age(run.active_at, run.at),
        ]
        for run in runs
    ]
    columns = ["run", "state", "step", "reward", "pass", "records", "samplers", "engines", "last"]
    return table(f"{len(runs)} runs on MongoDB at {host}", columns, cells, text=2)


def _state(run: RunSummary) -> Text:
    if run.problem is not None:
        return Text(excerpt(run.problem, 60), style="yellow")
    return Text(run.activity, style=ACTIVITY_STYLES[run.activity])


def render_run_list(host: str, runs: Sequence[RunSummary]) -> RenderableType:
    """Return a row per run with its model, size, tags and note, for managing the runs of ``host``."""
    if not runs:
        return render_runs(host, runs)
    cells = [
        [
            clean(run.name),
            _state(run) if run.problem is not None else "live" if run.alive else "ended",
            MISSING if run.model is None else excerpt(run.model, 40),
            f"{run.tasks:,}",
            run.steps or MISSING,
            MISSING if run.bytes is None else amount(run.bytes),
            age(run.active_at, run.at),
            clean(" ".join(run.tags)),
            excerpt(run.note or "", 60),
        ]
        for run in runs
    ]
    columns = ["run", "state", "model", "tasks", "step", "size", "last", "tags", "note"]
    return table(f"{len(runs)} runs on MongoDB at {host}", columns, cells, text=3)
