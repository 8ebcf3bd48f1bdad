"""Check a whole run: every section once, then every suspected violation a second time; and invariant 4."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from operator import itemgetter
from typing import Any, ClassVar

from agentrl.documents.status import RecordStatus, SlotStatus, TaskStatus
from agentrl.store.admin.check.contents import (
    SEARCHED,
    Contents,
    Family,
    Files,
    Images,
    Retractions,
    StrayFiles,
    Withdrawn,
)
from agentrl.store.admin.check.reading import (
    Check,
    CheckOptions,
    Findings,
    Invariant,
    Problem,
    Report,
    Section,
    Snapshot,
    Violation,
    only_if,
)
from agentrl.store.admin.check.training import (
    Data,
    Epochs,
    Lineage,
    Statistics,
    StepData,
    Versions,
    token_problems,
)
from agentrl.store.admin.check.trajectories import (
    CHECKED_FIELDS,
    SETTLED,
    TERMINAL,
    CallParents,
    ColumnsOfRecords,
    Evaluations,
    OutsideTokens,
    RecordParents,
    call_problems,
    group_problems,
    read_call_sizes,
    score_problems,
    slot_problems,
)
from agentrl.store.mechanics.blobs import PACKED, PARTS
from agentrl.store.mechanics.connection import Json, Repository, database_call
from agentrl.store.names import DATA, RECORD, TASK, VERSION
from agentrl.store.schema import VALIDATORS


class Legal(Section):
    """Checks the documents of one collection against its validator, which lists legal states and types."""

    fields: ClassVar = {"_id": 1}
    page_size = 2000

    async def inspect(self, moment: Snapshot, page: list[Json], findings: Findings) -> None:
        findings.count(Invariant.STATES, "documents", len(page))
        ids = {"_id": {"$gte": page[0]["_id"], "$lte": page[-1]["_id"]}} if page else {}
        query = {**ids, "$nor": [VALIDATORS[self.collection]]}
        for document in await moment.find(self.collection, query, {"status": 1}):
            name = f"{self.collection} {document['_id']}"
            what = f"a document that the validator of {self.collection} accepts"
            status = f"status {document.get('status')!r}"
            findings.wrong(Invariant.STATES, document["_id"], name, what, "a legal document", status)


_STOPPED = {RecordStatus.COMPLETED, RecordStatus.SCORING} | SETTLED


def task_problems(task: Json) -> Iterator[Problem]:
    """Yield illegal combinations of the status of a Task and those of its slots."""
    name, slots = f"Task {task['_id']}", task["slots"]
    legal: tuple[TaskStatus, ...]
    if all(slot["status"] in TERMINAL for slot in slots):
        legal = (TaskStatus.WAITING, TaskStatus.COMPLETED)
    elif all(slot["status"] == SlotStatus.OPEN and not slot["attempt"] for slot in slots):
        legal = (TaskStatus.RUNNING,) if task.get("admission") else (TaskStatus.CREATED,)
    else:
        legal = (TaskStatus.RUNNING,)
    if task["status"] not in legal:
        yield Problem(name, "the status that follows from its slots", " or ".join(legal), task["status"])
    if task.get("admission") and any(slot["attempt"] for slot in slots):
        what = "no admission rank, since a slot of it has been claimed"
        yield Problem(name, what, None, task["admission"])
    for slot in slots:
        yield from _slot(f"{name} slot {slot['traj_id']}", slot)


def _slot(name: str, slot: Json) -> Iterator[Problem]:
    status = slot["status"]
    if slot.get("released", 0) > slot["attempt"]:
        yield Problem(name, "at most as many releases as attempts", slot["attempt"], slot["released"])
    if status == SlotStatus.RUNNING:
        for field in ("owner", "lease_expires_at", "record_id"):
            if slot.get(field) is None:
                yield Problem(name, f"{field}, since it is running", "a value", None)
    elif slot.get("lease_expires_at") is not None:
        yield Problem(name, f"no lease, since it is {status}", None, slot["lease_expires_at"])
    if status in (SlotStatus.OPEN, SlotStatus.SAMPLED, SlotStatus.FAILED) and slot.get("owner") is not None:
        yield Problem(name, f"no owner, since it is {status}", None, slot["owner"])
    if status != SlotStatus.OPEN and not slot["attempt"]:
        yield Problem(name, f"at least one attempt, since it is {status}", "1 or more", slot["attempt"])
    what = f"a score if and only if it is scored (it is {status})"
    yield from only_if(name, what, status == SlotStatus.SCORED, slot.get("score"), "a score")


def record_problems(task: Json, record: Json) -> Iterator[Problem]:
    """Yield illegal combinations of the status of a Record and that of its Task."""
    name, status = f"Record {record['_id']}", record["status"]
    settled = (RecordStatus.READY, RecordStatus.ABANDONED)
    is_completed = task["status"] == TaskStatus.COMPLETED
    if is_completed and status == RecordStatus.SCORED:
        yield Problem(name, "settled, since its group is completed", " or ".join(settled), status)
    if not is_completed and status in settled:
        what = f"not settled, since its group is {task['status']}"
        yield Problem(name, what, RecordStatus.SCORED.value, status)
    if status in _STOPPED and record.get("stop_reason") is None:
        yield Problem(name, f"a stop reason, since it is {status}", "a stop_reason", None)
    if status == RecordStatus.CREATED and record["traj"]:
        yield Problem(name, "no model call, since it is created", [], record["traj"])
    if status != RecordStatus.READY and record.get("trained_count"):
        yield Problem(name, f"never trained, since it is {status}", 0, record["trained_count"])


def overdue(task: Json, now: datetime, heartbeat_seconds: float) -> Sequence[Problem]:
    """Return the running slots whose lease expired more than a heartbeat ago, by the server's clock."""
    latest = now - timedelta(seconds=heartbeat_seconds)
    return [
        Problem(
            f"Task {task['_id']} slot {slot['traj_id']}",
            f"a lease of {slot.get('owner')} that has not expired",
            f"after {latest.isoformat(timespec='seconds')}",
            slot["lease_expires_at"].isoformat(timespec="seconds"),
        )
        for slot in task["slots"]
        if slot["status"] == SlotStatus.RUNNING
        and slot.get("lease_expires_at") is not None
        and slot["lease_expires_at"] < latest
    ]  # fmt: skip


class Tasks(Section):
    """Checks every Task with its Records and their model calls."""

    collection = TASK
    fields: ClassVar = {
        "split": 1, "epoch": 1, "status": 1, "slots": 1, "group": 1, "admission": 1, "inherited": 1,
    }  # fmt: skip
    page_size = 32

    async def inspect(self, moment: Snapshot, page: list[Json], findings: Findings) -> None:
        page = [task for task in page if not task.get("inherited")]  # its Records are the parent's
        ids = [task["_id"] for task in page]
        of_task: dict[str, list[Json]] = {key: [] for key in ids}
        for record in await moment.find(RECORD, {"task": {"$in": ids}}, CHECKED_FIELDS, by="task"):
            of_task[record["task"]].append(record)
        record_ids = [record["_id"] for records in of_task.values() for record in records]
        of_record = await read_call_sizes(moment, record_ids)
        trained = await moment.ids(DATA, record_ids)
        for task in page:
            records = sorted(of_task[task["_id"]], key=itemgetter("traj_id", "attempt"))
            _check_task(task, records, trained, self.options.is_final, findings)
            for record in records:
                _check_record(task, record, of_record[record["_id"]], findings)
        await self._check_versions(moment, page, of_task, of_record, findings)
        await self._check_leases(moment, page, findings)

    async def _check_versions(
        self, moment: Snapshot, page: Sequence[Json], of_task: Mapping[str, Sequence[Json]],
        of_record: Mapping[str, Sequence[Json]], findings: Findings,
    ) -> None:  # fmt: skip
        every = [call for several in of_record.values() for call in several]
        named = {span["version"] for call in every for span in call["versions"]}
        known = await moment.by_id(VERSION, named, {"published_at": 1})
        findings.count(Invariant.VERSIONS, "model calls", len(every))
        skew = self.options.clock_skew_seconds
        for task in page:
            of_this = [call for record in of_task[task["_id"]] for call in of_record[record["_id"]]]
            problems = token_problems(of_this, known, skew)
            findings.add(Invariant.VERSIONS, task["_id"], problems)

    async def _check_leases(self, moment: Snapshot, page: Sequence[Json], findings: Findings) -> None:
        """Check for expired leases; if no sampler of the split is alive to take them over, only note them."""
        running = [s for task in page for s in task["slots"] if s["status"] == SlotStatus.RUNNING]
        findings.count(Invariant.STATES, "leases", len(running))
        if not running:
            return
        now = await self.connection.server_time()
        for task in page:
            late = overdue(task, now, self.options.heartbeat_seconds)
            if late and (self.options.is_final or await _is_sampled(moment, task["split"], now)):
                findings.add(Invariant.STATES, task["_id"], late)
            elif late:
                findings.note(f"no sampler of split {task['split']} is alive: expired leases wait for one")


def _check_task(
    task: Json, records: Sequence[Json], trained: set[Any], is_final: bool, findings: Findings
) -> None:
    key = task["_id"]
    findings.count(Invariant.TRAJECTORIES, "slots", len(task["slots"]))
    findings.count(Invariant.TRAJECTORIES, "Records", len(records))
    findings.add(Invariant.TRAJECTORIES, key, slot_problems(task, records, is_final))
    findings.add(Invariant.STATES, key, task_problems(task))
    mine = sum(
        record["_id"] in trained or (_has_data(record) and record.get("pruned_at") is not None)
        for record in records
    )
    findings.count(Invariant.GROUPS, "groups", int(task["status"] == TaskStatus.COMPLETED))
    findings.add(Invariant.GROUPS, key, group_problems(task, records, mine))
    if mine and not (task.get("group") or {}).get("rules"):
        findings.note("some groups do not store their rules: their advantages are not recomputed")
    for record in records:
        if _has_data(record) and not record.get("pruned_at") and record["_id"] not in trained:
            name = f"Record {record['_id']}"
            what = "training data, since it is ready"
            findings.wrong(Invariant.TRAINING, key, name, what, "a DBRecordData", "none")


def _check_record(task: Json, record: Json, its_calls: Sequence[Json], findings: Findings) -> None:
    key = task["_id"]
    if not record.get("pruned_at"):
        findings.count(Invariant.TRAJECTORIES, "model calls", len(its_calls))
        findings.add(Invariant.TRAJECTORIES, key, call_problems(record, its_calls))
    findings.add(Invariant.STATES, key, record_problems(task, record))
    findings.count(Invariant.GROUPS, "scores", int(record.get("score") is not None))
    findings.add(Invariant.GROUPS, key, score_problems(record))


def _has_data(record: Json) -> bool:
    """Return whether it has training data; Records of an evaluation are ready without an advantage."""
    return record["status"] == RecordStatus.READY and record.get("advantage") is not None


async def _is_sampled(moment: Snapshot, split: str, now: Any) -> bool:
    """Return whether a sampler of the split holds a lease that has not expired."""
    alive = {"status": SlotStatus.RUNNING.value, "lease_expires_at": {"$gt": now}}
    query = {"split": split, "status": TaskStatus.RUNNING.value, "slots": {"$elemMatch": alive}}
    return bool(await moment.find(TASK, query, {"_id": 1}, limit=1))


_SECTIONS: Sequence[type[Check]] = (
    Tasks, RecordParents, CallParents, Data, StepData, Lineage, Versions, Epochs, Evaluations,
    OutsideTokens, Statistics, ColumnsOfRecords, Images, StrayFiles, Family, Retractions,
)  # fmt: skip
_BY_COLLECTION: Mapping[type[Section], Iterable[str]] = {
    Legal: VALIDATORS, Contents: PARTS, Files: PACKED, Withdrawn: SEARCHED,
}  # fmt: skip


class Checks(Repository):
    """The check of one run: ``Checks(store.connection).run(options)``."""

    @database_call
    async def run(self, options: CheckOptions) -> Report:
        """Check every invariant, page by page, each page in one snapshot.

        Other processes may write meanwhile: a suspected violation is checked again after ``settle_seconds``,
        and counts if it is found both times. Memory is bounded by a page and by the violations.
        """
        total = Findings()
        suspicions: list[tuple[Check, list[Violation]]] = []
        sections: list[Check] = [kind(self._connection, options) for kind in _SECTIONS]
        for kind, collections in _BY_COLLECTION.items():
            sections += [kind(self._connection, options, name) for name in collections]
        for section in sections:
            findings = Findings()
            await section.scan(findings)
            total.merge(findings)
            if findings.violations:
                suspicions.append((section, findings.violations))
        if suspicions:
            await asyncio.sleep(options.settle_seconds)
        confirmed: list[Violation] = []
        for section, seen in suspicions:
            again = Findings()
            await section.look_again({violation.key for violation in seen}, again)
            earlier = {violation.same_as() for violation in seen}
            confirmed += [violation for violation in again.violations if violation.same_as() in earlier]
        return Report(total.checked, tuple(confirmed), tuple(total.notes))
