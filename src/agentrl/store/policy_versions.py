"""What only a run's one trainer writes, under its lease: the PolicyVersions, its published weights."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pymongo import ASCENDING, DESCENDING

from agentrl.base.processes import ProcessIdentity, has_ended
from agentrl.documents.document import plain
from agentrl.documents.run import TRAINER, Doing, PolicyVersion, SavedCheckpoint, TrainerLease
from agentrl.documents.status import VERSION_EDGES, TrainerEnd, VersionStatus, sources
from agentrl.errors import LeaseHeldError, LeaseLostError, StoreError
from agentrl.store.mechanics.connection import (
    LEASE,
    RUN,
    STEP,
    VERSION,
    Connection,
    Json,
    Repository,
    database_call,
    insert_if_missing,
)
from agentrl.store.mechanics.lease import FREE, DocumentLease, literal, live
from agentrl.store.settings import CHILDREN

_VERSIONS_PER_UPDATE = 500
"""Bounds a transaction: a run may have to withdraw thousands of versions."""


class PolicyVersions(Repository):
    """The calls on published weights: the trainer publishes them, engines load them.

    ``attempt`` is the return value of ``TrainerLeases.acquire``. A trainer that has been replaced gets a
    LeaseLostError, and nothing is written.
    """

    @database_call
    async def reserve(self, version: PolicyVersion, *, attempt: int | None = None) -> None:
        """Reserve the number and the folder of ``version``, which becomes visible when it is published.

        Replaces the reservation of an earlier trainer. Idempotent. Raises StoreError if the number is already
        published or lower than an existing number.
        """
        document = replace(version, status=VersionStatus.RESERVED).to_document()

        async def write() -> None:
            stored = await self._stored(version.id)
            if stored is None:
                await self._collection(VERSION).insert_one(document)
            elif stored.status is VersionStatus.RESERVED:
                await self._collection(VERSION).replace_one({"_id": version.id}, document)
            else:
                raise _taken(version)

        await fenced(self._connection, attempt, write)

    @database_call
    async def publish(self, version: PolicyVersion, *, attempt: int | None = None) -> None:
        """Make a version visible. Idempotent. Numbers only grow, withdrawn versions included.

        Raises StoreError if the number belongs to other weights or is lower than an existing number.
        """

        async def write() -> None:
            stored = await self._stored(version.id)
            if stored is None:
                await self._collection(VERSION).insert_one(version.to_document())
            elif (stored.location, stored.files) != (version.location, version.files):
                raise _taken(version)
            elif stored.status is VersionStatus.RESERVED:
                await self._collection(VERSION).replace_one({"_id": version.id}, version.to_document())

        await fenced(self._connection, attempt, write)

    async def _stored(self, version: int) -> PolicyVersion | None:
        """Return the version with this number, if it exists. Raises StoreError if a higher number exists."""
        newest = await self._collection(VERSION).find_one({}, sort=[("_id", DESCENDING)])
        if newest is None or newest["_id"] < version:
            return None
        if newest["_id"] > version:
            raise StoreError(
                f"policy version {version} is older than version {newest['_id']}, which exists",
                hint="number versions after the newest one, withdrawn ones included",
            )
        return PolicyVersion.from_document(newest)

    @database_call
    async def reserved(self) -> PolicyVersion | None:
        """Return the reserved version, which has the highest number; None if there is none."""
        return await self._one(PolicyVersion, VERSION, {"status": VersionStatus.RESERVED.value})

    @database_call
    async def latest(self) -> PolicyVersion | None:
        """Return the newest published version; None if there is none."""
        published = {"status": VersionStatus.PUBLISHED.value}
        return await self._one(PolicyVersion, VERSION, published, sort=[("_id", DESCENDING)])

    @database_call
    async def get(self, version: int) -> PolicyVersion | None:
        """Return the version with this number, in any status; None if there is none."""
        return await self._one(PolicyVersion, VERSION, {"_id": version})

    @database_call
    async def newest_id(self) -> int | None:
        """Return the highest version number in any status; None if there are no versions."""
        newest = await self._collection(VERSION).find_one({}, {"_id": 1}, sort=[("_id", DESCENDING)])
        return None if newest is None else int(newest["_id"])

    @database_call
    async def published(self, limit: int, *, below: int | None = None) -> list[PolicyVersion]:
        """Return up to ``limit`` published versions, newest first; with ``below``, only lower numbers."""
        query: Json = {"status": VersionStatus.PUBLISHED.value}
        if below is not None:
            query["_id"] = {"$lt": below}
        return await self._all(PolicyVersion, VERSION, query, sort=[("_id", DESCENDING)], limit=limit)

    @database_call
    async def steps_above(self, version: int) -> dict[int, int]:
        """Return {version: its step} of the published and withdrawn versions above ``version``, ascending.

        These pairs never change, and later versions have higher numbers. So a caller that has read up to a
        number needs only the versions above it.
        """
        query = {"_id": {"$gt": version}, "status": {"$ne": VersionStatus.RESERVED.value}}
        cursor = self._collection(VERSION).find(query, {"step": 1}, sort=[("_id", ASCENDING)])
        return {int(document["_id"]): int(document["step"]) async for document in cursor}

    @database_call
    async def withdrawn(self, step: int) -> list[PolicyVersion]:
        """Return the withdrawn versions of ``step``, newest first."""
        query = {"status": VersionStatus.WITHDRAWN.value, "step": step}
        return await self._all(PolicyVersion, VERSION, query, sort=[("_id", DESCENDING)])

    @database_call
    async def all(self) -> list[PolicyVersion]:
        """Return every version in any status, oldest first. For reports: a run may have thousands."""
        return await self._all(PolicyVersion, VERSION, {}, sort=[("_id", ASCENDING)])

    @database_call
    async def withdraw_after(self, step: int, *, attempt: int | None = None) -> int:
        """Withdraw every version of a step above ``step``, which has been reverted; return how many.

        Also withdraws those above the newest stored version: they were in the memory of a trainer that has
        ended. Each transaction withdraws a few hundred, oldest first. After an interruption, call it again.
        """
        kept = {
            "status": VersionStatus.PUBLISHED.value, "location": {"$ne": ""}, "step": {"$lte": step},
        }  # fmt: skip
        stored = await self._one(PolicyVersion, VERSION, kept, sort=[("_id", DESCENDING)])
        lost: Json = {"location": "", "_id": {"$gt": -1 if stored is None else stored.id}}
        later: Json = {
            "$or": [{"step": {"$gt": step}}, lost],
            "status": {"$in": sources(VERSION_EDGES, VersionStatus.WITHDRAWN)},
        }
        withdrawn = 0
        while count := await self._withdraw_some(later, attempt):
            withdrawn += count
        return withdrawn

    async def _withdraw_some(self, later: Json, attempt: int | None) -> int:
        async def write() -> int:
            oldest = [("_id", ASCENDING)]
            ids = await self._ids(VERSION, later, sort=oldest, limit=_VERSIONS_PER_UPDATE)
            result = await self._collection(VERSION).update_many(
                {"_id": {"$in": ids}}, {"$set": {"status": VersionStatus.WITHDRAWN.value}}
            )
            return result.modified_count

        return await fenced(self._connection, attempt, write)

    @database_call
    async def reinstate(self, version: PolicyVersion, *, attempt: int | None = None) -> None:
        """Publish a withdrawn version again, for another ``train_step`` that ended with the same weights.

        They may be in other files now. Idempotent. Raises StoreError if the version does not exist.
        """
        allowed = [VersionStatus.WITHDRAWN.value, VersionStatus.PUBLISHED.value]
        content = version.to_document()
        fields = ("train_step", "location", "files", "encoding", "base", "live")
        again = {"status": VersionStatus.PUBLISHED.value, "pruned_at": None} | {
            name: content[name] for name in fields
        }
        query = {"_id": version.id, "status": {"$in": allowed}}
        versions = self._collection(VERSION)
        result = await fenced(self._connection, attempt, lambda: versions.update_one(query, {"$set": again}))
        if result.matched_count == 0:
            raise StoreError(f"policy version {version.id} cannot be published again: it does not exist")

    @database_call
    async def mark_pruned(self, versions: Sequence[int], *, attempt: int | None = None) -> None:
        """Record that the folders of ``versions`` are pruned; delete the folders after this call."""
        query = {"_id": {"$in": list(versions)}, "pruned_at": None}
        pruned = {"$currentDate": {"pruned_at": True}}
        await fenced(self._connection, attempt, lambda: self._collection(VERSION).update_many(query, pruned))

    @database_call
    async def by_ids(self, ids: Sequence[int]) -> list[PolicyVersion]:
        """Return the versions with these numbers, in any status, oldest first."""
        return await self._all(PolicyVersion, VERSION, {"_id": {"$in": list(ids)}}, sort=[("_id", ASCENDING)])


def _taken(version: PolicyVersion) -> StoreError:
    return StoreError(
        f"policy version {version.id} exists with other weights", hint="is a second trainer running? stop it"
    )


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
        # Begin above stored steps, which a fork has without a lease: their ids start with an attempt.
        if await self._collection(LEASE).find_one({"_id": TRAINER}, {"_id": 1}) is None:
            await self._begin_after_planned_steps()
        holder = await self.read()
        is_dead = _has_ended(holder, host)
        fields = {
            "host": literal(host), "pid": pid, "process": literal(plain(process)), "ended": None,
            "doing": None,
        }  # fmt: skip
        # Name the attempt that was found dead: another trainer may have replaced it since the read.
        document = await self._lease.take(
            owner, lease_seconds, fields, or_if=[{"$eq": ["$attempt", holder.attempt]}] if is_dead else ()
        )
        if document is None:
            raise _held(await self.read())
        return TrainerLease.from_document(document).attempt

    @database_call
    async def renew(self, attempt: int, lease_seconds: float, doing: Doing | None = None) -> None:
        """Extend the lease to ``lease_seconds`` from now, and store what the trainer does.

        Raises LeaseLostError if another trainer has it.
        """
        await self._lease.renew(attempt, lease_seconds, {"doing": literal(plain(doing))})

    @database_call
    async def release(self, attempt: int, ended: TrainerEnd | None = None) -> None:
        """Release the lease and store how the trainer ended; do nothing if another trainer has it."""
        released = {
            **FREE, "host": None, "pid": None, "process": None, "doing": None,
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
            # Change the lease document always: a fork writes it too, so that one of the two is repeated.
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
        # Read the ids from the index alone: a step holds the ids of all its data.
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
    # Ask for the process, not its pid: a later one may have it, or one on a machine of the same name.
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
