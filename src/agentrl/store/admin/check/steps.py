"""Invariant 2: committed steps are numbered without a gap, their data exist, and checkpoints contain them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import ClassVar

from agentrl.documents.status import ACTIVE_STEPS, APPLIED_STEPS, DataStatus, StepStatus
from agentrl.store.admin.check.findings import Findings, Invariant, Problem
from agentrl.store.admin.check.reading import Section, Snapshot, Whole, differing
from agentrl.store.admin.checkpoints import Checkpoint
from agentrl.store.connection import Json
from agentrl.store.names import DATA, RECORD, STEP, VERSION


class StepData(Section):
    """Every TrainStep and the data that it names."""

    collection = STEP
    fields: ClassVar = {"metrics": 0}
    page_size = 8

    async def inspect(self, moment: Snapshot, page: list[Json], findings: Findings) -> None:
        named = {key for step in page for key in step["data"]}
        fields = {"status": 1, "trained_at_steps": 1, "planned_step": 1}
        data = await moment.by_id(DATA, named, fields)
        pruned = await _pruned(moment, named - data.keys())
        versions = await moment.ids(VERSION, {step["policy_version"] for step in page})
        findings.count(Invariant.TRAINING, "steps", len(page))
        for step in page:
            findings.add(Invariant.TRAINING, step["_id"], step_problems(step, data, pruned))
            if step["policy_version"] not in versions:
                what = "the policy version that it starts from"
                problem = Problem(f"TrainStep {step['_id']}", what, step["policy_version"], "no such version")
                findings.add(Invariant.TRAINING, step["_id"], [problem])


async def _pruned(moment: Snapshot, missing: Collection[str]) -> set[str]:
    """Which missing data are those of Records that retention has pruned."""
    query = {"_id": {"$in": list(missing)}, "pruned_at": {"$ne": None}}
    return {record["_id"] for record in await moment.find(RECORD, query, {"_id": 1})} if missing else set()


def step_problems(step: Json, data: Mapping[str, Json], pruned: Collection[str]) -> Iterator[Problem]:
    """What is wrong between a step and the data that it names; one that is undone makes no claim on them."""
    name, number, status = f"TrainStep {step['_id']}", step["step"], step["status"]
    if status in APPLIED_STEPS and step.get("committed_at") is None:
        yield Problem(name, "when it was committed", "a time", None)
    if status in (StepStatus.PLANNING, StepStatus.PLANNED) and step.get("committed_at") is not None:
        yield Problem(name, f"no commit, since it is {status}", None, step["committed_at"])
    if (status == StepStatus.COMMITTING) != (step.get("pending") is not None):
        yield Problem(name, f"pending exactly while it commits (it is {status})", None, step.get("pending"))
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
    """Whether a commit that is under way has not reached the data, or leaves them out."""
    if step["status"] != StepStatus.COMMITTING:
        return False
    return data.get("planned_step") == step["step"] or key in (step["pending"] or {}).get("untrained", ())


class Lineage(Whole):
    """The numbers of the living steps, and the steps of the last checkpoint."""

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
            findings.note("there is no checkpoint (--output_dir): the lineage of the steps is not checked")
            return
        findings.count(Invariant.TRAINING, "steps of a checkpoint", len(checkpoint.train_steps))
        problems = lineage_problems(checkpoint, committed, self.options.is_final)
        findings.add(Invariant.TRAINING, None, problems)


def number_problems(committed: Sequence[Json]) -> Iterator[Problem]:
    """Gaps and repetitions in the numbers of committed steps, which are in order."""
    expected = 1
    for step in committed:
        if step["step"] != expected:
            what = "numbers of committed steps without a gap or a repetition"
            yield Problem(f"TrainStep {step['_id']}", what, expected, step["step"])
        expected = step["step"] + 1


def plan_problems(planned: Sequence[Json], committed: int, is_final: bool) -> Iterator[Problem]:
    """Plans that are not for the step after the last; at the end of a run any plan is one too many."""
    for step in planned:
        name = f"TrainStep {step['_id']}"
        if is_final:
            yield Problem(name, "no plan left at the end of the run", "committed or reverted", step["status"])
        elif step["step"] != committed + 1:
            yield Problem(name, "a plan for the next step", committed + 1, step["step"])


def unfinished_problems(steps: Sequence[Json]) -> Iterator[Problem]:
    """Commits and reverts between two of their parts, at the end of a run."""
    for step in steps:
        if step["status"] in (StepStatus.COMMITTING, StepStatus.REVERTING):
            what = "no change left half done at the end of the run"
            yield Problem(f"TrainStep {step['_id']}", what, "committed or reverted", step["status"])


def lineage_problems(checkpoint: Checkpoint, committed: Sequence[Json], is_final: bool) -> Iterator[Problem]:
    """Where the committed steps up to the checkpoint's are not those that it contains.

    Later ones are in no checkpoint yet while the run goes on; at its end there are none.
    """
    ids = [step["_id"] for step in committed if is_final or step["step"] <= checkpoint.step]
    for number, (contained, found) in enumerate(zip_longest(checkpoint.train_steps, ids), start=1):
        if contained != found:
            name = f"TrainStep {found or contained}"
            what = f"step {number} of {checkpoint.name}"
            yield Problem(name, what, contained or "no such step", found or "no committed step")
