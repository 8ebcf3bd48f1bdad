"""Pipelines of the views of training: groups, tasks, steps, trained and waiting data, evaluations."""

from __future__ import annotations

from agentrl.documents.status import DataStatus, SlotStatus, TaskStatus
from agentrl.store.mechanics.connection import Json
from agentrl.store.names import DATA, RECORD
from agentrl.store.views.aggregation import (
    LAST_STEP,
    NEWEST_VERSION,
    age,
    as_is,
    fields_of,
    first,
    join,
    oldest_step,
    row_of,
    seconds,
)
from agentrl.store.views.rows import GroupRow, StepRow

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
    ),
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
