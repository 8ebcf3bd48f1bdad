"""Invariants 2, 5 and 6: training data equal their model calls; steps, versions and epochs are whole."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import ClassVar

from agentrl.documents.run import OUTSIDE_VERSION, epoch_key, parse_epoch_key
from agentrl.documents.status import (
    ACTIVE_STEPS,
    APPLIED_STEPS,
    DataStatus,
    EpochStatus,
    RecordStatus,
    StepStatus,
    VersionStatus,
    values,
)
from agentrl.documents.task import CONVERSATIONS
from agentrl.documents.training import Checkpoint, DBRecordData, TokenStatistics
from agentrl.errors import ConfigError, StoreError
from agentrl.lab.check.reading import (
    CheckProblem,
    CheckSection,
    ConsistentRead,
    Findings,
    Invariant,
    Whole,
    differing,
    only_if,
)
from agentrl.scoring.groups import rules_of
from agentrl.store.epochs import OF_SOURCES
from agentrl.store.groups import read_columns
from agentrl.store.mechanics.blobs import Blobs
from agentrl.store.mechanics.connection import (
    DATA,
    EPOCH,
    RECORD,
    STEP,
    TASK,
    TOKEN_STATISTICS,
    VERSION,
    Json,
    id_prefix,
)
from agentrl.store.model_calls import read_model_calls

_RECORD_FIELDS = {
    "task": 1, "split": 1, "status": 1, "score": 1, "advantage": 1, "turn_advantages": 1,
    "trained_count": 1, "turns": 1, "last_trained_step": 1, "untrained_calls": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepsRead:
    """The steps that name some data: {data id: step numbers}. A step being reverted may be in both."""

    committed: dict[str, set[int]]
    planned: dict[str, set[int]]


class DataCheck(CheckSection):
    """Checks every DBRecordData against its Record, its model calls and its steps."""

    collection = DATA
    fields: ClassVar = {}
    page_size = 16

    async def inspect(self, moment: ConsistentRead, page: list[Json], findings: Findings) -> None:
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

    async def _compare_tokens(self, moment: ConsistentRead, page: list[Json], findings: Findings) -> None:
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


def origin_problems(data: Json, record: Json) -> Iterator[CheckProblem]:
    """Yield contradictions between training data and their Record."""
    name = f"DBRecordData {data['_id']}"
    rows = [(f"{field} of its Record", record.get(field), data.get(field)) for field in _COPIED]
    left_out = record.get("untrained_calls") or [], data.get("untrained_calls") or []
    rows.append(("untrained_calls of its Record", *left_out))
    yield from differing(name, [("the Record whose _id it has", data["_id"], data["record"]), *rows])
    if record["status"] != RecordStatus.READY:
        yield CheckProblem(name, "a Record that is ready", RecordStatus.READY.value, record["status"])


_COPIED = ("task", "split", "score", "advantage", "turn_advantages", "turns", "trained_count")


def count_problems(data: Json, record: Json, limit: int) -> Iterator[CheckProblem]:
    """Yield contradictions between the number of times the data were trained and their status."""
    name, count, at_steps = f"DBRecordData {data['_id']}", data["trained_count"], data["trained_at_steps"]
    status, planned = data["status"], data.get("planned_step")
    yield from differing(name, [("trained_count of its trained_at_steps", len(at_steps), count)])
    if len(set(at_steps)) != len(at_steps):
        yield CheckProblem(name, "trained once by a step", sorted(set(at_steps)), at_steps)
    if count > limit:
        yield CheckProblem(name, "trained at most max_trained_count times", f"at most {limit}", count)
    if status in (DataStatus.READY, DataStatus.PLANNED) and count >= limit:
        what = f"trained, since it was trained {limit} times (max_trained_count)"
        yield CheckProblem(name, what, DataStatus.TRAINED.value, status)
    if status == DataStatus.TRAINED and not count:
        yield CheckProblem(name, "trained at least once, since it is trained", "1 or more", count)
    what = f"a problem if and only if it is quarantined (it is {status})"
    yield from only_if(name, what, status == DataStatus.QUARANTINED, data.get("problem"), "a problem")
    what = f"a planned_step if and only if it is planned (it is {status})"
    yield from only_if(name, what, status == DataStatus.PLANNED, planned, "a step")
    yield from differing(
        f"Record {data['_id']}",
        [("last_trained_step", max(at_steps, default=None), record.get("last_trained_step"))],
    )


def data_step_problems(data: Json, steps: StepsRead) -> Iterator[CheckProblem]:
    """Yield the steps that the data name and that do not name the data."""
    name, key = f"DBRecordData {data['_id']}", data["_id"]
    for number in data["trained_at_steps"]:
        if number not in steps.committed.get(key, ()):
            yield CheckProblem(
                name, f"named by step {number}, which trained it", "a committed TrainStep", "none"
            )
    planned = data.get("planned_step")
    if planned is not None and planned not in steps.planned.get(key, ()):
        yield CheckProblem(name, f"named by step {planned}, which plans it", "a planned TrainStep", "none")


async def _steps_naming(moment: ConsistentRead, page: Sequence[Json]) -> StepsRead:
    numbers = {number for data in page for number in (*data["trained_at_steps"], data.get("planned_step"))}
    active = values((*ACTIVE_STEPS, StepStatus.REVERTING))
    named = {"$setIntersection": ["$data", [data["_id"] for data in page]]}
    pipeline: list[Json] = [
        {"$match": {"status": {"$in": active}, "step": {"$in": [n for n in numbers if n is not None]}}},
        {"$project": {"step": 1, "status": 1, "data": named}},
    ]
    steps = StepsRead({}, {})
    for step in await moment.aggregate(STEP, pipeline):
        for key in step["data"]:
            if step["status"] in (*APPLIED_STEPS, StepStatus.REVERTING):
                steps.committed.setdefault(key, set()).add(step["step"])
            if step["status"] != StepStatus.COMMITTED:
                steps.planned.setdefault(key, set()).add(step["step"])
    return steps


class StepDataCheck(CheckSection):
    """Checks every TrainStep and the data that it names."""

    collection = STEP
    fields: ClassVar = {"metrics": 0}
    page_size = 8

    async def inspect(self, moment: ConsistentRead, page: list[Json], findings: Findings) -> None:
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


def step_problems(step: Json, data: Mapping[str, Json], pruned: Collection[str]) -> Iterator[CheckProblem]:
    """Yield contradictions between a step and the data that it names; a reverted step is not checked."""
    name, number, status = f"TrainStep {step['_id']}", step["step"], step["status"]
    if status in APPLIED_STEPS and step.get("committed_at") is None:
        yield CheckProblem(name, "the time when it was committed", "a time", None)
    if status in (StepStatus.PLANNING, StepStatus.PLANNED) and step.get("committed_at") is not None:
        yield CheckProblem(name, f"no commit, since it is {status}", None, step["committed_at"])
    what = f"pending if and only if it is committing (it is {status})"
    yield from only_if(name, what, status == StepStatus.COMMITTING, step.get("pending"))
    if status not in ACTIVE_STEPS:
        return
    named: Counter[str] = Counter(step["data"])
    for key, times in named.items():
        if times > 1:
            yield CheckProblem(name, f"names {key} once", 1, times)
        if key in pruned:
            continue
        if key not in data:
            yield CheckProblem(name, f"its training data {key}", "a DBRecordData", "none")
        elif status in APPLIED_STEPS and number not in data[key]["trained_at_steps"]:
            if not _is_pending(step, data[key], key):
                at_steps = data[key]["trained_at_steps"]
                yield CheckProblem(
                    f"DBRecordData {key}", f"trained by {name}, which names it", number, at_steps
                )
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


class LineageCheck(Whole):
    """Checks the numbers of the steps, and the steps of the last checkpoint."""

    async def inspect(self, moment: ConsistentRead, findings: Findings) -> None:
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


def number_problems(committed: Sequence[Json]) -> Iterator[CheckProblem]:
    """Yield gaps and repetitions in the numbers of committed steps, given in order."""
    expected = 1
    for step in committed:
        if step["step"] != expected:
            what = "numbers of committed steps without a gap or a repetition"
            yield CheckProblem(f"TrainStep {step['_id']}", what, expected, step["step"])
        expected = step["step"] + 1


def plan_problems(planned: Sequence[Json], committed: int, is_final: bool) -> Iterator[CheckProblem]:
    """Yield plans that are not for the next step; at the end of a run, every plan."""
    for step in planned:
        name = f"TrainStep {step['_id']}"
        if is_final:
            yield CheckProblem(
                name, "no plan left at the end of the run", "committed or reverted", step["status"]
            )
        elif step["step"] != committed + 1:
            yield CheckProblem(name, "a plan for the next step", committed + 1, step["step"])


def unfinished_problems(steps: Sequence[Json]) -> Iterator[CheckProblem]:
    """Yield commits and reverts that are unfinished at the end of a run."""
    for step in steps:
        if step["status"] in (StepStatus.COMMITTING, StepStatus.REVERTING):
            what = "no change left half done at the end of the run"
            yield CheckProblem(f"TrainStep {step['_id']}", what, "committed or reverted", step["status"])


def lineage_problems(
    checkpoint: Checkpoint, committed: Sequence[Json], is_final: bool
) -> Iterator[CheckProblem]:
    """Yield differences between the committed steps and those that the checkpoint contains.

    While the run goes on, steps after the checkpoint's are ignored: no checkpoint contains them yet.
    """
    ids = [step["_id"] for step in committed if is_final or step["step"] <= checkpoint.state.step]
    for number, (contained, step_id) in enumerate(zip_longest(checkpoint.state.train_steps, ids), start=1):
        if contained != step_id:
            name = f"TrainStep {step_id or contained}"
            what = f"step {number} of {checkpoint.folder.name}"
            yield CheckProblem(name, what, contained or "no such step", step_id or "no committed step")


class StatisticsCheck(CheckSection):
    """Checks that packed values have the length of their spans, inside the training data."""

    collection = TOKEN_STATISTICS
    fields: ClassVar = {}
    page_size = 32

    async def inspect(self, moment: ConsistentRead, page: list[Json], findings: Findings) -> None:
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


class VersionsCheck(Whole):
    """Checks the PolicyVersions and their folders."""

    async def inspect(self, moment: ConsistentRead, findings: Findings) -> None:
        versions = await moment.find(VERSION, {})
        made_by = [version["train_step"] for version in versions if version.get("train_step")]
        steps = await moment.by_id(STEP, made_by, {"step": 1, "status": 1})
        findings.count(Invariant.VERSIONS, "versions", len(versions))
        findings.add(Invariant.VERSIONS, None, version_number_problems(versions))
        findings.add(Invariant.VERSIONS, None, base_problems(versions))
        for version in versions:
            findings.add(Invariant.VERSIONS, None, version_origin_problems(version, steps))
        await self._files(versions, findings)

    async def _files(self, versions: Sequence[Json], findings: Findings) -> None:
        published = [version for version in versions if version["status"] == VersionStatus.PUBLISHED]
        for version in published:
            if version.get("pruned_at") is not None or not version["location"]:
                continue
            folder = Path(version["location"])
            if await asyncio.to_thread(folder.is_dir):
                await self._folder(version, findings)
            elif version is published[-1] or version.get("attempt") is not None:
                if await asyncio.to_thread(folder.parent.is_dir):
                    name = f"PolicyVersion {version['_id']}"
                    what = "its folder, which is not pruned"
                    findings.wrong(Invariant.VERSIONS, None, name, what, str(folder), "no folder")
                else:
                    findings.note(f"{folder.parent} is not on this machine: its files are not checked")

    async def _folder(self, version: Json, findings: Findings) -> None:
        verify = self.options.verify_files
        if verify is None:
            findings.note("files are not checked, as asked")
            return
        findings.count(Invariant.VERSIONS, "files", len(version["files"]))
        differences = await asyncio.gather(
            *(asyncio.to_thread(verify, version["location"], file) for file in version["files"])
        )
        name = f"PolicyVersion {version['_id']}"
        for file, difference in zip(version["files"], differences, strict=True):
            if difference is not None:
                what, expected = f"its file {file['name']} as published", f"sha256 {file['sha256']}"
                findings.wrong(Invariant.VERSIONS, None, name, what, expected, difference)


def version_number_problems(versions: Sequence[Json]) -> Iterator[CheckProblem]:
    """Yield gaps in the numbers of ``versions``, which are in order and begin with 0."""
    expected = 0
    for version in versions:
        if version["_id"] != expected:
            yield CheckProblem(
                f"PolicyVersion {version['_id']}", "numbers without a gap", expected, version["_id"]
            )
        expected = version["_id"] + 1


def base_problems(versions: Sequence[Json]) -> Iterator[CheckProblem]:
    """Yield published versions that are kept while the version that they change or extend is not."""
    kept = {version["_id"] for version in versions if version.get("pruned_at") is None and version["files"]}
    for version in versions:
        base = version.get("base")
        is_published = version["status"] == VersionStatus.PUBLISHED
        if is_published and version["_id"] in kept and base is not None and base not in kept:
            expected = f"version {base} with its files"
            yield CheckProblem(f"PolicyVersion {version['_id']}", "its base", expected, "none")


def version_origin_problems(version: Json, steps: Mapping[str, Json]) -> Iterator[CheckProblem]:
    """Yield published versions whose TrainStep is missing, not committed or another one."""
    name, made_by = f"PolicyVersion {version['_id']}", version.get("train_step")
    if version["status"] != VersionStatus.PUBLISHED or (made_by is None and not version["step"]):
        return
    step = steps.get(made_by) if made_by is not None else None
    if step is None:
        yield CheckProblem(name, "the step that made it", f"a TrainStep {version['step']}", made_by)
    elif (step["status"], step["step"]) != (StepStatus.COMMITTED, version["step"]):
        found = f"{step['status']} step {step['step']}"
        yield CheckProblem(name, f"made by {made_by}", f"committed step {version['step']}", found)


def token_problems(
    calls: Sequence[Json], versions: Mapping[int, Json], skew_seconds: float
) -> Iterator[CheckProblem]:
    """Yield model calls with tokens of a version that was not published when they ended.

    Version 0 is the model that the run starts from: engines serve it before a trainer publishes it. Tokens of
    ``OUTSIDE_VERSION`` are of a model folder; only evaluations have them.
    """
    tolerance = timedelta(seconds=skew_seconds)
    for call in calls:
        name = f"DispatchedSamplingTask {call['_id']}"
        sampled = {span["version"] for span in call["versions"] if span["end"] > span["start"]}
        for number in sorted(sampled - {0, OUTSIDE_VERSION}):
            version = versions.get(number)
            if version is None:
                yield CheckProblem(
                    name, f"policy version {number} of its tokens", "a published version", "none"
                )
            elif version["published_at"] > call["created_at"] + tolerance:
                yield CheckProblem(
                    name, f"policy version {number} published before the call ended",
                    f"by {call['created_at'].isoformat()}", version["published_at"].isoformat(),
                )  # fmt: skip


_NAMED = 5


@dataclass(frozen=True, slots=True)
class _Epoch:
    """One epoch: the number of its tasks and its ``Epoch`` documents."""

    split: str
    number: int
    source: str | None
    """The source of a mixture whose epoch it is."""
    tasks: int
    opening: Json | None
    first: Json | None
    """The document of epoch 0."""

    @property
    def name(self) -> str:
        return f"Epoch {epoch_key(self.split, self.number, self.source)}"

    @property
    def set_aside(self) -> int:
        """How many tasks it leaves out because of their pass rates."""
        return sum((self.opening or {}).get("set_aside", {}).values())

    @property
    def is_open(self) -> bool:
        """Whether every task must exist: no load or opening is in progress or due."""
        if self.opening is None:
            return False
        loaded = self.first or self.opening
        is_loaded: bool = loaded["status"] == EpochStatus.OPEN
        has_all: bool = self.opening["tasks"] >= loaded["tasks"]
        return is_loaded and self.opening["status"] == EpochStatus.OPEN and has_all

    @property
    def is_begun_early(self) -> bool:
        """Whether it is not open yet and holds only tasks selected in advance (``--task_selection``)."""
        return self.opening is not None and self.number > 0 and not self.opening["attempt"]


class EpochsCheck(Whole):
    """Checks every epoch of every split."""

    async def inspect(self, moment: ConsistentRead, findings: Findings) -> None:
        openings = {opening["_id"]: opening for opening in await moment.find(EPOCH, {})}
        counts = await _counts(moment)
        mixed = {split for split, _, source in map(parse_epoch_key, openings) if source is not None}
        # Only epoch 0 holds the tasks of all sources: each of them has later epochs of its own.
        counts = {key: count for key, count in counts.items() if key[0] not in mixed or key[1] == 0}
        for split in mixed:
            counts |= await _counts_by_source(moment, split)
        for epoch in _epochs(counts, openings):
            findings.count(Invariant.EPOCHS, "epochs")
            findings.count(Invariant.EPOCHS, "tasks", epoch.tasks)
            if epoch.opening is None:
                findings.wrong(Invariant.EPOCHS, None, epoch.name, "its document", "one", "none")
            elif epoch.is_open:
                findings.add(Invariant.EPOCHS, None, await _problems(moment, epoch))
            elif epoch.is_begun_early:
                findings.note(f"{epoch.name} is not open yet: {epoch.tasks} of its tasks were begun early")
            elif self.options.is_final:
                what = "open at the end of the run"
                found = f"{epoch.tasks} tasks of an opening that has not ended"
                findings.wrong(Invariant.EPOCHS, None, epoch.name, what, "every task", found)
            else:
                findings.note(f"{epoch.name} is being opened: it holds {epoch.tasks} tasks by now")


async def _counts_by_source(moment: ConsistentRead, split: str) -> dict[tuple[str, int, str | None], int]:
    """Count the Tasks of a mixture by split, epoch and source."""
    groups = await moment.aggregate(
        TASK,
        [
            {"$match": {"split": split, **OF_SOURCES}},
            {"$group": {"_id": {"epoch": "$epoch", "source": "$source"}, "tasks": {"$sum": 1}}},
        ],
    )
    return {(split, group["_id"]["epoch"], group["_id"]["source"]): group["tasks"] for group in groups}


async def _counts(moment: ConsistentRead) -> dict[tuple[str, int, str | None], int]:
    """Count Tasks by split and epoch; the sort makes the query covered by an index."""
    groups = await moment.aggregate(
        TASK,
        [
            {"$sort": {"split": 1, "epoch": 1, "order": 1}},
            {"$group": {"_id": {"split": "$split", "epoch": "$epoch"}, "tasks": {"$sum": 1}}},
        ],
    )
    return {(group["_id"]["split"], group["_id"]["epoch"], None): group["tasks"] for group in groups}


def _epochs(
    counts: Mapping[tuple[str, int, str | None], int], openings: Mapping[str, Json]
) -> Iterator[_Epoch]:
    counts = {key: number for key, number in counts.items() if key[1] != CONVERSATIONS}
    recorded = set(map(parse_epoch_key, openings))
    for key in sorted({*counts, *recorded}, key=lambda key: (key[0], key[1], key[2] or "")):
        split, number, source = key
        yield _Epoch(
            split, number, source, counts.get(key, 0), openings.get(epoch_key(*key)),
            openings.get(epoch_key(split, 0, source)),
        )  # fmt: skip


async def _problems(moment: ConsistentRead, epoch: _Epoch) -> Sequence[CheckProblem]:
    """Return the problems of an open epoch."""
    opening = epoch.opening or {}
    problems = differing(epoch.name, [("tasks", epoch.tasks + epoch.set_aside, opening["tasks"])])
    if epoch.number == 0:
        return problems
    missing, strange = await _differences(moment, epoch)
    missing = missing[epoch.set_aside :]
    for what, names in (("every task of epoch 0", missing), ("only tasks of epoch 0", strange)):
        if names:
            found = f"{len(names)} that differ: {', '.join(names[:_NAMED])}{', …' if names[_NAMED:] else ''}"
            problems.append(CheckProblem(epoch.name, what, "the same tasks, each once", found))
    return problems


async def _differences(moment: ConsistentRead, epoch: _Epoch) -> tuple[list[str], list[str]]:
    """Return the tasks of epoch 0 that are missing, and those that epoch 0 does not have."""
    wanted = _task_ids(moment, epoch_key(epoch.split, 0, epoch.source))
    present = _task_ids(moment, epoch_key(epoch.split, epoch.number, epoch.source))
    missing: list[str] = []
    strange: list[str] = []
    left, right = await anext(wanted, None), await anext(present, None)
    while left is not None or right is not None:
        if right is None or (left is not None and _key(left) < _key(right)):
            missing.append(str(left))
            left = await anext(wanted, None)
        elif left is None or _key(right) < _key(left):
            strange.append(right)
            right = await anext(present, None)
        else:
            left, right = await anext(wanted, None), await anext(present, None)
    return missing, strange


def _key(task_id: str) -> bytes:
    """Return a sort key in the order of the server."""
    return task_id.encode("utf-8", "surrogatepass")


async def _task_ids(moment: ConsistentRead, key: str) -> AsyncIterator[str]:
    """Yield the ids of an epoch's tasks, in order."""
    async for task in moment.each(TASK, {"_id": id_prefix(f"{key}/")}, {"_id": 1}):
        yield task["_id"].removeprefix(f"{key}/")
