"""Invariants 5 and 6: policy versions are whole and tokens name them; every epoch holds every task once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from agentrl.documents.run import OUTSIDE_VERSION, epoch_key
from agentrl.documents.status import EpochStatus, StepStatus, VersionStatus
from agentrl.documents.task import CONVERSATIONS
from agentrl.store.admin.check.reading import Snapshot, Whole, differing
from agentrl.store.admin.check.report import Findings, Invariant, Problem
from agentrl.store.mechanics.connection import Json, id_prefix
from agentrl.store.names import EPOCH, STEP, TASK, VERSION


class Versions(Whole):
    """Checks the PolicyVersions and their folders."""

    async def inspect(self, moment: Snapshot, findings: Findings) -> None:
        versions = await moment.find(VERSION, {})
        made_by = [version["train_step"] for version in versions if version.get("train_step")]
        steps = await moment.by_id(STEP, made_by, {"step": 1, "status": 1})
        findings.count(Invariant.VERSIONS, "versions", len(versions))
        findings.add(Invariant.VERSIONS, None, number_problems(versions))
        findings.add(Invariant.VERSIONS, None, base_problems(versions))
        for version in versions:
            findings.add(Invariant.VERSIONS, None, origin_problems(version, steps))
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


def number_problems(versions: Sequence[Json]) -> Iterator[Problem]:
    """Yield gaps in the numbers of ``versions``, which are in order and begin with 0."""
    expected = 0
    for version in versions:
        if version["_id"] != expected:
            yield Problem(
                f"PolicyVersion {version['_id']}", "numbers without a gap", expected, version["_id"]
            )
        expected = version["_id"] + 1


def base_problems(versions: Sequence[Json]) -> Iterator[Problem]:
    """Yield published versions that are kept while the version that they change or extend is not."""
    kept = {version["_id"] for version in versions if version.get("pruned_at") is None and version["files"]}
    for version in versions:
        base = version.get("base")
        is_published = version["status"] == VersionStatus.PUBLISHED
        if is_published and version["_id"] in kept and base is not None and base not in kept:
            expected = f"version {base} with its files"
            yield Problem(f"PolicyVersion {version['_id']}", "its base", expected, "none")


def origin_problems(version: Json, steps: Mapping[str, Json]) -> Iterator[Problem]:
    """Yield published versions whose TrainStep is missing, not committed or another one."""
    name, made_by = f"PolicyVersion {version['_id']}", version.get("train_step")
    if version["status"] != VersionStatus.PUBLISHED or (made_by is None and not version["step"]):
        return
    step = steps.get(made_by) if made_by is not None else None
    if step is None:
        yield Problem(name, "the step that made it", f"a TrainStep {version['step']}", made_by)
    elif (step["status"], step["step"]) != (StepStatus.COMMITTED, version["step"]):
        found = f"{step['status']} step {step['step']}"
        yield Problem(name, f"made by {made_by}", f"committed step {version['step']}", found)


def token_problems(
    calls: Sequence[Json], versions: Mapping[int, Json], skew_seconds: float
) -> Iterator[Problem]:
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
                yield Problem(name, f"policy version {number} of its tokens", "a published version", "none")
            elif version["published_at"] > call["created_at"] + tolerance:
                yield Problem(
                    name, f"policy version {number} published before the call ended",
                    f"by {call['created_at'].isoformat()}", version["published_at"].isoformat(),
                )  # fmt: skip


_NAMED = 5


@dataclass(frozen=True, slots=True)
class _Epoch:
    """One epoch: the number of its tasks and its ``Epoch`` documents."""

    split: str
    number: int
    tasks: int
    opening: Json | None
    first: Json | None
    """The document of epoch 0."""

    @property
    def name(self) -> str:
        return f"Epoch {epoch_key(self.split, self.number)}"

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


class Epochs(Whole):
    """Checks every epoch of every split."""

    async def inspect(self, moment: Snapshot, findings: Findings) -> None:
        openings = {opening["_id"]: opening for opening in await moment.find(EPOCH, {})}
        for epoch in _epochs(await _counts(moment), openings):
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


async def _counts(moment: Snapshot) -> dict[tuple[str, int], int]:
    """Count Tasks by split and epoch; the sort makes the query covered by an index."""
    groups = await moment.aggregate(
        TASK,
        [
            {"$sort": {"split": 1, "epoch": 1, "order": 1}},
            {"$group": {"_id": {"split": "$split", "epoch": "$epoch"}, "tasks": {"$sum": 1}}},
        ],
    )
    return {(group["_id"]["split"], group["_id"]["epoch"]): group["tasks"] for group in groups}


def _epochs(counts: Mapping[tuple[str, int], int], openings: Mapping[str, Json]) -> Iterator[_Epoch]:
    counts = {key: number for key, number in counts.items() if key[1] != CONVERSATIONS}
    recorded = {(key.rpartition("/")[0], int(key.rpartition("/")[2])) for key in openings}
    for split, number in sorted({*counts, *recorded}):
        yield _Epoch(
            split, number, counts.get((split, number), 0), openings.get(epoch_key(split, number)),
            openings.get(epoch_key(split, 0)),
        )  # fmt: skip


async def _problems(moment: Snapshot, epoch: _Epoch) -> Sequence[Problem]:
    """Return the problems of an open epoch."""
    opening = epoch.opening or {}
    problems = differing(epoch.name, [("tasks", epoch.tasks, opening["tasks"])])
    if epoch.number == 0:
        return problems
    missing, strange = await _differences(moment, epoch)
    for what, names in (("every task of epoch 0", missing), ("only tasks of epoch 0", strange)):
        if names:
            found = f"{len(names)} that differ: {', '.join(names[:_NAMED])}{', …' if names[_NAMED:] else ''}"
            problems.append(Problem(epoch.name, what, "the same tasks, each once", found))
    return problems


async def _differences(moment: Snapshot, epoch: _Epoch) -> tuple[list[str], list[str]]:
    """Return the tasks of epoch 0 that are missing, and those that epoch 0 does not have."""
    wanted = _task_ids(moment, epoch_key(epoch.split, 0))
    present = _task_ids(moment, epoch_key(epoch.split, epoch.number))
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


async def _task_ids(moment: Snapshot, key: str) -> AsyncIterator[str]:
    """Yield the ids of an epoch's tasks, in order."""
    async for task in moment.each(TASK, {"_id": id_prefix(f"{key}/")}, {"_id": 1}):
        yield task["_id"].removeprefix(f"{key}/")
