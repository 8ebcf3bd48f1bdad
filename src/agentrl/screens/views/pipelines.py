"""Rows of the audit views, whose fields are those that Compass shows, and the pipelines that make them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any

from agentrl.columns.pool import OWNER_NAME
from agentrl.documents.document import Root
from agentrl.documents.record import Failure
from agentrl.documents.status import (
    APPLIED_STEPS,
    DataStatus,
    RecordStatus,
    ServiceStatus,
    SlotStatus,
    StepStatus,
    StopReason,
    TaskStatus,
    VersionStatus,
    shown_status,
    values,
)
from agentrl.documents.task import task_key
from agentrl.store.mechanics.connection import DATA, MODEL_CALL, RECORD, STEP, TASK, VERSION, Json


def known_steps(of_data: Sequence[int], last: int | None) -> tuple[int, ...]:
    """Return the steps that trained a trajectory by its data; without data, the ``last`` by its Record."""
    return tuple(of_data) or (() if last is None else (last,))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRow(Root):
    """One row of ``audit_trajectories``: one Record, and its training."""

    id: str
    split: str
    epoch: int
    task: str
    traj_id: int
    attempt: int
    """The attempt that began it."""
    status: RecordStatus
    query: str
    answer: Any = None
    final_answer: str | None = None
    score: float | None = None
    advantage: float | None = None
    stop_reason: StopReason | None = None
    failure: Failure | None = None
    abandoned_because: str | None = None
    turns: int = 0
    tool_calls: int = 0
    context_resets: int = 0
    prompt_tokens: int = 0
    """Tokens of the last call's prompt."""
    generated_tokens: int = 0
    generate_seconds: float = 0.0
    tool_seconds: float = 0.0
    judge_seconds: float = 0.0
    api_cost: float = 0.0
    """Of its judges and other models, in the currency of their prices."""
    min_version: int | None = None
    max_version: int | None = None
    training_status: DataStatus | None = None
    quarantined_because: str | None = None
    trained_at_steps: tuple[int, ...] = ()
    staleness: int | None = None
    """Optimizer steps between its oldest token and the last step that trained it."""
    tokens: int | None = None
    trainable_tokens: int | None = None
    seconds: float | None = None
    """From the claim to the score."""
    trained_count: int = 0
    last_trained_step: int | None = None
    owner: str | None = None
    owners: int = 0
    """How many processes sampled it, one after the other."""
    saved_turns: int = 0
    """Model calls that owners had from the journal; likewise tokens and seconds of tools."""
    saved_tokens: int = 0
    saved_tool_seconds: float = 0.0
    dropped_turns: int = 0
    """Model calls that were taken out of it, because it went another way there."""
    created_at: datetime
    scored_at: datetime | None = None
    pruned_at: datetime | None = None

    @property
    def known_steps(self) -> tuple[int, ...]:
        """The steps that trained it; the last one, once its training data is pruned."""
        return known_steps(self.trained_at_steps, self.last_trained_step)

    @property
    def shown_status(self) -> str:
        """The status that people read: ``trained`` in place of ``ready`` once a step trained it."""
        return shown_status(self.status, self.trained_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow(Root):
    """One row of ``audit_groups``: one Task of one epoch with the scores of its trajectories."""

    id: str
    split: str
    epoch: int
    order: int
    task_id: str
    status: TaskStatus
    query: str
    answer: Any = None
    slots: int
    attempts: int
    scores: tuple[float, ...]
    agreement: str
    mean_score: float | None = None
    scored: int | None = None
    failed: int | None = None
    outcome: str | None = None
    trained: int | None = None
    finalized_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow(Root):
    """One row of ``audit_tasks``: one question over the epochs in which its group is completed."""

    id: str
    split: str
    task_id: str
    query: str
    answer: Any = None
    epochs: tuple[int, ...]
    mean_scores: tuple[float | None, ...]
    """In the order of ``epochs``."""
    best_score: float | None = None
    lowest_score: float | None = None
    scored: int = 0
    failed: int = 0
    mixed: int = 0
    """Groups whose scores differ; only these can be trained."""
    change: float | None = None
    """Mean score of the last epoch with a score minus that of the first."""
    always_wrong: bool = False

    @property
    def last(self) -> str:
        """``_id`` of the Task of its last epoch."""
        return task_key(self.split, self.epochs[-1], self.task_id)

    @property
    def known(self) -> list[float]:
        """The mean scores of the epochs with a score."""
        return [value for value in self.mean_scores if value is not None]

    @property
    def mean(self) -> float | None:
        """The mean over the epochs; None without a score."""
        known = self.known
        return sum(known) / len(known) if known else None

    @property
    def agreement(self) -> str:
        """``always agrees``, ``never agrees``, ``sometimes agrees``, or ``no scores``."""
        groups = len(self.known)
        if not groups:
            return "no scores"
        if self.mixed == 0:
            return "always agrees"
        return "never agrees" if self.mixed == groups else "sometimes agrees"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow(Root):
    """One row of ``audit_steps``: one optimizer step."""

    id: str
    step: int
    status: StepStatus
    policy_version: int
    reward: float | None = None
    pass_rate: float | None = None
    loss: float | None = None
    entropy: float | None = None
    grad_norm: float | None = None
    trajectories: int
    groups: int
    tokens: int | None = None
    trainable_tokens: int | None = None
    staleness_mean: float | None = None
    staleness_max: float | None = None
    seconds: float | None = None
    """From the plan to the commit."""
    seconds_waiting_for_data: float | None = None
    owner: str
    inherited: bool = False
    """``TrainStep.inherited``."""
    planned_at: datetime
    committed_at: datetime | None = None
    metrics: dict[str, Any] = field(default_factory=dict)

    def metric(self, name: str) -> float | None:
        """Return a metric that is a finite number; None without it."""
        value = self.metrics.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return None
        return float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow(Root):
    """One row of ``audit_engines``: one engine, the version that it serves, and its speed."""

    id: str
    url: str
    engine: str
    model: str
    status: ServiceStatus
    policy_version: int | None = None
    newest_version: int | None = None
    versions_behind: int | None = None
    recent_calls: int = 0
    seconds_per_call: float | None = None
    slowest_seconds: float | None = None
    tokens_per_second: float | None = None
    prefix_cache_hit_rate: float | None = None
    last_call_at: datetime | None = None
    seconds_since_heartbeat: float | None = None
    running_requests: int = 0
    running_tokens: int = 0
    context_length: int | None = None
    detail: str | None = None
    host: str
    pid: int
    started_at: datetime
    heartbeat: datetime


def as_is(*names: str) -> Json:
    """Return a $project of fields to pass on unchanged; a filter on them can use an index."""
    return dict.fromkeys(names, 1)


def row_of(row: type[Root], **computed: Any) -> Json:
    """Return the $project of the fields of ``row``: the ``computed`` ones, and the others as they are."""
    names = [field.name for field in fields(row) if field.name != "id"]  # type: ignore[arg-type]
    return {"$project": {name: computed.get(name, 1) for name in names}}


def fields_of(part: str, *names: str) -> Json:
    """Return a $project of fields of ``part``, each under its own name."""
    return {name: f"${part}.{name}" for name in names}


def seconds(start: str, end: str) -> Json:
    """Return the expression of the seconds from ``start`` to ``end``; null if one of them is null."""
    return {"$divide": [{"$subtract": [end, start]}, 1000]}


def ratio(part: Any, whole: Any) -> Json:
    """Return the expression of ``part / whole``; null if ``whole`` is not above 0."""
    return {"$cond": [{"$gt": [whole, 0]}, {"$divide": [part, whole]}, None]}


def join(collection: str, local: str, foreign: str, name: str, *pipeline: Json) -> Json:
    """Return a $lookup by equality; ``pipeline`` runs on the documents that it finds."""
    lookup = {"from": collection, "localField": local, "foreignField": foreign, "as": name}
    return {"$lookup": {**lookup, "pipeline": list(pipeline)}}


def first(*names: str) -> Json:
    """Return a $set that replaces each joined list by its first element."""
    return {"$set": {name: {"$first": f"${name}"} for name in names}}


def oldest_step(*versions: str) -> list[Json]:
    """Return stages that set ``oldest_step``: the lowest step at which one of ``versions`` was published.

    Ages are counted in steps, since the numbers of versions jump where a trainer resumes.
    """
    named = [{"$cond": [{"$isArray": field}, field, [field]]} for field in versions]
    return [
        {"$set": {"sampled_by": {"$concatArrays": named}}},
        join(VERSION, "sampled_by", "_id", "published", {"$project": as_is("step")}),
        {"$set": {"oldest_step": {"$min": "$published.step"}}},
    ]


def excerpt(name: str, characters: int, otherwise: Any = None) -> Json:
    """Return the expression of the beginning of a text field; ``otherwise`` if it is not text."""
    is_text = {"$eq": [{"$type": f"${name}"}, "string"]}
    return {"$cond": [is_text, {"$substrCP": [f"${name}", 0, characters]}, otherwise]}


def age(trained: Json | str) -> Json:
    """Return the expression of the optimizer steps from ``oldest_step`` to ``trained``; null if unknown."""
    known = {"$and": [{"$isNumber": trained}, {"$isNumber": "$oldest_step"}]}
    return {"$cond": [known, {"$max": [0, {"$subtract": [trained, "$oldest_step"]}]}, None]}


NEWEST_FIRST: Json = {"$sort": {"created_at": -1}}
"""Sorts in the order of an index, so that a page costs no more than its rows. Filters go before it."""

NEWEST_VERSION: Json = {
    "$lookup": {
        "from": VERSION,
        "pipeline": [
            {"$match": {"status": VersionStatus.PUBLISHED.value}},
            {"$sort": {"_id": -1}},
            {"$limit": 1},
            {"$project": {"_id": 1}},
        ],
        "as": "newest",
    }
}
"""Independent of the document, so that the server runs it once."""

LAST_STEP: Json = {
    "$lookup": {
        "from": STEP,
        "pipeline": [
            {"$match": {"status": {"$in": values(APPLIED_STEPS)}}},
            {"$sort": {"step": -1}},
            {"$limit": 1},
            {"$project": {"step": 1}},
        ],
        "as": "last_step",
    }
}
"""The last committed or committing step; also independent of the document."""


_RECENT = 1000
"""The newest trajectories; an engine's speed is measured on their model calls."""
_DATA_FIELDS = as_is("status", "problem", "trained_at_steps", "tokens", "trainable_tokens", "spans.version")

TRAJECTORIES: list[Json] = [
    NEWEST_FIRST,
    join(DATA, "_id", "_id", "data", {"$project": _DATA_FIELDS}),
    first("data"),
    *oldest_step("$min_version", "$max_version", "$data.spans.version"),
    row_of(
        TrajectoryRow,
        training_status="$data.status",
        quarantined_because="$data.problem",
        staleness=age({"$subtract": ["$last_trained_step", 1]}),
        **fields_of("data", "trained_at_steps", "tokens", "trainable_tokens"),
        seconds=seconds("$created_at", "$scored_at"),
        generate_seconds={"$ifNull": ["$generate_seconds", 0.0]},
        tool_seconds={"$ifNull": ["$tool_seconds", 0.0]},
        judge_seconds={"$ifNull": ["$judge_seconds", 0.0]},
        api_cost={"$sum": ["$api_cost", "$judge_cost"]},
        owners={"$size": {"$ifNull": ["$owners", []]}},
        saved_turns={"$sum": "$owners.replayed"},
        saved_tokens={"$sum": "$owners.tokens"},
        saved_tool_seconds={"$sum": "$owners.tool_seconds"},
        dropped_turns={"$sum": "$owners.dropped"},
    ),
]

_NAMED: Json = {"$regexFind": {"input": "$owners.owner", "regex": OWNER_NAME}}

OWNERS: list[Json] = [
    NEWEST_FIRST,
    {"$unwind": {"path": "$owners", "includeArrayIndex": "place"}},
    {"$set": {"trajectory": "$_id", "branch": {"$toString": "$owners.attempt"}}},
    {"$set": {"_id": {"$concat": ["$_id", "@", "$branch"]}}},
    {
        "$project": {
            **as_is("trajectory", "task", "traj_id", "split", "status", "created_at", "place"),
            **fields_of("owners", "owner", "attempt", "since", "until", "ended"),
            "host": {"$first": {"$getField": {"field": "captures", "input": _NAMED}}},
            "seconds": seconds("$owners.since", "$owners.until"),
            "saved_turns": "$owners.replayed",
            "saved_tokens": "$owners.tokens",
            "saved_tool_seconds": "$owners.tool_seconds",
            "diverged_at": "$owners.diverged_at",
            "dropped_turns": "$owners.dropped",
            "kept_as": {
                "$cond": [
                    {"$gt": ["$owners.dropped", 0]},
                    {"$concat": ["$task", "/", {"$toString": "$traj_id"}, "/", "$branch"]},
                    None,
                ]
            },
        }
    },
]  # fmt: skip


def _whole(messages: str, executions: Json) -> Json:
    """Return the expression of ``messages`` with tool results as ``content``, looked up in ``executions``."""
    answer: Json = {
        "$let": {
            "vars": {"ran": {"$arrayElemAt": [executions, "$$message.execution"]}},
            "in": {"content": {"$concat": [{"$cond": ["$$ran.error", "Error: ", ""]}, "$$ran.result"]}},
        }
    }
    whole = {"$mergeObjects": ["$$message", {"$cond": [{"$isNumber": "$$message.execution"}, answer, {}]}]}
    return {"$map": {"input": messages, "as": "message", "in": whole}}


TURNS: list[Json] = [
    join(MODEL_CALL, "parent", "_id", "before", {"$project": as_is("tool_executions")}),
    {"$set": {"messages": _whole("$messages", {"$first": "$before.tool_executions"})}},
    {
        "$project": {
            **as_is("record", "index", "parent", "status"),
            "new_context": {"$and": [{"$eq": ["$parent", None]}, {"$gt": ["$index", 0]}]},
            **as_is(
                "messages", "response", "tool_executions", "events", "attempt", "error", "finish_reason"
            ),
            "tools_offered": "$tools.function.name",
            **as_is(
                "versions", "prompt_tokens", "cached_tokens", "generated_tokens", "engine",
                "generate_seconds", "tool_seconds",
            ),
            "tokens_per_second": ratio("$generated_tokens", "$generate_seconds"),
            **as_is("created_at"),
        }
    }
]  # fmt: skip

_CONTEXT: Json = {
    "$size": {
        "$filter": {
            "input": "$calls", "as": "other",
            "cond": {
                "$and": [{"$eq": ["$$other.parent", None]}, {"$lte": ["$$other.index", "$$call.index"]}]
            },
        }
    }
}  # fmt: skip
"""The number of the context of ``$$call``, from 1; each context reset begins another."""

_EXECUTIONS_BEFORE: Json = {
    "$getField": {
        "field": "tool_executions",
        "input": {"$arrayElemAt": ["$calls", {"$subtract": ["$$call.index", 1]}]},
    }
}

_SAID: Json = {
    "$let": {
        "vars": {"position": {"turn": "$$call.index", "context": _CONTEXT}},
        "in": {
            "$concatArrays": [
                {
                    "$map": {
                        "input": _whole("$$call.messages", _EXECUTIONS_BEFORE), "as": "read",
                        "in": {"$mergeObjects": ["$$position", "$$read"]},
                    }
                },
                [{"$mergeObjects": ["$$position", {"role": "assistant"}, "$$call.response"]}],
            ]
        },
    }
}  # fmt: skip

CONVERSATIONS: list[Json] = [
    NEWEST_FIRST,
    join(
        MODEL_CALL, "_id", "record", "calls",
        {"$sort": {"index": 1}},
        {"$project": as_is("index", "parent", "messages", "response", "tool_executions")},
    ),
    {
        "$project": {
            **as_is("task", "status", "query", "answer", "final_answer", "score", "created_at"),
            "conversation": {
                "$reduce": {
                    "input": {"$map": {"input": "$calls", "as": "call", "in": _SAID}},
                    "initialValue": [],
                    "in": {"$concatArrays": ["$$value", "$$this"]},
                }
            },
        }
    },
]  # fmt: skip

_SLOT_OF_RECORD: Json = {
    "$first": {
        "$filter": {
            "input": {"$first": "$tasks.slots"}, "as": "slot",
            "cond": {"$eq": ["$$slot.traj_id", "$traj_id"]},
        }
    }
}  # fmt: skip

_GIVEN_UP: Json = {
    "$switch": {
        "branches": [
            {"case": {"$eq": ["$failure.kind", kind]}, "then": f"given up: {why}"}
            for kind, why in (
                ("poison", "it kills its samplers"), ("replay", "its tools cannot be restored"),
            )
        ],
        "default": "given up: no attempts left",
    }
}  # fmt: skip

FAILURES: list[Json] = [
    NEWEST_FIRST,
    {"$match": {"status": RecordStatus.FAILED.value}},
    join(TASK, "task", "_id", "tasks", {"$project": as_is("slots")}),
    {"$set": {"slot": _SLOT_OF_RECORD}},
    {
        "$project": {
            **as_is("split", "epoch", "task", "traj_id", "attempt", "status"),
            "kind": "$failure.kind",
            "message": "$failure.message",
            "failed_at": "$failure.at",
            "slot": "$slot.status",
            "then": {
                "$switch": {
                    "branches": [
                        {"case": {"$eq": ["$slot.status", status.value]}, "then": then}
                        for status, then in (
                            (SlotStatus.SCORED, "another attempt was scored"),
                            (SlotStatus.FAILED, _GIVEN_UP),
                            (SlotStatus.RUNNING, "another attempt is running"),
                        )
                    ],
                    "default": "waits for another attempt",
                }
            },
            **as_is("turns", "tool_calls", "generated_tokens", "owner", "created_at"),
        }
    },
]  # fmt: skip

_TOOL_CALL: Json = {
    "tool": "$calls.tool_executions.name",
    **fields_of(
        "calls.tool_executions",
        "server",
        "arguments",
        "result",
        "error",
        "seconds",
        "started_at",
        "attempt",
        "finished",
    ),
    "turn": "$calls.index",
}

TOOL_CALLS: list[Json] = [
    NEWEST_FIRST,
    join(MODEL_CALL, "_id", "record", "calls", {"$project": as_is("index", "tool_executions")}),
    {"$unwind": "$calls"},
    {"$unwind": {"path": "$calls.tool_executions", "includeArrayIndex": "execution"}},
    {"$set": {"trajectory": "$_id"}},
    {
        "$set": {
            "_id": {"$concat": ["$_id", "/", {"$toString": "$calls.index"}, ":", {"$toString": "$execution"}]}
        }
    },
    {"$project": {**as_is("trajectory", "task", "split", "status", "score", "created_at"), **_TOOL_CALL}},
]

_ALL_OF_TOOL = {"window": {"documents": ["unbounded", "unbounded"]}}


def _quantile(share: float) -> Json:
    """Return the accumulator of the ``share`` quantile of ``seconds`` over a tool's calls."""
    reached = {"$gte": ["$rank", {"$multiply": ["$calls", share]}]}
    return {"$min": {"$cond": [reached, "$seconds", None]}}


TOOLS: list[Json] = [
    {"$match": {"tool_executions.0": {"$exists": True}}},
    {"$unwind": "$tool_executions"},
    {
        "$project": {
            "_id": 0,
            "tool": "$tool_executions.name",
            **fields_of("tool_executions", "server", "seconds"),
            "errors": {"$cond": ["$tool_executions.error", 1, 0]},
        }
    },
    {
        "$setWindowFields": {
            "partitionBy": {"tool": "$tool", "server": "$server"},
            "sortBy": {"seconds": 1},
            "output": {"rank": {"$documentNumber": {}}, "calls": {"$count": {}, **_ALL_OF_TOOL}},
        }
    },
    {
        "$group": {
            "_id": {"$concat": ["$tool", " @ ", {"$ifNull": ["$server", "?"]}]},
            "tool": {"$first": "$tool"},
            "server": {"$first": "$server"},
            "calls": {"$sum": 1},
            "errors": {"$sum": "$errors"},
            "median_seconds": _quantile(0.5),
            "p95_seconds": _quantile(0.95),
            "max_seconds": {"$max": "$seconds"},
            "total_seconds": {"$sum": "$seconds"},
        }
    },
    {"$set": {"error_rate": ratio("$errors", "$calls")}},
]


_SPEEDS: Json = {
    "$lookup": {
        "from": RECORD,
        "pipeline": [
            {"$sort": {"created_at": -1}},
            {"$limit": _RECENT},
            {"$project": as_is("_id")},
            join(
                MODEL_CALL, "_id", "record", "calls",
                {"$project": as_is(
                    "engine", "generate_seconds", "generated_tokens", "prompt_tokens", "cached_tokens",
                    "created_at",
                )},
            ),
            {"$unwind": "$calls"},
            {
                "$group": {
                    "_id": "$calls.engine",
                    "calls": {"$sum": 1},
                    "generated_tokens": {"$sum": "$calls.generated_tokens"},
                    "prompt_tokens": {"$sum": "$calls.prompt_tokens"},
                    "cached_tokens": {"$sum": "$calls.cached_tokens"},
                    "seconds": {"$sum": "$calls.generate_seconds"},
                    "slowest": {"$max": "$calls.generate_seconds"},
                    "last_call_at": {"$max": "$calls.created_at"},
                }
            },
        ],
        "as": "speeds",
    }
}  # fmt: skip
"""Independent of the engine, so that the server computes it once."""

_SPEED: Json = {"$first": {"$filter": {"input": "$speeds", "cond": {"$eq": ["$$this._id", "$url"]}}}}

_NEWER_VERSIONS: Json = {
    "$lookup": {
        "from": VERSION,
        "let": {"served": "$policy_version"},
        "pipeline": [
            {
                "$match": {
                    "status": VersionStatus.PUBLISHED.value, "$expr": {"$gt": ["$_id", "$$served"]},
                }
            },
            {"$count": "count"},
        ],
        "as": "newer",
    }
}  # fmt: skip
"""Counts the newer versions. Subtracting numbers would be wrong: they jump where a trainer resumes."""

ENGINES: list[Json] = [
    NEWEST_VERSION,
    _NEWER_VERSIONS,
    _SPEEDS,
    {"$set": {"newest": {"$first": "$newest._id"}, "speed": _SPEED}},
    row_of(
        EngineRow,
        newest_version="$newest",
        versions_behind={
            "$cond": [
                {
                    "$or": [
                        {"$eq": ["$status", ServiceStatus.STOPPED.value]},
                        {"$not": [{"$isNumber": "$policy_version"}]},
                    ]
                },
                None,
                {"$ifNull": [{"$first": "$newer.count"}, 0]},
            ]
        },
        recent_calls={"$ifNull": ["$speed.calls", 0]},
        seconds_per_call=ratio("$speed.seconds", "$speed.calls"),
        slowest_seconds="$speed.slowest",
        tokens_per_second=ratio("$speed.generated_tokens", "$speed.seconds"),
        prefix_cache_hit_rate=ratio("$speed.cached_tokens", "$speed.prompt_tokens"),
        last_call_at="$speed.last_call_at",
        seconds_since_heartbeat=seconds("$heartbeat", "$$NOW"),
    ),
]


_SCORED: Json = {
    "$filter": {
        "input": "$slots", "as": "slot", "cond": {"$eq": ["$$slot.status", SlotStatus.SCORED.value]},
    }
}  # fmt: skip
_LOWEST, _HIGHEST = {"$min": "$scores"}, {"$max": "$scores"}

_AGREEMENT: Json = {
    "$switch": {
        "branches": [
            {"case": {"$eq": ["$scores", []]}, "then": "no scores"},
            {"case": {"$ne": [_LOWEST, _HIGHEST]}, "then": "mixed"},
            {"case": {"$gte": [_LOWEST, 1]}, "then": "all right"},
            {"case": {"$lte": [_HIGHEST, 0]}, "then": "all wrong"},
        ],
        "default": "all the same",
    }
}

_CHANGE: Json = {
    "$let": {
        "vars": {"known": {"$filter": {"input": "$mean_scores", "cond": {"$ne": ["$$this", None]}}}},
        "in": {"$subtract": [{"$last": "$$known"}, {"$first": "$$known"}]},
    }
}
"""Mean score of the last epoch with a score minus that of the first."""

_DIFFER: Json = {"$gt": [{"$max": "$slots.score"}, {"$min": "$slots.score"}]}
_ALWAYS_WRONG: Json = {"$and": [{"$ne": ["$best_score", None]}, {"$lte": ["$best_score", 0]}]}

GROUPS: list[Json] = [
    {"$set": {"scores": {"$map": {"input": _SCORED, "as": "slot", "in": "$$slot.score"}}}},
    row_of(
        GroupRow,
        slots={"$size": "$slots"},
        attempts={"$sum": "$slots.attempt"},
        agreement=_AGREEMENT,
        **fields_of("group", "mean_score", "scored", "failed", "outcome", "trained", "finalized_at"),
    ),
]

TASKS: list[Json] = [
    {"$match": {"status": TaskStatus.COMPLETED.value}},
    {"$project": {**as_is("split", "epoch", "task_id", "query", "answer", "group"), "slots": {"score": 1}}},
    {"$sort": {"epoch": 1}},
    {
        "$group": {
            "_id": {"$concat": ["$split", "/", "$task_id"]},
            "split": {"$first": "$split"},
            "task_id": {"$first": "$task_id"},
            "query": {"$first": "$query"},
            "answer": {"$first": "$answer"},
            "epochs": {"$push": "$epoch"},
            "mean_scores": {"$push": "$group.mean_score"},
            "best_score": {"$max": {"$max": "$slots.score"}},
            "lowest_score": {"$min": {"$min": "$slots.score"}},
            "scored": {"$sum": "$group.scored"},
            "failed": {"$sum": "$group.failed"},
            "mixed": {"$sum": {"$cond": [_DIFFER, 1, 0]}},
        }
    },
    {"$set": {"change": _CHANGE, "always_wrong": _ALWAYS_WRONG}},
]

_TASKS_OF_STEP: Json = {
    "$setUnion": {
        "$map": {
            "input": "$data", "as": "key",
            "in": {
                "$first": {
                    "$getField": {
                        "field": "captures",
                        "input": {"$regexFind": {"input": "$$key", "regex": r"^(.*)/\d+/\d+$"}},
                    }
                }
            },
        }
    }
}  # fmt: skip
"""The Tasks of a step's data, extracted from the ids of the data: slow over thousands of steps."""

STEPS: list[Json] = [
    row_of(
        StepRow,
        **fields_of("metrics", "reward", "pass_rate", "loss", "entropy", "grad_norm"),
        trajectories={"$size": "$data"},
        groups={"$ifNull": ["$metrics.groups", {"$size": _TASKS_OF_STEP}]},
        **fields_of("metrics", "tokens", "trainable_tokens", "staleness_mean", "staleness_max"),
        seconds=seconds("$planned_at", "$committed_at"),
        seconds_waiting_for_data="$metrics.seconds_data",
        inherited={"$ifNull": ["$inherited", False]},
    )
]

_OF_RECORD = (
    "task", "query", "answer", "final_answer", "score", "advantage", "turns", "generated_tokens",
    "min_version", "max_version",
)  # fmt: skip

TRAINING: list[Json] = [
    {"$unwind": "$data"},
    join(RECORD, "data", "_id", "record", {"$project": as_is(*_OF_RECORD, "created_at")}),
    join(DATA, "data", "_id", "tree", {"$project": as_is("spans.version")}),
    first("record", "tree"),
    {"$set": {"_id": {"$concat": ["$_id", ":", "$data"]}}},
    *oldest_step("$record.min_version", "$record.max_version", "$tree.spans.version"),
    {
        "$project": {
            **as_is("step", "status", "policy_version"),
            "trajectory": "$data",
            **fields_of("record", *_OF_RECORD),
            "staleness": age({"$subtract": ["$step", 1]}),
            "seconds_from_claim_to_plan": seconds("$record.created_at", "$planned_at"),
        }
    },
]  # fmt: skip

WAITING: list[Json] = [
    {
        "$match": {
            "split": {"$gte": ""},  # any split: the index begins with it
            "status": {"$in": [DataStatus.READY.value, DataStatus.PLANNED.value]},
        }
    },
    NEWEST_VERSION,
    LAST_STEP,
    {
        "$set": {
            "newest": {"$first": "$newest._id"},
            "trained": {"$ifNull": [{"$first": "$last_step.step"}, 0]},
        }
    },
    *oldest_step("$spans.version"),
    {
        "$project": {
            **as_is("split", "task", "status", "score", "advantage"),
            **as_is("tokens", "trainable_tokens", "turns", "min_version", "max_version"),
            "newest_version": "$newest",
            "staleness_now": age("$trained"),
            **as_is("trained_count", "planned_step", "not_before_step"),
            "seconds_waiting": seconds("$created_at", "$$NOW"),
            **as_is("created_at"),
        }
    },
]


EVALUATIONS: list[Json] = [
    {
        "$project": {
            **as_is("status", "version", "step", "model", "file", "samples", "label"),
            **fields_of("results.total", "tasks", "scored", "failed"),
            "score": "$results.total.score.value",
            "score_low": "$results.total.score.low",
            "score_high": "$results.total.score.high",
            "pass_at_1": "$results.total.pass_at.1.value",
            **fields_of("results.total", "turns", "generated_tokens", "cost"),
            **as_is("tasks_digest", "settings_digest", "by", "began_at", "seen_at", "finished_at"),
        }
    }
]
