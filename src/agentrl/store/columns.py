"""Open, claim, fill and give up the columns of Records: values that another process adds before training."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from pymongo import ASCENDING, UpdateOne

from agentrl.documents.model_call import pack_floats
from agentrl.documents.record import Column, TopLogprobs, column_key
from agentrl.documents.status import ColumnStatus, values
from agentrl.documents.task import Task
from agentrl.errors import LeaseLostError
from agentrl.store.mechanics.blobs import Blobs
from agentrl.store.mechanics.connection import COLUMN, Connection, Json, Repository, database_call
from agentrl.store.mechanics.lease import FREE, DocumentLease, after_backoff, expired, literal

UNFILLED = (ColumnStatus.OPEN, ColumnStatus.RUNNING)
"""Statuses of a column that its group waits for."""
_UNFILLED = values(UNFILLED)
_RESTED = {"$lte": [{"$ifNull": ["$not_before", "$$NOW"]}, "$$NOW"]}
_CLAIMABLE: Json = {
    "$or": [
        {"$and": [{"$eq": ["$status", ColumnStatus.OPEN.value]}, _RESTED]},
        {"$and": [{"$eq": ["$status", ColumnStatus.RUNNING.value]}, expired()]},
    ]
}
"""It is open and its back-off is over, or its filler's lease has expired."""


@dataclass(frozen=True, slots=True)
class ColumnClaim:
    """The right to fill one column, until its lease expires and another filler claims it."""

    column: Column
    owner: str

    @property
    def attempt(self) -> int:
        """The number of this claim."""
        return self.column.attempt

    @property
    def record_id(self) -> str:
        """The Record whose value it is."""
        return self.column.record


class Columns(Repository):
    """The calls on columns. A write under a claim that is lost raises LeaseLostError and changes nothing."""

    @database_call
    async def claim(
        self, name: str, *, owner: str, lease_seconds: float, limit: int = 1, filler: str = ""
    ) -> list[ColumnClaim]:
        """Claim up to ``limit`` columns of a name that wait for a value, the oldest first.

        ``filler`` claims those that name it or nobody; the empty one only those that name nobody. A column
        whose lease has expired is claimed again: its filler died.
        """
        query: Json = {
            "status": {"$in": _UNFILLED}, "name": name, "filler": {"$in": sorted({"", filler})},
            "$expr": _CLAIMABLE,
        }  # fmt: skip
        oldest = [("created_at", ASCENDING), ("_id", ASCENDING)]
        fields = {"status": ColumnStatus.RUNNING.value, "not_before": None}
        claims = []
        for key in await self._ids(COLUMN, query, sort=oldest, limit=limit):
            # Take only what waits: a lease is free for its own owner, who would get what it is filling again.
            taken = await self._lease(key).take(owner, lease_seconds, fields, only_if=_CLAIMABLE)
            if taken is not None:
                claims.append(ColumnClaim(Column.from_document(taken), owner))
        return claims

    @database_call
    async def renew(self, claim: ColumnClaim, lease_seconds: float) -> None:
        """Extend the lease to ``lease_seconds`` from now, also if it has expired."""
        await self._lease(claim.column.id).renew(claim.attempt, lease_seconds)

    @database_call
    async def fill(
        self, claim: ColumnClaim, values: Sequence[float], top: TopLogprobs | None = None, *, by: str
    ) -> None:
        """Fill a column: a value for each generated token of its Record, NaN for one without.

        ``by`` says what filled it. Idempotent under one claim.
        """
        document = await Blobs(self._connection, COLUMN).offload(
            {"_id": claim.column.id, "values": pack_floats(values), "top": b"" if top is None else top.pack()}
        )
        packed = {key: value for key, value in document.items() if key != "_id"}
        filled: Json = {
            **FREE, **packed, "status": ColumnStatus.FILLED.value, "by": by, "problem": None,
        }  # fmt: skip
        await self._lease(claim.column.id).write(
            claim.attempt,
            {"$set": filled, "$currentDate": {"filled_at": True}},
            {"status": {"$in": [ColumnStatus.RUNNING.value, ColumnStatus.FILLED.value]}},
        )

    @database_call
    async def fail(
        self, claim: ColumnClaim, problem: str, *, max_attempts: int, backoff_seconds: float,
        counts: bool = True,
    ) -> ColumnStatus:  # fmt: skip
        """Hand a column back without values; return its status: OPEN, or FAILED at ``max_attempts``.

        It may be claimed again after a back-off, which doubles with each failure that counts. Without
        ``counts`` the filler was not to blame: its engine is down. A FAILED column abandons its Record.
        """
        failures = claim.column.failures + int(counts)
        status = ColumnStatus.FAILED if counts and failures >= max_attempts else ColumnStatus.OPEN
        fields = {
            **FREE, "status": status.value, "failures": failures, "problem": literal(problem),
            # Halve the back-off: ``failures`` counts this one already, which doubles the first wait.
            "not_before": after_backoff(backoff_seconds / 2, literal(failures)),
        }  # fmt: skip
        await self._lease(claim.column.id).write(
            claim.attempt, [{"$set": fields}], {"status": ColumnStatus.RUNNING.value}
        )
        return status

    @database_call
    async def release(self, claim: ColumnClaim) -> None:
        """Hand a column back at once: its filler stops."""
        fields = {**FREE, "status": ColumnStatus.OPEN.value, "not_before": None}
        await self._lease(claim.column.id).write(
            claim.attempt, {"$set": fields}, {"status": ColumnStatus.RUNNING.value}
        )

    @database_call
    async def of_owner(self, name: str, owner: str) -> list[ColumnClaim]:
        """Return the claims on columns of a name that ``owner`` holds according to the database."""
        query: Json = {"status": ColumnStatus.RUNNING.value, "name": name, "owner": owner}
        return [ColumnClaim(column, owner) for column in await self._all(Column, COLUMN, query)]

    @database_call
    async def waiting(self, name: str | None = None) -> dict[str, int]:
        """Return {filler: unfilled columns} of a name, or of all names."""
        query: Json = {"status": {"$in": _UNFILLED}, **({} if name is None else {"name": name})}
        return await self._count_by("filler", COLUMN, query)

    def _lease(self, key: str) -> DocumentLease:
        def lost(attempt: int) -> LeaseLostError:
            return LeaseLostError(
                f"claim {attempt} of column {key} expired, and another filler took it over",
                hint="nothing is lost: the other one fills it; if it happens often, raise --lease_seconds",
            )

        return DocumentLease(self._collection(COLUMN), key, lost)


async def read_columns(connection: Connection, record_ids: Sequence[str]) -> dict[str, tuple[Column, ...]]:
    """Return the columns of each Record that has any, by name, with their values."""
    blobs = Blobs(connection, COLUMN)
    query = {"record": {"$in": list(record_ids)}}
    found: dict[str, tuple[Column, ...]] = {}
    order = [("record", ASCENDING), ("name", ASCENDING)]
    async for document in connection.collection(COLUMN).find(query, sort=order):
        column = Column.from_document(await blobs.restore(document))
        found[column.record] = (*found.get(column.record, ()), column)
    return found


async def open_columns(
    connection: Connection, task: Task, names: Iterable[str], record_ids: Iterable[str]
) -> None:
    """Open the columns ``names`` of Records of ``task`` that lack them. Idempotent.

    Where ``Task.meta`` has a text under the name of a column, that filler alone fills it.
    """
    writes = []
    for name, record in product(names, record_ids):
        wanted = task.meta.get(name)
        filler = wanted if isinstance(wanted, str) else ""
        key = column_key(record, name)
        column = Column(id=key, record=record, task=task.id, split=task.split, name=name, filler=filler)
        document = {field: value for field, value in column.to_document().items() if field != "_id"}
        # Set nothing that exists: the column may have been opened, or filled, by another process.
        writes.append(UpdateOne({"_id": key}, {"$setOnInsert": document}, upsert=True))
    if writes:
        await connection.collection(COLUMN).bulk_write(writes, ordered=False)


async def tasks_with_unfilled(connection: Connection, split: str) -> Collection[str]:
    """Return the ids of the Tasks that wait for a column."""
    query = {"status": {"$in": _UNFILLED}, "split": split}
    found: list[str] = await connection.collection(COLUMN).distinct("task", query)
    return found
