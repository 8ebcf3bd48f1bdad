"""Records as a table, newest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from rich.console import RenderableType

from agentrl.documents.base import now
from agentrl.documents.record import Record
from agentrl.documents.status import DataStatus, RecordStatus
from agentrl.observe.sanitize_terminal import excerpt
from agentrl.observe.tables import MISSING, age, fixed, table, versions

if TYPE_CHECKING:
    from agentrl.store.client import Store

_LARGE_FIELDS = {"traj": 0, "score_details": 0}


async def read_records(store: Store, status: str | None, limit: int) -> list[Record]:
    """The newest ``limit`` Records, of one status where given."""
    query = {} if status is None else {"status": status}
    cursor = store.database["Record"].find(query, _LARGE_FIELDS).sort([("created_at", -1), ("_id", 1)])
    return [Record.from_document(document) for document in await cursor.limit(limit).to_list()]


async def quarantined(store: Store, records: Sequence[Record]) -> dict[str, str]:
    """Why training data of these Records are quarantined, by Record."""
    ids = [record.id for record in records if record.status is RecordStatus.READY]
    query = {"_id": {"$in": ids}, "status": DataStatus.QUARANTINED.value}
    cursor = store.database["DBRecordData"].find(query, {"problem": 1})
    return {data["_id"]: data["problem"] async for data in cursor}


def render_records(
    records: Sequence[Record], quarantined: Mapping[str, str] = MappingProxyType({})
) -> RenderableType:
    """A row per Record: how it went, and why; also why its training data are quarantined."""
    at = now()
    rows = [
        [
            record.id,
            record.status,
            _why(record, quarantined.get(record.id)),
            excerpt(MISSING if record.final_answer is None else record.final_answer, 30),
            fixed(record.score),
            fixed(record.advantage, sign=True),
            record.turns,
            record.generated_tokens,
            versions(record.min_version, record.max_version),
            age(record.created_at, at),
        ]
        for record in records
    ]
    columns = [
        "id",
        "status",
        "why",
        "answer",
        "score",
        "advantage",
        "turns",
        "tokens",
        "versions",
        "created",
    ]
    return table("Records, newest first", columns, rows, text=4)


def _why(record: Record, quarantined: str | None) -> str:
    if quarantined is not None:
        return excerpt(f"quarantined: {quarantined}", 90)
    if record.failure:
        return excerpt(f"{record.failure.kind}: {record.failure.message}", 60)
    return excerpt(record.abandoned_because or record.stop_reason or "", 60)
