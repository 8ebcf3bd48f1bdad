"""The state of a run as tables: tasks, records, failures, training data, engines, versions, steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from agentrl.documents.base import now
from agentrl.documents.policy import PolicyVersion
from agentrl.documents.run import RunSettings
from agentrl.documents.service import InferenceService
from agentrl.documents.status import DataStatus, RecordStatus, ServiceStatus, TaskStatus
from agentrl.documents.training import TrainStep
from agentrl.observe.audit.groups import GroupCount, count_groups, group_table
from agentrl.observe.live import number
from agentrl.observe.sanitize_terminal import excerpt
from agentrl.observe.tables import MISSING, age, fixed, table
from agentrl.scoring.groups import FAILED

if TYPE_CHECKING:
    from agentrl.store.client import Store

LAST_STEPS = 10
LAST_VERSIONS = 5
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


@dataclass(frozen=True, kw_only=True)
class FailureCount:
    """Failed Records of one kind, and the newest one's message."""

    kind: str
    count: int
    message: str


@dataclass(frozen=True, kw_only=True)
class DataCount:
    """Training data in one state."""

    status: str
    count: int
    tokens: int
    trainable_tokens: int
    because: str | None = None
    """Why one of them is quarantined."""


@dataclass(frozen=True, kw_only=True)
class LengthBias:
    """Mean generated tokens of the scored trajectories of a split, and of those of them that were trained."""

    split: str
    sampled: int
    sampled_tokens: float
    trained: int
    trained_tokens: float | None

    @property
    def ratio(self) -> float | None:
        """Below 1, training sees shorter trajectories than the policy writes."""
        if not self.trained_tokens or not self.sampled_tokens:
            return None
        return self.trained_tokens / self.sampled_tokens


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What ``agentrl audit run`` shows."""

    run_name: str
    tasks: Mapping[str, Mapping[str, int]]
    """``split, epoch`` → status → Tasks."""
    records: Mapping[str, Mapping[str, int]]
    """split → status → Records."""
    failures: Sequence[FailureCount]
    data: Sequence[DataCount]
    lengths: Sequence[LengthBias]
    samplers: Mapping[str, int]
    """sampler → slots of the train split that it holds under live leases."""
    engines: Sequence[InferenceService]
    versions: Sequence[PolicyVersion]
    """The newest ones, newest first."""
    steps: Sequence[TrainStep]
    """The last ones, oldest first."""
    at: datetime
    groups: Sequence[GroupCount] = ()
    settings: Sequence[RunSettings] = ()
    """What the run was begun with."""

    @property
    def empty(self) -> bool:
        """Whether the database holds nothing of a run."""
        return not (self.tasks or self.records or self.engines or self.versions or self.steps)


async def read_state(store: Store) -> RunState:
    """Read the state of the run. Reads only."""
    versions = await _last(store, "PolicyVersion", {"_id": -1}, LAST_VERSIONS)
    steps = await _last(store, "TrainStep", {"planned_at": -1, "step": -1}, LAST_STEPS)
    engines = await store.database["InferenceService"].find().sort("started_at").to_list()
    return RunState(
        run_name=store.run_name,
        tasks=await _by_status(store, "Task", {"$concat": ["$split", ", epoch ", {"$toString": "$epoch"}]}),
        records=await _by_status(store, "Record", "$split"),
        failures=await _failures(store),
        data=await _data(store),
        lengths=await _lengths(store),
        samplers=(await store.presence.look("train", 0.0)).claims,
        engines=[InferenceService.from_document(document) for document in engines],
        versions=[PolicyVersion.from_document(document) for document in versions],
        steps=[TrainStep.from_document(document) for document in reversed(steps)],
        at=now(),
        groups=await count_groups(store),
        settings=await store.settings.all(),
    )


def render_state(state: RunState, *, alive_seconds: float) -> RenderableType:
    """The tables. An engine whose last heartbeat is older than ``alive_seconds`` counts as dead."""
    return Group(
        Text(f"run {state.run_name}, {state.at:%Y-%m-%d %H:%M:%S} UTC", style="bold"),
        *([_settings_table(state)] if state.settings else []),
        _status_table("Tasks", "split", state.tasks, [str(status) for status in TaskStatus]),
        _status_table("Records", "split", state.records, [str(status) for status in RecordStatus]),
        *([_failure_table(state)] if state.failures else []),
        *([group_table(state.groups)] if state.groups else []),
        _data_table(state),
        *([_length_table(state)] if state.lengths else []),
        _sampler_table(state),
        _engine_table(state, alive_seconds),
        _version_table(state),
        _step_table(state),
    )


def _settings_table(state: RunState) -> RenderableType:
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


def _status_table(
    title: str, key: str, counts: Mapping[str, Mapping[str, int]], states: Sequence[str]
) -> RenderableType:
    rows = [
        [name, *(by_status.get(status, 0) or MISSING for status in states), sum(by_status.values())]
        for name, by_status in sorted(counts.items())
    ]
    return table(title, [key, *states, "all"], rows)


def _failure_table(state: RunState) -> RenderableType:
    rows = [[failure.kind, failure.count, excerpt(failure.message, 90)] for failure in state.failures]
    return table("Failed attempts", ["kind", "count", "newest message"], rows)


def _data_table(state: RunState) -> RenderableType:
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


def _length_table(state: RunState) -> RenderableType:
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


def _sampler_table(state: RunState) -> RenderableType:
    rows = [[excerpt(name, 60), claims] for name, claims in state.samplers.items()]
    return table("Samplers that hold claims (split train)", ["sampler", "claims"], rows)


def _engine_table(state: RunState, alive_seconds: float) -> RenderableType:
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
                age(engine.heartbeat, state.at),
                excerpt(engine.detail or "", 60),
            ]
        )
    columns = ["url", "engine", "status", "version", "running", "heartbeat", "detail"]
    return table("Engines", columns, rows, text=3)


def _version_table(state: RunState) -> RenderableType:
    rows = [
        [version.id, version.step, version.status, age(version.published_at, state.at), version.location]
        for version in state.versions
    ]
    return table("Policy versions", ["version", "step", "status", "published", "location"], rows, text=0)


def _step_table(state: RunState) -> RenderableType:
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


async def _last(store: Store, name: str, order: Mapping[str, int], limit: int) -> list[dict[str, Any]]:
    cursor = store.database[name].find({}, {"data": 0, "files": 0}).sort(list(order.items())).limit(limit)
    documents: list[dict[str, Any]] = await cursor.to_list()
    return [{"data": (), "files": (), **document} for document in documents]


async def _by_status(store: Store, name: str, key: object) -> dict[str, dict[str, int]]:
    groups = await _aggregate(
        store, name, {"$group": {"_id": {"key": key, "status": "$status"}, "count": {"$sum": 1}}}
    )
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    for group in groups:
        counts[group["_id"]["key"]][group["_id"]["status"]] = group["count"]
    return dict(counts)


async def _failures(store: Store) -> list[FailureCount]:
    groups = await _aggregate(
        store,
        "Record",
        {"$match": {"status": RecordStatus.FAILED.value}},
        {"$sort": {"failure.at": 1}},
        {"$group": {"_id": "$failure.kind", "count": {"$sum": 1}, "message": {"$last": "$failure.message"}}},
        {"$sort": {"count": -1, "_id": 1}},
    )
    groups += await _aggregate(
        store,
        "Task",
        {"$match": {"status": TaskStatus.COMPLETED.value, "group.outcome": FAILED}},
        {"$group": {"_id": "group", "count": {"$sum": 1}, "message": {"$last": "$group.problem"}}},
    )
    return [
        FailureCount(kind=group["_id"] or "unknown", count=group["count"], message=group["message"] or "")
        for group in groups
    ]


async def _data(store: Store) -> list[DataCount]:
    fields = {
        "count": {"$sum": 1},
        "tokens": {"$sum": "$tokens"},
        "trainable_tokens": {"$sum": "$trainable_tokens"},
        "because": {"$max": "$problem"},
    }
    groups = await _aggregate(store, "DBRecordData", {"$group": {"_id": "$status", **fields}})
    return [DataCount(status=group.pop("_id"), **group) for group in groups]


async def _lengths(store: Store) -> list[LengthBias]:
    trained = {"$gt": ["$trained_count", 0]}
    groups = await _aggregate(
        store,
        "Record",
        {"$match": {"score": {"$ne": None}}},
        {
            "$group": {
                "_id": "$split",
                "sampled": {"$sum": 1},
                "sampled_tokens": {"$avg": "$generated_tokens"},
                "trained": {"$sum": {"$cond": [trained, 1, 0]}},
                "trained_tokens": {"$avg": {"$cond": [trained, "$generated_tokens", None]}},
            }
        },
        {"$sort": {"_id": 1}},
    )
    return [LengthBias(split=group.pop("_id"), **group) for group in groups]


async def _aggregate(store: Store, name: str, *stages: Mapping[str, Any]) -> list[dict[str, Any]]:
    cursor = await store.database[name].aggregate(list(stages))
    groups: list[dict[str, Any]] = await cursor.to_list()
    return groups
