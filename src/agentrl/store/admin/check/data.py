"""Invariant 2: training data are what their calls convert to, and the steps that they name trained them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from agentrl.documents.status import ACTIVE_STEPS, APPLIED_STEPS, DataStatus, RecordStatus, StepStatus, values
from agentrl.documents.training import DBRecordData
from agentrl.errors import StoreError
from agentrl.store.admin.check.findings import Findings, Invariant, Problem
from agentrl.store.admin.check.groups import rules_of
from agentrl.store.admin.check.reading import Section, Snapshot, differing
from agentrl.store.blobs import Blobs
from agentrl.store.connection import Json
from agentrl.store.model_calls import read_calls
from agentrl.store.names import DATA, RECORD, STEP, TASK

_RECORD_FIELDS = {
    "task": 1, "split": 1, "status": 1, "score": 1, "advantage": 1, "trained_count": 1, "turns": 1,
    "last_trained_step": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps that name some data: {data id: step numbers}; one that is being undone may be both."""

    committed: dict[str, set[int]]
    planned: dict[str, set[int]]


class Data(Section):
    """Every DBRecordData."""

    collection = DATA
    fields: ClassVar = {}
    page_size = 16

    async def inspect(self, moment: Snapshot, page: list[Json], findings: Findings) -> None:
        ids = [data["_id"] for data in page]
        records = await moment.by_id(RECORD, ids, _RECORD_FIELDS)
        steps = await _steps_of(moment, page)
        findings.count(Invariant.TRAINING, "training data", len(page))
        quarantined = [data for data in page if data["status"] == DataStatus.QUARANTINED]
        if quarantined:
            findings.count(Invariant.TRAINING, "quarantined data", len(quarantined))
        for data in page:
            key = data["_id"]
            record = records.get(key)
            if record is None:
                problem = Problem(f"DBRecordData {key}", "its Record", key, "none")
                findings.add(Invariant.TRAINING, key, [problem])
                continue
            findings.add(Invariant.TRAINING, key, origin_problems(data, record))
            findings.add(
                Invariant.TRAINING, key, count_problems(data, record, self.options.max_trained_count)
            )
            findings.add(Invariant.TRAINING, key, step_problems(data, steps))
            if self.options.is_final and data["status"] == DataStatus.PLANNED:
                what = "no plan left at the end of the run"
                problem = Problem(f"DBRecordData {key}", what, "another status", data["status"])
                findings.add(Invariant.TRAINING, key, [problem])
        await self._compare_tokens(moment, [item for item in page if item not in quarantined], findings)

    async def _compare_tokens(self, moment: Snapshot, page: list[Json], findings: Findings) -> None:
        tasks = await moment.by_id(TASK, {data["task"] for data in page}, {"group.rules": 1})
        calls = await read_calls(self.connection, [data["_id"] for data in page], readable=False)
        blobs = Blobs(self.connection, DATA)
        for document in page:
            try:
                data = DBRecordData.from_document(await blobs.restore(document))
                rules = (tasks.get(data.task, {}).get("group") or {}).get("rules")
                config = None if rules is None else rules_of(rules)
                difference = self.options.compare_tokens(data, calls[data.id], config)
            except (StoreError, ValueError) as error:
                difference = str(error)
            findings.count(Invariant.TRAINING, "tokens", document["tokens"])
            if difference is not None:
                what = "the tokens of its model calls"
                problem = Problem(f"DBRecordData {document['_id']}", what, "their conversion", difference)
                findings.add(Invariant.TRAINING, document["_id"], [problem])


def origin_problems(data: Json, record: Json) -> Iterator[Problem]:
    """What the data say otherwise than the Record that they come from."""
    name = f"DBRecordData {data['_id']}"
    rows = [(f"{field} of its Record", record.get(field), data.get(field)) for field in _COPIED]
    yield from differing(name, [("the Record whose _id it has", data["_id"], data["record"]), *rows])
    if record["status"] != RecordStatus.READY:
        yield Problem(name, "a Record that is ready", RecordStatus.READY.value, record["status"])


_COPIED = ("task", "split", "score", "advantage", "turns", "trained_count")


def count_problems(data: Json, record: Json, limit: int) -> Iterator[Problem]:
    """What is wrong with how often the data were trained, and with the state that says so."""
    name, count, at_steps = f"DBRecordData {data['_id']}", data["trained_count"], data["trained_at_steps"]
    status, planned = data["status"], data.get("planned_step")
    yield from differing(name, [("trained_count of its trained_at_steps", len(at_steps), count)])
    if len(set(at_steps)) != len(at_steps):
        yield Problem(name, "trained once by a step", sorted(set(at_steps)), at_steps)
    if count > limit:
        yield Problem(name, "trained at most max_trained_count times", f"at most {limit}", count)
    if status == DataStatus.TRAINED and not count:
        yield Problem(name, "trained at least once, since it is trained", "1 or more", count)
    if (status == DataStatus.QUARANTINED) != (data.get("problem") is not None):
        what = f"a problem exactly where it is quarantined (it is {status})"
        yield Problem(name, what, "a problem", data.get("problem"))
    if (status == DataStatus.PLANNED) != (planned is not None):
        expected = "a step" if status == DataStatus.PLANNED else None
        yield Problem(name, f"a planned_step exactly where it is planned (it is {status})", expected, planned)
    yield from differing(
        f"Record {data['_id']}",
        [("last_trained_step", max(at_steps, default=None), record.get("last_trained_step"))],
    )


def step_problems(data: Json, steps: Steps) -> Iterator[Problem]:
    """What the data say otherwise than the committed and planned steps."""
    name, key = f"DBRecordData {data['_id']}", data["_id"]
    for number in data["trained_at_steps"]:
        if number not in steps.committed.get(key, ()):
            yield Problem(name, f"named by step {number}, which trained it", "a committed TrainStep", "none")
    planned = data.get("planned_step")
    if planned is not None and planned not in steps.planned.get(key, ()):
        yield Problem(name, f"named by step {planned}, which plans it", "a planned TrainStep", "none")


async def _steps_of(moment: Snapshot, page: Sequence[Json]) -> Steps:
    numbers = {number for data in page for number in (*data["trained_at_steps"], data.get("planned_step"))}
    active = values((*ACTIVE_STEPS, StepStatus.REVERTING))
    named = {"$setIntersection": ["$data", [data["_id"] for data in page]]}
    pipeline: list[Json] = [
        {"$match": {"status": {"$in": active}, "step": {"$in": [n for n in numbers if n is not None]}}},
        {"$project": {"step": 1, "status": 1, "data": named}},
    ]
    steps = Steps({}, {})
    for step in await moment.aggregate(STEP, pipeline):
        for key in step["data"]:
            if step["status"] in (*APPLIED_STEPS, StepStatus.REVERTING):
                steps.committed.setdefault(key, set()).add(step["step"])
            if step["status"] != StepStatus.COMMITTED:
                steps.planned.setdefault(key, set()).add(step["step"])
    return steps
