"""Read what the tables of ``agentrl audit run`` add to the picture of a run; it reads whole collections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import TaskStatus
from agentrl.store.mechanics.connection import Json, Repository, database_call
from agentrl.store.names import DATA, RECORD, TASK
from agentrl.store.selection import ORDER
from agentrl.store.views.read import Views
from agentrl.store.views.rows import StepRow
from agentrl.store.views.scores import Versions

_LAST_STEPS = 10
_LAST_VERSIONS = 5
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentCount:
    """The tasks of one environment in one split, and the scores of its finalized groups."""

    split: str
    environment: str
    tasks: int
    finalized: int
    trajectories: int
    """Those with a score."""
    score: float | None
    """Mean over the groups."""
    pass_rate: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCount:
    """Finalized groups of the train split that were begun by order, or by their tasks' pass rate."""

    by: str
    groups: int
    abandoned_groups: int
    """Groups without a trained trajectory."""
    trajectories: int
    """Those with a score."""
    trained: int
    """Trajectories that became training data."""
    pass_rate: float | None
    """Mean over the groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCount:
    """Training data of one status."""

    status: str
    count: int
    tokens: int
    trainable_tokens: int
    because: str | None = None
    """Why one of them is quarantined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBias:
    """Mean generated tokens of the scored trajectories of a split, and of the trained ones among them."""

    split: str
    sampled: int
    sampled_tokens: float
    trained: int
    trained_tokens: float | None

    @property
    def ratio(self) -> float | None:
        """Trained over sampled; below 1, training sees shorter trajectories than the policy writes."""
        if not self.trained_tokens or not self.sampled_tokens:
            return None
        return self.trained_tokens / self.sampled_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokens:
    """Tokens of the prompts of all model calls of a split, and those that engines had cached."""

    split: str
    tokens: int
    cached: int

    @property
    def cache_hit_rate(self) -> float | None:
        """The fraction of cached tokens; None without a prompt."""
        return self.cached / self.tokens if self.tokens else None


@dataclass(frozen=True, kw_only=True)
class RunDetails:
    """The rows of the tables."""

    groups: Sequence[GroupCount]
    data: Sequence[DataCount]
    lengths: Sequence[LengthBias]
    prompts: Sequence[PromptTokens]
    environments: Sequence[EnvironmentCount]
    versions: Sequence[PolicyVersion]
    """The newest ones, newest first, without their files."""
    steps: Sequence[StepRow]
    """The last planned ones of every status, oldest first."""


# not a part of Counts, which every refresh of a page reads: these sums look at each document
class Details(Repository):
    """Reads the rows of the tables. It never writes."""

    @database_call
    async def read(self) -> RunDetails:
        """Return all of them."""
        is_final = {"$eq": ["$status", TaskStatus.COMPLETED.value]}
        trained = {"$gt": ["$trained_count", 0]}
        return RunDetails(
            groups=await self.groups(),
            data=await self._grouped(
                DataCount, DATA, {"status": "$status"},
                {
                    "count": {"$sum": 1},
                    "tokens": {"$sum": "$tokens"},
                    "trainable_tokens": {"$sum": "$trainable_tokens"},
                    "because": {"$max": "$problem"},
                },
            ),
            lengths=await self._grouped(
                LengthBias, RECORD, {"split": "$split"},
                {
                    "sampled": {"$sum": 1},
                    "sampled_tokens": {"$avg": "$generated_tokens"},
                    "trained": {"$sum": {"$cond": [trained, 1, 0]}},
                    "trained_tokens": {"$avg": {"$cond": [trained, "$generated_tokens", None]}},
                },
                {"score": {"$ne": None}},
            ),
            prompts=await self._grouped(
                PromptTokens, RECORD, {"split": "$split"},
                {"tokens": {"$sum": "$input_tokens"}, "cached": {"$sum": "$cached_tokens"}},
                {"input_tokens": {"$gt": 0}},
            ),
            environments=await self._grouped(
                EnvironmentCount, TASK, {"split": "$split", "environment": "$environment"},
                {
                    "tasks": {"$sum": 1},
                    "finalized": {"$sum": {"$cond": [is_final, 1, 0]}},
                    "trajectories": {"$sum": "$group.scored"},
                    "score": {"$avg": "$group.mean_score"},
                    "pass_rate": {"$avg": "$group.pass_rate"},
                },
                {"environment": {"$ne": None}},
            ),
            versions=await Versions(self._connection).published(_LAST_VERSIONS),
            steps=await Views(self._connection).steps(last=_LAST_STEPS),
        )  # fmt: skip

    @database_call
    async def groups(self) -> list[GroupCount]:
        """Count the finalized groups of the train split: those begun by order, those begun by pass rate."""
        return await self._grouped(
            GroupCount, TASK, {"by": {"$ifNull": ["$begun.by", ORDER]}},
            {
                "groups": {"$sum": 1},
                "abandoned_groups": {"$sum": {"$cond": [{"$eq": ["$group.trained", 0]}, 1, 0]}},
                "trajectories": {"$sum": "$group.scored"},
                "trained": {"$sum": "$group.trained"},
                "pass_rate": {"$avg": "$group.pass_rate"},
            },
            {"split": "train", "status": TaskStatus.COMPLETED.value},
        )  # fmt: skip

    async def _grouped(
        self, row: type[T], collection: str, keys: Json, sums: Json, query: Json | None = None
    ) -> list[T]:
        """Return a row per value of ``keys``, with ``sums`` over its documents, in the order of the keys."""
        grouped = {"$group": {"_id": keys, **sums}}
        groups = await self._aggregate(collection, {"$match": query or {}}, grouped, {"$sort": {"_id": 1}})
        return [row(**group.pop("_id"), **group) for group in groups]
