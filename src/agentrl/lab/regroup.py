"""Decide stored groups again: by new scores or other rules, without some Records, with reopened slots."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pymongo import UpdateOne

from agentrl.base.batches import batches
from agentrl.base.concurrency import DECISION_THREADS
from agentrl.data.finalize_group import Decide, GroupRules, decide_stored
from agentrl.documents.document import plain
from agentrl.documents.record import CALL_ROLES, ROLE_REWARDS, TURN_REWARDS, Record
from agentrl.documents.run import Relative
from agentrl.documents.status import ColumnStatus, DataStatus, RecordStatus, SlotStatus, TaskStatus, values
from agentrl.documents.task import CONVERSATIONS, FEEDBACK, Begin, Task, record_task
from agentrl.errors import ConfigError, GroupError, ScorerError, StoreError, TrainingError
from agentrl.lab.flags import GROUP_RULES
from agentrl.scoring.groups import FAILED
from agentrl.scoring.scorers import score_context, stored_context
from agentrl.store.client import Store
from agentrl.store.epochs import ease_after_group
from agentrl.store.groups import GroupOutcome, StoredGroup, read_group, settle_records
from agentrl.store.mechanics import lease
from agentrl.store.mechanics.blobs import Blobs, seal
from agentrl.store.mechanics.connection import (
    COLUMN,
    DATA,
    RECORD,
    TASK,
    Connection,
    Json,
    Repository,
    database_call,
)
from agentrl.store.mechanics.lease import after, literal, set_slots
from agentrl.store.model_calls import read_model_calls
from agentrl.store.records import read_records

if TYPE_CHECKING:
    from agentrl.store.client import Store

DecideTask = Callable[[Task], Decide | None]
"""A finalized Task → the function that decides its group; None if its rules are unknown."""

R = TypeVar("R")
_TRIES = 5
_CONSUMED = [DataStatus.PLANNED.value, DataStatus.TRAINED.value]
_DECIDED = [RecordStatus.READY.value, RecordStatus.ABANDONED.value]


class Blocker(StrEnum):
    """Why a group is left as it is; all but the last are about finalized groups."""

    TRAINED = "trained"  # a step has trained, or has planned to train, some of its data
    PRUNED = "pruned"  # model calls of its scored trajectories have been deleted
    NO_RULES = "no rules"  # it does not store the rules by which it was decided
    CONVERSATION = "conversation"  # its user is gone: nobody can sample it again


def selection(split: str | None, tasks: Sequence[str], records: Sequence[str]) -> Json:
    """Return the filter of a command's Records: None and empty sequences select all."""
    query: Json = {}
    if split is not None:
        query["split"] = split
    if tasks:
        query["task"] = {"$in": list(tasks)}
    if records:
        query["_id"] = {"$in": list(records)}
    return query


class GroupChangedError(Exception):
    """Another process changed the group since it was read: read it again and retry."""


class GroupBlockedError(Exception):
    """The group is finalized and cannot be taken back."""

    def __init__(self, blocker: Blocker) -> None:
        super().__init__(blocker)
        self.blocker = blocker


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChange:
    """The changes to a group, as aggregation updates."""

    task: Sequence[Json]
    records: Sequence[UpdateOne] = ()
    """Changes of single Records, each of which must match."""
    outcome: GroupOutcome | None = None
    """The new decision on a finalized group; None: it is undecided until its slots are terminal again."""


async def retry_changed(change: Callable[[], Awaitable[R]], task_id: str, *, doing: str, hint: str) -> R:
    """Call ``change``, which reads and writes a group, again while other processes change it meanwhile."""
    for _ in range(_TRIES):
        with contextlib.suppress(GroupChangedError, GroupBlockedError):
            return await change()
    raise StoreError(f"group {task_id} kept changing while it was {doing}", hint=hint)


async def decide_anew(
    connection: Connection, task: Json, records: Sequence[Record], decide_by: DecideTask
) -> GroupOutcome | Blocker:
    """Return the decision on a finalized group that has ``records`` now, or why it keeps the old one."""
    if (blocker := await _find_blocker(connection, task["_id"])) is not None:
        return blocker
    parsed = Task.from_document(task)
    decide = decide_by(parsed)
    return Blocker.NO_RULES if decide is None else decide(await read_group(connection, parsed, records))


async def regroup(connection: Connection, task: Json, change: GroupChange) -> int:
    """Change a group; one that is finalized is taken back first, and decided anew by ``change.outcome``.

    Taking back deletes its training data and moves its Records back to SCORED. Returns the number of deleted
    training documents. Raises GroupChangedError if ``task`` is not as it was read, or GroupBlockedError: each
    aborts the transaction.
    """
    task_id = task["_id"]
    await change_task(connection, task, change.task)
    if change.records:
        written = await connection.collection(RECORD).bulk_write(list(change.records))
        if written.matched_count != len(change.records):
            raise GroupChangedError
    if task["status"] != TaskStatus.COMPLETED.value:
        return 0
    await require_unblocked(connection, task_id)
    deleted = await _take_back(connection, task_id)
    if change.outcome is not None:
        await settle_records(connection, change.outcome.records)
        blobs = Blobs(connection, DATA)
        for item in change.outcome.data:
            document = await blobs.rewrite(item.to_document())
            await connection.collection(DATA).insert_one(document)
    return deleted


async def change_task(connection: Connection, task: Json, change: Sequence[Json]) -> None:
    """Update a Task. Raises GroupChangedError if it is not as it was read."""
    unchanged = {key: task[key] for key in ("_id", "status", "updated_at")}
    updated = await connection.collection(TASK).update_one(unchanged, list(change))
    if not updated.matched_count:
        raise GroupChangedError


def decided(task: Json, outcome: GroupOutcome) -> Json:
    """Return the fields of a Task, as expressions, that a new decision changes; the group keeps its times."""
    gone = ("problem", "kept_as_trained")
    kept = {key: value for key, value in (task["group"] or {}).items() if key not in gone}
    changes: Json = {"group": literal({**kept, **plain(outcome.summary)}), "updated_at": "$$NOW"}
    if task.get("begun") and task.get("ease") is not None:
        changes["ease"] = ease_after_group(Begin.from_document(task["begun"]), outcome.summary)
    return changes


async def require_unblocked(connection: Connection, task_id: str) -> None:
    """Raise GroupBlockedError if a finalized group cannot be taken back."""
    if (blocker := await _find_blocker(connection, task_id)) is not None:
        raise GroupBlockedError(blocker)


async def _find_blocker(connection: Connection, task_id: str) -> Blocker | None:
    """Return why a finalized group cannot be taken back; None if it can."""
    consumed = {"$or": [{"status": {"$in": _CONSUMED}}, {"trained_count": {"$gt": 0}}]}
    data = connection.collection(DATA)
    if await data.find_one({"task": task_id, **consumed}, {"_id": 1}):
        return Blocker.TRAINED
    pruned = {"task": task_id, "score": {"$ne": None}, "pruned_at": {"$ne": None}}
    if await connection.collection(RECORD).find_one(pruned, {"_id": 1}):
        return Blocker.PRUNED
    return None


async def _take_back(connection: Connection, task_id: str) -> int:
    """Delete the group's training data with their files, and move its Records back to SCORED.

    A step planned at the same moment writes the same documents, so that one of the two transactions retries.
    """
    data = connection.collection(DATA)
    ids = [item["_id"] async for item in data.find({"task": task_id}, {"_id": 1})]
    if ids:
        await data.delete_many({"_id": {"$in": ids}})
        await Blobs(connection, DATA).delete(ids)
    scored: Json = {
        "status": RecordStatus.SCORED.value, "advantage": None, "turn_advantages": [],
        "abandoned_because": None,
    }  # fmt: skip
    await connection.collection(RECORD).update_many(
        {"task": task_id, "status": {"$in": _DECIDED}}, {"$set": scored}
    )
    return len(ids)


_SETTLED = (RecordStatus.READY, RecordStatus.ABANDONED)
SCORED = (RecordStatus.SCORED, *_SETTLED)
"""The statuses of a Record with a score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewScore:
    """A new score of a Record that has one."""

    score: float
    details: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """The result of rescoring one group.

    ``kept_because``: why the Records keep their scores; the new ones are stored beside them in ``rescored``.
    ``decided_again``: the group was finalized, and its advantages and training data are new.
    """

    changed: int
    decided_again: bool = False
    kept_because: Blocker | None = None


class Rescoring(Repository):
    """Reads the Records to score again, and writes their new scores."""

    @database_call
    async def tasks(
        self, *, split: str | None = None, tasks: Sequence[str] = (), records: Sequence[str] = (),
        statuses: Sequence[RecordStatus] = SCORED,
    ) -> list[str]:  # fmt: skip
        """Return the ``_id`` of the Tasks with Records to score; without a filter, of all."""
        query = _query(split, tasks, records, statuses)
        return sorted(await self._collection(RECORD).distinct("task", query))

    @database_call
    async def group(
        self, task_id: str, *, records: Sequence[str] = (), statuses: Sequence[RecordStatus] = SCORED
    ) -> StoredGroup:
        """Return the Records of one Task to score, with their model calls unless they were pruned."""
        document = await self._collection(TASK).find_one({"_id": task_id})
        if document is None:
            raise StoreError(f"there is no Task {task_id}")
        chosen = await self._all(Record, RECORD, _query(None, [task_id], records, statuses))
        calls = await read_model_calls(self._connection, [record.id for record in chosen])
        return StoredGroup(task=Task.from_document(document), records=chosen, calls=calls)

    @database_call
    async def apply(
        self, task_id: str, scores: Mapping[str, NewScore], decide_by: DecideTask, *, dry_run: bool = False
    ) -> Rescored:
        """Write the new scores of one group in one transaction.

        A group that is not finalized is decided by them later. A finalized group is decided anew at once if
        nothing of it has been trained; otherwise the new scores are stored beside the old ones.
        """
        return await retry_changed(
            lambda: self._apply(task_id, scores, decide_by, dry_run), task_id, doing="rescored",
            hint="rescore it when its samplers are done",
        )  # fmt: skip

    async def _apply(
        self, task_id: str, scores: Mapping[str, NewScore], decide_by: DecideTask, dry_run: bool
    ) -> Rescored:
        document = await self._collection(TASK).find_one({"_id": task_id})
        if document is None:
            raise StoreError(f"there is no Task {task_id}")
        records = await read_records(self._connection, task_id)
        renewed = [_with_score(record, scores.get(record.id)) for record in records]
        earlier = [old for old, new in zip(records, renewed, strict=True) if old is not new]
        if not earlier:
            return Rescored(changed=0)
        if document["status"] != TaskStatus.COMPLETED.value:
            if not dry_run:
                await self._write(document, earlier, scores, None)
            return Rescored(changed=len(earlier))
        outcome = await decide_anew(self._connection, document, renewed, decide_by)
        if isinstance(outcome, Blocker):
            if not dry_run:
                await self._note(earlier, scores)
            return Rescored(changed=len(earlier), kept_because=outcome)
        if not dry_run:
            await self._write(document, earlier, scores, outcome)
        return Rescored(changed=len(earlier), decided_again=True)

    async def _write(
        self, task: Json, earlier: Sequence[Record], scores: Mapping[str, NewScore],
        outcome: GroupOutcome | None,
    ) -> None:  # fmt: skip
        """Write the new scores, and the group as ``outcome`` decides it."""
        change = GroupChange(
            task=_new_task(earlier, scores, task, outcome),
            records=[_new_record(record, scores[record.id]) for record in earlier],
            outcome=outcome,
        )
        await self._connection.transaction(lambda: regroup(self._connection, task, change))

    async def _note(self, records: Sequence[Record], scores: Mapping[str, NewScore]) -> None:
        notes = []
        for record in records:
            new = scores[record.id]
            stored = literal({"score": new.score, "details": plain(new.details)})
            note: list[Json] = [{"$set": {"rescored": stored}}, {"$set": {"rescored.at": "$$NOW"}}]
            notes.append(UpdateOne({"_id": record.id}, note))
        await self._collection(RECORD).bulk_write(notes)


def _query(
    split: str | None, tasks: Sequence[str], records: Sequence[str], statuses: Sequence[RecordStatus]
) -> Json:
    scored: Json = {"status": {"$in": values(statuses)}, "score": {"$ne": None}}
    return scored | selection(split, tasks, records)


def _with_score(record: Record, new: NewScore | None) -> Record:
    """Return the Record with its new score; the Record itself if nothing of the score changed."""
    if new is None or record.score is None:
        return record
    compared = ("scorer", TURN_REWARDS, ROLE_REWARDS)
    is_same = all(record.score_details.get(key) == new.details.get(key) for key in compared)
    if record.score == new.score and is_same:
        return record
    return dataclasses.replace(record, score=new.score, score_details=new.details)


def _new_record(record: Record, new: NewScore) -> UpdateOne:
    earlier = {"score": record.score, "details": record.score_details, "scored_at": record.scored_at}
    scored = {"score": new.score, "score_details": plain(new.details)}
    return UpdateOne(
        {"_id": record.id, "status": record.status.value, "score": record.score},
        {
            "$set": {**scored, **seal(RECORD, "score", scored)},
            "$push": {"score_history": plain(earlier)},
            "$currentDate": {"scored_at": True},
        },
    )


def _new_task(
    earlier: Sequence[Record], scores: Mapping[str, NewScore], task: Json, outcome: GroupOutcome | None
) -> list[Json]:
    branches = [
        {"case": {"$eq": ["$$slot.record_id", literal(record.id)]}, "then": scores[record.id].score}
        for record in earlier
    ]
    score = {"$switch": {"branches": branches, "default": "$$slot.score"}}
    is_scored = {"$eq": ["$$slot.status", SlotStatus.SCORED.value]}
    scored = set_slots(is_scored, {"score": score})
    if outcome is None:
        return [scored, {"$set": {"updated_at": "$$NOW"}}]
    return [scored, {"$set": decided(task, outcome)}, {"$set": {"group.rescored_at": "$$NOW"}}]


GIVEN_UP = "group"
"""The failure kind of a group that could not be finalized."""
COLUMN_KIND = "column"
"""The failure kind of a column that was given up."""
_BEGUN = [TaskStatus.RUNNING.value, TaskStatus.WAITING.value, TaskStatus.COMPLETED.value]
_UNDECIDED: Json = {"group": None, "finalizing": None}


@dataclass(slots=True, kw_only=True)
class Reopened:
    """Counts of what was reopened."""

    slots: int = 0
    groups: int = 0
    finalized: int = 0
    """Groups that had been finalized, and are undecided again."""
    data: int = 0
    """Training documents deleted; finalizing the group again makes them anew."""
    columns: int = 0
    """Columns that were given up, and wait to be filled again."""
    given_up: int = 0
    """Groups that could not be finalized, and wait to be finalized again."""
    conversations: int = 0
    """Conversations that wait for feedback again."""
    left: Counter[Blocker] = field(default_factory=Counter)
    """Groups left as they are, by reason."""


@dataclass(slots=True, kw_only=True)
class Requeued:
    """Counts of the trajectories that wait for a score again."""

    by_split: Counter[str] = field(default_factory=Counter)
    left: Counter[Blocker] = field(default_factory=Counter)
    """Groups left as they are, by reason."""


class Reopening(Repository):
    """Reopens slots and groups of a run: one transaction per group.

    A finalized group is taken back to running, unless a step has planned or trained some of its data.
    """

    @database_call
    async def reopen(
        self, kinds: Sequence[str] = (), *, split: str | None = None, feedback_hours: float = 72.0,
        dry_run: bool = False,
    ) -> Reopened:  # fmt: skip
        """Reopen the failed slots whose last attempt failed with one of ``kinds`` (none: with any).

        They get all their attempts. A conversation that nobody rated (kind ``FEEDBACK``) waits for feedback
        again, ``feedback_hours`` from now; other conversations stay. A group that could not be finalized
        (kind ``GIVEN_UP``) waits for it again, and one with columns that were given up (kind ``COLUMN_KIND``)
        waits for these again.
        """
        of_split: Json = {} if split is None else {"split": split}
        done = Reopened()
        failed = {"status": {"$in": _BEGUN}, "slots.status": SlotStatus.FAILED.value, **of_split}
        for task_id in sorted(await self._ids(TASK, {**failed, "epoch": {"$ne": CONVERSATIONS}})):
            records = None if not kinds else {"task": task_id, "failure.kind": {"$in": list(kinds)}}
            if changed := await self._change(task_id, records, _opening, done.left, dry_run):
                done.slots += changed.slots
                done.groups += 1
                done.finalized += changed.task["status"] == TaskStatus.COMPLETED.value
                done.data += changed.data
        await self._reopen_conversations(failed, kinds, feedback_hours, done, dry_run)
        if not kinds or GIVEN_UP in kinds:
            given_up = {"status": TaskStatus.COMPLETED.value, "group.outcome": FAILED, **of_split}
            for task_id in sorted(await self._ids(TASK, given_up)):
                done.given_up += dry_run or await self._wait_again({"_id": task_id, **given_up}, done)
        if not kinds or COLUMN_KIND in kinds:
            await self._reopen_columns(of_split, done, dry_run)
        return done

    @database_call
    async def requeue(
        self, *, split: str | None = None, tasks: Sequence[str] = (), records: Sequence[str] = (),
        dry_run: bool = False,
    ) -> Requeued:  # fmt: skip
        """Queue the sampled Records that failed for good in scoring, with all attempts to score them."""
        query: Json = {
            "status": RecordStatus.FAILED.value, "failure.kind": "scorer", "completed_at": {"$ne": None},
            "pruned_at": None, **selection(split, tasks, records),
        }  # fmt: skip
        done = Requeued()
        for task_id in sorted(await self._collection(RECORD).distinct("task", query)):
            chosen = {**query, "task": task_id}
            if changed := await self._change(task_id, chosen, _queueing, done.left, dry_run):
                done.by_split[changed.task["split"]] += changed.slots
        return done

    async def _reopen_conversations(
        self, failed: Json, kinds: Sequence[str], hours: float, done: Reopened, dry_run: bool
    ) -> None:
        """Let those that only lack feedback wait for it; count the others."""
        waiting = partial(_queueing, not_before=after(hours * 3600))
        for task_id in sorted(await self._ids(TASK, {**failed, "epoch": CONVERSATIONS})):
            of_kind: Json = {"failure.kind": {"$in": list(kinds)}} if kinds else {}
            query = {"task": task_id, "status": RecordStatus.FAILED.value, **of_kind}
            record = await self._collection(RECORD).find_one(query)
            if record is None:
                continue
            is_whole = record["completed_at"] is not None and record["pruned_at"] is None
            lacks = is_whole and record["failure"]["kind"] == FEEDBACK
            if lacks and await self._change(task_id, {"_id": record["_id"]}, waiting, done.left, dry_run):
                done.conversations += 1
            else:
                done.left[Blocker.CONVERSATION] += 1

    async def _reopen_columns(self, of_split: Json, done: Reopened, dry_run: bool) -> None:
        """Open the columns that were given up; their groups wait for them."""
        columns = self._collection(COLUMN)
        failed: Json = {"status": ColumnStatus.FAILED.value, **of_split}
        for task_id in sorted(await columns.distinct("task", failed)):
            of_task = {**failed, "task": task_id}
            count = await columns.count_documents(of_task)
            if dry_run or await self._wait_again({"_id": task_id}, done, of_task):
                done.columns += count

    async def _wait_again(self, query: Json, done: Reopened, columns: Json | None = None) -> bool:
        """Move a group back to WAITING and open its ``columns``; return False if it is gone or blocked."""
        opened = {"status": ColumnStatus.OPEN.value, "failures": 0, "not_before": None}
        update = {"status": TaskStatus.WAITING.value, "updated_at": "$$NOW", **_UNDECIDED}

        async def write() -> bool:
            task = await self._collection(TASK).find_one(query)
            if task is not None:
                await regroup(self._connection, task, GroupChange(task=[{"$set": update}]))
                if columns is not None:
                    await self._collection(COLUMN).update_many(columns, {"$set": opened})
            return task is not None

        try:
            return await self._connection.transaction(write)
        except GroupBlockedError as error:
            done.left[error.blocker] += 1
            return False

    async def _change(
        self, task_id: str, records: Json | None, change: Callable[[Sequence[Json]], GroupChange],
        left: Counter[Blocker], dry_run: bool,
    ) -> _Changed | None:  # fmt: skip
        """Change the failed slots of a group whose Record is among ``records`` (None: all of them).

        None if there is none, and for a group that cannot be taken back, which ``left`` counts.
        """

        async def write() -> _Changed | None:
            task = await self._collection(TASK).find_one({"_id": task_id})
            if task is None:
                return None
            failed = [slot for slot in task["slots"] if slot["status"] == SlotStatus.FAILED]
            if records is not None:
                chosen = await self._ids(RECORD, records)
                failed = [slot for slot in failed if slot.get("record_id") in chosen]
            if not failed:
                return None
            if not dry_run:
                deleted = await regroup(self._connection, task, change(failed))
                return _Changed(task, len(failed), deleted)
            if task["status"] == TaskStatus.COMPLETED:
                await require_unblocked(self._connection, task_id)
            return _Changed(task, len(failed), 0)

        try:
            return await self._connection.transaction(write)
        except GroupBlockedError as error:
            left[error.blocker] += 1
            return None


class _Changed(NamedTuple):
    task: Json
    """As it was before."""
    slots: int
    data: int
    """Training documents that were deleted."""


def _opening(failed: Sequence[Json]) -> GroupChange:
    """Return the change that opens slots with all their attempts; the group is undecided again."""
    chosen = {"$in": ["$$slot.traj_id", [slot["traj_id"] for slot in failed]]}
    return GroupChange(task=[*lease.change_slots(chosen, lease.REOPENED), {"$set": _UNDECIDED}])


def _queueing(failed: Sequence[Json], not_before: Json | None = None) -> GroupChange:
    """Return the change that queues failed slots for a score; the group is undecided again."""
    chosen = {"$in": ["$$slot.traj_id", [slot["traj_id"] for slot in failed]]}
    records = [
        UpdateOne(
            {"_id": slot["record_id"], "status": RecordStatus.FAILED.value},
            {"$set": {"status": RecordStatus.COMPLETED.value, "failure": None}},
        )
        for slot in failed
    ]
    update = lease.change_slots(chosen, {**lease.QUEUED, "scorings": 0, "not_before": not_before})
    return GroupChange(task=[*update, {"$set": _UNDECIDED}], records=records)


SCORER = "scorer"
"""Key of the scorer in ``Relative.changed``."""


@dataclass(frozen=True, kw_only=True)
class Regrouped:
    """A group as it is decided now. ``scores``: the new score of each Record, if they were scored again."""

    outcome: GroupOutcome
    scores: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Regrouping:
    """How groups are decided again; by default none is."""

    rules: Mapping[str, Any] = field(default_factory=dict)
    """Flags of ``GroupConfig`` that replace those that each group was decided by."""
    without: frozenset[str] = frozenset()
    """``_id`` of Records that are left out: their groups are decided as if they had never been sampled."""
    scorer: str | None = None
    """Scores all Records again; None: they keep their scores."""
    scorer_timeout_seconds: float = 60.0
    agent_config_path: str = ""

    @cached_property
    def _tasks(self) -> frozenset[str]:
        return frozenset(map(record_task, self.without))

    def concerns(self, task_id: str) -> bool:
        """Return whether a group is decided again."""
        return bool(self.rules) or self.scorer is not None or task_id in self._tasks

    async def decide(self, store: Store, task_id: str) -> Regrouped:
        """Decide a stored group again.

        Raises TrainingError if its documents are gone or a scorer fails; GroupError or ConfigError for a
        group filter or an advantage of a user that fails.
        """
        group = await store.groups.stored(task_id)
        summary = group.task.group if group is not None else None
        if group is None or summary is None or "rules" not in summary:
            raise TrainingError(
                f"group {task_id} cannot be decided again: run {store.run_name} does not hold"
                + (" its Task" if group is None else " the rules that decided it"),
                hint="leave its step out (--steps)",
            )
        if group.task.pruned_at is not None:
            raise TrainingError(
                f"group {task_id} cannot be decided again: its model calls have been pruned",
                hint="keep the rules and the Records as they are, or leave its step out (--steps)",
            )
        stored = GroupRules.of_group(summary)
        config = replace(stored.config, **self.rules)
        keeps_filter = config.group_filter == stored.config.group_filter and self.scorer is None
        rules = replace(
            stored, config=config, recorded=False, filtered=stored.filtered if keeps_filter else None
        )
        records: list[Record] = [record for record in group.records if record.id not in self.without]
        if rules.filtered is not None:
            left = {record.id for record in records}
            rules = replace(rules, filtered={id: why for id, why in rules.filtered.items() if id in left})
        if self.scorer is not None:
            name = self.scorer
            records = list(await asyncio.gather(*(self._score(group, record, name) for record in records)))
        outcome = await DECISION_THREADS.run(rules.decide, replace(group, records=records))
        scores = {record.id: record.score for record in records if record.score is not None}
        return Regrouped(outcome=outcome, scores=scores if self.scorer is not None else {})

    async def _score(self, group: StoredGroup, record: Record, scorer: str) -> Record:
        """Return the Record with its new score; one without a score stays as it is."""
        if record.score is None:
            return record
        calls = group.calls.get(record.id, ())
        context = stored_context(group.task, record, calls, self.agent_config_path)
        try:
            found = await score_context(
                scorer, replace(context, agent_score=None), self.scorer_timeout_seconds
            )
        except ScorerError as error:
            raise TrainingError(
                f"--scorer {scorer} does not score {record.id}: {error.message}", hint=error.hint
            ) from error
        return replace(record, score=found.score, score_details=found.details)


def regrouping_of(relative: Relative, usual: Regrouping | None = None) -> Regrouping:
    """Return how a what-if decides the groups of its parent; ``usual`` has the settings of scorers."""
    new = {name: values[1] for name, values in relative.changed.items()}
    return replace(
        usual or Regrouping(),
        rules={name: value for name, value in new.items() if name in GROUP_RULES},
        without=frozenset(relative.without),
        scorer=new.get(SCORER),
    )


_GROUPS_AT_A_TIME = 8
_ERRORS_SHOWN = 5
LABELS = "labels"
"""The ``scorer`` of ``score_details`` of a score that people gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RescoreOptions:
    """Which Records to score again, and how. Filters that are empty select all."""

    scorer: str | None = None
    """A name or a path ``module:function``; None: each task's own."""
    from_labels: bool = False
    """Take the scores that people gave in Labels; Records without one keep theirs."""
    split: str | None = None
    statuses: Sequence[RecordStatus] = SCORED
    tasks: Sequence[str] = ()
    records: Sequence[str] = ()
    concurrency: int = 16
    scorer_timeout_seconds: float = 120.0
    agent_config_path: str = "assets/agent_config.yml"
    dry_run: bool = False


@dataclass(slots=True, kw_only=True)
class SplitReport:
    """The old and new scores of one split's Records, and counts of groups decided again and kept."""

    old: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)
    changed: int = 0
    decided_again: int = 0
    kept: dict[str, int] = field(default_factory=dict)
    """Groups that keep their scores, by reason."""

    @property
    def old_mean(self) -> float | None:
        """The mean of the old scores; None without any."""
        return fmean(self.old) if self.old else None

    @property
    def new_mean(self) -> float | None:
        """The mean of the new scores; None without any."""
        return fmean(self.new) if self.new else None


@dataclass(frozen=True, slots=True)
class RescoreReport:
    """The result of rescoring a run."""

    splits: dict[str, SplitReport] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    """Records and groups that could not be scored or decided, with the reason."""
    writers: Mapping[str, int] = field(default_factory=dict)
    """Who wrote labels with a score, and how many, if labels gave the scores."""

    def remarks(self) -> Iterator[str]:
        """Yield a line for who wrote labels, groups that keep their scores, and the first errors."""
        for who, labels in self.writers.items():
            yield f"{labels} labels of {who}"
        for name, split in sorted(self.splits.items()):
            for why, groups in split.kept.items():
                yield (
                    f"{name}: {groups} groups keep their scores ({why});"
                    " the new ones stand beside them as Record.rescored"
                )
        for error in self.errors[:_ERRORS_SHOWN]:
            yield f"not scored  {error}"
        if len(self.errors) > _ERRORS_SHOWN:
            yield f"not scored  {len(self.errors) - _ERRORS_SHOWN} more"


async def rescore_run(store: Store, options: RescoreOptions) -> RescoreReport:
    """Score the selected Records again, a few groups at a time. Raises StoreError if none is selected."""
    labelled: dict[str, float] | None = None
    report = RescoreReport()
    if options.from_labels:
        labelled = await store.labels.scores()
        report = RescoreReport(writers=await store.labels.writers())
        wanted = [record for record in labelled if not options.records or record in options.records]
        if not wanted:
            raise StoreError(
                f"run {store.run_name!r} has no label with a score among these Records",
                hint="give labels a score in `agentrl dashboard`, on the page of a trajectory",
            )
        options = replace(options, records=wanted)
    rescoring = Rescoring(store.connection)
    tasks = await rescoring.tasks(
        split=options.split, tasks=options.tasks, records=options.records, statuses=options.statuses
    )
    if not tasks:
        raise StoreError(
            f"run {store.run_name!r} has no scored Record like that",
            hint="`agentrl audit records --status ready` lists Records",
        )
    rescorer = _Rescorer(rescoring, options, asyncio.Semaphore(max(1, options.concurrency)), labelled, report)
    for batch in batches(tasks, _GROUPS_AT_A_TIME):
        await asyncio.gather(*map(rescorer.rescore_group, batch))
    return report


@dataclass(frozen=True, slots=True)
class _Rescorer:
    rescoring: Rescoring
    options: RescoreOptions
    slots: asyncio.Semaphore
    labelled: Mapping[str, float] | None
    """The scores that people gave, by Record; None if a scorer gives the scores."""
    report: RescoreReport

    async def rescore_group(self, task_id: str) -> None:
        """Score the Records of one group, write the scores and count the result in the report."""
        options = self.options
        group = await self.rescoring.group(task_id, records=options.records, statuses=options.statuses)
        scores = await self._scores(group)
        try:
            done = await self.rescoring.apply(task_id, scores, decide_stored, dry_run=options.dry_run)
        except (ConfigError, GroupError) as error:
            self.report.errors.append(f"{task_id}: {error.message}")
            return
        _count(self.report.splits.setdefault(group.task.split, SplitReport()), group, scores, done)

    async def _scores(self, group: StoredGroup) -> dict[str, NewScore]:
        results = await asyncio.gather(*(self._score(group, record) for record in group.records))
        return {record.id: new for record, new in zip(group.records, results, strict=True) if new}

    async def _score(self, group: StoredGroup, record: Record) -> NewScore | None:
        options = self.options
        if self.labelled is not None:
            return _labelled(record, self.labelled[record.id])
        calls = group.calls.get(record.id, ())
        context = stored_context(group.task, record, calls, options.agent_config_path)
        if options.scorer is not None:
            context = replace(context, agent_score=None)
        async with self.slots:
            try:
                result = await score_context(
                    options.scorer or group.task.scorer, context, options.scorer_timeout_seconds
                )
            except (ConfigError, ScorerError) as error:
                self.report.errors.append(f"{record.id}: {error.message}")
                return None
        return NewScore(score=result.score, details=result.details)


def _labelled(record: Record, score: float) -> NewScore:
    """Return the score that people gave; the rewards of turns and roles stay those of the scorer."""
    kept = {
        key: record.score_details[key]
        for key in (TURN_REWARDS, ROLE_REWARDS, CALL_ROLES)
        if key in record.score_details
    }
    return NewScore(score=score, details={"scorer": LABELS, **kept})


def _count(split: SplitReport, group: StoredGroup, scores: Mapping[str, NewScore], done: Rescored) -> None:
    for record in group.records:
        if record.id in scores and record.score is not None:
            split.old.append(record.score)
            split.new.append(scores[record.id].score)
            split.changed += record.score != scores[record.id].score
    split.decided_again += done.decided_again
    if done.kept_because is not None:
        split.kept[done.kept_because] = split.kept.get(done.kept_because, 0) + 1
