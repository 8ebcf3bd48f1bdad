"""Invariant 2 for TokenStatistics: those of a committed step fit the training data that it trained."""

from __future__ import annotations

from typing import ClassVar

from agentrl.documents.status import APPLIED_STEPS, values
from agentrl.documents.training import TokenStatistics
from agentrl.store.admin.check.findings import Findings, Invariant, Problem
from agentrl.store.admin.check.reading import Section, Snapshot
from agentrl.store.mechanics.connection import Json
from agentrl.store.names import DATA, STEP, TOKEN_STATISTICS


class Statistics(Section):
    """Checks that packed values have the length of their spans, inside the training data."""

    collection = TOKEN_STATISTICS
    fields: ClassVar = {}
    page_size = 32

    async def inspect(self, moment: Snapshot, page: list[Json], findings: Findings) -> None:
        items = [TokenStatistics.from_document(document) for document in page]
        steps = await moment.by_id(STEP, {item.train_step for item in items}, {"status": 1})
        data = await moment.by_id(DATA, {item.record for item in items}, {"tokens": 1})
        findings.count(Invariant.TRAINING, "token statistics", len(items))
        for item in items:
            problem = _problem(item, steps.get(item.train_step), data.get(item.record))
            if problem is not None:
                what = "values of the tokens that its step trained"
                name = f"TokenStatistics {item.id}"
                found = [Problem(name, what, "two float16 for each token of its spans", problem)]
                findings.add(Invariant.TRAINING, item.id, found)


def _problem(item: TokenStatistics, step: Json | None, data: Json | None) -> str | None:
    """Return what is wrong; None if nothing is, or if the step does not count."""
    if step is None:
        return f"no step {item.train_step}"
    if step["status"] not in values(APPLIED_STEPS):
        return None
    return "no training data" if data is None else item.problem(data["tokens"])
