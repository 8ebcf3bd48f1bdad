"""Packed token arrays too large for a document: kept in GridFS, put back when the document is read."""

from __future__ import annotations

from gridfs import AsyncGridFSBucket
from gridfs.errors import FileExists, NoFile
from pymongo.errors import DuplicateKeyError

from agentrl.errors import StoreError
from agentrl.store.connection import Connection, Json

_LIMIT = 8 * 2**20
"""Packed bytes of one document beyond which they move; messages keep the other half of the 16 MiB."""
_MARK = "packed_in_gridfs"


class Blobs:
    """Moves the bytes fields of one collection's documents. A file's id is ``document/field``."""

    def __init__(self, connection: Connection, collection: str) -> None:
        self._bucket = AsyncGridFSBucket(connection.database, bucket_name=f"{collection}.packed")

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

    async def restore(self, document: Json) -> Json:
        """Inverse of ``offload``."""
        for name in document.get(_MARK, ()):
            try:
                stream = await self._bucket.open_download_stream(f"{document['_id']}/{name}")
            except NoFile as error:
                raise StoreError(f"{document['_id']}: its {name} is missing from GridFS") from error
            document[name] = await stream.read()
        return document
