"""Invariant 1: nothing is left of a Task or a Record that is gone."""

from __future__ import annotations

from typing import ClassVar

from agentrl.store.admin.check.findings import Findings, Invariant, Problem
from agentrl.store.admin.check.reading import Section, Snapshot
from agentrl.store.connection import Json
from agentrl.store.names import CALL, RECORD, TASK


class _Parents(Section):
    """The documents that ``order`` names exist in ``parents``."""

    parents: ClassVar[str]
    page_size: ClassVar[int] = 5000

    async def inspect(self, moment: Snapshot, page: list[Json], findings: Findings) -> None:
        named = {document[self.order] for document in page}
        for key in sorted(named - await moment.ids(self.parents, named)):
            problem = Problem(
                f"{self.collection} of {key}", f"the {self.parents} that it belongs to", key, "none"
            )
            findings.add(Invariant.TRAJECTORIES, key, [problem])


class RecordParents(_Parents):
    """Every Record has its Task."""

    collection = RECORD
    parents = TASK
    order = "task"
    fields: ClassVar = {"task": 1, "_id": 0}


class CallParents(_Parents):
    """Every model call has its Record."""

    collection = CALL
    parents = RECORD
    order = "record"
    fields: ClassVar = {"record": 1, "_id": 0}
