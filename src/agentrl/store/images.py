"""Store the images of a run, each once, by the hash of its bytes."""

from __future__ import annotations

import contextlib
import math
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence

from pymongo.errors import DuplicateKeyError

from agentrl.documents.base import now
from agentrl.documents.images import Image
from agentrl.errors import ImageError
from agentrl.store.ancestry import Ancestry
from agentrl.store.mechanics.blobs import Blobs
from agentrl.store.mechanics.connection import Connection, Repository, database_call
from agentrl.store.names import IMAGE

_CACHED_BYTES = 256 * 2**20
_FRESH_SECONDS = 600.0
"""Time for which an image that this process has put need not be marked as used again."""


class Images(Repository):
    """The images of tasks, tool results and requests. Large ones lie in GridFS."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._blobs = Blobs(connection, IMAGE)
        self._cached: OrderedDict[str, Image] = OrderedDict()
        self._bytes = 0
        self._put_at: dict[str, float] = {}

    @database_call
    async def put(self, *images: Image) -> None:
        """Store images. Idempotent; an image that is stored already is marked as used now."""
        for image in images:
            if time.monotonic() - self._put_at.get(image.id, -math.inf) < _FRESH_SECONDS:
                continue
            marked = await self._collection(IMAGE).update_one({"_id": image.id}, {"$set": {"used_at": now()}})
            if not marked.matched_count:
                document = await self._blobs.offload(image.to_document())
                with contextlib.suppress(DuplicateKeyError):  # another process stored it now
                    await self._collection(IMAGE).insert_one(document)
            self._put_at[image.id] = time.monotonic()
            self._keep(image)

    @database_call
    async def get(self, hashes: Collection[str]) -> dict[str, Image]:
        """Return images by hash. Raises ImageError for one that is not stored."""
        images = {key: self._cached[key] for key in hashes if key in self._cached}
        missing = sorted(set(hashes) - set(images))
        if missing:
            images |= await self._read(missing)
        lost: Sequence[str] = [key for key in missing if key not in images]
        if lost and (parent := await Ancestry(self._connection).parent()) is not None:
            # a child's tasks show the images of its parent
            images |= await Images(self._connection.beside(parent.run)).get(lost)
            lost = ()
        if lost:
            raise ImageError(
                f"{len(lost)} images are not stored, the first is {lost[0][:12]}…",
                hint="load the tasks again; `agentrl db prune` keeps images that tasks and calls name",
            )
        return images

    async def _read(self, hashes: Sequence[str]) -> dict[str, Image]:
        images = {}
        async for document in self._collection(IMAGE).find({"_id": {"$in": list(hashes)}}):
            image = Image.from_document(await self._blobs.restore(document))
            self._keep(image)
            images[image.id] = image
        return images

    def _keep(self, image: Image) -> None:
        if image.id in self._cached:
            return
        self._cached[image.id] = image
        self._bytes += len(image.data)
        while self._bytes > _CACHED_BYTES and len(self._cached) > 1:
            _, old = self._cached.popitem(last=False)
            self._bytes -= len(old.data)
