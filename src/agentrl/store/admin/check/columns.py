"""Invariant 4 of columns: each belongs to a scored Record, and has values if and only if it is filled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from agentrl.documents.status import ColumnStatus, TaskStatus
from agentrl.store.admin.check.reading import Section, Snapshot, differing, only_if
from agentrl.store.admin.check.report import Findings, Invariant, Problem
from agentrl.store.columns import UNFILLED
from agentrl.store.mechanics.blobs import MARK
from agentrl.store.mechanics.connection import Json
from agentrl.store.names import COLUMN, RECORD, TASK


class ColumnsOfRecords(Section):
    """Checks every Column against its Record and its Task."""

    collection = COLUMN
    page_size = 100
    fields: ClassVar = {
        "record": 1, "task": 1, "name": 1, "status": 1, "owner": 1, "lease_expires_at": 1, "problem": 1,
        "by": 1, "filled_at": 1, MARK: 1, "packed": {"$binarySize": "$values"},
    }  # fmt: skip

    async def inspect(self, moment: Snapshot, page: list[Json], findings: Findings) -> None:
        fields = {"task": 1, "score": 1, "generated_tokens": 1}
        records = await moment.by_id(RECORD, {column["record"] for column in page}, fields)
        tasks = await moment.by_id(TASK, {column["task"] for column in page}, {"status": 1})
        findings.count(Invariant.STATES, "columns", len(page))
        for column in page:
            record, task = records.get(column["record"]), tasks.get(column["task"])
            findings.add(Invariant.STATES, column["_id"], column_problems(column, record, task))


def column_problems(column: Json, record: Json | None, task: Json | None) -> Iterator[Problem]:
    """Yield illegal combinations of a Column's fields, and contradictions to its Record and its Task."""
    name, status = f"Column {column['_id']}", column["status"]
    if record is None or task is None:
        yield Problem(name, "its Record and its Task", column["record"], "none")
        return
    if record.get("score") is None:
        yield Problem(name, "a Record with a score", "a score", None)
    rows = [("the Task of its Record", record["task"], column["task"])]
    is_filled = status == ColumnStatus.FILLED
    if is_filled and not column.get(MARK):
        rows.append(("bytes of values", 4 * record["generated_tokens"], column["packed"]))
    yield from differing(name, rows)
    for field, is_due in (
        ("owner", status == ColumnStatus.RUNNING), ("lease_expires_at", status == ColumnStatus.RUNNING),
        ("by", is_filled), ("filled_at", is_filled),
    ):  # fmt: skip
        yield from only_if(name, f"{field}, since it is {status}", is_due, column.get(field))
    if status == ColumnStatus.FAILED and not column.get("problem"):
        yield Problem(name, "a problem, since it was given up", "a problem", None)
    if status in UNFILLED and task["status"] == TaskStatus.COMPLETED:
        yield Problem(name, "no column left to fill in a finalized group", ColumnStatus.FILLED.value, status)
