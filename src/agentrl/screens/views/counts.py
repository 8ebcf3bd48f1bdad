"""Count what a run holds: tasks, Records, failures, rates, sizes; and what scores go with."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from statistics import fmean
from typing import Any, Final, TypeVar

import pymongo

from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import TRAINED, DataStatus, RecordStatus, TaskStatus
from agentrl.scoring.groups import FAILED
from agentrl.screens.views.pipelines import StepRow, as_is, excerpt, seconds
from agentrl.screens.views.read import Views
from agentrl.store.epochs import ORDER
from agentrl.store.gateways import Labels
from agentrl.store.mechanics.connection import DATA, RECORD, TASK, VERSION, Json, Repository, database_call
from agentrl.store.records import LEASE, RELEASED, RESTARTED, WITHOUT_BRANCHES
from agentrl.store.run_list import Disk, read_disk

RATE_SECONDS = 300.0
"""Rates are those of the trajectories that were begun within this time."""
_RATE_RECORDS = 10_000
_ANY_SPLIT: Json = {"split": {"$gte": ""}}
"""The indexes begin with the split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCount:
    """Failures of one kind, and the newest one's message."""

    kind: str
    count: int
    message: str
    record: str | None = None
    """The id of the newest Record; None for groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the trajectories begun in the last ``seconds`` amount to."""

    seconds: float
    trajectories: int = 0
    scored: int = 0
    failed: int = 0
    generated_tokens: int = 0
    mean_score: float | None = None

    @property
    def per_minute(self) -> float:
        """Scored trajectories per minute."""
        return 60.0 * self.scored / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """What trajectories that went on in another process came to, and what did not."""

    trajectories: int = 0
    """Those with more than one owner."""
    died: int = 0
    """Owners of them whose lease ran out."""
    released: int = 0
    """Owners of them that released them."""
    turns: int = 0
    """Model calls that came from the journal."""
    tokens: int = 0
    """Generated tokens that nobody had to sample again."""
    tool_seconds: float = 0.0
    """Seconds of tools that nobody had to run again."""
    diverged: int = 0
    """How often one went another way than its journal."""
    dropped: int = 0
    """Model calls that this took out of them."""
    restarted: int = 0
    """Trajectories that were begun anew: their tools could not be restored."""
    poison: int = 0
    """Trajectories that failed because they kill their samplers."""

    @property
    def any(self) -> bool:
        """Return whether there is one to show."""
        return bool(self.trajectories or self.restarted or self.poison)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersSeen:
    """Trajectories whose answer stood in a result of ``tool`` before the model wrote it."""

    tool: str
    count: int
    record: str
    """The id of one of them."""


class Counts(Repository):
    """The counts behind the picture of a run. It never writes.

    ``tasks``, ``records`` and ``data`` read only indexes.
    """

    @database_call
    async def tasks(self) -> dict[tuple[str, int], dict[str, int]]:
        """Return (split, epoch) → status → Tasks."""
        counts: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)
        for (split, status, epoch), number in (await self._count(TASK, "split", "status", "epoch")).items():
            counts[split, epoch][status] = number
        return dict(sorted(counts.items()))

    @database_call
    async def records(self) -> dict[str, dict[str, int]]:
        """Return split → status as people read it (``SHOWN_STATUSES``) → Records."""
        counts = _by_split(await self._count(RECORD, "split", "status"))
        ready = RecordStatus.READY.value
        for split, by_status in counts.items():
            query = {"split": split, "status": ready, "trained_count": {"$gt": 0}}
            trained = await self._collection(RECORD).count_documents(query) if ready in by_status else 0
            if trained:
                by_status[TRAINED] = trained
                by_status[ready] = max(0, by_status[ready] - trained)
        return counts

    @database_call
    async def data(self) -> dict[str, dict[str, int]]:
        """Return split → status → training data."""
        return _by_split(await self._count(DATA, "split", "status"))

    @database_call
    async def quarantined_because(self) -> str | None:
        """Return why one of the quarantined training data must not be trained; None without one."""
        document = await self._collection(DATA).find_one(
            {**_ANY_SPLIT, "status": DataStatus.QUARANTINED.value}, {"problem": 1}
        )
        return None if document is None else document["problem"]

    @database_call
    async def failures(self) -> list[FailureCount]:
        """Count failed attempts by kind, the most frequent first, then groups that cannot be finalized."""
        attempts = await self._aggregate(
            RECORD,
            {"$match": {"status": RecordStatus.FAILED.value}},
            {"$sort": {"created_at": -1}},
            {"$project": {"failure": 1}},
            {
                "$group": {
                    "_id": {"$ifNull": ["$failure.kind", "unknown"]},
                    "count": {"$sum": 1},
                    "message": {"$first": "$failure.message"},
                    "record": {"$first": "$_id"},
                }
            },
            {"$sort": {"count": -1, "_id": 1}},
        )
        groups = await self._aggregate(
            TASK,
            {"$match": {"group.outcome": FAILED, "status": TaskStatus.COMPLETED.value}},
            {"$group": {"_id": "group", "count": {"$sum": 1}, "message": {"$last": "$group.problem"}}},
        )
        return [
            FailureCount(kind=group.pop("_id"), message=group.pop("message") or "", **group)
            for group in (*attempts, *groups)
        ]

    @database_call
    async def answers_seen(self) -> list[AnswersSeen]:
        """Count trajectories by the tool that had their answer, the most frequent first."""
        by_tool = {"$group": {"_id": "$answer_seen_in", "count": {"$sum": 1}, "record": {"$max": "$_id"}}}
        groups = await self._aggregate(
            RECORD, {"$match": {"answer_seen_in": {"$gt": ""}}}, by_tool, {"$sort": {"count": -1, "_id": 1}}
        )
        return [AnswersSeen(tool=group.pop("_id"), **group) for group in groups]

    @database_call
    async def continued(self) -> Continued:
        """Sum up the trajectories that went on in another process."""

        def ended(why: str) -> Json:
            return {"$sum": {"$cond": [{"$eq": ["$owners.ended", why]}, 1, 0]}}

        groups = await self._aggregate(
            RECORD,
            {"$match": {"owners.1.attempt": {"$gt": 0}}},
            {"$project": {"owners": 1}},
            {"$unwind": {"path": "$owners", "includeArrayIndex": "place"}},
            {
                "$group": {
                    "_id": None,
                    "trajectories": {"$sum": {"$cond": [{"$eq": ["$place", 0]}, 1, 0]}},
                    "died": ended(LEASE),
                    "released": ended(RELEASED),
                    "turns": {"$sum": "$owners.replayed"},
                    "tokens": {"$sum": "$owners.tokens"},
                    "tool_seconds": {"$sum": "$owners.tool_seconds"},
                    "diverged": {"$sum": {"$cond": [{"$isNumber": "$owners.diverged_at"}, 1, 0]}},
                    "dropped": {"$sum": "$owners.dropped"},
                }
            },
            {"$unset": "_id"},
        )
        records = self._collection(RECORD)
        restarted = {"status": RecordStatus.RELEASED.value, "owners.ended": RESTARTED}
        poison = {"status": RecordStatus.FAILED.value, "failure.kind": "poison"}
        return Continued(
            restarted=await records.count_documents(restarted),
            poison=await records.count_documents(poison),
            **(groups[0] if groups else {}),
        )

    @database_call
    async def rates(self, at: datetime) -> Rates:
        """Return the rates at the server's time ``at``, over less time if 10,000 trajectories are newer."""
        is_failed = {"$eq": ["$status", RecordStatus.FAILED.value]}
        groups = await self._aggregate(
            RECORD,
            {"$match": {"created_at": {"$gte": at - timedelta(seconds=RATE_SECONDS)}, **WITHOUT_BRANCHES}},
            {"$sort": {"created_at": -1}},
            {"$limit": _RATE_RECORDS},
            {"$project": as_is("status", "score", "generated_tokens", "created_at")},
            {
                "$group": {
                    "_id": None,
                    "trajectories": {"$sum": 1},
                    "scored": {"$sum": {"$cond": [{"$isNumber": "$score"}, 1, 0]}},
                    "failed": {"$sum": {"$cond": [is_failed, 1, 0]}},
                    "generated_tokens": {"$sum": "$generated_tokens"},
                    "mean_score": {"$avg": "$score"},
                    "oldest": {"$min": "$created_at"},
                }
            },
            {"$unset": "_id"},
        )
        if not groups:
            return Rates(seconds=RATE_SECONDS)
        (group,) = groups
        oldest = group.pop("oldest")
        is_cut = group["trajectories"] == _RATE_RECORDS
        seconds = max(1.0, (at - oldest).total_seconds()) if is_cut else RATE_SECONDS
        return Rates(seconds=seconds, **group)

    @database_call
    async def disk(self) -> Disk:
        """Return the sizes; without the right to read them, none."""
        return await read_disk(self._connection.database)

    async def _count(self, source: str, *fields: str) -> dict[tuple[Any, ...], int]:
        """Return the values of ``fields`` → documents. An index begins with them, in any order.

        The server skips through it for the distinct values, and counts its keys.
        """
        collection, keys = self._collection(source), [dict[str, Any]()]
        for name in fields:
            values = await asyncio.gather(*(collection.distinct(name, key) for key in keys))
            keys = [{**key, name: value} for key, of in zip(keys, values, strict=True) for value in of]
        numbers = await asyncio.gather(*(collection.count_documents(key) for key in keys))
        return {tuple(key.values()): number for key, number in zip(keys, numbers, strict=True)}


def _by_split(numbers: Mapping[tuple[Any, ...], int]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    for (split, status), number in numbers.items():
        counts[split][status] = number
    return dict(counts)


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
    """Finalized groups of the train split that were begun by order, or by their tasks' pass rate.

    Of a mixture, those of one source.
    """

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
            versions=await VersionScores(self._connection).published(_LAST_VERSIONS),
            steps=await Views(self._connection).steps(last=_LAST_STEPS),
        )  # fmt: skip

    @database_call
    async def groups(self) -> list[GroupCount]:
        """Count the finalized groups of the train split, by source, or else by what began them."""
        return await self._grouped(
            GroupCount, TASK, {"by": {"$ifNull": ["$source", "$begun.by", ORDER]}},
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
