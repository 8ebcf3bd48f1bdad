"""The state of a run as tables: tasks, records, failures, training data, engines, versions, steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agentrl.documents.status import SHOWN_STATUSES, DataStatus, ServiceStatus, TaskStatus
from agentrl.observe.audit.evaluations import environment_table, evaluation_table
from agentrl.observe.live import number
from agentrl.observe.terminal import MISSING, age, excerpt, fixed, table
from agentrl.store.views.read import RunState

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


def render_state(state: RunState, *, alive_seconds: float) -> RenderableType:
    """Return the tables that have rows; an engine is dead without a heartbeat for ``alive_seconds``."""
    tables = [
        _outage_table(state),
        _past_outage_table(state),
        _settings_table(state),
        _configuration_table(state),
        _status_table("Tasks", "split", state.tasks, [str(status) for status in TaskStatus]),
        _status_table("Records", "split", state.records, SHOWN_STATUSES),
        _failure_table(state),
        _group_table(state),
        environment_table(state),
        evaluation_table(state),
        _data_table(state),
        _length_table(state),
        _prompt_table(state),
        _sampler_table(state),
        _engine_table(state, alive_seconds),
        _version_table(state),
        _step_table(state),
    ]
    title = Text(f"run {state.run_name}, {state.at:%Y-%m-%d %H:%M:%S} UTC", style="bold")
    if state.waiting_for_score:
        title.append(f"\n{state.waiting_for_score} sampled trajectories wait for a score", style="yellow")
    return Group(title, *(built for built in tables if built.row_count))


def _outage_table(state: RunState) -> Table:
    """Return what samplers find down: they hold what needs it, and claim nothing that does."""
    rows = [
        [
            Text(item.dependency, style="red"),
            age(item.began_at, state.at),
            item.held,
            excerpt(item.why, 120),
            excerpt(item.by, 60),
        ]
        for item in state.outages
    ]
    return table("Down now", ["what", "since", "calls held", "last error", "seen by"], rows, text=3)


def _past_outage_table(state: RunState) -> Table:
    rows = [
        [
            item.dependency,
            f"{item.began_at:%H:%M:%S}",
            f"{item.ended_at:%H:%M:%S}",
            age(item.ended_at, state.at),
            excerpt(item.why, 120),
            excerpt(item.by, 60),
        ]
        for item in state.past_outages
        if item.ended_at is not None
    ]
    columns = ["what", "since (UTC)", "until", "ended", "last error", "seen by"]
    return table("Was down", columns, rows, text=4)


def _settings_table(state: RunState) -> Table:
    rows = [
        [
            fact.id,
            excerpt(", ".join(f"{name} {value}" for name, value in fact.values.items()), 400),
            excerpt(fact.by, 60),
            age(fact.at, state.at),
        ]
        for fact in state.settings
    ]
    return table("Begun with", ["concern", "settings", "by", "when"], rows, text=3)


def _configuration_table(state: RunState) -> Table:
    """Return the flags that each role was given; the stored configuration has the others too."""
    rows = [
        [
            item.role,
            excerpt(", ".join(f"{name} {item.values.get(name, '***')}" for name in item.given), 400),
            excerpt(", ".join(f"{name} {version}" for name, version in (item.packages or {}).items()), 200),
            excerpt(item.by, 60),
            age(item.at, state.at),
        ]
        for item in state.configurations
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


def _failure_table(state: RunState) -> Table:
    rows = [[failure.kind, failure.count, excerpt(failure.message, 90)] for failure in state.failures]
    return table("Failed attempts", ["kind", "count", "newest message"], rows)


def _group_table(state: RunState) -> Table:
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
        for item in state.groups
    ]
    columns = ["begun by", "groups", "abandoned", "share", "trajectories", "abandoned", "share", "pass rate"]
    return table("Training groups", columns, rows)


def _data_table(state: RunState) -> Table:
    order = [str(status) for status in DataStatus]
    rows = [
        [
            data.status,
            data.count,
            f"{data.tokens:,}",
            f"{data.trainable_tokens:,}",
            excerpt(data.because or "", 120),
        ]
        for data in sorted(state.data, key=lambda data: order.index(data.status))
    ]
    return table("Training data", ["status", "trajectories", "tokens", "trainable tokens", "why"], rows)


def _length_table(state: RunState) -> Table:
    rows = [
        [
            item.split,
            item.sampled,
            fixed(item.sampled_tokens, 1),
            item.trained,
            fixed(item.trained_tokens, 1),
            fixed(item.ratio, 2),
        ]
        for item in state.lengths
    ]
    columns = ["split", "sampled", "tokens each", "trained", "tokens each", "trained / sampled"]
    return table("Length bias (generated tokens of scored trajectories)", columns, rows)


def _prompt_table(state: RunState) -> Table:
    rows = [
        [item.split, f"{item.tokens:,}", f"{item.cached:,}", fixed(item.cache_hit_rate, 2)]
        for item in state.prompts
    ]
    columns = ["split", "tokens", "cached by engines", "hit rate"]
    return table("Prefix cache (prompts of all model calls)", columns, rows)


def _sampler_table(state: RunState) -> Table:
    rows = [[excerpt(name, 60), claims] for name, claims in state.samplers.items()]
    return table("Samplers that hold claims (split train)", ["sampler", "claims"], rows)


def _engine_table(state: RunState, alive_seconds: float) -> Table:
    rows = []
    for engine in state.engines:
        if engine.status is ServiceStatus.STOPPED:
            continue
        alive = (state.at - engine.heartbeat).total_seconds() <= alive_seconds
        rows.append(
            [
                engine.url,
                engine.engine,
                Text(str(engine.status), style="green") if alive else Text("dead", style="red"),
                MISSING if engine.policy_version is None else engine.policy_version,
                engine.running_requests,
                fixed(engine.tokens_per_second, 1),
                fixed(engine.prefix_cache_hit_rate, 2),
                age(engine.heartbeat, state.at),
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


def _version_table(state: RunState) -> Table:
    rows = [
        [version.id, version.step, version.status, age(version.published_at, state.at), version.location]
        for version in state.versions
    ]
    return table("Policy versions", ["version", "step", "status", "published", "location"], rows, text=0)


def _step_table(state: RunState) -> Table:
    rows = [
        [
            step.step,
            step.status,
            step.policy_version,
            *(number(step.metrics, key, form) for key, form in _STEP_METRICS.values()),
            age(step.committed_at or step.planned_at, state.at),
        ]
        for step in state.steps
    ]
    return table("Last steps", ["step", "status", "from version", *_STEP_METRICS, "when"], rows, text=0)
