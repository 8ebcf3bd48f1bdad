"""Read what scores go with: length, tools, answers, other scorers, and the policy version that sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import fmean
from typing import Any, Final

import pymongo

from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import RecordStatus
from agentrl.screens.views.pipelines import as_is, excerpt, seconds
from agentrl.store.gateways import Labels
from agentrl.store.mechanics.connection import RECORD, VERSION, Json, Repository, database_call

PEOPLE: Final = "people"
"""The name of the opinion that labels give."""
NEWEST: Final = 2000
_SECONDS = 10.0
_ANSWER_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRow:
    """One scored trajectory, with what its score may depend on."""

    id: str
    task: str
    score: float
    generated_tokens: int
    turns: int
    tool_calls: int
    answer: str | None
    """The first 300 characters of the final answer."""
    opinions: Mapping[str, float] = field(default_factory=dict)
    """Scorer → its score: the parts of a sum, earlier and later scorings, and ``people`` for labels."""
    judges: frozenset[str] = frozenset()
    """The scorers among them that asked a model."""
    created_at: datetime


class Rewards(Repository):
    """Reads scored trajectories for the page about rewards. It never writes."""

    @database_call
    async def newest(self, split: str, *, limit: int = NEWEST) -> list[ScoredRow]:
        """Return the newest scored trajectories of a split, newest first."""
        people = await Labels(self._connection).scores()
        with pymongo.timeout(_SECONDS):
            records = await self._aggregate(
                RECORD,
                {"$match": {"split": split}},
                {"$sort": {"created_at": -1, "_id": -1}},
                {"$match": {"score": {"$ne": None}}},
                {"$limit": limit},
                {"$project": _FIELDS},
            )
        return [_scored(record, people) for record in records]

    @database_call
    async def sampled_splits(self) -> list[str]:
        """Return the splits with Records, in alphabetical order: a split of tasks may have none yet."""
        return sorted(await self._collection(RECORD).distinct("split"))


_PARTS = {
    "$map": {
        "input": {"$objectToArray": {"$ifNull": ["$score_details.parts", {}]}}, "as": "part",
        "in": {"k": "$$part.k", "score": "$$part.v.score", "judge": "$$part.v.judge"},
    }
}  # fmt: skip
_EARLIER = {
    "$map": {
        "input": {"$ifNull": ["$score_history", []]}, "as": "old",
        "in": {"k": "$$old.details.scorer", "score": "$$old.score", "judge": "$$old.details.judge"},
    }
}  # fmt: skip
_FIELDS: Json = {
    **as_is("task", "score", "generated_tokens", "turns", "tool_calls", "created_at"),
    "answer": excerpt("final_answer", _ANSWER_CHARS),
    "now": {"k": "$score_details.scorer", "score": "$score", "judge": "$score_details.judge"},
    "later": {
        "k": "$rescored.details.scorer",
        "score": "$rescored.score",
        "judge": "$rescored.details.judge",
    },
    "parts": _PARTS,
    "earlier": _EARLIER,
}


def _scored(document: Json, people: Mapping[str, float]) -> ScoredRow:
    opinions: dict[str, float] = {}
    judges = set()
    for opinion in (*document["earlier"], document["now"], document.get("later", {}), *document["parts"]):
        name, score = opinion.get("k"), opinion.get("score")
        if isinstance(name, str) and _is_number(score):
            opinions[name] = float(score)
            if opinion.get("judge") is not None:
                judges.add(name)
    if document["_id"] in people:
        opinions[PEOPLE] = people[document["_id"]]
    plain = ("task", "score", "generated_tokens", "turns", "tool_calls", "answer", "created_at")
    return ScoredRow(
        id=document["_id"], opinions=opinions, judges=frozenset(judges),
        **{name: document[name] for name in plain},
    )  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_RIGHT = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSummary:
    """What the trajectories of one split that began under one policy version look like."""

    version: int
    step: int | None
    published_at: datetime | None
    trajectories: int = 0
    scored: int = 0
    failed: int = 0
    score: float | None = None
    right: float | None = None
    """Share of the scored trajectories with a score above 0.5."""
    generated_tokens: float | None = None
    turns: float | None = None
    tool_calls: float | None = None
    seconds: float | None = None
    """From the claim to the score."""


class VersionScores(Repository):
    """The reads behind the comparison of versions. It never writes."""

    @database_call
    async def published(self, limit: int) -> list[PolicyVersion]:
        """Return the newest versions, newest first, without their files."""
        cursor = self._collection(VERSION).find({}, {"files": 0}, sort=[("_id", -1)], limit=limit)
        return [PolicyVersion.from_document({**version, "files": ()}) async for version in cursor]

    @database_call
    async def newest_sampled(self, split: str) -> int | None:
        """Return the newest version that a trajectory of ``split`` began under; None without one."""
        query = {"split": split, "min_version": {"$gte": 0}}
        newest = await self._collection(RECORD).find_one(
            query, {"min_version": 1}, sort=[("min_version", -1)]
        )
        return None if newest is None else int(newest["min_version"])

    @database_call
    async def summary(self, version: int, split: str) -> VersionSummary | None:
        """Summarize the trajectories whose oldest token is of ``version``; None without such a version."""
        document = await self._collection(VERSION).find_one({"_id": version}, {"step": 1, "published_at": 1})
        if document is None:
            return None
        is_scored: Json = {"$isNumber": "$score"}
        is_failed = {"$eq": ["$status", RecordStatus.FAILED.value]}
        is_right = {"$cond": [{"$gt": ["$score", _RIGHT]}, 1, 0]}
        groups = await self._aggregate(
            RECORD,
            {"$match": {"split": split, "min_version": version}},
            {
                "$group": {
                    "_id": None,
                    "trajectories": {"$sum": 1},
                    "scored": {"$sum": {"$cond": [is_scored, 1, 0]}},
                    "failed": {"$sum": {"$cond": [is_failed, 1, 0]}},
                    "score": {"$avg": "$score"},
                    "right": {"$avg": {"$cond": [is_scored, is_right, None]}},
                    "generated_tokens": {"$avg": "$generated_tokens"},
                    "turns": {"$avg": "$turns"},
                    "tool_calls": {"$avg": "$tool_calls"},
                    "seconds": {"$avg": seconds("$created_at", "$scored_at")},
                }
            },
            {"$unset": "_id"},
        )
        counts = groups[0] if groups else {}
        return VersionSummary(
            version=version, step=document["step"], published_at=document["published_at"], **counts
        )

    @database_call
    async def outcomes(self, versions: Sequence[int], split: str) -> dict[str, dict[int, float]]:
        """Return task id → version → mean score, of the tasks that every one of ``versions`` has sampled."""
        key = {"task": "$task", "version": "$min_version"}
        rows = await self._aggregate(
            RECORD,
            {"$match": {"split": split, "min_version": {"$in": list(versions)}, "score": {"$ne": None}}},
            {"$group": {"_id": key, "score": {"$avg": "$score"}}},
        )
        by_task: dict[str, dict[int, list[float]]] = {}
        for row in rows:
            task_id = row["_id"]["task"].split("/", 2)[2]
            by_task.setdefault(task_id, {}).setdefault(row["_id"]["version"], []).append(row["score"])
        return {
            task: {version: fmean(scores) for version, scores in by_version.items()}
            for task, by_version in by_task.items()
            if len(by_version) == len(set(versions))
        }
