"""Views of questions: one group a row, and one question over its epochs."""

from __future__ import annotations

from agentrl.documents.status import SlotStatus, TaskStatus
from agentrl.store.connection import Json
from agentrl.store.views.parts import as_is

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
"""From the first epoch with a score to the last."""

_ALWAYS_WRONG: Json = {"$and": [{"$ne": ["$best_score", None]}, {"$lte": ["$best_score", 0]}]}

GROUPS: list[Json] = [
    {"$set": {"scores": {"$map": {"input": _SCORED, "as": "slot", "in": "$$slot.score"}}}},
    {
        "$project": {
            **as_is("split", "epoch", "order", "task_id", "status", "query", "answer"),
            "slots": {"$size": "$slots"},
            "attempts": {"$sum": "$slots.attempt"},
            **as_is("scores"),
            "agreement": _AGREEMENT,
            "mean_score": "$group.mean_score",
            "scored": "$group.scored",
            "failed": "$group.failed",
            "outcome": "$group.outcome",
            "trained": "$group.trained",
            "finalised_at": "$group.finalised_at",
        }
    },
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
            "scored": {"$sum": "$group.scored"},
            "failed": {"$sum": "$group.failed"},
        }
    },
    {"$set": {"change": _CHANGE, "always_wrong": _ALWAYS_WRONG}},
]
