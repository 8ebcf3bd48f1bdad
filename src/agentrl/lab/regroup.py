"""Change what was decided of a run: new scores, reopened slots, and their groups decided anew."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pymongo import UpdateOne

from agentrl.data.finalize_group import Decide
from agentrl.documents.document import plain
from agentrl.documents.record import ROLE_REWARDS, TURN_REWARDS, Record, judged
from agentrl.documents.status import ColumnStatus, DataStatus, RecordStatus, SlotStatus, TaskStatus, values
from agentrl.documents.task import CONVERSATIONS, FEEDBACK, Begin, Task
from agentrl.errors import StoreError
from agentrl.scoring.groups import FAILED
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
    pass

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
        """Store the new scores beside the old ones. Idempotent: it adds nothing for what is stored."""
        notes = []
        for record in records:
            new = scores[record.id]
            stored = literal({"score": new.score, "details": plain(new.details)})
            is_stored = {"$eq": [{"score": "$rescored.score", "details": "$rescored.details"}, stored]}
            added = {name: {"$cond": [is_stored, 0, took]} for name, took in judged(new.details).items()}
            took = {name: {"$sum": [f"${name}", amount]} for name, amount in added.items()}
            note: list[Json] = [{"$set": {"rescored": stored, **took}}, {"$set": {"rescored.at": "$$NOW"}}]
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
    scored = dataclasses.replace(record, score=new.score, score_details=new.details)
    # Compare the scorers' own scores: those of a sum may change, and the sum not (GDPO).
    if record.score == new.score and is_same and record.score_parts == scored.score_parts:
        return record
    return scored


def _new_record(record: Record, new: NewScore) -> UpdateOne:
    earlier = {"score": record.score, "details": record.score_details, "scored_at": record.scored_at}
    scored = {"score": new.score, "score_details": plain(new.details)}
    return UpdateOne(
        {"_id": record.id, "status": record.status.value, "score": record.score},
        {
            "$set": {**scored, **seal(RECORD, "score", scored)},
            "$push": {"score_history": plain(earlier)},
            "$inc": judged(new.details),
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
