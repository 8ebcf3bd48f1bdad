"""Invariant 4: every document is in a legal state, with the fields that its state implies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import ClassVar

from agentrl.documents.status import RecordStatus, SlotStatus, TaskStatus
from agentrl.store.admin.check.findings import Findings, Invariant, Problem
from agentrl.store.admin.check.reading import CheckOptions, Section, Snapshot
from agentrl.store.admin.check.trajectories import SETTLED, TERMINAL
from agentrl.store.mechanics.connection import Connection, Json
from agentrl.store.schema import VALIDATORS


class Legal(Section):
    """Checks the documents of one collection against its validator, which lists legal states and types."""

    fields: ClassVar = {"_id": 1}
    page_size = 2000

    def __init__(self, connection: Connection, options: CheckOptions, collection: str) -> None:
        super().__init__(connection, options)
        self.collection = collection

    async def inspect(self, moment: Snapshot, page: list[Json], findings: Findings) -> None:
        findings.count(Invariant.STATES, "documents", len(page))
        ids = {"_id": {"$gte": page[0]["_id"], "$lte": page[-1]["_id"]}} if page else {}
        query = {**ids, "$nor": [VALIDATORS[self.collection]]}
        for document in await moment.find(self.collection, query, {"status": 1}):
            name = f"{self.collection} {document['_id']}"
            what = f"a document that the validator of {self.collection} accepts"
            problem = Problem(name, what, "a legal document", f"status {document.get('status')!r}")
            findings.add(Invariant.STATES, document["_id"], [problem])


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
    if (status == SlotStatus.SCORED) != (slot.get("score") is not None):
        expected = "a score" if status == SlotStatus.SCORED else None
        yield Problem(
            name, f"a score if and only if it is scored (it is {status})", expected, slot.get("score")
        )


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
