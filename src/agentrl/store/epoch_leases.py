"""The lease under which one process at a time inserts the tasks of an epoch; times are the server's."""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pymongo
from pymongo import ReturnDocument
from pymongo.errors import DuplicateKeyError

from agentrl.documents.run import EpochOpening, epoch_key
from agentrl.documents.status import EpochStatus
from agentrl.errors import LeaseLostError, StoreError
from agentrl.store import slots
from agentrl.store.connection import Connection, Json, Repository, database_call
from agentrl.store.names import EPOCH

_RELEASE_SECONDS = 2.0
_FREE: Json = {"owner": None, "lease_expires_at": None}


class EpochLeases(Repository):
    """Reads and writes ``EpochOpening`` documents. One instance has one owner's name."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._owner = f"{socket.gethostname().split('.')[0]}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._seconds = 2 * connection.timeout + 10
        self._locks: dict[str, asyncio.Lock] = {}

    def lock(self, key: str) -> asyncio.Lock:
        """Return the lock that serializes the openers of this process, which share the owner's name."""
        return self._locks.setdefault(key, asyncio.Lock())

    @database_call
    async def of_split(self, split: str) -> dict[int, EpochOpening]:
        """Return the openings of a split by epoch."""
        cursor = self._collection(EPOCH).find({"_id": ids_of(f"{split}/")})
        openings = [EpochOpening.from_document(document) async for document in cursor]
        numbered = {int(opening.id.rpartition("/")[2]): opening for opening in openings}
        return {number: each for number, each in numbered.items() if each.id == epoch_key(split, number)}

    @database_call
    async def make(self, opening: EpochOpening) -> None:
        """Insert the document unless it is there."""
        fields = opening.to_document()
        key = fields.pop("_id")
        with suppress(DuplicateKeyError):
            await self._collection(EPOCH).update_one({"_id": key}, {"$setOnInsert": fields}, upsert=True)

    @database_call
    async def acquire(self, opening: EpochOpening, *, copies: bool = False) -> EpochOpening | None:
        """Take the lease; None where another process holds it.

        What the document says of seed, order and generations stays. ``copies``: the caller copies epoch 0,
        which has ``opening.tasks`` tasks; None, too, where the epoch is open and holds as many.
        """
        await self.make(replace(opening, tasks=0))
        free = {
            "$or": [
                {"$eq": ["$owner", None]},
                {"$eq": ["$owner", slots.literal(self._owner)]},
                {"$lte": ["$lease_expires_at", "$$NOW"]},
            ]
        }
        taken: Json = {
            "attempt": {"$add": ["$attempt", 1]}, "owner": slots.literal(self._owner),
            "lease_expires_at": slots.after(self._seconds),
            **{name: {"$ifNull": [f"${name}", getattr(opening, name)]} for name in _PLAN},
        }  # fmt: skip
        if copies:
            is_opening = {"$eq": ["$status", EpochStatus.OPENING.value]}
            free = {"$and": [free, {"$or": [is_opening, {"$lt": ["$tasks", opening.tasks]}]}]}
            taken |= {"status": EpochStatus.OPENING.value, "tasks": opening.tasks}
        document = await self._collection(EPOCH).find_one_and_update(
            {"_id": opening.id, "$expr": free}, [{"$set": taken}], return_document=ReturnDocument.AFTER
        )
        return None if document is None else EpochOpening.from_document(document)

    @database_call
    async def renew(self, held: EpochOpening, expected: int | None = None) -> None:
        """Let the lease run anew; with ``expected``, the epoch is being opened and will hold so many tasks.

        Raises LeaseLostError where another process has taken the lease.
        """
        opening = {} if expected is None else {"status": EpochStatus.OPENING.value, "tasks": expected}
        await self._change(held, {**opening, "lease_expires_at": slots.after(self._seconds)})

    @database_call
    async def finish(self, held: EpochOpening, tasks: int) -> None:
        """Record that the epoch is open and holds ``tasks`` tasks, and free the lease."""
        await self._change(held, {"status": EpochStatus.OPEN.value, "tasks": tasks, **_FREE})

    @asynccontextmanager
    async def releasing(self, held: EpochOpening) -> AsyncIterator[None]:
        """Free the lease after an error, so that the next process need not wait for its end."""
        try:
            yield
        except BaseException:
            with suppress(pymongo.errors.PyMongoError, StoreError), pymongo.timeout(_RELEASE_SECONDS):
                await self._change(held, _FREE)
            raise

    async def _change(self, held: EpochOpening, fields: Json) -> None:
        result = await self._collection(EPOCH).update_one(
            {"_id": held.id, "attempt": held.attempt}, [{"$set": fields}]
        )
        if not result.matched_count:
            raise LeaseLostError(
                f"another process opens epoch {held.id}: the lease of {self._owner} ran out",
                hint="nothing is lost: the other inserts what is missing",
            )


_PLAN = ("seed", "shuffle", "num_generations")


def ids_of(prefix: str) -> Json:
    """A filter on ``_id``: it begins with ``prefix``, which ends with a slash."""
    return {"$gt": prefix, "$lt": f"{prefix[:-1]}0"}
