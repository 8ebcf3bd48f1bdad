"""Pipeline of the view of engines: the version that each serves, and its speed."""

from __future__ import annotations

from agentrl.documents.status import ServiceStatus, VersionStatus
from agentrl.store.connection import Json
from agentrl.store.names import MODEL_CALL, RECORD, VERSION
from agentrl.store.views.aggregation import NEWEST_VERSION, as_is, join, ratio, seconds

_RECENT = 1000
"""The newest trajectories; an engine's speed is measured on their model calls."""

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
    {
        "$project": {
            **as_is("url", "engine", "model", "status", "policy_version"),
            "newest_version": "$newest",
            "versions_behind": {
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
            "recent_calls": {"$ifNull": ["$speed.calls", 0]},
            "seconds_per_call": ratio("$speed.seconds", "$speed.calls"),
            "slowest_seconds": "$speed.slowest",
            "tokens_per_second": ratio("$speed.generated_tokens", "$speed.seconds"),
            "prefix_cache_hit_rate": ratio("$speed.cached_tokens", "$speed.prompt_tokens"),
            "last_call_at": "$speed.last_call_at",
            "seconds_since_heartbeat": seconds("$heartbeat", "$$NOW"),
            **as_is("running_requests", "running_tokens", "context_length"),
            **as_is("detail", "host", "pid", "started_at", "heartbeat"),
        }
    },
]  # fmt: skip
