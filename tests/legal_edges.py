"""Watch the statuses of a run's documents change, and name each change along no listed edge."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pymongo.asynchronous.change_stream import AsyncDatabaseChangeStream

from agentrl.documents.status import (
    COLUMN_EDGES,
    DATA_EDGES,
    RECORD_EDGES,
    RECORD_REVISIONS,
    STEP_EDGES,
    TASK_EDGES,
    VERSION_EDGES,
)
from agentrl.store.client import Store

Edges = Mapping[str, frozenset[str]]
_MARK = "Mark"
_LIMIT_MS = 200


def _merged(*edges: Mapping[Any, frozenset[StrEnum]]) -> Edges:
    states = {str(state) for each in edges for state in each}
    return {
        state: frozenset(str(target) for each in edges for target in each.get(state, ())) for state in states
    }


EDGES: Mapping[str, Edges] = {
    "Task": _merged(TASK_EDGES),
    "Record": _merged(RECORD_EDGES, RECORD_REVISIONS),
    "DBRecordData": _merged(DATA_EDGES),
    "Column": _merged(COLUMN_EDGES),
    "TrainStep": _merged(STEP_EDGES),
    "PolicyVersion": _merged(VERSION_EDGES),
}


@dataclass
class Watcher:
    """The last status of every document, and the changes that are not legal."""

    stream: AsyncDatabaseChangeStream[dict[str, Any]]
    statuses: dict[tuple[str, Any], str] = field(default_factory=dict)
    illegal: list[str] = field(default_factory=list)
    seen: int = 0

    async def read_to(self, mark: Any) -> None:
        """Read every change up to the insertion of the document ``mark``."""
        async for change in self.stream:
            place = change["ns"]["coll"], change["documentKey"]["_id"]
            if place == (_MARK, mark):
                return
            if place[0] in EDGES:
                self._note(place, change)

    def _note(self, place: tuple[str, Any], change: Mapping[str, Any]) -> None:
        whole = change.get("fullDocument") if change["operationType"] != "update" else None
        fields = whole or (change.get("updateDescription") or {}).get("updatedFields") or {}
        if change["operationType"] == "delete":
            self.statuses.pop(place, None)
        elif "status" in fields:
            before, after = self.statuses.get(place), fields["status"]
            self.statuses[place] = after
            self.seen += before not in (None, after)
            if before not in (None, after) and after not in EDGES[place[0]][str(before)]:
                self.illegal.append(f"{place[0]} {place[1]}: {before} → {after}")


@asynccontextmanager
async def watched(store: Store) -> AsyncIterator[Watcher]:
    """Watch the run's documents in the block; the Watcher is complete after it."""
    async with await store.database.watch(max_await_time_ms=_LIMIT_MS) as stream:
        watcher = Watcher(stream)
        yield watcher
        mark = await store.database[_MARK].insert_one({})
        await watcher.read_to(mark.inserted_id)
