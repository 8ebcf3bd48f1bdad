"""Read what scores depend on: length, tools, answers, and the opinions of several scorers on a trajectory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import pymongo

from agentrl.store.labels import Labels
from agentrl.store.mechanics.connection import Json, Repository, database_call
from agentrl.store.names import RECORD
from agentrl.store.views.aggregation import as_is, excerpt

PEOPLE: Final = "people"
"""The name of the opinion that labels give."""
NEWEST: Final = 2000
_SECONDS = 10.0
_ANSWER_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTrajectory:
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
    async def newest(self, split: str, *, limit: int = NEWEST) -> list[ScoredTrajectory]:
        """Return the newest scored trajectories of a split, newest first."""
        people = await Labels(self._connection).scores()
        pipeline: list[Json] = [
            {"$match": {"split": split}},
            {"$sort": {"created_at": -1, "_id": -1}},
            {"$match": {"score": {"$ne": None}}},
            {"$limit": limit},
            {"$project": _FIELDS},
        ]
        with pymongo.timeout(_SECONDS):
            cursor = await self._collection(RECORD).aggregate(pipeline)
            return [_scored(document, people) async for document in cursor]

    @database_call
    async def splits(self) -> list[str]:
        """Return the splits with Records, in alphabetical order."""
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


def _scored(document: Json, people: Mapping[str, float]) -> ScoredTrajectory:
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
    return ScoredTrajectory(
        id=document["_id"], opinions=opinions, judges=frozenset(judges),
        **{name: document[name] for name in plain},
    )  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
