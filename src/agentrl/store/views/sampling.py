"""Pipelines of the views of sampling: trajectories, turns, conversations, failures, tools, engines."""

from __future__ import annotations

from agentrl.documents.status import RecordStatus, ServiceStatus, SlotStatus, VersionStatus
from agentrl.store.mechanics.connection import Json
from agentrl.store.names import DATA, MODEL_CALL, RECORD, TASK, VERSION
from agentrl.store.views.aggregation import (
    NEWEST_FIRST,
    NEWEST_VERSION,
    age,
    as_is,
    fields_of,
    first,
    join,
    oldest_step,
    ratio,
    row_of,
    seconds,
)
from agentrl.store.views.rows import EngineRow, TrajectoryRow

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
    ),
]


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
            **as_is("messages", "response", "tool_executions", "error", "finish_reason"),
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
                            (SlotStatus.FAILED, "given up: no attempts left"),
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
    **fields_of("calls.tool_executions", "server", "arguments", "result", "error", "seconds"),
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
            "output": {
                "rank": {"$documentNumber": {}},
                "calls": {"$count": {}, **_ALL_OF_TOOL},
            },
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
