"""Delete images that no task, model call or training data names any more."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from pymongo.asynchronous.client_session import AsyncClientSession

from agentrl.store.mechanics.blobs import Blobs
from agentrl.store.mechanics.connection import Json, Repository, database_call
from agentrl.store.names import DATA, IMAGE, MODEL_CALL, TASK

_GRACE = timedelta(hours=1)
"""Images that were put more recently stay: the call that shows them may not be stored yet."""


class ImageRetention(Repository):
    """Deletes what ``agentrl db prune`` left without a user."""

    @database_call
    async def prune(self, *, dry_run: bool = False, grace: timedelta = _GRACE) -> tuple[int, int]:
        """Delete unused images that were last put before ``grace``; return their number and bytes."""
        hello = await self._connection.client.admin.command("hello")
        before = hello["localTime"].replace(tzinfo=UTC) - grace
        fields: Json = {"bytes": {"$bsonSize": "$$ROOT"}}
        cursor = self._collection(IMAGE).find({"used_at": {"$lt": before}}, fields)
        unused: dict[str, int] = {}
        async for document in cursor:
            if not await self._is_used(document["_id"]):
                unused[document["_id"]] = document["bytes"]
        if dry_run:
            return len(unused), sum(unused.values())
        deleted = [image for image in unused if await self._delete(image, before)]
        return len(deleted), sum(unused[image] for image in deleted)

    async def _delete(self, image: str, before: datetime) -> bool:
        """Delete one image and its files unless it was put again meanwhile."""

        async def write(session: AsyncClientSession) -> bool:
            query = {"_id": image, "used_at": {"$lt": before}}
            found = await self._collection(IMAGE).delete_one(query, session=session)
            if found.deleted_count:
                await Blobs(self._connection, IMAGE).delete([image], session)
            return bool(found.deleted_count)

        return await self._connection.transaction(write)

    async def _is_used(self, image: str) -> bool:
        for collection in (TASK, MODEL_CALL, DATA):
            if await self._collection(collection).find_one({"images.sha256": image}, {"_id": 1}):
                return True
        return False
