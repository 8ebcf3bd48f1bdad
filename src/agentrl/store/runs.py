"""Runs: what there is once in a run; above all the lease that lets one trainer, and one only, write steps."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from pymongo import ReturnDocument
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import DuplicateKeyError

from agentrl.documents.base import plain
from agentrl.documents.run import TRAINER, Gate, ProcessIdentity, TrainerLease
from agentrl.errors import LeaseHeldError, LeaseLostError
from agentrl.processes import has_ended
from agentrl.store import slots
from agentrl.store.connection import Connection, Json, Repository, database_call
from agentrl.store.names import GATE, LEASE, STEP


class Runs(Repository):
    """The trainer's lease. Expiry is judged by the server's clock."""

    @database_call
    async def acquire_trainer(
        self, owner: str, host: str, pid: int, lease_seconds: float, process: ProcessIdentity | None = None
    ) -> int:
        """Become the run's trainer; returns the attempt, one more than that of the trainer before.

        ``owner`` is unique to this start of a trainer. What is written under an earlier attempt is refused
        from then on. The lease is free when it was released, has run out, belongs to ``owner`` already, or to
        a process that is known to have ended. Raises LeaseHeldError, which names the holder, otherwise.
        """
        await _prepare_lease(self._connection.database)
        holder = await self.trainer()
        free = [
            {"$eq": ["$owner", None]},
            {"$lte": ["$lease_expires_at", "$$NOW"]},
            {"$eq": ["$owner", slots.literal(owner)]},
        ]
        if holder.host == host and holder.process is not None and has_ended(holder.process):
            free.append({"$eq": ["$attempt", holder.attempt]})
        taken = {
            "attempt": {"$add": ["$attempt", 1]}, "owner": slots.literal(owner),
            "host": slots.literal(host), "pid": pid, "process": slots.literal(plain(process)),
            "lease_expires_at": slots.after(lease_seconds),
        }  # fmt: skip
        document = await self._collection(LEASE).find_one_and_update(
            {"_id": TRAINER, "$expr": {"$or": free}}, [{"$set": taken}],
            return_document=ReturnDocument.AFTER,
        )  # fmt: skip
        if document is None:
            raise _held(await self.trainer())
        return TrainerLease.from_document(document).attempt

    @database_call
    async def renew_trainer(self, attempt: int, lease_seconds: float) -> None:
        """Let the lease run for ``lease_seconds`` from now. Raises LeaseLostError if another took it."""
        result = await self._collection(LEASE).update_one(
            {"_id": TRAINER, "attempt": attempt, "owner": {"$ne": None}},
            [{"$set": {"lease_expires_at": slots.after(lease_seconds)}}],
        )
        if not result.matched_count:
            raise _replaced(attempt)

    @database_call
    async def release_trainer(self, attempt: int) -> None:
        """Give the lease back; it does nothing if another trainer has it by now."""
        await self._collection(LEASE).update_one(
            {"_id": TRAINER, "attempt": attempt},
            {"$set": {"owner": None, "host": None, "pid": None, "process": None, "lease_expires_at": None}},
        )

    @database_call
    async def discard_checkpoints(self, attempt: int, names: Sequence[str]) -> None:
        """Record which checkpoints are about to be deleted; no trainer resumes from them any more.

        Raises LeaseLostError, and records nothing, if another trainer has taken over.
        """
        result = await self._collection(LEASE).update_one(
            {"_id": TRAINER, "attempt": attempt},
            {"$set": {"discarded": list(names)}, "$inc": {"writes": 1}},
        )
        if not result.matched_count:
            raise _replaced(attempt)

    @database_call
    async def trainer(self) -> TrainerLease:
        """The lease as it is; ``owner`` None: nobody trains."""
        document = await self._collection(LEASE).find_one({"_id": TRAINER})
        return TrainerLease() if document is None else TrainerLease.from_document(document)


async def guard(connection: Connection, attempt: int | None, session: AsyncClientSession) -> None:
    """Refuse the transaction unless ``attempt`` is the trainer's; None, a caller without a lease, passes.

    It writes the lease, so that a takeover and this transaction conflict and cannot both go through.
    """
    if attempt is None:
        return
    result = await connection.collection(LEASE).update_one(
        {"_id": TRAINER, "attempt": attempt}, {"$inc": {"writes": 1}}, session=session
    )
    if not result.matched_count:
        raise _replaced(attempt)


async def prepare_gate(database: AsyncDatabase[Json]) -> None:
    """Make the admission gate if it is missing."""
    await _insert_if_missing(database[GATE], Gate())


async def _prepare_lease(database: AsyncDatabase[Json]) -> None:
    """Make the lease if it is missing, with the highest attempt that has planned a step."""
    if await database[LEASE].find_one({"_id": TRAINER}, {"_id": 1}) is not None:
        return
    ids = database[STEP].find({}, {"_id": 1}, hint=[("_id", 1)])
    steps = [document["_id"] async for document in ids]
    earlier = (key.partition("/")[0] for key in steps)
    attempt = max((int(number) for number in earlier if number.isdecimal()), default=0)
    await _insert_if_missing(database[LEASE], TrainerLease(attempt=attempt))


async def _insert_if_missing(collection: AsyncCollection[Json], document: Gate | TrainerLease) -> None:
    if await collection.find_one({"_id": document.id}, {"_id": 1}) is None:
        with contextlib.suppress(DuplicateKeyError):  # another process made it at the same moment
            await collection.insert_one(document.to_document())


def _held(holder: TrainerLease) -> LeaseHeldError:
    until = f" until {holder.lease_expires_at:%H:%M:%S} UTC" if holder.lease_expires_at else ""
    return LeaseHeldError(
        f"this run has a trainer: {holder.owner} (process {holder.pid} on {holder.host}), whose lease is"
        f" alive{until}",
        hint="stop it; or, if it is dead, wait until its lease runs out",
    )


def _replaced(attempt: int) -> LeaseLostError:
    return LeaseLostError(
        f"this trainer (attempt {attempt}) has been replaced by another, and its write was refused",
        hint="let one trainer run; this one may be started again when the other has ended",
    )
