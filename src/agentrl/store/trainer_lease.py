"""Acquire, renew and fence the lease by which one trainer at a time writes steps and weights of a run."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from agentrl.documents.base import plain
from agentrl.documents.run import TRAINER, ProcessIdentity, SavedCheckpoint, TrainerLease
from agentrl.documents.status import TrainerEnd
from agentrl.errors import LeaseHeldError, LeaseLostError
from agentrl.processes import has_ended
from agentrl.store.ancestry import CHILDREN
from agentrl.store.mechanics.connection import Connection, Repository, database_call, insert_if_missing
from agentrl.store.mechanics.lease import FREE, DocumentLease, literal, live
from agentrl.store.names import LEASE, RUN, STEP

R = TypeVar("R")


class TrainerLeases(Repository):
    """The calls on the trainer's lease, one document per run. Expiry follows the server's clock."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._lease = _lease(connection)

    @database_call
    async def acquire(
        self, owner: str, host: str, pid: int, lease_seconds: float, process: ProcessIdentity | None = None
    ) -> int:
        """Acquire the lease and return the attempt, which is one higher than the previous trainer's.

        ``owner`` must be unique to this start of a trainer. From then on, writes under an earlier attempt are
        refused. The lease is free if it was released, has expired, belongs to ``owner``, or belongs to a
        process that is known to have ended. Otherwise raises LeaseHeldError, which names the holder.
        """
        if await self._collection(LEASE).find_one({"_id": TRAINER}, {"_id": 1}) is None:
            await self._begin_after_planned_steps()
        holder = await self.read()
        is_dead = _has_ended(holder, host)
        fields = {
            "host": literal(host), "pid": pid, "process": literal(plain(process)), "ended": None,
        }  # fmt: skip
        document = await self._lease.take(
            owner, lease_seconds, fields, or_if=[{"$eq": ["$attempt", holder.attempt]}] if is_dead else ()
        )
        if document is None:
            raise _held(await self.read())
        return TrainerLease.from_document(document).attempt

    @database_call
    async def renew(self, attempt: int, lease_seconds: float) -> None:
        """Extend the lease to ``lease_seconds`` from now. Raises LeaseLostError if another trainer has it."""
        await self._lease.renew(attempt, lease_seconds)

    @database_call
    async def release(self, attempt: int, ended: TrainerEnd | None = None) -> None:
        """Release the lease and store how the trainer ended; do nothing if another trainer has it."""
        released = {
            **FREE, "host": None, "pid": None, "process": None,
            "ended": None if ended is None else ended.value,
        }  # fmt: skip
        with suppress(LeaseLostError):
            await self._lease.write(attempt, {"$set": released})

    @database_call
    async def discard_checkpoints(self, attempt: int, names: Sequence[str]) -> list[str]:
        """Record which checkpoints are about to be deleted, so that no trainer or fork begins from them.

        Returns them: ``names`` without those from which a child began. Raises LeaseLostError, and records
        nothing, if another trainer has the lease.
        """

        async def write() -> list[str]:
            notes = self._collection(RUN).find(CHILDREN, {"checkpoint": 1})
            kept = {Path(note["checkpoint"]).name async for note in notes}
            discarded = [name for name in names if name not in kept]
            update = {"$set": {"discarded": discarded}, "$inc": {"writes": 1}}
            await self._lease.write(attempt, update)
            return discarded

        return await self._connection.transaction(write)

    @database_call
    async def record_output(self, attempt: int, place: str) -> None:
        """Store where the trainer keeps its output. Raises LeaseLostError as ``renew``."""
        await self._lease.write(attempt, {"$set": {"output": place}})

    @database_call
    async def record_saved(self, attempt: int, saved: SavedCheckpoint) -> None:
        """Store which checkpoint is the newest. Raises LeaseLostError as ``renew``."""
        await self._lease.write(attempt, {"$set": {"saved": plain(saved)}})

    @database_call
    async def require_free(self, host: str) -> None:
        """Raise LeaseHeldError, naming the holder, if a process on ``host`` could not acquire the lease."""
        held = {"_id": TRAINER, "owner": {"$ne": None}, "$expr": live()}
        holder = await self._one(TrainerLease, LEASE, held)
        if holder is not None and not _has_ended(holder, host):
            raise _held(holder)

    @database_call
    async def read(self) -> TrainerLease:
        """Return the lease; ``owner`` is None if no trainer holds it."""
        return await self._one(TrainerLease, LEASE, {"_id": TRAINER}) or TrainerLease()

    async def _begin_after_planned_steps(self) -> None:
        """Insert the lease with the highest attempt that has planned a step."""
        earlier = [key.partition("/")[0] for key in await self._ids(STEP, {}, hint=[("_id", 1)])]
        attempt = max((int(number) for number in earlier if number.isdecimal()), default=0)
        await insert_if_missing(self._collection(LEASE), TrainerLease(attempt=attempt))


async def fenced(
    connection: Connection, attempt: int | None, write: Callable[[], Coroutine[Any, Any, R]]
) -> R:
    """Run ``write`` in a transaction of the current trainer, and return its result.

    Raises LeaseLostError, and writes nothing, unless ``attempt`` is the current trainer's; None (no lease)
    always passes. The transaction writes the lease document, so that it and a concurrent takeover conflict
    and only one of them commits.
    """

    async def protected() -> R:
        if attempt is not None:
            await _lease(connection).write(attempt, {"$inc": {"writes": 1}})
        return await write()

    return await connection.transaction(protected)


def _lease(connection: Connection) -> DocumentLease:
    return DocumentLease(connection.collection(LEASE), TRAINER, _replaced)


def _has_ended(holder: TrainerLease, host: str) -> bool:
    return holder.host == host and holder.process is not None and has_ended(holder.process)


def _held(holder: TrainerLease) -> LeaseHeldError:
    until = f" until {holder.lease_expires_at:%H:%M:%S} UTC" if holder.lease_expires_at else ""
    return LeaseHeldError(
        f"this run has a trainer: {holder.owner} (process {holder.pid} on {holder.host}), whose lease is"
        f" valid{until}",
        hint="stop it; if it is dead, wait until its lease expires",
    )


def _replaced(attempt: int) -> LeaseLostError:
    return LeaseLostError(
        f"this trainer (attempt {attempt}) has been replaced by another, and its write was refused",
        hint="run one trainer at a time; start this one again after the other has ended",
    )
