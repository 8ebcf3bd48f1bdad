"""Check a whole run: every section once, then every suspected violation a second time."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from agentrl.documents.status import RecordStatus, SlotStatus, TaskStatus
from agentrl.store.admin.check import groups, states, trajectories, versions
from agentrl.store.admin.check.contents import PACKED, Contents, Files, Images, StrayFiles
from agentrl.store.admin.check.epochs import Epochs
from agentrl.store.admin.check.evaluations import Evaluations, OutsideTokens
from agentrl.store.admin.check.findings import Findings, Invariant, Problem, Report, Violation
from agentrl.store.admin.check.reading import CheckOptions, Section, Snapshot, server_time
from agentrl.store.admin.check.states import Legal
from agentrl.store.admin.check.token_statistics import Statistics
from agentrl.store.admin.check.training import Data, Lineage, StepData
from agentrl.store.admin.check.trajectories import CallParents, RecordParents
from agentrl.store.admin.check.versions import Versions
from agentrl.store.mechanics.blobs import PARTS
from agentrl.store.mechanics.connection import Connection, Json, Repository, database_call
from agentrl.store.names import DATA, RECORD, TASK, VERSION
from agentrl.store.schema import VALIDATORS


class Tasks(Section):
    """Checks every Task with its Records and their model calls."""

    collection = TASK
    fields: ClassVar = {"split": 1, "epoch": 1, "status": 1, "slots": 1, "group": 1, "admission": 1}
    page_size = 32

    async def inspect(self, moment: Snapshot, page: list[Json], findings: Findings) -> None:
        ids = [task["_id"] for task in page]
        of_task: dict[str, list[Json]] = {key: [] for key in ids}
        for record in await moment.find(
            RECORD, {"task": {"$in": ids}}, trajectories.RECORD_FIELDS, by="task"
        ):
            of_task[record["task"]].append(record)
        record_ids = [record["_id"] for records in of_task.values() for record in records]
        of_record = await trajectories.read_model_calls(moment, record_ids)
        trained = await moment.ids(DATA, record_ids)
        for task in page:
            records = sorted(of_task[task["_id"]], key=_order)
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
            problems = versions.token_problems(of_this, known, skew)
            findings.add(Invariant.VERSIONS, task["_id"], problems)

    async def _check_leases(self, moment: Snapshot, page: Sequence[Json], findings: Findings) -> None:
        """Check for expired leases; if no sampler of the split is alive to take them over, only note them."""
        running = [s for task in page for s in task["slots"] if s["status"] == SlotStatus.RUNNING]
        findings.count(Invariant.STATES, "leases", len(running))
        if not running:
            return
        now = await server_time(self.connection)
        for task in page:
            late = states.overdue(task, now, self.options.heartbeat_seconds)
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
    findings.add(Invariant.TRAJECTORIES, key, trajectories.slot_problems(task, records, is_final))
    findings.add(Invariant.STATES, key, states.task_problems(task))
    mine = sum(record["_id"] in trained or _is_pruned_data(record) for record in records)
    findings.count(Invariant.GROUPS, "groups", int(task["status"] == TaskStatus.COMPLETED))
    findings.add(Invariant.GROUPS, key, groups.group_problems(task, records, mine))
    if mine and not (task.get("group") or {}).get("rules"):
        findings.note("some groups do not store their rules: their advantages are not recomputed")
    for record in records:
        if _has_data(record) and not record.get("pruned_at") and record["_id"] not in trained:
            name = f"Record {record['_id']}"
            problem = Problem(name, "training data, since it is ready", "a DBRecordData", "none")
            findings.add(Invariant.TRAINING, key, [problem])


def _check_record(task: Json, record: Json, its_calls: Sequence[Json], findings: Findings) -> None:
    key = task["_id"]
    if not record.get("pruned_at"):
        findings.count(Invariant.TRAJECTORIES, "model calls", len(its_calls))
        findings.add(Invariant.TRAJECTORIES, key, trajectories.call_problems(record, its_calls))
    findings.add(Invariant.STATES, key, states.record_problems(task, record))
    findings.count(Invariant.GROUPS, "scores", int(record.get("score") is not None))
    findings.add(Invariant.GROUPS, key, groups.score_problems(record))


def _has_data(record: Json) -> bool:
    """Return whether it has training data; Records of an evaluation are ready without an advantage."""
    return record["status"] == RecordStatus.READY and record.get("advantage") is not None


def _is_pruned_data(record: Json) -> bool:
    return _has_data(record) and record.get("pruned_at") is not None


async def _is_sampled(moment: Snapshot, split: str, now: Any) -> bool:
    """Return whether a sampler of the split holds a lease that has not expired."""
    alive = {"status": SlotStatus.RUNNING.value, "lease_expires_at": {"$gt": now}}
    query = {"split": split, "status": TaskStatus.RUNNING.value, "slots": {"$elemMatch": alive}}
    return bool(await moment.find(TASK, query, {"_id": 1}, limit=1))


def _order(record: Json) -> tuple[int, int]:
    return record["traj_id"], record["attempt"]


class Checkable(Protocol):
    """A section of the check."""

    async def scan(self, findings: Findings) -> None:
        """Check everything."""

    async def look_again(self, keys: Collection[Any], findings: Findings) -> None:
        """Check the documents of ``keys`` again."""


class Checks(Repository):
    """The check of one run: ``Checks(store.connection).run(options)``."""

    @database_call
    async def run(self, options: CheckOptions) -> Report:
        """Check every invariant, page by page, each page in one snapshot.

        Other processes may write meanwhile: a suspected violation is checked again after ``settle_seconds``,
        and counts if it is found both times. Memory is bounded by a page and by the violations.
        """
        total = Findings()
        suspicions: list[tuple[Checkable, list[Violation]]] = []
        for section in _sections(self._connection, options):
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


def _sections(connection: Connection, options: CheckOptions) -> Sequence[Checkable]:
    kinds = (
        Tasks, RecordParents, CallParents, Data, StepData, Lineage, Versions, Epochs, Evaluations,
        OutsideTokens, Statistics, Images, StrayFiles,
    )  # fmt: skip
    legal = [Legal(connection, options, collection=name) for name in VALIDATORS]
    contents = [Contents(connection, options, collection=name) for name in PARTS]
    files = [Files(connection, options, owner=name) for name in PACKED]
    return [*(kind(connection, options) for kind in kinds), *legal, *contents, *files]
