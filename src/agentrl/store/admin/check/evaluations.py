"""Invariant 3 for evaluations: their numbers follow from their Tasks and Records."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import ClassVar

from agentrl.documents.run import OUTSIDE_VERSION
from agentrl.documents.status import EvaluationStatus
from agentrl.documents.task import Task
from agentrl.scoring.evaluation import pass_at_k
from agentrl.store.admin.check.findings import Findings, Invariant, Problem
from agentrl.store.admin.check.reading import Section, Snapshot, differing
from agentrl.store.evaluations import RECORD_FIELDS, evaluated_task
from agentrl.store.mechanics.connection import Json
from agentrl.store.names import EVALUATION, RECORD, TASK

_TOLERANCE = 1e-9


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
                what, expected = "tokens of a model folder", "an Evaluation of a model folder"
                problem = Problem(f"Record {record['_id']}", what, expected, f"split {record['split']}")
                findings.add(Invariant.VERSIONS, record["_id"], [problem])


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
        found = None if stored is None else stored["value"]
        if (expected is None) != (found is None) or abs((expected or 0.0) - (found or 0.0)) > _TOLERANCE:
            problems.append(Problem(name, what, expected, found))
    return problems
