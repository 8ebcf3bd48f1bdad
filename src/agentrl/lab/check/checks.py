"""Check a whole run: every section once, then every suspected violation again; invariants 4, 7, 8 and 9."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Final

from pymongo.errors import OperationFailure

from agentrl.documents.run import PARENT, child_key
from agentrl.documents.status import APPLIED_STEPS, DataStatus, RecordStatus, SlotStatus, TaskStatus
from agentrl.documents.training import is_checkpoint
from agentrl.lab.check.attempts import (
    CHECKED_FIELDS,
    SETTLED,
    TERMINAL,
    CallParentsCheck,
    ColumnsCheck,
    EvaluationsCheck,
    OutsideTokensCheck,
    RecordParentsCheck,
    call_problems,
    group_problems,
    owner_problems,
    read_call_sizes,
    score_problems,
    slot_problems,
)
from agentrl.lab.check.reading import (
    CheckOptions,
    CheckProblem,
    CheckSection,
    ConsistentRead,
    Findings,
    Invariant,
    Report,
    RunCheck,
    Violation,
    Whole,
    only_if,
)
from agentrl.lab.check.training_data import (
    DataCheck,
    EpochsCheck,
    LineageCheck,
    StatisticsCheck,
    StepDataCheck,
    VersionsCheck,
    token_problems,
)
from agentrl.store.mechanics.blobs import CHECKSUMS, MARK, PACKED, PARTS, changed_parts, digest, moved_fields
from agentrl.store.mechanics.connection import (
    DATA,
    IMAGE,
    RECORD,
    RETRACTION,
    RUN,
    STEP,
    TASK,
    TOMBSTONE,
    VERSION,
    Connection,
    Json,
    Repository,
    database_call,
)
from agentrl.store.schema import VALIDATORS
from agentrl.store.settings import CHILDREN

_SAMPLED = frozenset(
    {RecordStatus.COMPLETED, RecordStatus.SCORING, RecordStatus.SCORED, RecordStatus.READY,
     RecordStatus.ABANDONED}
)  # fmt: skip


class ContentsCheck(CheckSection):
    """Checks the documents of one collection against the checksums that were written with them."""

    fields: ClassVar = {}
    page_size = 32

    async def inspect(self, moment: ConsistentRead, page: list[Json], findings: Findings) -> None:
        for document in page:
            key, name = document["_id"], f"{self.collection} {document['_id']}"
            findings.count(Invariant.CONTENTS, "checksums", len(document.get(CHECKSUMS, {})))
            for part, stored, now in changed_parts(self.collection, document):
                what, expected = f"{part} as it was written", f"sha256 {stored}"
                findings.wrong(Invariant.CONTENTS, key, name, what, expected, f"sha256 {now}")
            if self._is_due(document) and not document.get(CHECKSUMS):
                findings.wrong(Invariant.CONTENTS, key, name, CHECKSUMS, "one or more", "none")

    def _is_due(self, document: Json) -> bool:
        """Return whether a checksum is written before a document is as this one is."""
        if self.collection == RECORD:
            return document["status"] in _SAMPLED
        return self.collection != STEP or document["status"] in APPLIED_STEPS


class ImagesCheck(CheckSection):
    """Checks every image against its ``_id``, the hash of its bytes."""

    collection = IMAGE
    fields: ClassVar = {"data": 1, MARK: 1}
    page_size = 32

    async def inspect(self, moment: ConsistentRead, page: list[Json], findings: Findings) -> None:
        for image in (image for image in page if not image.get(MARK)):
            findings.count(Invariant.CONTENTS, "images")
            actual = hashlib.sha256(image["data"]).hexdigest()
            if actual != image["_id"]:
                key, expected = image["_id"], f"sha256 {image['_id']}"
                findings.wrong(Invariant.CONTENTS, key, f"Image {key}", "its bytes", expected, actual)


class FilesCheck(CheckSection):
    """Checks the GridFS files of one collection's documents, which are named by their digests."""

    fields: ClassVar = {"length": 1}
    page_size = 16

    def __init__(self, connection: Connection, options: CheckOptions, owner: str) -> None:
        super().__init__(connection, options, f"{owner}.packed.files")
        self.owner = owner

    async def inspect(self, moment: ConsistentRead, page: list[Json], findings: Findings) -> None:
        for file in page:
            findings.count(Invariant.CONTENTS, "files")
            expected = digest(file["_id"])
            chunks = moment.each(
                f"{self.owner}.packed.chunks", {"files_id": file["_id"]}, {"data": 1}, by="n"
            )
            actual = hashlib.sha256()
            async for chunk in chunks:
                actual.update(chunk["data"])
            is_changed = actual.hexdigest()[: len(expected)] != expected
            if is_changed and not await _is_quarantined(moment, self.owner, file["_id"]):
                findings.wrong(
                    Invariant.CONTENTS, file["_id"], f"{self.collection} {file['_id']}",
                    "its bytes as they were written", f"sha256 {expected}…", f"sha256 {actual.hexdigest()}",
                )  # fmt: skip


class StrayFilesCheck(Whole):
    """Names the GridFS files that no document names, and the documents whose files are gone."""

    async def inspect(self, moment: ConsistentRead, findings: Findings) -> None:
        for owner in PACKED:
            files = {file["_id"] for file in await moment.find(f"{owner}.packed.files", {}, {"_id": 1})}
            named: dict[str, str] = {}
            async for moved in moment.each(owner, {MARK: {"$exists": True}}, {MARK: 1}):
                named |= dict.fromkeys(moved_fields(moved), f"{owner} {moved['_id']}")
            for file, document in named.items():
                if file not in files and not await _is_quarantined(moment, owner, file):
                    findings.wrong(Invariant.CONTENTS, None, document, "its file in GridFS", file, "none")
            chunks = await moment.aggregate(f"{owner}.packed.chunks", [{"$group": {"_id": "$files_id"}}])
            stray = sorted(map(str, {*files, *(chunk["_id"] for chunk in chunks)} - named.keys()))
            if stray:
                findings.note(
                    f"{owner}: {len(stray)} files in GridFS belong to no document: {stray[0]}"
                    f"{', …' if stray[1:] else ''}: a writer ended before its document, or somebody deleted"
                    " it"
                )


async def _is_quarantined(moment: ConsistentRead, owner: str, file_id: str) -> bool:
    """Return whether a file's datum is quarantined, which names what is wrong with it."""
    datum = {"_id": file_id.rsplit("/", 2)[0], "status": DataStatus.QUARANTINED.value}
    return owner == DATA and bool(await moment.find(DATA, datum, {"_id": 1}))


class FamilyCheck(Whole):
    """Checks the documents ``parent`` and ``child/NAME`` against those of the other runs."""

    async def inspect(self, moment: ConsistentRead, findings: Findings) -> None:
        for parent in await moment.find(RUN, {"_id": PARENT}):
            await self._parent(parent, findings)
        for child in await moment.find(RUN, CHILDREN):
            findings.count(Invariant.FAMILY, "children")
            other = await self._of_run(child["run"], PARENT, findings)
            if other is None or other.get("run") != self.connection.database.name:
                findings.note(f"there is no child {child['run']} any more: agentrl db prune forgets it")
            else:
                await self._checkpoint(f"Run {child['_id']}", child, findings)

    async def _parent(self, parent: Json, findings: Findings) -> None:
        findings.count(Invariant.FAMILY, "parents")
        key = child_key(self.connection.database.name)
        note = await self._of_run(parent["run"], key, findings)
        if note is None:
            what = f"the document {key} of run {parent['run']}"
            hint = "its checkpoint is not kept for this run"
            findings.wrong(Invariant.FAMILY, None, f"Run {PARENT}", what, "a note of this child", hint)
        await self._checkpoint(f"Run {PARENT}", parent, findings)

    async def _of_run(self, run: str, key: str, findings: Findings) -> Json | None:
        try:
            return await self.connection.beside(run).collection(RUN).find_one({"_id": key})
        except OperationFailure:
            findings.note(f"this user may not read run {run}: the family is not checked")
            return {"run": self.connection.database.name}

    async def _checkpoint(self, name: str, relative: Json, findings: Findings) -> None:
        if not relative["checkpoint"]:  # the base model
            return
        folder = Path(relative["checkpoint"])
        if await asyncio.to_thread(is_checkpoint, folder):
            return
        if await asyncio.to_thread(folder.parent.is_dir):
            what = f"the checkpoint from which {relative['kind']} begins"
            findings.wrong(Invariant.FAMILY, None, name, what, str(folder), "no checkpoint")
        else:
            findings.note(f"{folder.parent} is not on this machine: the family's checkpoints are not checked")


SEARCHED: Final = (
    *(name for name in VALIDATORS if name != TOMBSTONE),
    *(f"{name}.packed.{part}" for name in PACKED for part in ("files", "chunks")),
)
"""The collections that may not name what is withdrawn."""
_CUTS = re.compile(r"[/@:\s,;\"']|$")


class RetractionsCheck(Whole):
    """Names the retractions that a call began and did not finish."""

    async def inspect(self, moment: ConsistentRead, findings: Findings) -> None:
        for retraction in await moment.find(RETRACTION, {}, {"finished_at": 1}):
            findings.count(Invariant.RETRACTED, "retractions")
            if retraction.get("finished_at") is None:
                what, expected = "finished", "a call of agentrl retract that ends"
                name = f"Retraction {retraction['_id']}"
                findings.wrong(Invariant.RETRACTED, None, name, what, expected, "an unfinished one")


class WithdrawnCheck(CheckSection):
    """Searches one collection for the ids in tombstones, in every text of every document."""

    fields: ClassVar = {}
    page_size = 100
    _ids: frozenset[str] = frozenset()

    async def scan(self, findings: Findings) -> None:
        await self._load()
        if self._ids:
            await super().scan(findings)

    async def look_again(self, keys: Collection[Any], findings: Findings) -> None:
        await self._load()
        await super().look_again(keys, findings)

    async def _load(self) -> None:
        deleted = self.connection.collection(TOMBSTONE).find({"deleted_at": {"$ne": None}}, {"_id": 1})
        self._ids = frozenset([stone["_id"] async for stone in deleted])

    async def inspect(self, moment: ConsistentRead, page: list[Json], findings: Findings) -> None:
        epochs = {"/".join(key.split("/")[:2]) for key in self._ids}
        begin = re.compile("|".join(re.escape(f"{epoch}/") for epoch in sorted(epochs)))
        findings.count(Invariant.RETRACTED, "documents searched", len(page))
        for document in page:
            for text in _texts(document):
                for found in begin.finditer(text):
                    cuts = (text[found.start() : cut.start()] for cut in _CUTS.finditer(text, found.end()))
                    for name in self._ids.intersection(cuts):
                        what = "no name of what is withdrawn"
                        findings.wrong(
                            Invariant.RETRACTED, document["_id"], f"{self.collection} {document['_id']}",
                            what, "only its Tombstone", name,
                        )  # fmt: skip


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a document, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


class LegalCheck(CheckSection):
    """Checks the documents of one collection against its validator, which lists legal states and types."""

    fields: ClassVar = {"_id": 1}
    page_size = 2000

    async def inspect(self, moment: ConsistentRead, page: list[Json], findings: Findings) -> None:
        findings.count(Invariant.STATES, "documents", len(page))
        ids = {"_id": {"$gte": page[0]["_id"], "$lte": page[-1]["_id"]}} if page else {}
        query = {**ids, "$nor": [VALIDATORS[self.collection]]}
        for document in await moment.find(self.collection, query, {"status": 1}):
            name = f"{self.collection} {document['_id']}"
            what = f"a document that the validator of {self.collection} accepts"
            status = f"status {document.get('status')!r}"
            findings.wrong(Invariant.STATES, document["_id"], name, what, "a legal document", status)


_STOPPED = {RecordStatus.COMPLETED, RecordStatus.SCORING} | SETTLED


def task_problems(task: Json) -> Iterator[CheckProblem]:
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
        yield CheckProblem(name, "the status that follows from its slots", " or ".join(legal), task["status"])
    if task.get("admission") and any(slot["attempt"] for slot in slots):
        what = "no admission rank, since a slot of it has been claimed"
        yield CheckProblem(name, what, None, task["admission"])
    for slot in slots:
        yield from _slot(f"{name} slot {slot['traj_id']}", slot)


def _slot(name: str, slot: Json) -> Iterator[CheckProblem]:
    status = slot["status"]
    if slot.get("released", 0) > slot["attempt"]:
        yield CheckProblem(name, "at most as many releases as attempts", slot["attempt"], slot["released"])
    if (slot.get("begun") or 0) > slot["attempt"]:
        yield CheckProblem(name, "begun by its attempt or an earlier one", slot["attempt"], slot["begun"])
    if status == SlotStatus.RUNNING:
        for field in ("owner", "lease_expires_at", "record_id"):
            if slot.get(field) is None:
                yield CheckProblem(name, f"{field}, since it is running", "a value", None)
    elif slot.get("lease_expires_at") is not None:
        yield CheckProblem(name, f"no lease, since it is {status}", None, slot["lease_expires_at"])
    if status in (SlotStatus.OPEN, SlotStatus.SAMPLED, SlotStatus.FAILED) and slot.get("owner") is not None:
        yield CheckProblem(name, f"no owner, since it is {status}", None, slot["owner"])
    if status != SlotStatus.OPEN and not slot["attempt"]:
        yield CheckProblem(name, f"at least one attempt, since it is {status}", "1 or more", slot["attempt"])
    what = f"a score if and only if it is scored (it is {status})"
    yield from only_if(name, what, status == SlotStatus.SCORED, slot.get("score"), "a score")


def record_problems(task: Json, record: Json) -> Iterator[CheckProblem]:
    """Yield illegal combinations of the status of a Record and that of its Task."""
    name, status = f"Record {record['_id']}", record["status"]
    settled = (RecordStatus.READY, RecordStatus.ABANDONED)
    is_completed = task["status"] == TaskStatus.COMPLETED
    if is_completed and status == RecordStatus.SCORED:
        yield CheckProblem(name, "settled, since its group is completed", " or ".join(settled), status)
    if not is_completed and status in settled:
        what = f"not settled, since its group is {task['status']}"
        yield CheckProblem(name, what, RecordStatus.SCORED.value, status)
    if status in _STOPPED and record.get("stop_reason") is None:
        yield CheckProblem(name, f"a stop reason, since it is {status}", "a stop_reason", None)
    if status == RecordStatus.CREATED and record["traj"]:
        yield CheckProblem(name, "no model call, since it is created", [], record["traj"])
    if status != RecordStatus.READY and record.get("trained_count"):
        yield CheckProblem(name, f"never trained, since it is {status}", 0, record["trained_count"])


def overdue(task: Json, now: datetime, heartbeat_seconds: float) -> Sequence[CheckProblem]:
    """Return the running slots whose lease expired more than a heartbeat ago, by the server's clock."""
    latest = now - timedelta(seconds=heartbeat_seconds)
    return [
        CheckProblem(
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


class TasksCheck(CheckSection):
    """Checks every Task with its Records and their model calls."""

    collection = TASK
    fields: ClassVar = {
        "split": 1, "epoch": 1, "status": 1, "slots": 1, "group": 1, "admission": 1, "inherited": 1,
    }  # fmt: skip
    page_size = 32

    async def inspect(self, moment: ConsistentRead, page: list[Json], findings: Findings) -> None:
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
            _check_task(task, records, of_record, trained, self.options.is_final, findings)
            for record in records:
                _check_record(
                    task, record, of_record[record["_id"]], self.options.clock_skew_seconds, findings
                )
        await self._check_versions(moment, page, of_task, of_record, findings)
        await self._check_leases(moment, page, findings)

    async def _check_versions(
        self, moment: ConsistentRead, page: Sequence[Json], of_task: Mapping[str, Sequence[Json]],
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

    async def _check_leases(self, moment: ConsistentRead, page: Sequence[Json], findings: Findings) -> None:
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
    task: Json, records: Sequence[Json], of_record: Mapping[str, Sequence[Json]], trained: set[Any],
    is_final: bool, findings: Findings,
) -> None:  # fmt: skip
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
    findings.add(Invariant.GROUPS, key, group_problems(task, records, mine, of_record))
    if mine and not (task.get("group") or {}).get("rules"):
        findings.note("some groups do not store their rules: their advantages are not recomputed")
    for record in records:
        if _has_data(record) and not record.get("pruned_at") and record["_id"] not in trained:
            name = f"Record {record['_id']}"
            what = "training data, since it is ready"
            findings.wrong(Invariant.TRAINING, key, name, what, "a DBRecordData", "none")


def _check_record(
    task: Json, record: Json, its_calls: Sequence[Json], clock_skew_seconds: float, findings: Findings
) -> None:
    key = task["_id"]
    if not record.get("pruned_at"):
        findings.count(Invariant.TRAJECTORIES, "model calls", len(its_calls))
        findings.add(Invariant.TRAJECTORIES, key, call_problems(record, its_calls))
        findings.count(Invariant.OWNERS, "owners", len(record.get("owners") or ()))
        findings.add(Invariant.OWNERS, key, owner_problems(record, its_calls, clock_skew_seconds))
    findings.add(Invariant.STATES, key, record_problems(task, record))
    findings.count(Invariant.GROUPS, "scores", int(record.get("score") is not None))
    findings.add(Invariant.GROUPS, key, score_problems(record))


def _has_data(record: Json) -> bool:
    """Return whether it has training data; Records of an evaluation are ready without an advantage."""
    return record["status"] == RecordStatus.READY and record.get("advantage") is not None


async def _is_sampled(moment: ConsistentRead, split: str, now: Any) -> bool:
    """Return whether a sampler of the split holds a lease that has not expired."""
    alive = {"status": SlotStatus.RUNNING.value, "lease_expires_at": {"$gt": now}}
    query = {"split": split, "status": TaskStatus.RUNNING.value, "slots": {"$elemMatch": alive}}
    return bool(await moment.find(TASK, query, {"_id": 1}, limit=1))


_SECTIONS: Sequence[type[RunCheck]] = (
    TasksCheck, RecordParentsCheck, CallParentsCheck, DataCheck, StepDataCheck, LineageCheck, VersionsCheck,
    EpochsCheck, EvaluationsCheck, OutsideTokensCheck, StatisticsCheck, ColumnsCheck, ImagesCheck,
    StrayFilesCheck, FamilyCheck, RetractionsCheck,
)  # fmt: skip
_BY_COLLECTION: Mapping[type[CheckSection], Iterable[str]] = {
    LegalCheck: VALIDATORS, ContentsCheck: PARTS, FilesCheck: PACKED, WithdrawnCheck: SEARCHED,
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
        suspicions: list[tuple[RunCheck, list[Violation]]] = []
        sections: list[RunCheck] = [kind(self._connection, options) for kind in _SECTIONS]
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
