"""Copy a run into a folder, as of one moment, and from a folder or a database into an empty database."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import bson
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import ASCENDING, IndexModel
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import OperationFailure

from agentrl.atomic_folder import atomic_folder
from agentrl.documents.family import CHILD_PREFIX
from agentrl.documents.run import SCHEMA
from agentrl.errors import StoreError
from agentrl.store.admin.archive import (
    CODEC,
    MANIFEST,
    ExportedFile,
    LineWriter,
    Manifest,
    encode_line,
    file_name,
    read_lines,
    require_empty,
    verify,
    write_manifest,
)
from agentrl.store.admin.making import make_run
from agentrl.store.ancestry import Ancestry
from agentrl.store.mechanics.connection import Connection, Json, Repository, database_call
from agentrl.store.names import GATE, IMPORTS, RECORD, RUN, SCHEMA_VERSION, TASK, TOMBSTONE
from agentrl.store.schema import holds_run, prepare

_PAGE = 500
_BATCH_BYTES = 8 * 2**20
_SNAPSHOT_GONE = 239
_GRIDFS = {
    ".files": IndexModel([("filename", ASCENDING), ("uploadDate", ASCENDING)]),
    ".chunks": IndexModel([("files_id", ASCENDING), ("n", ASCENDING)], unique=True),
}
"""The indexes of GridFS collections, which the driver makes only with the first file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The result of an import. ``imports`` are the paths of the folder's ``Imports``."""

    manifest: Manifest
    imports: tuple[str, ...] = ()


class Transfer(Repository):
    """Exports and imports a run, with at most a page of documents in memory.

    ``on_documents`` is called with the number of documents of each page that was read or written.
    """

    def __init__(self, connection: Connection, *, on_documents: Callable[[int], None] | None = None) -> None:
        super().__init__(connection)
        self._on_documents = on_documents or (lambda count: None)

    @database_call
    async def export(self, folder: Path) -> Manifest:
        """Write the run into ``folder``, which must not exist or be empty, as of one moment.

        The folder appears when it is complete. Raises StoreError if the server no longer holds that moment.
        """
        require_empty(folder)
        if not await holds_run(self._connection.database):
            raise StoreError(f"there is no run {self._connection.database.name!r} to export")
        names = await self._stored_collections()
        with writing_folder(folder) as temporary:
            async with self._connection.client.start_session(snapshot=True) as session:
                try:
                    files = [await self._export(name, temporary, session) for name in names]
                except OperationFailure as error:
                    if error.code != _SNAPSHOT_GONE:
                        raise
                    raise StoreError(
                        "the export took longer than the server keeps a snapshot",
                        hint="raise the server's minSnapshotHistoryWindowInSeconds (300 by default)",
                    ) from error
            manifest = Manifest(schema=SCHEMA_VERSION, collections=tuple(files))
            write_manifest(temporary, manifest)
        return manifest

    @database_call
    async def load(self, folder: Path, *, allow_modules: bool = False, withdrawn: bool = False) -> Imported:
        """Read the run in ``folder`` into this database, which must be empty.

        Samplers import and run what ``Imports`` names, so that it is left out without ``allow_modules``.
        Documents that violate a validator are kept, and ``agentrl db check`` lists them. Everything is
        verified before anything is written. Repeating an interrupted import starts it over. Raises StoreError
        for a folder that holds what ``agentrl retract`` withdrew from a run of this server, unless
        ``withdrawn``.
        """
        manifest = verify(folder)
        if not withdrawn:
            await self._refuse_withdrawn(folder, manifest)
        imports = _imports(folder, manifest)
        async with make_run(self._connection) as making:
            await prepare(self._connection.database)
            await self._collection(GATE).delete_many({})  # the run brings its own
            schema: Json | None = None
            for item in manifest.collections:
                if item.collection == IMPORTS and not allow_modules:
                    continue
                imported = await self._import(folder / item.file, item.collection)
                schema = imported if item.collection == RUN else schema
            version = None if schema is None else schema.get("version")
            if schema is None or version != manifest.schema:
                raise StoreError(
                    f"{folder}: its Run has schema version {version!r:.60},"
                    f" and its {MANIFEST} {manifest.schema}",
                    hint="export the run again; the unfinished import is not a run, and the next one replaces"
                    " it",
                )
            await making.finish({name: value for name, value in schema.items() if name != "_id"})
        await self._join_family()
        return Imported(manifest=manifest, imports=imports)

    async def _join_family(self) -> None:
        """Note an imported child in its parent, if that is on this server."""
        parent = await Ancestry(self._connection).parent()
        if parent is not None and await self._connection.beside(parent.run).collection(RUN).find_one({}):
            family = Ancestry(self._connection.beside(parent.run))
            await family.adopt(self._connection.database.name, parent)

    async def _refuse_withdrawn(self, folder: Path, manifest: Manifest) -> None:
        for name in await self._connection.databases():
            database = self._connection.client[name]
            stones = await database[TOMBSTONE].find({}, {"created_at": 1}).to_list()
            created = {stone["_id"]: stone["created_at"] for stone in stones}
            if found := withdrawn_in(folder, manifest, created):
                raise StoreError(
                    f"{folder} holds {len(found)} Records or Tasks that were withdrawn from run {name!r}",
                    hint=f"take them out of it first: agentrl retract {name} --archive {folder}",
                )

    async def copy(self, target: AsyncDatabase[Json]) -> None:
        """Insert every document except the schema document into ``target``, which holds no others.

        Raises StoreError if the numbers of documents differ then: another process writes.
        """
        for name in await self._stored_collections():
            others = {"_id": {"$ne": SCHEMA}} if name == RUN else {}
            source = (each async for each in self._documents(name) if name != RUN or each["_id"] != SCHEMA)
            await self._insert(target[name], source)
            here = await self._collection(name).count_documents(others)
            there = await target[name].count_documents(others)
            if there != here:
                raise StoreError(
                    f"{name} had {there:,} documents when it was copied, and has {here:,} now",
                    hint="stop the processes of the run",
                )

    async def _stored_collections(self) -> list[str]:
        listed = await self._connection.database.list_collections(filter={"type": "collection"})
        names = [entry["name"] async for entry in listed]
        return sorted(name for name in names if not name.startswith("system."))

    async def _export(self, name: str, folder: Path, session: AsyncClientSession) -> ExportedFile:
        file = file_name(name)
        with (folder / file).open("wb") as stream:
            writer = LineWriter(stream)
            async for document in self._documents(name, session):
                writer.line(encode_line(bytes(document.raw)))
        return ExportedFile(
            collection=name, file=file, documents=writer.lines, bytes=writer.bytes, sha256=writer.sha256
        )

    async def _documents(
        self, name: str, session: AsyncClientSession | None = None
    ) -> AsyncIterator[RawBSONDocument]:
        """Yield every document by ``_id``, with one query per page, so that each has its own time limit."""
        raw: CodecOptions[RawBSONDocument] = CodecOptions(document_class=RawBSONDocument)
        collection = self._collection(name).with_options(codec_options=raw)
        last: Any = None
        while True:
            cursor = collection.find(sort=[("_id", 1)], limit=_PAGE, session=session)
            if last is not None:
                cursor = cursor.hint([("_id", 1)]).min([("_id", last)]).skip(1)
            page: list[RawBSONDocument] = await cursor.to_list()
            self._on_documents(len(page))
            for document in page:
                yield document
            if len(page) < _PAGE:
                return
            last = page[-1]["_id"]

    async def _import(self, file: Path, name: str) -> Json | None:
        """Insert a file's documents, without notes of children; return its schema document if it has one."""
        if name not in await self._stored_collections():
            await self._connection.database.create_collection(name, check_exists=False)
        schema: list[Json] = []

        async def documents() -> AsyncIterator[RawBSONDocument]:
            for raw in read_lines(file):
                document = bson.decode(raw, CODEC) if name == RUN else {}
                if document.get("_id") == SCHEMA:
                    schema.append(document)
                elif not str(document.get("_id")).startswith(CHILD_PREFIX):  # they name another run
                    yield RawBSONDocument(raw)

        await self._insert(self._collection(name), documents())
        return schema[-1] if schema else None

    async def _insert(self, collection: AsyncCollection[Json], documents: AsyncIterator[Any]) -> None:
        for ending, index in _GRIDFS.items():
            if collection.name.endswith(ending):
                await collection.create_indexes([index])
        batch: list[Any] = []
        size = 0
        async for document in documents:
            batch.append(document)
            size += len(document.raw)
            if size >= _BATCH_BYTES or len(batch) == _PAGE:
                await collection.insert_many(batch, bypass_document_validation=True)
                self._on_documents(len(batch))
                batch, size = [], 0
        if batch:
            await collection.insert_many(batch, bypass_document_validation=True)


def _imports(folder: Path, manifest: Manifest) -> tuple[str, ...]:
    """Return the paths that the folder's ``Imports`` names."""
    paths: set[str] = set()
    for item in (item for item in manifest.collections if item.collection == IMPORTS):
        for raw in read_lines(folder / item.file):
            named = bson.decode(raw, CODEC).get("paths")
            paths.update(map(str, named if isinstance(named, list) else ()))
    return tuple(sorted(paths))


def withdrawn_in(folder: Path, manifest: Manifest, created: Mapping[str, datetime]) -> set[str]:
    """Return the ids among ``created`` of the Records and Tasks that an exported folder holds.

    A document with the same ``_id`` and another time of creation is one of another run.
    """
    found: set[str] = set()
    if not created:
        return found
    for item in (item for item in manifest.collections if item.collection in (RECORD, TASK)):
        for raw in read_lines(folder / item.file):
            document = bson.decode(raw, CODEC)
            if created.get(document["_id"], 0) == document.get("created_at"):
                found.add(document["_id"])
    return found


@contextmanager
def writing_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``folder`` at the end. Raises StoreError on a failed write."""
    try:
        with atomic_folder(folder.resolve()) as temporary:
            yield temporary
    except OSError as error:
        raise StoreError(f"{folder} cannot be written: {error.strerror}") from error
