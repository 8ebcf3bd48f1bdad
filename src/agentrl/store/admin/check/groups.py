"""Invariant 3: groups and evaluations say what their Records say, and a scorer gave every score."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from agentrl.documents.base import is_finite
from agentrl.documents.record import Record
from agentrl.documents.run import OUTSIDE_VERSION
from agentrl.documents.status import EvaluationStatus, RecordStatus, SlotStatus, TaskStatus
from agentrl.documents.task import Task
from agentrl.scoring.advantages import BUILT_IN
from agentrl.scoring.evaluation import pass_at_k
from agentrl.scoring.groups import FAILED, decide_group, filtered_of, rules_of, summarize
from agentrl.store.admin.check.reading import Section, Snapshot, differing, only_if
from agentrl.store.admin.check.report import Findings, Invariant, Problem
from agentrl.store.admin.check.trajectories import DEAD, SETTLED
from agentrl.store.evaluations import RECORD_FIELDS, evaluated_task
from agentrl.store.mechanics.connection import Json
from agentrl.store.names import EVALUATION, RECORD, TASK

_TOLERANCE = 1e-9
_DECIDING = (
    "_id", "task", "traj_id", "attempt", "split", "epoch", "score", "stop_reason", "turns", "min_version",
    "max_version", "generated_tokens", "score_details",
)  # fmt: skip


def score_problems(record: Json) -> Iterator[Problem]:
    """Yield contradictions between the status of a Record and its score, failure and reason."""
    name, status, score = f"Record {record['_id']}", record["status"], record.get("score")
    if status in DEAD and score is not None:
        yield Problem(name, f"no score, since it is {status}", None, score)
    if status in SETTLED:
        yield from _settled(name, record)
    elif record.get("advantage") is not None:
        yield Problem(name, f"no advantage, since it is {status}", None, record["advantage"])
    if status not in SETTLED | DEAD and score is not None:
        yield Problem(name, f"no score, since it is {status}", None, score)
    what, failure = f"a failure if and only if it failed (it is {status})", record.get("failure") or None
    yield from only_if(name, what, status == RecordStatus.FAILED, failure, "a failure")
    what, reason = "a reason if and only if it is abandoned", record.get("abandoned_because") or None
    yield from only_if(name, what, status == RecordStatus.ABANDONED, reason, "a reason")


def _settled(name: str, record: Json) -> Iterator[Problem]:
    score = record.get("score")
    if not is_finite(score):
        yield Problem(name, "a finite score", "a number", score)
    if not record.get("score_details", {}).get("scorer"):
        yield Problem(name, f"the scorer that gave {score}", "score_details.scorer", None)
    if record.get("scored_at") is None:
        yield Problem(name, "the time when it was scored", "a time", None)


def group_problems(task: Json, records: Sequence[Json], trained: int) -> Iterator[Problem]:
    """Yield differences between a group's summary and its Records; ``trained`` counts its training data."""
    name, group = f"Task {task['_id']}", task.get("group")
    is_final = task["status"] == TaskStatus.COMPLETED
    what = f"a group summary if and only if it is completed (it is {task['status']})"
    yield from only_if(name, what, is_final, group or None, "a summary")
    if not is_final or not group:
        return
    scored = [_record(record) for record in records if record.get("score") is not None]
    failed = sum(slot["status"] == SlotStatus.FAILED for slot in task["slots"])
    expected_group = summarize(scored, failed, trained, group.get("rules") or group)
    given_up = group.get("outcome") == FAILED
    if given_up:
        expected_group["outcome"] = FAILED
        if not group.get("problem"):
            yield Problem(name, "the reason why it could not be finalized", "group.problem", None)
    yield from (
        Problem(name, f"group.{key} of its Records", value, group.get(key))
        for key, value in expected_group.items()
        if not _close(value, group.get(key))
    )
    rules = group.get("rules")
    if group.get("kept_as_trained"):
        return
    if rules is not None and not given_up and rules.get("advantage", "leave_one_out") in BUILT_IN:
        yield from _advantages(task, records, scored, group)


def _advantages(
    task: Json, records: Sequence[Json], scored: Sequence[Record], group: Mapping[str, Any]
) -> Iterator[Problem]:
    rules = group["rules"]
    rng = random.Random(f"{rules['seed']}/{task['_id']}")
    decisions = decide_group(scored, rules_of(rules), rng, filtered_of(group))
    by_id = {record["_id"]: record for record in records}
    for decision in decisions:
        record = by_id[decision.record_id]
        name, advantage = f"Record {decision.record_id}", record.get("advantage")
        if decision.advantage is None:
            because = decision.abandoned_because
            yield from differing(name, [("abandoned_because", because, record.get("abandoned_because"))])
        elif record["status"] == RecordStatus.READY and not _close(decision.advantage, advantage):
            yield Problem(name, "the advantage that its group gives it", decision.advantage, advantage)
        elif record["status"] == RecordStatus.READY and not _all_close(
            decision.turn_advantages, record.get("turn_advantages") or ()
        ):
            expected, stored = decision.turn_advantages, record.get("turn_advantages")
            yield Problem(name, "the turn advantages that its group gives it", expected, stored)
        elif record["status"] == RecordStatus.ABANDONED and advantage is not None:
            yield Problem(name, "no advantage, since it is abandoned", None, advantage)


def _record(document: Json) -> Record:
    """Return a Record with the fields that deciding a group needs."""
    known = {name: document[name] for name in _DECIDING if document.get(name) is not None}
    return Record.from_document({"query": "", **known})


def _all_close(expected: Sequence[float], found: Sequence[Any]) -> bool:
    return len(expected) == len(found) and all(map(_close, expected, found))


def _close(expected: Any, found: Any) -> bool:
    if isinstance(expected, float) and isinstance(found, (int, float)):
        return math.isclose(expected, found, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    return bool(expected == found)


class Evaluations(Section):
    """Checks the numbers of every finished Evaluation."""

    collection = EVALUATION
    fields: ClassVar = {"status": 1, "results.total": 1, "right_threshold": 1, "finished_at": 1}
    page_size = 1

    async def inspect(self, moment: Snapshot, page: list[Json], findings: Findings) -> None:
        for evaluation in page:
            findings.count(Invariant.GROUPS, "evaluations")
            if evaluation["status"] != EvaluationStatus.FINISHED:
                continue
            newer = {"split": evaluation["_id"], "scored_at": {"$gt": evaluation["finished_at"]}}
            if await moment.find(RECORD, newer, {"_id": 1}, limit=1):
                findings.note(
                    f"{evaluation['_id']} was scored again: `agentrl eval` computes its numbers anew"
                )
                continue
            findings.add(Invariant.GROUPS, evaluation["_id"], await _problems(moment, evaluation))


class OutsideTokens(Section):
    """Checks that Records with tokens of a model folder belong to an Evaluation of a model folder."""

    collection = RECORD
    fields: ClassVar = {"split": 1, "min_version": 1}
    page_size = 2000

    async def inspect(self, moment: Snapshot, page: list[Json], findings: Findings) -> None:
        outside = [record for record in page if record.get("min_version") == OUTSIDE_VERSION]
        if not outside:
            return
        splits = sorted({record["split"] for record in outside})
        known = await moment.by_id(EVALUATION, splits, {"version": 1})
        for record in outside:
            evaluation = known.get(record["split"])
            if evaluation is None or evaluation["version"] is not None:
                key, what = record["_id"], "tokens of a model folder"
                expected, found = "an Evaluation of a model folder", f"split {record['split']}"
                findings.wrong(Invariant.VERSIONS, key, f"Record {key}", what, expected, found)


async def _problems(moment: Snapshot, evaluation: Json) -> list[Problem]:
    split, name = evaluation["_id"], f"Evaluation {evaluation['_id']}"
    of_task: dict[str, list[Json]] = defaultdict(list)
    async for record in moment.each(RECORD, {"split": split}, RECORD_FIELDS):
        of_task[record["task"]].append(record)
    means, rates, failed, scored = [], [], 0, 0
    tasks = await moment.find(TASK, {"split": split})
    for document in tasks:
        task = Task.from_document(document)
        item = evaluated_task(task, of_task[task.id], "", evaluation["right_threshold"])
        failed, scored = failed + item.failed, scored + len(item.scores)
        if item.scores:
            means.append(math.fsum(item.scores) / len(item.scores))
            rates.append(pass_at_k(len(item.scores), item.passes, 1))
    total = evaluation["results"]["total"]
    rows = [
        ("its number of tasks", len(tasks), total["tasks"]),
        ("its scored trajectories", scored, total["scored"]),
        ("its failed trajectories", failed, total["failed"]),
    ]
    problems = differing(name, rows)
    for what, values, stored in (
        ("its mean score", means, total["score"]), ("its pass@1", rates, total["pass_at"].get("1")),
    ):  # fmt: skip
        expected = math.fsum(values) / len(values) if values else None
        number = None if stored is None else stored["value"]
        if (expected is None) != (number is None) or abs((expected or 0.0) - (number or 0.0)) > _TOLERANCE:
            problems.append(Problem(name, what, expected, number))
    return problems
