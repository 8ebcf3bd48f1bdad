"""Invariant 5: policy versions have no gaps, their files are intact, and tokens name published versions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from agentrl.documents.run import OUTSIDE_VERSION
from agentrl.documents.status import StepStatus, VersionStatus
from agentrl.store.admin.check.findings import Findings, Invariant, Problem
from agentrl.store.admin.check.reading import Snapshot, Whole
from agentrl.store.mechanics.connection import Json
from agentrl.store.names import STEP, VERSION


class Versions(Whole):
    """Checks the PolicyVersions and their folders."""

    async def inspect(self, moment: Snapshot, findings: Findings) -> None:
        versions = await moment.find(VERSION, {})
        made_by = [version["train_step"] for version in versions if version.get("train_step")]
        steps = await moment.by_id(STEP, made_by, {"step": 1, "status": 1})
        findings.count(Invariant.VERSIONS, "versions", len(versions))
        findings.add(Invariant.VERSIONS, None, number_problems(versions))
        for version in versions:
            findings.add(Invariant.VERSIONS, None, origin_problems(version, steps))
        await self._files(versions, findings)

    async def _files(self, versions: Sequence[Json], findings: Findings) -> None:
        published = [version for version in versions if version["status"] == VersionStatus.PUBLISHED]
        for version in published:
            if version.get("pruned_at") is not None:
                continue
            folder = Path(version["location"])
            if await asyncio.to_thread(folder.is_dir):
                await self._folder(version, findings)
            elif version is published[-1] or version.get("attempt") is not None:
                if await asyncio.to_thread(folder.parent.is_dir):
                    name = f"PolicyVersion {version['_id']}"
                    problem = Problem(name, "its folder, which is not pruned", str(folder), "no folder")
                    findings.add(Invariant.VERSIONS, None, [problem])
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
        findings.add(
            Invariant.VERSIONS,
            None,
            [
                Problem(name, f"its file {file['name']} as published", f"sha256 {file['sha256']}", difference)
                for file, difference in zip(version["files"], differences, strict=True)
                if difference is not None
            ],
        )


def number_problems(versions: Sequence[Json]) -> Iterator[Problem]:
    """Yield gaps in the numbers of ``versions``, which are in order and begin with 0."""
    expected = 0
    for version in versions:
        if version["_id"] != expected:
            yield Problem(
                f"PolicyVersion {version['_id']}", "numbers without a gap", expected, version["_id"]
            )
        expected = version["_id"] + 1


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
