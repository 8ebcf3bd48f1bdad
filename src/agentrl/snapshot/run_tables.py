"""Show a run as tables: what is wrong, processes, counts, training data, versions, steps, evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agentrl.documents.evaluation import Evaluation
from agentrl.documents.status import SHOWN_STATUSES, DataStatus, ServiceStatus, TaskStatus
from agentrl.observe.live import number
from agentrl.observe.terminal import MISSING, age, excerpt, fixed, table
from agentrl.snapshot.findings import findings
from agentrl.snapshot.snapshot import Details, RunSnapshot

LAST_EVALUATIONS = 5
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


def render_tables(run: RunSnapshot, details: Details) -> RenderableType:
    """Return the tables that have rows."""
    tasks = {f"{split}, epoch {epoch}": counts for (split, epoch), counts in run.tasks.items()}
    tables = [
        _finding_table(run),
        _outage_table(run),
        _past_outage_table(run),
        _settings_table(run),
        _configuration_table(run),
        _status_table("Tasks", "split", tasks, [str(status) for status in TaskStatus]),
        _status_table("Records", "split", run.records, SHOWN_STATUSES),
        _failure_table(run),
        _group_table(details),
        _environment_table(details),
        _evaluation_table(run),
        _data_table(details),
        _length_table(details),
        _prompt_table(details),
        _sampler_table(run),
        _engine_table(run),
        _version_table(run, details),
        _step_table(run, details),
    ]
    title = Text(f"run {run.run_name}, {run.at:%Y-%m-%d %H:%M:%S} UTC", style="bold")
    if run.liveness.waiting_for_score:
        waiting = f"\n{run.liveness.waiting_for_score} sampled trajectories wait for a score"
        title.append(waiting, style="yellow")
    return Group(title, *(built for built in tables if built.row_count))


def _finding_table(run: RunSnapshot) -> Table:
    rows = [
        [Text(excerpt(item.what, 400), style="red" if item.severity == "bad" else "yellow"), item.hint]
        for item in findings(run)
    ]
    return table("What is wrong", ["what", "what to do"], rows, text=2)


def _outage_table(run: RunSnapshot) -> Table:
    """Return what samplers find down: they hold what needs it, and claim nothing that does."""
    rows = [
        [
            Text(item.dependency, style="red"),
            age(item.began_at, run.at),
            item.held,
            excerpt(item.why, 120),
            excerpt(item.by, 60),
        ]
        for item in run.liveness.outages
    ]
    return table("Down now", ["what", "since", "calls held", "last error", "seen by"], rows, text=3)


def _past_outage_table(run: RunSnapshot) -> Table:
    rows = [
        [
            item.dependency,
            f"{item.began_at:%H:%M:%S}",
            f"{item.ended_at:%H:%M:%S}",
            age(item.ended_at, run.at),
            excerpt(item.why, 120),
            excerpt(item.by, 60),
        ]
        for item in run.past_outages
        if item.ended_at is not None
    ]
    columns = ["what", "since (UTC)", "until", "ended", "last error", "seen by"]
    return table("Was down", columns, rows, text=4)


def _settings_table(run: RunSnapshot) -> Table:
    rows = [
        [
            fact.id,
            excerpt(", ".join(f"{name} {value}" for name, value in fact.values.items()), 400),
            excerpt(fact.by, 60),
            age(fact.at, run.at),
        ]
        for fact in run.settings
    ]
    return table("Begun with", ["concern", "settings", "by", "when"], rows, text=3)


def _configuration_table(run: RunSnapshot) -> Table:
    """Return the flags that each role was given; the stored configuration has the others too."""
    rows = [
        [
            item.role,
            excerpt(", ".join(f"{name} {value}" for name, value in item.given_values), 400),
            excerpt(", ".join(f"{name} {version}" for name, version in (item.packages or {}).items()), 200),
            excerpt(item.by, 60),
            age(item.at, run.at),
        ]
        for item in run.configurations
    ]
    return table("Configuration", ["role", "flags given", "packages", "by", "when"], rows, text=4)


def _status_table(
    title: str, key: str, counts: Mapping[str, Mapping[str, int]], states: Sequence[str]
) -> Table:
    rows = [
        [name, *(by_status.get(status, 0) or MISSING for status in states), sum(by_status.values())]
        for name, by_status in sorted(counts.items())
    ]
    return table(title, [key, *states, "all"], rows)


def _failure_table(run: RunSnapshot) -> Table:
    rows = [[failure.kind, failure.count, excerpt(failure.message, 90)] for failure in run.failures]
    return table("Failed attempts", ["kind", "count", "newest message"], rows)


def _group_table(details: Details) -> Table:
    rows = [
        [
            item.by,
            item.groups,
            item.abandoned_groups,
            fixed(item.abandoned_groups / item.groups, 2),
            item.trajectories,
            item.trajectories - item.trained,
            fixed((item.trajectories - item.trained) / item.trajectories if item.trajectories else None, 2),
            fixed(item.pass_rate, 2),
        ]
        for item in details.groups
    ]
    columns = ["begun by", "groups", "abandoned", "share", "trajectories", "abandoned", "share", "pass rate"]
    return table("Training groups", columns, rows)


def _data_table(details: Details) -> Table:
    order = [str(status) for status in DataStatus]
    rows = [
        [
            data.status,
            data.count,
            f"{data.tokens:,}",
            f"{data.trainable_tokens:,}",
            excerpt(data.because or "", 120),
        ]
        for data in sorted(details.data, key=lambda data: order.index(data.status))
    ]
    return table("Training data", ["status", "trajectories", "tokens", "trainable tokens", "why"], rows)


def _length_table(details: Details) -> Table:
    rows = [
        [
            item.split,
            item.sampled,
            fixed(item.sampled_tokens, 1),
            item.trained,
            fixed(item.trained_tokens, 1),
            fixed(item.ratio, 2),
        ]
        for item in details.lengths
    ]
    columns = ["split", "sampled", "tokens each", "trained", "tokens each", "trained / sampled"]
    return table("Length bias (generated tokens of scored trajectories)", columns, rows)


def _prompt_table(details: Details) -> Table:
    rows = [
        [item.split, f"{item.tokens:,}", f"{item.cached:,}", fixed(item.cache_hit_rate, 2)]
        for item in details.prompts
    ]
    columns = ["split", "tokens", "cached by engines", "hit rate"]
    return table("Prefix cache (prompts of all model calls)", columns, rows)


def _sampler_table(run: RunSnapshot) -> Table:
    rows = [[excerpt(name, 60), claims] for name, claims in run.liveness.claims.items()]
    return table("Samplers that hold claims (split train)", ["sampler", "claims"], rows)


def _engine_table(run: RunSnapshot) -> Table:
    rows = []
    for engine in run.engines:
        if engine.status is ServiceStatus.STOPPED:
            continue
        rows.append(
            [
                engine.url,
                engine.engine,
                Text(str(engine.status), style="green")
                if run.is_alive(engine)
                else Text("dead", style="red"),
                MISSING if engine.policy_version is None else engine.policy_version,
                engine.running_requests,
                fixed(engine.tokens_per_second, 1),
                fixed(engine.prefix_cache_hit_rate, 2),
                age(engine.heartbeat, run.at),
                excerpt(engine.detail or "", 60),
            ]
        )
    columns = [
        "url",
        "engine",
        "status",
        "version",
        "running",
        "tokens/s",
        "prompt cached",
        "heartbeat",
        "detail",
    ]
    return table("Engines", columns, rows, text=3)


def _version_table(run: RunSnapshot, details: Details) -> Table:
    rows = [
        [version.id, version.step, version.status, age(version.published_at, run.at), version.location]
        for version in details.versions
    ]
    return table("Policy versions", ["version", "step", "status", "published", "location"], rows, text=0)


def _step_table(run: RunSnapshot, details: Details) -> Table:
    rows = [
        [
            step.step,
            step.status,
            step.policy_version,
            *(number(step.metrics, key, form) for key, form in _STEP_METRICS.values()),
            age(step.committed_at or step.planned_at, run.at),
        ]
        for step in details.steps
    ]
    return table("Last steps", ["step", "status", "from version", *_STEP_METRICS, "when"], rows, text=0)


def _environment_table(details: Details) -> Table:
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
        for item in details.environments
    ]
    columns = ["split", "environment", "tasks", "finalized", "scored", "mean score", "pass rate"]
    return table("Environments", columns, rows, text=2)


def _evaluation_table(run: RunSnapshot) -> Table:
    """Return the newest evaluations with their scores and 95 % intervals."""
    rows = []
    for item in run.evaluations[: -LAST_EVALUATIONS - 1 : -1]:
        total: Mapping[str, Any] = item.total
        rows.append(
            [
                excerpt(item.id, 40),
                _policy(item),
                MISSING if item.step is None else item.step,
                run.state_of(item),
                excerpt(item.file, 40),
                item.samples,
                total.get("scored", MISSING),
                total.get("failed", MISSING),
                _interval(total.get("score")),
                _interval((total.get("pass_at") or {}).get("1")),
                age(item.finished_at or item.seen_at, run.at),
            ]
        )
    columns = [
        "evaluation", "policy", "step", "status", "tasks of", "samples", "scored", "failed", "score",
        "pass@1", "when",
    ]  # fmt: skip
    return table("Evaluations, newest first (agentrl eval report lists all)", columns, rows, text=5)


def _policy(item: Evaluation) -> str:
    return excerpt(item.model or MISSING, 40) if item.version is None else f"version {item.version}"


def _interval(value: Mapping[str, float] | None) -> str:
    if value is None or value.get("value") is None:
        return MISSING
    if value.get("low") is None or value.get("high") is None:
        return fixed(value["value"])
    return f"{value['value']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"
