"""Packed token arrays too large for a document: kept in GridFS, put back when the document is read."""

from __future__ import annotations

from collections.abc import Sequence

from gridfs import AsyncGridFSBucket
from gridfs.errors import FileExists, NoFile
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.errors import DuplicateKeyError

from agentrl.documents.base import now
from agentrl.errors import StoreError
from agentrl.store.connection import Connection, Json

_LIMIT = 8 * 2**20
"""Packed bytes of one document beyond which they move; messages keep the other half of the 16 MiB."""
_MARK = "packed_in_gridfs"
_CHUNK = 255 * 1024


class Blobs:
    """Moves the bytes fields of one collection's documents. A file's id is ``document/field``."""

    def __init__(self, connection: Connection, collection: str) -> None:
        self._bucket = AsyncGridFSBucket(connection.database, bucket_name=f"{collection}.packed")
        self._files = connection.collection(f"{collection}.packed.files")
        self._chunks = connection.collection(f"{collection}.packed.chunks")

    async def offload(self, document: Json) -> Json:
        """The document, its bytes fields moved to GridFS where they are large together."""
        packed = {name: value for name, value in document.items() if isinstance(value, bytes)}
        if sum(map(len, packed.values())) <= _LIMIT:
            return document
        for name, value in packed.items():
            key = f"{document['_id']}/{name}"
            try:
                await self._bucket.upload_from_stream_with_id(key, name, value)
            except (FileExists, DuplicateKeyError):
                continue
        return {**document, **dict.fromkeys(packed, b""), _MARK: sorted(packed)}

    async def rewrite(self, document: Json, session: AsyncClientSession) -> Json:
        """``offload`` within a transaction, once ``delete`` has removed the files that were there."""
        packed = {name: value for name, value in document.items() if isinstance(value, bytes)}
        if sum(map(len, packed.values())) <= _LIMIT:
            return document
        for name, value in packed.items():
            key = f"{document['_id']}/{name}"
            parts = range(0, len(value), _CHUNK)
            chunks = [
                {"files_id": key, "n": n, "data": value[start : start + _CHUNK]}
                for n, start in enumerate(parts)
            ]
            entry = {
                "_id": key, "filename": name, "chunkSize": _CHUNK, "length": len(value), "uploadDate": now(),
            }  # fmt: skip
            if chunks:
                await self._chunks.insert_many(chunks, session=session)
            await self._files.insert_one(entry, session=session)
        return {**document, **dict.fromkeys(packed, b""), _MARK: sorted(packed)}

    async def sizes(self, record_ids: Sequence[str], session: AsyncClientSession | None) -> dict[str, int]:
        """Bytes by id of every file that belongs to one of these Records."""
        if not record_ids:
            return {}
        below = [{"_id": {"$gte": f"{key}/", "$lt": f"{key}0"}} for key in record_ids]  # "0" follows "/"
        cursor = self._files.find({"$or": below}, {"length": 1}, session=session)
        return {entry["_id"]: entry["length"] async for entry in cursor}

    async def delete(self, record_ids: Sequence[str], session: AsyncClientSession) -> None:
        """Delete every file that belongs to one of these Records."""
        keys = list(await self.sizes(record_ids, session))
        if keys:
            await self._chunks.delete_many({"files_id": {"$in": keys}}, session=session)
            await self._files.delete_many({"_id": {"$in": keys}}, session=session)

    async def restore(self, document: Json) -> Json:
        """Inverse of ``offload``."""
        for name in document.get(_MARK, ()):
            try:
                stream = await self._bucket.open_download_stream(f"{document['_id']}/{name}")
            except NoFile as error:
                raise StoreError(f"{document['_id']}: its {name} is missing from GridFS") from error
            document[name] = await stream.read()
        return document
