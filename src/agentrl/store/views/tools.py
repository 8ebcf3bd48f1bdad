"""Views of tools: every call a row, and how each tool does."""

from __future__ import annotations

from agentrl.store.connection import Json
from agentrl.store.names import CALL
from agentrl.store.views.parts import NEWEST_FIRST, as_is, join, ratio

_TOOL_CALL: Json = {
    "tool": "$calls.tool_executions.name",
    "server": "$calls.tool_executions.server",
    "arguments": "$calls.tool_executions.arguments",
    "result": "$calls.tool_executions.result",
    "error": "$calls.tool_executions.error",
    "seconds": "$calls.tool_executions.seconds",
    "turn": "$calls.index",
}

TOOL_CALLS: list[Json] = [
    NEWEST_FIRST,
    join(CALL, "_id", "record", "calls", {"$project": as_is("index", "tool_executions")}),
    {"$unwind": "$calls"},
    {"$unwind": {"path": "$calls.tool_executions", "includeArrayIndex": "place"}},
    {"$set": {"trajectory": "$_id"}},
    {
        "$set": {
            "_id": {"$concat": ["$_id", "/", {"$toString": "$calls.index"}, ":", {"$toString": "$place"}]}
        }
    },
    {"$project": {**as_is("trajectory", "task", "split", "status", "score", "created_at"), **_TOOL_CALL}},
]

_ALL_OF_TOOL = {"window": {"documents": ["unbounded", "unbounded"]}}


def _quantile(share: float) -> Json:
    """The least ``seconds`` that ``share`` of a tool's calls do not exceed."""
    reached = {"$gte": ["$place", {"$multiply": ["$calls", share]}]}
    return {"$min": {"$cond": [reached, "$seconds", None]}}


TOOLS: list[Json] = [
    {"$match": {"tool_executions.0": {"$exists": True}}},
    {"$unwind": "$tool_executions"},
    {
        "$project": {
            "_id": 0,
            "tool": "$tool_executions.name",
            "server": "$tool_executions.server",
            "seconds": "$tool_executions.seconds",
            "errors": {"$cond": ["$tool_executions.error", 1, 0]},
        }
    },
    {
        "$setWindowFields": {
            "partitionBy": {"tool": "$tool", "server": "$server"},
            "sortBy": {"seconds": 1},
            "output": {
                "place": {"$documentNumber": {}},
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
