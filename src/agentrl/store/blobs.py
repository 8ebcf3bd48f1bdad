"""Fields too large for a document: kept in GridFS, put back when the document is read.

Packed token arrays move whole. Readable fields move too where the document would still be too large; what is
left of them says so. A file's id is ``document/field/digest``: repeating an upload that was cut completes it,
without deleting anything, and never mixes it with an earlier upload of other bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import bson
from gridfs import AsyncGridFSBucket
from gridfs.errors import CorruptGridFile, NoFile
from pymongo import ASCENDING
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.errors import BulkWriteError, DuplicateKeyError

from agentrl.documents.base import now
from agentrl.errors import StoreError
from agentrl.store.connection import Connection, Json

_LIMIT = 8 * 2**20
"""Packed bytes of one document beyond which they move; messages keep the other half of the 16 MiB."""
_DOCUMENT_LIMIT = 15 * 2**20
"""Bytes of one document beyond which readable fields move, too."""
_READABLE: Final = ("tool_executions", "messages", "response", "tools")
"""Fields that may move, in the order in which they do."""
_SHOWN = 500
"""Characters that stay of a text that moved."""
MARK: Final = "packed_in_gridfs"
"""The field that names the files of a document: ``field/digest``, or ``field`` as older versions wrote."""
_CHUNK = 255 * 1024
_CHUNKS_AT_ONCE = 16
_DUPLICATE = 11000


class Blobs:
    """Moves the large fields of one collection's documents."""

    def __init__(self, connection: Connection, collection: str) -> None:
        self._bucket = AsyncGridFSBucket(connection.database, bucket_name=f"{collection}.packed")
        self._files = connection.collection(f"{collection}.packed.files")
        self._chunks = connection.collection(f"{collection}.packed.chunks")

    async def offload(self, document: Json) -> Json:
        """Return the document with large fields moved to GridFS. Repeating it changes nothing."""
        document, files = _split(document)
        for file in files:
            if await self._files.find_one({"_id": file.id}, {"_id": 1}) is None:
                await self._upload(file)
        return document

    async def rewrite(self, document: Json, session: AsyncClientSession) -> Json:
        """``offload`` within a transaction, once ``delete`` has removed the files that were there."""
        document, files = _split(document)
        for file in files:
            for chunks in file.chunks():
                await self._chunks.insert_many(chunks, session=session)
            await self._files.insert_one(file.entry(), session=session)
        return document

    async def sizes(self, record_ids: Sequence[str], session: AsyncClientSession | None) -> dict[str, int]:
        """Bytes by id of every file that belongs to one of these Records."""
        if not record_ids:
            return {}
        cursor = self._files.find({"$or": _below("_id", record_ids)}, {"length": 1}, session=session)
        return {entry["_id"]: entry["length"] async for entry in cursor}

    async def delete(self, record_ids: Sequence[str], session: AsyncClientSession) -> None:
        """Delete every file of these Records, and the chunks of uploads that were cut."""
        if record_ids:
            await self._chunks.delete_many({"$or": _below("files_id", record_ids)}, session=session)
            await self._files.delete_many({"$or": _below("_id", record_ids)}, session=session)

    async def restore(self, document: Json, *, readable: bool = True) -> Json:
        """Inverse of ``offload``; without ``readable``, texts that moved stay as they are shown."""
        for file_id, field in moved_fields(document).items():
            if field not in _READABLE:
                document[field] = await self._read(file_id)
            elif readable:
                document[field] = bson.decode(await self._read(file_id))[field]
        return document

    async def _upload(self, file: _File) -> None:
        """Write the chunks, then the entry that makes them a file; those that are there already stay."""
        await self._chunks.create_index([("files_id", ASCENDING), ("n", ASCENDING)], unique=True)
        for chunks in file.chunks():
            try:
                await self._chunks.insert_many(chunks, ordered=False)
            except BulkWriteError as error:
                if any(problem["code"] != _DUPLICATE for problem in error.details["writeErrors"]):
                    raise
        try:
            await self._files.insert_one(file.entry())
        except DuplicateKeyError:
            return

    async def _read(self, file_id: str) -> bytes:
        try:
            return await (await self._bucket.open_download_stream(file_id)).read()
        except (NoFile, CorruptGridFile) as error:
            raise StoreError(f"the file {file_id} is missing from GridFS, or incomplete: {error}") from error


class _File:
    """The bytes of one field."""

    def __init__(self, document_id: str, field: str, data: bytes) -> None:
        digest = hashlib.sha256(data).hexdigest()[:16]
        self.mark = f"{field}/{digest}"
        self.id = f"{document_id}/{self.mark}"
        self._field = field
        self._data = data

    def chunks(self) -> list[list[Json]]:
        """The chunks, some at a time. Their ids follow from the file's: none is written twice."""
        all_chunks: list[Json] = [
            {"_id": f"{self.id}/{n}", "files_id": self.id, "n": n, "data": self._data[at : at + _CHUNK]}
            for n, at in enumerate(range(0, len(self._data), _CHUNK))
        ]
        starts = range(0, len(all_chunks), _CHUNKS_AT_ONCE)
        return [all_chunks[start : start + _CHUNKS_AT_ONCE] for start in starts]

    def entry(self) -> Json:
        """The document in ``files``."""
        return {
            "_id": self.id, "filename": self._field, "chunkSize": _CHUNK, "length": len(self._data),
            "uploadDate": now(),
        }  # fmt: skip


def moved_fields(document: Mapping[str, Any]) -> dict[str, str]:
    """The id of each file of a document, and the field that it holds."""
    marks = document.get(MARK) or ()
    return {f"{document['_id']}/{mark}": mark.partition("/")[0] for mark in marks}


def _split(document: Json) -> tuple[Json, list[_File]]:
    """The document without what is too large, and what was taken out."""
    packed = {name: value for name, value in document.items() if isinstance(value, bytes)}
    files = []
    if sum(map(len, packed.values())) > _LIMIT:
        files = [_File(document["_id"], name, value) for name, value in packed.items()]
        document = {**document, **dict.fromkeys(packed, b"")}
    for name in (name for name in _READABLE if document.get(name)):
        if len(bson.encode(document)) <= _DOCUMENT_LIMIT:
            break
        files.append(_File(document["_id"], name, bson.encode({name: document[name]})))
        document = {**document, name: _shortened(document[name])}
    if files:
        document = {**document, MARK: sorted(file.mark for file in files)}
    return document, files


def _shortened(value: Any) -> Any:
    """The value with every long text cut to its beginning and a notice."""
    if isinstance(value, str) and len(value) > 2 * _SHOWN:
        return f"{value[:_SHOWN]}\n[{len(value) - _SHOWN} more characters are in GridFS]"
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    return value


def _below(field: str, record_ids: Sequence[str]) -> list[Json]:
    """Filters on ids that begin with one of ``record_ids`` and a slash."""
    return [{field: {"$gte": f"{key}/", "$lt": f"{key}0"}} for key in record_ids]  # "0" follows "/"
