"""Reserve, publish, withdraw and find the PolicyVersions of a run: its published weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pymongo import ASCENDING, DESCENDING

from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import VERSION_EDGES, VersionStatus, sources
from agentrl.errors import StoreError
from agentrl.store.mechanics.connection import Json, Repository, database_call
from agentrl.store.names import VERSION
from agentrl.store.trainer_lease import fenced

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
