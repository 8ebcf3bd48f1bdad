"""Views for people: trajectories, turns and steps as one reads them in Compass, packed arrays left out."""

from __future__ import annotations

from agentrl.store.connection import Json
from agentrl.store.names import CALL, DATA, RECORD, STEP

_TRAJECTORIES: list[Json] = [
    {"$lookup": {"from": DATA, "localField": "_id", "foreignField": "_id", "as": "data"}},
    {"$set": {"data": {"$first": "$data"}}},
    {
        "$project": {
            "split": 1, "epoch": 1, "task": 1, "traj_id": 1, "attempt": 1, "status": 1, "score": 1,
            "advantage": 1, "query": 1, "answer": 1, "final_answer": 1, "stop_reason": 1, "failure": 1,
            "abandoned_because": 1, "turns": 1, "tool_calls": 1, "generated_tokens": 1, "min_version": 1,
            "max_version": 1, "owner": 1, "trained_count": 1, "last_trained_step": 1,
            "training_status": "$data.status", "trained_at_steps": "$data.trained_at_steps",
            "seconds": {"$divide": [{"$subtract": ["$scored_at", "$created_at"]}, 1000]},
            "created_at": 1, "scored_at": 1,
        }
    },
]  # fmt: skip

_TURNS: list[Json] = [
    {
        "$project": {
            "record": 1, "index": 1, "parent": 1, "status": 1, "messages": 1, "response": 1,
            "tool_executions": 1, "error": 1, "finish_reason": 1, "versions": 1, "prompt_tokens": 1,
            "generated_tokens": 1, "cached_tokens": 1, "engine": 1, "generate_seconds": 1, "tool_seconds": 1,
            "created_at": 1,
        }
    }
]  # fmt: skip

_STEPS: list[Json] = [
    {"$sort": {"step": 1}},
    {"$lookup": {"from": RECORD, "localField": "data", "foreignField": "_id", "as": "records"}},
    {
        "$project": {
            "step": 1, "status": 1, "policy_version": 1, "owner": 1, "planned_at": 1, "committed_at": 1,
            "metrics": 1, "trajectories": {"$size": "$data"},
            "tasks": {"$size": {"$setUnion": ["$records.task", []]}},
            "mean_score": {"$avg": "$records.score"},
            "oldest_version": {"$min": "$records.min_version"},
            "newest_version": {"$max": "$records.max_version"},
        }
    },
]  # fmt: skip

VIEWS: dict[str, tuple[str, list[Json]]] = {
    "audit_trajectories": (RECORD, _TRAJECTORIES),
    "audit_turns": (CALL, _TURNS),
    "audit_steps": (STEP, _STEPS),
}
"""View → (collection, pipeline)."""
