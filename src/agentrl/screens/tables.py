"""Show a run as tables, also as JSON: what is wrong, counts, data, processes, versions, steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agentrl.documents.run import Evaluation
from agentrl.documents.status import SHOWN_STATUSES, DataStatus, ServiceStatus, TaskStatus
from agentrl.observe.progress import metric_text
from agentrl.observe.terminal import MISSING, age, excerpt, fixed, table, table_of, to_json
from agentrl.screens.findings import findings
from agentrl.screens.snapshot import RunSnapshot
from agentrl.screens.status_screen import common_json
from agentrl.screens.views.counts import RunDetails

LAST_EVALUATIONS = 5
_STYLES = {"bad": "red", "warn": "yellow"}
_STEP_METRICS = {
    "reward": ("reward", ".3f"),
    "pass": ("pass_rate", ".2f"),
    "abandoned": ("abandoned_fraction", ".2f"),
    "loss": ("loss", "+.2e"),
    "KL(μ‖π)": ("kl_k3", ".1e"),
    "stale": ("staleness_mean", ".2f"),
    "trajectories": ("trajectories", ".0f"),
    "trained tokens": ("trainable_tokens", ",.0f"),
    "tok/s": ("tokens_per_second", ",.0f"),
}


def render_tables(run: RunSnapshot, details: RunDetails) -> RenderableType:
    """Return the tables that have rows."""
    title = Text(f"run {run.run_name}, {run.at:%Y-%m-%d %H:%M:%S} UTC", style="bold")
    if run.liveness.waiting_for_score:
        waiting = f"\n{run.liveness.waiting_for_score} sampled trajectories wait for a score"
        title.append(waiting, style="yellow")
    tables = chain(
        _wrong(run), _configuration(run), _sampling(run, details), _data(details), _processes(run),
        _training(run, details),
    )  # fmt: skip
    return Group(title, *(built for built in tables if built.row_count))


def _wrong(run: RunSnapshot) -> Iterator[Table]:
    """Yield what is wrong, and what samplers find or found down: they claim nothing that needs row."""
    yield table_of(
        "What is wrong", findings(run),
        ("what", lambda row: Text(excerpt(row.what, 400), style=_STYLES[row.severity])),
        ("what to do", lambda row: row.hint),
        text=2,
    )  # fmt: skip
    yield table_of(
        "Down now", run.liveness.outages,
        ("what", lambda row: Text(row.dependency, style="red")),
        ("since", lambda row: age(row.began_at, run.at)),
        ("calls held", lambda row: row.held),
        ("last error", lambda row: excerpt(row.why, 120)),
        ("seen by", lambda row: excerpt(row.by, 60)),
        text=3,
    )  # fmt: skip
    yield table_of(
        "Was down", run.past_outages,
        ("what", lambda row: row.dependency),
        ("since (UTC)", lambda row: f"{row.began_at:%H:%M:%S}"),
        ("until", lambda row: f"{row.ended_at:%H:%M:%S}"),
        ("ended", lambda row: age(row.ended_at, run.at)),
        ("last error", lambda row: excerpt(row.why, 120)),
        ("seen by", lambda row: excerpt(row.by, 60)),
        text=4,
    )  # fmt: skip


def _configuration(run: RunSnapshot) -> Iterator[Table]:
    """Yield the settings, and the flags that each role was given; the database has the others too."""
    yield table_of(
        "Begun with", run.settings,
        ("concern", lambda row: row.id),
        ("settings", lambda row: excerpt(_named(row.values.items()), 400)),
        ("by", lambda row: excerpt(row.by, 60)),
        ("when", lambda row: age(row.at, run.at)),
        text=3,
    )  # fmt: skip
    yield table_of(
        "Configuration", run.configurations,
        ("role", lambda row: row.role),
        ("flags given", lambda row: excerpt(_named(row.given_values), 400)),
        ("packages", lambda row: excerpt(_named((row.packages or {}).items()), 200)),
        ("by", lambda row: excerpt(row.by, 60)),
        ("when", lambda row: age(row.at, run.at)),
        text=4,
    )  # fmt: skip


def _named(values: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values)


def _sampling(run: RunSnapshot, details: RunDetails) -> Iterator[Table]:
    tasks = {f"{split}, epoch {epoch}": counts for (split, epoch), counts in run.tasks.items()}
    yield _statuses("Tasks", tasks, [str(status) for status in TaskStatus])
    yield _statuses("Records", run.records, SHOWN_STATUSES)
    yield table_of(
        "Failed attempts", run.failures,
        ("kind", lambda row: row.kind),
        ("count", lambda row: row.count),
        ("newest message", lambda row: excerpt(row.message, 90)),
    )  # fmt: skip
    yield table_of(
        "Training groups", details.groups,
        ("begun by", lambda row: row.by),
        ("groups", lambda row: row.groups),
        ("abandoned", lambda row: row.abandoned_groups),
        ("share", lambda row: _share(row.abandoned_groups, row.groups)),
        ("trajectories", lambda row: row.trajectories),
        ("abandoned", lambda row: row.trajectories - row.trained),
        ("share", lambda row: _share(row.trajectories - row.trained, row.trajectories)),
        ("pass rate", lambda row: fixed(row.pass_rate, 2)),
    )  # fmt: skip
    yield table_of(
        "Environments", details.environments,
        ("split", lambda row: excerpt(row.split, 40)),
        ("environment", lambda row: excerpt(row.environment, 40)),
        ("tasks", lambda row: row.tasks),
        ("finalized", lambda row: row.finalized),
        ("scored", lambda row: row.trajectories),
        ("mean score", lambda row: fixed(row.score)),
        ("pass rate", lambda row: fixed(row.pass_rate, 2)),
        text=2,
    )  # fmt: skip
    yield table_of(
        "Evaluations, newest first (agentrl eval report lists all)",
        run.evaluations[: -LAST_EVALUATIONS - 1 : -1],
        ("evaluation", lambda row: excerpt(row.id, 40)),
        ("policy", _policy),
        ("step", lambda row: MISSING if row.step is None else row.step),
        ("status", run.state_of),
        ("tasks of", lambda row: excerpt(row.file, 40)),
        ("samples", lambda row: row.samples),
        ("scored", lambda row: row.total.get("scored", MISSING)),
        ("failed", lambda row: row.total.get("failed", MISSING)),
        ("score", lambda row: _interval(row.total.get("score"))),
        ("pass@1", lambda row: _interval((row.total.get("pass_at") or {}).get("1"))),
        ("when", lambda row: age(row.finished_at or row.seen_at, run.at)),
        text=5,
    )  # fmt: skip


def _policy(item: Evaluation) -> str:
    return excerpt(item.model or MISSING, 40) if item.version is None else f"version {item.version}"


def _statuses(title: str, counts: Mapping[str, Mapping[str, int]], statuses: Sequence[str]) -> Table:
    rows = [
        [name, *(by_status.get(status, 0) or MISSING for status in statuses), sum(by_status.values())]
        for name, by_status in sorted(counts.items())
    ]
    return table(title, ["split", *statuses, "all"], rows)


def _share(part: int, whole: int) -> str:
    return fixed(part / whole if whole else None, 2)


def _interval(value: Mapping[str, float] | None) -> str:
    """Return a mean with its 95 % interval."""
    if value is None or value.get("value") is None:
        return MISSING
    if value.get("low") is None or value.get("high") is None:
        return fixed(value["value"])
    return f"{value['value']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


def _data(details: RunDetails) -> Iterator[Table]:
    order = [str(status) for status in DataStatus]
    yield table_of(
        "Training data", sorted(details.data, key=lambda row: order.index(row.status)),
        ("status", lambda row: row.status),
        ("trajectories", lambda row: row.count),
        ("tokens", lambda row: f"{row.tokens:,}"),
        ("trainable tokens", lambda row: f"{row.trainable_tokens:,}"),
        ("why", lambda row: excerpt(row.because or "", 120)),
    )  # fmt: skip
    yield table_of(
        "Length bias (generated tokens of scored trajectories)", details.lengths,
        ("split", lambda row: row.split),
        ("sampled", lambda row: row.sampled),
        ("tokens each", lambda row: fixed(row.sampled_tokens, 1)),
        ("trained", lambda row: row.trained),
        ("tokens each", lambda row: fixed(row.trained_tokens, 1)),
        ("trained / sampled", lambda row: fixed(row.ratio, 2)),
    )  # fmt: skip
    yield table_of(
        "Prefix cache (prompts of all model calls)", details.prompts,
        ("split", lambda row: row.split),
        ("tokens", lambda row: f"{row.tokens:,}"),
        ("cached by engines", lambda row: f"{row.cached:,}"),
        ("hit rate", lambda row: fixed(row.cache_hit_rate, 2)),
    )  # fmt: skip


def _processes(run: RunSnapshot) -> Iterator[Table]:
    yield table_of(
        "Samplers that hold claims (split train)", run.liveness.claims.items(),
        ("sampler", lambda row: excerpt(row[0], 60)),
        ("claims", lambda row: row[1]),
    )  # fmt: skip
    dead = Text("dead", style="red")
    yield table_of(
        "Engines", [engine for engine in run.engines if engine.status is not ServiceStatus.STOPPED],
        ("url", lambda row: row.url),
        ("engine", lambda row: row.engine),
        ("status", lambda row: Text(row.status, style="green") if run.is_alive(row) else dead),
        ("version", lambda row: MISSING if row.policy_version is None else row.policy_version),
        ("running", lambda row: row.running_requests),
        ("tokens/s", lambda row: fixed(row.tokens_per_second, 1)),
        ("prompt cached", lambda row: fixed(row.prefix_cache_hit_rate, 2)),
        ("heartbeat", lambda row: age(row.heartbeat, run.at)),
        ("detail", lambda row: excerpt(row.detail or "", 60)),
        text=3,
    )  # fmt: skip


def _training(run: RunSnapshot, details: RunDetails) -> Iterator[Table]:
    yield table_of(
        "Policy versions", details.versions,
        ("version", lambda row: row.id),
        ("step", lambda row: row.step),
        ("status", lambda row: row.status),
        ("published", lambda row: age(row.published_at, run.at)),
        ("location", lambda row: row.location),
        text=0,
    )  # fmt: skip
    rows = [
        [
            step.step,
            step.status,
            step.policy_version,
            *(metric_text(step.metrics, key, form) for key, form in _STEP_METRICS.values()),
            age(step.committed_at or step.planned_at, run.at),
        ]
        for step in details.steps
    ]
    yield table("Last steps", ["step", "status", "from version", *_STEP_METRICS, "when"], rows, text=0)


def tables_json(run: RunSnapshot, details: RunDetails) -> dict[str, Any]:
    """Return the value of ``agentrl audit run``: the rows of its tables."""
    return {
        **common_json(run),
        **to_json(details),
        "tasks": {f"{split}, epoch {epoch}": counts for (split, epoch), counts in run.tasks.items()},
        "records": to_json(run.records),
        "past_outages": to_json(run.past_outages),
        "waiting_for_score": run.liveness.waiting_for_score,
        "engines": to_json(run.engines),
        "settings": to_json(run.settings),
        "configurations": to_json(run.configurations),
        "evaluations": to_json(run.evaluations[: -LAST_EVALUATIONS - 1 : -1]),
    }
