"""Invariant 2: training data equal the conversion of their model calls, and steps trained what they name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import ClassVar

from agentrl.documents.checkpoint import Checkpoint
from agentrl.documents.status import ACTIVE_STEPS, APPLIED_STEPS, DataStatus, RecordStatus, StepStatus, values
from agentrl.documents.training import DBRecordData, TokenStatistics
from agentrl.errors import ConfigError, StoreError
from agentrl.scoring.groups import rules_of
from agentrl.store.admin.check.reading import Section, Snapshot, Whole, differing, only_if
from agentrl.store.admin.check.report import Findings, Invariant, Problem
from agentrl.store.columns import read_columns
from agentrl.store.mechanics.blobs import Blobs
from agentrl.store.mechanics.connection import Json
from agentrl.store.model_calls import read_model_calls
from agentrl.store.names import DATA, RECORD, STEP, TASK, TOKEN_STATISTICS, VERSION

_RECORD_FIELDS = {
    "task": 1, "split": 1, "status": 1, "score": 1, "advantage": 1, "turn_advantages": 1,
    "trained_count": 1, "turns": 1, "last_trained_step": 1, "untrained_calls": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps that name some data: {data id: step numbers}. A step being reverted may be in both."""

    committed: dict[str, set[int]]
    planned: dict[str, set[int]]


class Data(Section):
    """Checks every DBRecordData against its Record, its model calls and its steps."""

    collection = DATA
    fields: ClassVar = {}
    page_size = 16

    async def inspect(self, moment: Snapshot, page: list[Json], findings: Findings) -> None:
        ids = [data["_id"] for data in page]
        records = await moment.by_id(RECORD, ids, _RECORD_FIELDS)
        steps = await _steps_naming(moment, page)
        findings.count(Invariant.TRAINING, "training data", len(page))
        quarantined = [data for data in page if data["status"] == DataStatus.QUARANTINED]
        if quarantined:
            findings.count(Invariant.TRAINING, "quarantined data", len(quarantined))
        for data in page:
            key = data["_id"]
            record = records.get(key)
            if record is None:
                findings.wrong(Invariant.TRAINING, key, f"DBRecordData {key}", "its Record", key, "none")
                continue
            counted = count_problems(data, record, self.options.max_trained_count)
            for problems in (origin_problems(data, record), counted, data_step_problems(data, steps)):
                findings.add(Invariant.TRAINING, key, problems)
            if self.options.is_final and data["status"] == DataStatus.PLANNED:
                what = "no plan left at the end of the run"
                name = f"DBRecordData {key}"
                findings.wrong(Invariant.TRAINING, key, name, what, "another status", data["status"])
        await self._compare_tokens(moment, [item for item in page if item not in quarantined], findings)

    async def _compare_tokens(self, moment: Snapshot, page: list[Json], findings: Findings) -> None:
        tasks = await moment.by_id(TASK, {data["task"] for data in page}, {"group.rules": 1})
        calls = await read_model_calls(self.connection, [data["_id"] for data in page], readable=False)
        columns = await read_columns(self.connection, [data["_id"] for data in page])
        blobs = Blobs(self.connection, DATA)
        for document in page:
            try:
                data = DBRecordData.from_document(await blobs.restore(document))
                rules = (tasks.get(data.task, {}).get("group") or {}).get("rules")
                config = None if rules is None else rules_of(rules)
                own = columns.get(data.id, ())
                difference = self.options.compare_tokens(data, calls[data.id], config, own)
            except (StoreError, ConfigError, ValueError) as error:
                difference = str(error)
            findings.count(Invariant.TRAINING, "tokens", document["tokens"])
            if difference is not None:
                key, what = document["_id"], "the tokens of its model calls"
                name = f"DBRecordData {key}"
                findings.wrong(Invariant.TRAINING, key, name, what, "their conversion", difference)


def origin_problems(data: Json, record: Json) -> Iterator[Problem]:
    """Yield contradictions between training data and their Record."""
    name = f"DBRecordData {data['_id']}"
    rows = [(f"{field} of its Record", record.get(field), data.get(field)) for field in _COPIED]
    left_out = record.get("untrained_calls") or [], data.get("untrained_calls") or []
    rows.append(("untrained_calls of its Record", *left_out))
    yield from differing(name, [("the Record whose _id it has", data["_id"], data["record"]), *rows])
    if record["status"] != RecordStatus.READY:
        yield Problem(name, "a Record that is ready", RecordStatus.READY.value, record["status"])


_COPIED = ("task", "split", "score", "advantage", "turn_advantages", "turns", "trained_count")


def count_problems(data: Json, record: Json, limit: int) -> Iterator[Problem]:
    """Yield contradictions between the number of times the data were trained and their status."""
    name, count, at_steps = f"DBRecordData {data['_id']}", data["trained_count"], data["trained_at_steps"]
    status, planned = data["status"], data.get("planned_step")
    yield from differing(name, [("trained_count of its trained_at_steps", len(at_steps), count)])
    if len(set(at_steps)) != len(at_steps):
        yield Problem(name, "trained once by a step", sorted(set(at_steps)), at_steps)
    if count > limit:
        yield Problem(name, "trained at most max_trained_count times", f"at most {limit}", count)
    if status in (DataStatus.READY, DataStatus.PLANNED) and count >= limit:
        what = f"trained, since it was trained {limit} times (max_trained_count)"
        yield Problem(name, what, DataStatus.TRAINED.value, status)
    if status == DataStatus.TRAINED and not count:
        yield Problem(name, "trained at least once, since it is trained", "1 or more", count)
    what = f"a problem if and only if it is quarantined (it is {status})"
    yield from only_if(name, what, status == DataStatus.QUARANTINED, data.get("problem"), "a problem")
    what = f"a planned_step if and only if it is planned (it is {status})"
    yield from only_if(name, what, status == DataStatus.PLANNED, planned, "a step")
    yield from differing(
        f"Record {data['_id']}",
        [("last_trained_step", max(at_steps, default=None), record.get("last_trained_step"))],
    )


def data_step_problems(data: Json, steps: Steps) -> Iterator[Problem]:
    """Yield the steps that the data name and that do not name the data."""
    name, key = f"DBRecordData {data['_id']}", data["_id"]
    for number in data["trained_at_steps"]:
        if number not in steps.committed.get(key, ()):
            yield Problem(name, f"named by step {number}, which trained it", "a committed TrainStep", "none")
    planned = data.get("planned_step")
    if planned is not None and planned not in steps.planned.get(key, ()):
        yield Problem(name, f"named by step {planned}, which plans it", "a planned TrainStep", "none")


async def _steps_naming(moment: Snapshot, page: Sequence[Json]) -> Steps:
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


class StepData(Section):
    """Checks every TrainStep and the data that it names."""

    collection = STEP
    fields: ClassVar = {"metrics": 0}
    page_size = 8

    async def inspect(self, moment: Snapshot, page: list[Json], findings: Findings) -> None:
        # the data of the others are elsewhere
        page = [step for step in page if not (step.get("inherited") or step.get("recorded"))]
        named = {key for step in page for key in step["data"]}
        fields = {"status": 1, "trained_at_steps": 1, "planned_step": 1}
        data = await moment.by_id(DATA, named, fields)
        missing = {"_id": {"$in": list(named - data.keys())}, "pruned_at": {"$ne": None}}
        found = await moment.find(RECORD, missing, {"_id": 1}) if named - data.keys() else []
        pruned = {record["_id"] for record in found}
        versions = await moment.ids(VERSION, {step["policy_version"] for step in page})
        findings.count(Invariant.TRAINING, "steps", len(page))
        for step in page:
            findings.add(Invariant.TRAINING, step["_id"], step_problems(step, data, pruned))
            if step["policy_version"] not in versions:
                name, what = f"TrainStep {step['_id']}", "the policy version that it starts from"
                version, none = step["policy_version"], "no such version"
                findings.wrong(Invariant.TRAINING, step["_id"], name, what, version, none)


def step_problems(step: Json, data: Mapping[str, Json], pruned: Collection[str]) -> Iterator[Problem]:
    """Yield contradictions between a step and the data that it names; a reverted step is not checked."""
    name, number, status = f"TrainStep {step['_id']}", step["step"], step["status"]
    if status in APPLIED_STEPS and step.get("committed_at") is None:
        yield Problem(name, "the time when it was committed", "a time", None)
    if status in (StepStatus.PLANNING, StepStatus.PLANNED) and step.get("committed_at") is not None:
        yield Problem(name, f"no commit, since it is {status}", None, step["committed_at"])
    what = f"pending if and only if it is committing (it is {status})"
    yield from only_if(name, what, status == StepStatus.COMMITTING, step.get("pending"))
    if status not in ACTIVE_STEPS:
        return
    named: Counter[str] = Counter(step["data"])
    for key, times in named.items():
        if times > 1:
            yield Problem(name, f"names {key} once", 1, times)
        if key in pruned:
            continue
        if key not in data:
            yield Problem(name, f"its training data {key}", "a DBRecordData", "none")
        elif status in APPLIED_STEPS and number not in data[key]["trained_at_steps"]:
            if not _is_pending(step, data[key], key):
                at_steps = data[key]["trained_at_steps"]
                yield Problem(f"DBRecordData {key}", f"trained by {name}, which names it", number, at_steps)
        elif status == StepStatus.PLANNED:
            yield from differing(
                f"DBRecordData {key}",
                [
                    (f"planned, since {name} names it", DataStatus.PLANNED.value, data[key]["status"]),
                    (f"planned_step of {name}", number, data[key].get("planned_step")),
                ],
            )


def _is_pending(step: Json, data: Json, key: str) -> bool:
    """Return whether a commit in progress has not reached the data yet, or leaves them out."""
    if step["status"] != StepStatus.COMMITTING:
        return False
    return data.get("planned_step") == step["step"] or key in (step["pending"] or {}).get("untrained", ())


class Lineage(Whole):
    """Checks the numbers of the steps, and the steps of the last checkpoint."""

    async def inspect(self, moment: Snapshot, findings: Findings) -> None:
        steps = await moment.find(STEP, {}, {"step": 1, "status": 1}, by="step")
        committed = [step for step in steps if step["status"] in APPLIED_STEPS]
        planned = [step for step in steps if step["status"] in (StepStatus.PLANNING, StepStatus.PLANNED)]
        findings.add(Invariant.TRAINING, None, number_problems(committed))
        if self.options.is_final:
            findings.add(Invariant.TRAINING, None, unfinished_problems(steps))
        findings.add(Invariant.TRAINING, None, plan_problems(planned, len(committed), self.options.is_final))
        checkpoint = self.options.checkpoint
        if checkpoint is None:
            findings.note("there is no checkpoint (--output_dir): its steps are not compared with the run's")
            return
        findings.count(Invariant.TRAINING, "steps of a checkpoint", len(checkpoint.state.train_steps))
        problems = lineage_problems(checkpoint, committed, self.options.is_final)
        findings.add(Invariant.TRAINING, None, problems)


def number_problems(committed: Sequence[Json]) -> Iterator[Problem]:
    """Yield gaps and repetitions in the numbers of committed steps, given in order."""
    expected = 1
    for step in committed:
        if step["step"] != expected:
            what = "numbers of committed steps without a gap or a repetition"
            yield Problem(f"TrainStep {step['_id']}", what, expected, step["step"])
        expected = step["step"] + 1


def plan_problems(planned: Sequence[Json], committed: int, is_final: bool) -> Iterator[Problem]:
    """Yield plans that are not for the next step; at the end of a run, every plan."""
    for step in planned:
        name = f"TrainStep {step['_id']}"
        if is_final:
            yield Problem(name, "no plan left at the end of the run", "committed or reverted", step["status"])
        elif step["step"] != committed + 1:
            yield Problem(name, "a plan for the next step", committed + 1, step["step"])


def unfinished_problems(steps: Sequence[Json]) -> Iterator[Problem]:
    """Yield commits and reverts that are unfinished at the end of a run."""
    for step in steps:
        if step["status"] in (StepStatus.COMMITTING, StepStatus.REVERTING):
            what = "no change left half done at the end of the run"
            yield Problem(f"TrainStep {step['_id']}", what, "committed or reverted", step["status"])


def lineage_problems(checkpoint: Checkpoint, committed: Sequence[Json], is_final: bool) -> Iterator[Problem]:
    """Yield differences between the committed steps and those that the checkpoint contains.

    While the run goes on, steps after the checkpoint's are ignored: no checkpoint contains them yet.
    """
    ids = [step["_id"] for step in committed if is_final or step["step"] <= checkpoint.state.step]
    for number, (contained, step_id) in enumerate(zip_longest(checkpoint.state.train_steps, ids), start=1):
        if contained != step_id:
            name = f"TrainStep {step_id or contained}"
            what = f"step {number} of {checkpoint.folder.name}"
            yield Problem(name, what, contained or "no such step", step_id or "no committed step")


class Statistics(Section):
    """Checks that packed values have the length of their spans, inside the training data."""

    collection = TOKEN_STATISTICS
    fields: ClassVar = {}
    page_size = 32

    async def inspect(self, moment: Snapshot, page: list[Json], findings: Findings) -> None:
        items = [TokenStatistics.from_document(document) for document in page]
        steps = await moment.by_id(STEP, {item.train_step for item in items}, {"status": 1, "recorded": 1})
        data = await moment.by_id(DATA, {item.record for item in items}, {"tokens": 1})
        findings.count(Invariant.TRAINING, "token statistics", len(items))
        for item in items:
            problem = _problem(item, steps.get(item.train_step), data.get(item.record))
            if problem is not None:
                what = "values of the tokens that its step trained"
                expected, name = "two float16 for each token of its spans", f"TokenStatistics {item.id}"
                findings.wrong(Invariant.TRAINING, item.id, name, what, expected, problem)


def _problem(item: TokenStatistics, step: Json | None, data: Json | None) -> str | None:
    """Return what is wrong; None if nothing is, or if the step does not count."""
    if step is None:
        return f"no step {item.train_step}"
    if step["status"] not in values(APPLIED_STEPS) or step.get("recorded"):
        return None
    return "no training data" if data is None else item.problem(data["tokens"])
