"""PolicyVersions: published weights, ever newer."""

from __future__ import annotations

from pymongo import ASCENDING, DESCENDING
from pymongo.errors import DuplicateKeyError

from agentrl.documents.policy import PolicyVersion
from agentrl.documents.status import VERSION_EDGES, VersionStatus, sources
from agentrl.errors import StoreError
from agentrl.store.connection import Json, Part, database_call
from agentrl.store.names import VERSION


class Policies(Part):
    """What the trainer publishes and engines follow."""

    @database_call
    async def publish(self, version: PolicyVersion) -> None:
        """Make a version known. Numbers only grow, withdrawn ones included; repeating the call is harmless.

        Raises StoreError where the number is taken by other weights or below an existing one.
        """
        newest = await self._newest_id()
        if newest is not None and newest > version.id:
            raise StoreError(
                f"policy version {version.id} is older than version {newest}, which exists",
                cure="number versions after the newest one, withdrawn ones included",
            )
        try:
            await self._collection(VERSION).insert_one(version.to_document())
        except DuplicateKeyError:
            stored = await self.get(version.id)
            if stored is None or (stored.location, stored.files) != (version.location, version.files):
                raise StoreError(
                    f"policy version {version.id} exists with other weights",
                    cure="is a second trainer running? stop it",
                ) from None

    @database_call
    async def latest(self) -> PolicyVersion | None:
        """The newest version that is not withdrawn."""
        document = await self._collection(VERSION).find_one(
            {"status": VersionStatus.PUBLISHED.value}, sort=[("_id", DESCENDING)]
        )
        return None if document is None else PolicyVersion.from_document(document)

    @database_call
    async def get(self, version: int) -> PolicyVersion | None:
        """One version, whatever its status."""
        document = await self._collection(VERSION).find_one({"_id": version})
        return None if document is None else PolicyVersion.from_document(document)

    @database_call
    async def newest_id(self) -> int | None:
        """The highest number of a version, withdrawn ones included; None where there is no version."""
        return await self._newest_id()

    @database_call
    async def published(self, limit: int, *, below: int | None = None) -> list[PolicyVersion]:
        """The newest ``limit`` published versions, newest first; with ``below``, those of a lower number."""
        query: Json = {"status": VersionStatus.PUBLISHED.value}
        if below is not None:
            query["_id"] = {"$lt": below}
        cursor = self._collection(VERSION).find(query, sort=[("_id", DESCENDING)], limit=limit)
        return [PolicyVersion.from_document(document) async for document in cursor]

    @database_call
    async def withdrawn(self, step: int) -> list[PolicyVersion]:
        """The versions of ``step`` that were withdrawn, newest first."""
        query = {"status": VersionStatus.WITHDRAWN.value, "step": step}
        cursor = self._collection(VERSION).find(query, sort=[("_id", DESCENDING)])
        return [PolicyVersion.from_document(document) async for document in cursor]

    @database_call
    async def all(self) -> list[PolicyVersion]:
        """Every version, oldest first, withdrawn ones included. For reports: a run may have thousands."""
        cursor = self._collection(VERSION).find({}, sort=[("_id", ASCENDING)])
        return [PolicyVersion.from_document(document) async for document in cursor]

    @database_call
    async def withdraw_after(self, step: int) -> int:
        """Withdraw every version of a step above ``step``, which has been undone; returns how many."""
        result = await self._collection(VERSION).update_many(
            {"step": {"$gt": step}, "status": {"$in": sources(VERSION_EDGES, VersionStatus.WITHDRAWN)}},
            {"$set": {"status": VersionStatus.WITHDRAWN.value}},
        )
        return result.modified_count

    @database_call
    async def reinstate(self, version: int, *, train_step: str | None, location: str) -> None:
        """Publish a withdrawn version again: ``train_step`` has its weights, which lie at ``location``.

        Repeating the call is harmless. Raises StoreError for a version that does not exist.
        """
        allowed = [*sources(VERSION_EDGES, VersionStatus.PUBLISHED), VersionStatus.PUBLISHED.value]
        result = await self._collection(VERSION).update_one(
            {"_id": version, "status": {"$in": allowed}},
            {
                "$set": {
                    "status": VersionStatus.PUBLISHED.value, "train_step": train_step, "location": location,
                }
            },
        )  # fmt: skip
        if result.matched_count == 0:
            raise StoreError(f"policy version {version} cannot be re-instated: there is none")

    async def _newest_id(self) -> int | None:
        newest = await self._collection(VERSION).find_one({}, {"_id": 1}, sort=[("_id", DESCENDING)])
        return None if newest is None else int(newest["_id"])
