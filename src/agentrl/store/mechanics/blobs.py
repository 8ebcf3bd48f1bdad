"""Move fields that are too large for a document to GridFS and back; seal what people audit by checksums.

Packed token arrays move first. If the document is still too large, readable fields move too and leave an
excerpt. A file's id is ``document/field/digest``: a repeated upload completes an interrupted one, deletes
nothing, and never mixes with an upload of other bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import bson
from gridfs import AsyncGridFSBucket
from gridfs.errors import CorruptGridFile, NoFile
from pymongo import ASCENDING
from pymongo.errors import BulkWriteError, DuplicateKeyError

from agentrl.base.batches import batches
from agentrl.documents.document import now
from agentrl.documents.task import CONTENT
from agentrl.errors import StoreError
from agentrl.store.mechanics.connection import (
    COLUMN,
    DATA,
    IMAGE,
    MODEL_CALL,
    RECORD,
    STEP,
    TASK,
    Connection,
    Json,
    id_prefix,
    use_session,
)

PACKED: Final = (MODEL_CALL, DATA, IMAGE, COLUMN)
"""Collections whose documents may have files in GridFS."""
_LIMIT = 8 * 2**20
"""Packed arrays of more bytes move; the readable fields have the other half of the 16 MiB."""
_DOCUMENT_LIMIT = 15 * 2**20
"""Readable fields of a document of more bytes move."""
_READABLE: Final = ("tool_executions", "messages", "response", "events", "tools")
"""Readable fields that may move, in this order."""
_EXCERPT = 500
"""Characters of a moved text that stay in the document."""
MARK: Final = "packed_in_gridfs"
"""Field of a document that lists its files: ``field/digest``."""
_CHUNK = 255 * 1024
_CHUNKS_PER_INSERT = 16
_DUPLICATE = 11000


class Blobs:
    """Moves the large fields of one collection's documents to GridFS and back."""

    def __init__(self, connection: Connection, collection: str) -> None:
        self._bucket = AsyncGridFSBucket(connection.database, bucket_name=f"{collection}.packed")
        self._files = connection.collection(f"{collection}.packed.files")
        self._chunks = connection.collection(f"{collection}.packed.chunks")

    async def offload(self, document: Json) -> Json:
        """Return the document with large fields moved to GridFS, outside any transaction. Idempotent."""
        document, files = _split(document)
        with use_session(None):
            for file in files:
                if await self._files.find_one({"_id": file.id}, {"_id": 1}) is None:
                    await self._upload(file)
        return document

    async def encode(self, document: Json) -> bytes:
        """Return the document as BSON with a checksum of all of it; ``offload`` a large one first."""
        data = _sealed_bytes(document)
        # Look at no field of a small one: none of them moves.
        return data if len(data) <= _LIMIT else _sealed_bytes(await self.offload(document))

    async def rewrite(self, document: Json) -> Json:
        """Do the same as ``offload`` in a transaction; call ``delete`` first."""
        document, files = _split(document)
        for file in files:
            # Create no index here: in a transaction MongoDB refuses one on a filled collection.
            for chunks in file.chunks():
                await self._chunks.insert_many(chunks)
            await self._files.insert_one(file.entry())
        return document

    async def sizes(self, record_ids: Sequence[str]) -> dict[str, int]:
        """Return {file id: bytes} of every file of these Records."""
        if not record_ids:
            return {}
        query = {"$or": [{"_id": id_prefix(f"{key}/")} for key in record_ids]}
        cursor = self._files.find(query, {"length": 1})
        return {entry["_id"]: entry["length"] async for entry in cursor}

    async def delete(self, record_ids: Sequence[str]) -> None:
        """Delete every file of these Records, and the chunks of interrupted uploads."""
        for collection, field in ((self._chunks, "files_id"), (self._files, "_id")) if record_ids else ():
            query = {"$or": [{field: id_prefix(f"{key}/")} for key in record_ids]}
            await collection.delete_many(query)

    async def restore(self, document: Json, *, readable: bool = True) -> Json:
        """Return the inverse of ``offload``; without ``readable``, moved texts stay excerpts."""
        for file_id, field in moved_fields(document).items():
            if field not in _READABLE:
                document[field] = await self._read(file_id)
            elif readable:
                document[field] = bson.decode(await self._read(file_id))[field]
        return document

    async def _upload(self, file: _File) -> None:
        """Insert the missing chunks, then the entry that completes the file."""
        await self._chunks.create_index([("files_id", ASCENDING), ("n", ASCENDING)], unique=True)
        for chunks in file.chunks():
            try:
                await self._chunks.insert_many(chunks, ordered=False)
            except BulkWriteError as error:
                # Accept duplicates: a chunk's id names its bytes, which an interrupted upload has stored.
                if any(problem["code"] != _DUPLICATE for problem in error.details["writeErrors"]):
                    raise
        with suppress(DuplicateKeyError):
            await self._files.insert_one(file.entry())

    async def _read(self, file_id: str) -> bytes:
        try:
            return await (await self._bucket.open_download_stream(file_id)).read()
        except (NoFile, CorruptGridFile) as error:
            raise StoreError(f"the file {file_id} is missing from GridFS or incomplete: {error}") from error


class _File:
    """The bytes of one field."""

    def __init__(self, document_id: str, field: str, data: bytes) -> None:
        digest = hashlib.sha256(data).hexdigest()[:16]
        self.mark = f"{field}/{digest}"
        self.id = f"{document_id}/{self.mark}"
        self._field = field
        self._data = data

    def chunks(self) -> list[list[Json]]:
        """Return the chunks in batches. A chunk's id derives from the file's, so none is stored twice."""
        all_chunks: list[Json] = [
            {"_id": f"{self.id}/{n}", "files_id": self.id, "n": n, "data": data}
            for n, data in enumerate(batches(self._data, _CHUNK))
        ]
        return list(batches(all_chunks, _CHUNKS_PER_INSERT))

    def entry(self) -> Json:
        """Return the file's document in ``files``."""
        return {
            "_id": self.id, "filename": self._field, "chunkSize": _CHUNK, "length": len(self._data),
            "uploadDate": now(),
        }  # fmt: skip


def moved_fields(document: Mapping[str, Any]) -> dict[str, str]:
    """Return {file id: field} of a document's files."""
    marks = document.get(MARK) or ()
    return {f"{document['_id']}/{mark}": mark.partition("/")[0] for mark in marks}


def digest(file_id: str) -> str:
    """Return the first digits of the SHA-256 of a file's bytes."""
    return file_id.rpartition("/")[2]


def _split(document: Json) -> tuple[Json, list[_File]]:
    """Return the document without its large fields, and these fields as files."""
    packed = {name: value for name, value in document.items() if isinstance(value, bytes) and value}
    files = []
    if sum(map(len, packed.values())) > _LIMIT:
        files = [_File(document["_id"], name, value) for name, value in packed.items()]
        document = {**document, **dict.fromkeys(packed, b"")}
    # Measure again after each: people read these in the document, so as few as possible move.
    for name in (name for name in _READABLE if document.get(name)):
        if len(bson.encode(document)) <= _DOCUMENT_LIMIT:
            break
        files.append(_File(document["_id"], name, bson.encode({name: document[name]})))
        document = {**document, name: _shortened(document[name])}
    if files:
        document = {**document, MARK: sorted(file.mark for file in files)}
    return document, files


def _shortened(value: Any) -> Any:
    """Return the value with every long text cut to its beginning and a notice."""
    if isinstance(value, str) and len(value) > 2 * _EXCERPT:
        return f"{value[:_EXCERPT]}\n[{len(value) - _EXCERPT} more characters are in GridFS]"
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    return value


CHECKSUMS: Final = "checksums"
"""Field of a document: {part: SHA-256}."""

PARTS: Final[Mapping[str, Mapping[str, tuple[str, ...] | None]]] = {
    TASK: {"content": CONTENT},
    RECORD: {
        "sampled": ("query", "answer", "final_answer", "stop_reason", "tool_rewards", "agent_score"),
        "score": ("score", "score_details"),
    },
    MODEL_CALL: {"all": None},
    STEP: {"metrics": ("metrics",)},
}
"""Collection → part → its fields; None: every field of the document."""


def checksum(collection: str, part: str, document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a part of a document, over its fields as BSON."""
    fields = PARTS[collection][part]
    names = [name for name in document if name != CHECKSUMS] if fields is None else fields
    content = {name: document[name] for name in names if name in document}
    return hashlib.sha256(bson.encode(content)).hexdigest()


def sealed(collection: str, document: Json, *parts: str) -> Json:
    """Return the document with the checksums of ``parts``."""
    return {**document, CHECKSUMS: {part: checksum(collection, part, document) for part in parts}}


def _sealed_bytes(document: Json) -> bytes:
    """Return the document as BSON, with the checksum of all its other fields as its last one."""
    content = bson.encode({name: value for name, value in document.items() if name != CHECKSUMS})
    seal = bson.encode({CHECKSUMS: {"all": hashlib.sha256(content).hexdigest()}})
    # Join their fields: a document is its length in four bytes, the fields, and a zero byte.
    return (len(content) + len(seal) - 5).to_bytes(4, "little") + content[4:-1] + seal[4:]


def seal(collection: str, part: str, fields: Mapping[str, Any]) -> Json:
    """Return the fields of an update that store the checksum of a part, whose new values are ``fields``."""
    return {f"{CHECKSUMS}.{part}": checksum(collection, part, fields)}


def changed_parts(collection: str, document: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (part, stored checksum, checksum now) of each part that has changed since it was written."""
    for part, stored in document.get(CHECKSUMS, {}).items():
        now = checksum(collection, part, document) if part in PARTS[collection] else "no such part"
        if now != stored:
            yield part, str(stored), now
