"""Pipeline of the view of evaluations: what was evaluated, and the numbers of all its tasks."""

from __future__ import annotations

from agentrl.store.connection import Json
from agentrl.store.views.aggregation import as_is

EVALUATIONS: list[Json] = [
    {
        "$project": {
            **as_is("status", "version", "step", "model", "file", "samples", "label"),
            "tasks": "$results.total.tasks",
            "scored": "$results.total.scored",
            "failed": "$results.total.failed",
            "score": "$results.total.score.value",
            "score_low": "$results.total.score.low",
            "score_high": "$results.total.score.high",
            "pass_at_1": "$results.total.pass_at.1.value",
            "turns": "$results.total.turns",
            "generated_tokens": "$results.total.generated_tokens",
            "cost": "$results.total.cost",
            **as_is("tasks_digest", "settings_digest", "by", "began_at", "seen_at", "finished_at"),
        }
    }
]
