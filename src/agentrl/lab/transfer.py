"""Copy a run into a folder, as of one moment, and from a folder or a database into an empty database.

Two imports at once, or one that was stopped and goes on after another has finished, must not write into one
database. Why not a transaction? A run is larger than one may be. The schema document is the mark: it says
that the database is not a run yet, and who is making it one.

A document that extended JSON cannot hold exactly (one of its keys looks like a type, such as ``$date``) is
written as ``{"bson": …}``, the base64 of its bytes, so that reading restores every byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import lzma
import os
import re
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, Annotated, Any, BinaryIO, Final, Literal

import bson
from bson import json_util
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.raw_bson import RawBSONDocument
from pydantic import AfterValidator
from pymongo import ASCENDING, IndexModel
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import DuplicateKeyError, OperationFailure

from agentrl.base.atomic_folder import atomic_folder
from agentrl.base.installation import how_to_install
from agentrl.base.processes import has_ended, identify, is_observable
from agentrl.base.user_code import code_of_flags
from agentrl.base.validation import Count, PositiveWhole, SettingsModel, broken, check, wrong
from agentrl.documents.document import excerpt, now, plain
from agentrl.documents.images import text_of
from agentrl.documents.model_call import DispatchedSamplingTask, conversation
from agentrl.documents.record import Record
from agentrl.documents.run import CHILD_PREFIX, SCHEMA, Maker
from agentrl.documents.task import task_key
from agentrl.errors import ConfigError, LeaseLostError, StoreError, quoted
from agentrl.store.mechanics.connection import (
    DATA,
    GATE,
    IMPORTS,
    RECORD,
    RUN,
    SCHEMA_VERSION,
    SETTINGS,
    TASK,
    TOMBSTONE,
    Connection,
    Json,
    Repository,
    database_call,
)
from agentrl.store.mechanics.lease import after, renewed
from agentrl.store.model_calls import read_model_calls
from agentrl.store.schema import holds_run, prepare
from agentrl.store.settings import Ancestry

LEASE_SECONDS = 60.0
"""After this time a process of another machine, which cannot be observed from here, counts as ended."""


class Making:
    """The right of this process to make a run of a database; ``make_run`` acquires it."""

    def __init__(self, connection: Connection, maker: str) -> None:
        self._connection = connection
        self._own = {"_id": SCHEMA, "importing": True, "maker.id": maker}

    async def renew(self) -> None:
        """Extend the lease. Raises LeaseLostError if another process makes the run."""
        until = {"$set": {"maker.lease_expires_at": after(LEASE_SECONDS)}}
        if not (await self._connection.collection(RUN).update_one(self._own, [until])).matched_count:
            raise self._lost()

    async def finish(self, schema: Json) -> None:
        """Make the database a run with the schema document ``schema``. Raises LeaseLostError as ``renew``."""
        if not (await self._connection.collection(RUN).replace_one(self._own, schema)).matched_count:
            raise self._lost()

    async def drop(self) -> bool:
        """Drop the database, unless another process makes, or has made, a run of it; return whether."""
        is_own = await self._connection.collection(RUN).find_one(self._own, {"_id": 1}) is not None
        if is_own:
            await self._connection.client.drop_database(self._connection.database.name)
        return is_own

    def _lost(self) -> LeaseLostError:
        name = self._connection.database.name
        return LeaseLostError(
            f"another process makes run {name!r} now: this one stood still for longer than its lease",
            hint="`agentrl runs` shows whether that one has finished",
        )


@asynccontextmanager
async def make_run(connection: Connection, fields: Json | None = None) -> AsyncIterator[Making]:
    """Claim a database that is empty, or that an unfinished call left, and empty it.

    The schema document has ``fields`` too while the run is made.

    A block that raises leaves it unfinished: the next call begins anew. Raises StoreError if it holds
    something else, or if the process that makes a run of it is alive.
    """
    maker = secrets.token_hex(16)
    await _claim(connection, maker, fields or {})
    making = Making(connection, maker)
    try:
        async with renewed(making.renew, LEASE_SECONDS, f"the right to make run {connection.database.name}"):
            yield making
    finally:
        own = {"_id": SCHEMA, "maker.id": maker}
        with contextlib.suppress(StoreError):
            await connection.call(
                lambda: connection.collection(RUN).update_one(own, {"$unset": {"maker": ""}}),
                "releasing the database",
            )


async def _claim(connection: Connection, maker: str, fields: Json) -> None:
    runs, name = connection.collection(RUN), connection.database.name
    held = await runs.find_one({"_id": SCHEMA})
    listed = await connection.database.list_collection_names()
    others = sorted(item for item in listed if not item.startswith("system.") and item != RUN)
    if (held is None and others) or (held is not None and not held.get("importing")):
        raise StoreError(
            f"database {name!r} is not empty: it holds {', '.join((others or [RUN])[:5])}"
            + (", …" if len(others) > 5 else ""),
            hint="give a name that no run has; `agentrl runs` lists the runs",
        )
    before = held and held.get("maker")
    if before is not None and _is_alive(other := Maker.from_document(before)):
        raise StoreError(
            f"another process makes run {name!r}: {other.pid} on {other.host}",
            hint="wait until it has ended, or kill it",
        )
    own = Maker(
        id=maker, host=socket.gethostname(), process=identify(os.getpid()),
        lease_expires_at=now() + timedelta(seconds=LEASE_SECONDS),
    )  # fmt: skip
    mark = {**fields, "version": SCHEMA_VERSION, "importing": True, "maker": plain(own)}
    try:
        if held is None:
            await runs.insert_one({"_id": SCHEMA, **mark})
        elif not (await runs.replace_one({"_id": SCHEMA, "maker": before}, mark)).matched_count:
            raise DuplicateKeyError("another call was faster")
    except DuplicateKeyError as error:
        raise StoreError(
            f"another process has just begun to make run {name!r}", hint="wait until it has ended"
        ) from error
    for item in others:
        await connection.database.drop_collection(item)
    await runs.delete_many({"_id": {"$ne": SCHEMA}})


def _is_alive(maker: Maker) -> bool:
    """Return whether the process of ``maker`` may still write: not ended here, or its lease not expired."""
    if maker.process is not None and is_observable(maker.process):
        return not has_ended(maker.process)
    return maker.lease_expires_at > now()


MANIFEST: Final = "manifest.json"
COMPRESSED: Final = ".xz"
FORMAT: Final = 1

_READ_BYTES = 2**20
_LONGEST = 60
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
CODEC: CodecOptions[dict[str, Any]] = CodecOptions(
    tz_aware=True, datetime_conversion=DatetimeConversion.DATETIME_AUTO
)
_JSON = json_util.CANONICAL_JSON_OPTIONS.with_options(
    tz_aware=True, datetime_conversion=DatetimeConversion.DATETIME_AUTO
)


def is_collection_name(name: object) -> bool:
    """Return whether an export may hold a collection of this name; the server's own are excluded."""
    return isinstance(name, str) and bool(_NAME.fullmatch(name)) and not name.startswith("system.")


def _collection(name: str) -> str:
    if not is_collection_name(name):
        raise wrong("the name of a collection, none of the server's own")
    return name


def _digest(text: str) -> str:
    if not _SHA256.fullmatch(text):
        raise wrong("64 hex digits")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFile(SettingsModel):
    """One collection in the folder: ``file`` holds ``documents`` lines, compressed if it ends in ``.xz``.

    ``bytes`` and ``sha256`` are those of the lines.
    """

    collection: Annotated[str, AfterValidator(_collection)]
    file: str
    documents: Count
    bytes: Count
    sha256: Annotated[str, AfterValidator(_digest)]

    def __post_init__(self) -> None:
        if self.file.removesuffix(COMPRESSED) != f"{self.collection}.jsonl":
            raise wrong(f"{self.collection}.jsonl", "file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(SettingsModel):
    """The contents of the folder, without the run's name and the time: equal runs make equal folders."""

    format: PositiveWhole = FORMAT
    schema: PositiveWhole
    collections: tuple[ExportedFile, ...]

    def __post_init__(self) -> None:
        if len({item.collection for item in self.collections}) < len(self.collections):
            raise broken("names a collection twice", "collections")

    @property
    def documents(self) -> int:
        """Documents of all collections."""
        return sum(item.documents for item in self.collections)

    @property
    def bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(item.bytes for item in self.collections)


def verify(folder: Path) -> Manifest:
    """Compare every file with the manifest and return it. Raises StoreError if a file differs."""
    manifest = read_manifest(folder)
    for item in manifest.collections:
        digest, size, lines = hashlib.sha256(), 0, 0
        try:
            with _open(folder / item.file) as stream:
                # Stop behind the size that it should have: a small file may decompress to any.
                while size <= item.bytes and (block := stream.read(_READ_BYTES)):
                    digest.update(block)
                    size += len(block)
                    lines += block.count(b"\n")
        except (OSError, EOFError, lzma.LZMAError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise StoreError(f"{folder / item.file} cannot be read: {reason}") from error
        if (size, lines, digest.hexdigest()) != (item.bytes, item.documents, item.sha256):
            raise StoreError(
                f"{folder / item.file} differs from {MANIFEST}: {size} bytes, {lines} documents and"
                f" SHA-256 {digest.hexdigest()[:12]}…, not {item.bytes}, {item.documents} and"
                f" {item.sha256[:12]}…",
                hint="copy the folder again; nothing has been written to the database",
            )
    return manifest


def _open(file: Path, mode: Literal["rb", "wb"] = "rb") -> IO[bytes]:
    return lzma.open(file, mode) if file.suffix == COMPRESSED else file.open(mode)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of an exported folder. Raises StoreError if it is missing or invalid."""
    path = folder / MANIFEST
    other = f"{path} is not the manifest of an export"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StoreError(
            f"{path} cannot be read: {error.strerror}", hint="give the folder of a complete export"
        ) from error
    except RecursionError as error:
        raise StoreError(f"{other}: it is nested too deeply") from error
    except ValueError as error:
        raise StoreError(f"{other}: {error}") from error
    manifest = check(Manifest, content, lambda problem: StoreError(f"{other}: {problem}"))
    if (found := (manifest.format, manifest.schema)) != (FORMAT, SCHEMA_VERSION):
        number, schema = (excerpt(value, _LONGEST) for value in found)
        raise StoreError(
            f"{folder} has format {number} and schema version {schema}, and this AgentRL reads {FORMAT} and"
            f" {SCHEMA_VERSION} only",
            hint="import it with the AgentRL that wrote it",
        )
    return manifest


def encode_line(raw: bytes) -> bytes:
    """Return a BSON document as a line of JSON, which ``read_lines`` converts back to the same bytes."""
    text = json_util.dumps(
        bson.decode(raw, CODEC), json_options=_JSON, separators=(",", ":"), ensure_ascii=False
    )
    line = text.encode() + b"\n"
    if _decoded(line) != raw:
        line = json_util.dumps({"bson": raw}, json_options=_JSON, separators=(",", ":")).encode() + b"\n"
    return line


def read_lines(file: Path) -> Iterator[bytes]:
    """Yield the BSON documents that ``encode_line`` wrote. Raises StoreError for a line of another kind."""
    with _open(file) as stream:
        for number, line in enumerate(stream, start=1):
            if (raw := _decoded(line)) is None:
                raise StoreError(f"{file}, line {number}, is not a document in canonical extended JSON")
            yield raw


def _decoded(line: bytes) -> bytes | None:
    try:
        document = json_util.loads(line.decode(), json_options=_JSON)
        if "_id" in document:
            return bson.encode(document, codec_options=CODEC)
        raw = document["bson"]
        return raw if isinstance(raw, bytes) and "_id" in bson.decode(raw, CODEC) else None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, bson.errors.BSONError):
        return None


def require_empty(folder: Path) -> None:
    """Raise StoreError if the folder exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StoreError(f"{folder} exists and is not empty", hint="give a folder that does not exist")


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
    """The result of an import.

    ``imports`` are the paths of the folder's ``Imports``, ``flags`` its processes' flags that name code.
    """

    manifest: Manifest
    imports: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


class Transfer(Repository):
    """Exports and imports a run, with at most a page of documents in memory.

    ``on_documents`` is called with the number of documents of each page that was read or written.
    """

    def __init__(self, connection: Connection, *, on_documents: Callable[[int], None] | None = None) -> None:
        super().__init__(connection)
        self._on_documents = on_documents or (lambda count: None)

    @database_call
    async def export(self, folder: Path, *, compress: bool = False) -> Manifest:
        """Write the run into ``folder``, which must not exist or be empty, as of one moment.

        ``compress`` compresses each file by xz.
        The folder appears when it is complete. Raises StoreError if the server no longer holds that moment.
        """
        require_empty(folder)
        if not await holds_run(self._connection.database):
            raise StoreError(f"there is no run {self._connection.database.name!r} to export")
        names = await self._stored_collections()
        with writing_folder(folder) as temporary:
            async with self._connection.client.start_session(snapshot=True) as session:
                try:
                    files = [await self._export(name, temporary, session, compress) for name in names]
                except OperationFailure as error:
                    if error.code != _SNAPSHOT_GONE:
                        raise
                    raise StoreError(
                        "the export took longer than the server keeps a snapshot",
                        hint="raise the server's minSnapshotHistoryWindowInSeconds (300 by default)",
                    ) from error
            manifest = Manifest(schema=SCHEMA_VERSION, collections=tuple(files))
            # Write the manifest last: a folder without it is no export.
            (temporary / MANIFEST).write_bytes(json.dumps(asdict(manifest), indent=1).encode() + b"\n")
        return manifest

    @database_call
    async def load(self, folder: Path, *, allow_modules: bool = False, withdrawn: bool = False) -> Imported:
        """Read the run in ``folder`` into this database, which must be empty.

        Samplers import and run what ``Imports`` names, and a what-if what the flags of the trainer name, so
        that both are left out without ``allow_modules``.
        Documents that violate a validator are kept, and ``agentrl db check`` lists them. Everything is
        verified before anything is written. Repeating an interrupted import starts it over. Raises StoreError
        for a folder that holds what ``agentrl retract`` withdrew from a run of this server, unless
        ``withdrawn``.
        """
        manifest = verify(folder)
        if not withdrawn:
            await self._refuse_withdrawn(folder, manifest)
        imports = _values(folder, manifest, IMPORTS, lambda document: document.get("paths"))
        flags = _values(folder, manifest, SETTINGS, _code_of)
        coded = _values(folder, manifest, SETTINGS, lambda item: [_of(item)] if _code_of(item) else [])
        left_out = () if allow_modules else coded
        async with make_run(self._connection) as making:
            await prepare(self._connection.database)
            await self._collection(GATE).delete_many({})  # the run brings its own
            schema: Json | None = None
            for item in manifest.collections:
                if item.collection == IMPORTS and not allow_modules:
                    continue
                leaves_out = left_out if item.collection == SETTINGS else ()
                imported = await self._import(folder / item.file, item.collection, leaves_out)
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
        parent = await Ancestry(self._connection).parent()
        if parent is not None and await self._connection.beside(parent.run).collection(RUN).find_one({}):
            # The parent is on this server: let it know its child, whose checkpoint it must keep.
            family = Ancestry(self._connection.beside(parent.run))
            await family.adopt(self._connection.database.name, parent)
        return Imported(manifest=manifest, imports=imports, flags=flags)

    async def _refuse_withdrawn(self, folder: Path, manifest: Manifest) -> None:
        for name in await self._connection.databases():
            database = self._connection.client[name]
            stones = await database[TOMBSTONE].find({}, {"created_at": 1}).to_list()
            created = {stone["_id"]: stone["created_at"] for stone in stones}
            if found := withdrawn_in(folder, manifest, created):
                raise StoreError(
                    f"{folder} holds {len(found)} Records or Tasks that were withdrawn from run {name!r}",
                    hint=f"take them out of it first: agentrl retract {name} --archive {quoted(folder)}",
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

    async def _export(
        self, name: str, folder: Path, session: AsyncClientSession, compress: bool
    ) -> ExportedFile:
        if not is_collection_name(name):
            raise StoreError(f"collection {name!r} has a name that cannot be a file name")
        file = f"{name}.jsonl{COMPRESSED if compress else ''}"
        digest, lines, size = hashlib.sha256(), 0, 0
        with _open(folder / file, "wb") as stream:
            async for document in self._documents(name, session):
                line = encode_line(bytes(document.raw))
                stream.write(line)
                digest.update(line)
                lines, size = lines + 1, size + len(line)
        return ExportedFile(
            collection=name, file=file, documents=lines, bytes=size, sha256=digest.hexdigest()
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

    async def _import(self, file: Path, name: str, leaves_out: Collection[str]) -> Json | None:
        """Insert a file's documents, without notes of children; return its schema document if it has one.

        ``leaves_out`` are the settings (``_of``) that are not inserted.
        """
        if name not in await self._stored_collections():
            await self._connection.database.create_collection(name, check_exists=False)
        schema: list[Json] = []

        async def documents() -> AsyncIterator[RawBSONDocument]:
            for raw in read_lines(file):
                document = bson.decode(raw, CODEC) if name == RUN or leaves_out else {}
                if leaves_out and _of(document) in leaves_out:
                    continue
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


def _values(
    folder: Path, manifest: Manifest, collection: str, of: Callable[[Json], object]
) -> tuple[str, ...]:
    """Return what ``of`` finds in the documents of a collection of the folder, sorted."""
    found: set[str] = set()
    for item in (item for item in manifest.collections if item.collection == collection):
        for raw in read_lines(folder / item.file):
            named = of(bson.decode(raw, CODEC))
            found.update(map(str, named if isinstance(named, (list, frozenset)) else ()))
    return tuple(sorted(found))


def _of(settings: Json) -> str:
    """Return what a document of ``Settings`` belongs to: all flags of trainers go together."""
    return str(settings.get("_id")).partition("@")[0]


def _code_of(settings: Json) -> frozenset[str]:
    """Return the flags in a document of ``Settings`` that name code."""
    values = settings.get("values")
    return code_of_flags(values) if isinstance(values, dict) else frozenset()


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


FILE = "data/train.parquet"
_ROW_GROUP = 64
"""Trajectories in memory at a time; each page is a row group of the file."""
_README = """---
configs:
- config_name: default
  data_files: {file}
---

# Trajectories of the run {run}

{rows} scored trajectories, a row each. `messages` is the conversation: prompts, responses, tool results;
`tool_calls` of a message and `answer` are JSON text, and images are left out. `split` is that of the run.
`trained` says whether a committed step trained the trajectory, and `trained_at_steps` which steps did.

```python
import datasets

rows = datasets.load_dataset("FOLDER", split="train")
```
"""


def require_pyarrow() -> None:
    """Raise ConfigError without pyarrow, before anything is read."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "Parquet needs pyarrow, which is not installed", hint=how_to_install("parquet")
        ) from error


def write_parquet(rows: Sequence[Mapping[str, Any]], file: BinaryIO) -> None:
    """Write rows of the same keys; the types of the columns come from the values. Raises ConfigError."""
    require_pyarrow()
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file, compression="zstd")


class TrajectoryDataset(Repository):
    """Writes a dataset with at most a page of trajectories in memory. It only reads the database.

    ``on_rows`` is called with the number of rows of each page.
    """

    def __init__(self, connection: Connection, *, on_rows: Callable[[int], None]) -> None:
        super().__init__(connection)
        self._on_rows = on_rows

    @database_call
    async def export(self, folder: Path) -> int:
        """Write the trajectories that have a score and are not pruned into ``folder``; return their number.

        The folder must not exist or be empty, and appears when it is complete. Raises ConfigError without
        pyarrow, StoreError if the folder cannot be written.
        """
        require_pyarrow()
        require_empty(folder)
        import pyarrow
        import pyarrow.parquet

        rows = 0
        with writing_folder(folder) as temporary:
            (temporary / FILE).parent.mkdir()
            schema = _schema()
            with pyarrow.parquet.ParquetWriter(temporary / FILE, schema, compression="zstd") as writer:
                async for page in self._pages(
                    RECORD, {"score": {"$ne": None}, "pruned_at": None}, _ROW_GROUP
                ):
                    written = await self._rows([Record.from_document(document) for document in page])
                    writer.write_table(pyarrow.Table.from_pylist(written, schema=schema))
                    rows += len(page)
                    self._on_rows(len(page))
            readme = _README.format(file=FILE, run=self._connection.database.name, rows=f"{rows:,}")
            (temporary / "README.md").write_text(readme, encoding="utf-8")
        return rows

    async def _rows(self, records: Sequence[Record]) -> list[Json]:
        ids = [record.id for record in records]
        calls = await read_model_calls(self._connection, ids)
        data = self._collection(DATA).find({"_id": {"$in": ids}}, {"trained_at_steps": 1})
        steps = {document["_id"]: document["trained_at_steps"] async for document in data}
        return [_row(record, calls[record.id], steps.get(record.id, ())) for record in records]


def _row(record: Record, calls: Sequence[DispatchedSamplingTask], steps: Sequence[int]) -> Json:
    return {
        "id": record.id, "task_id": record.task.removeprefix(task_key(record.split, record.epoch, "")),
        "split": record.split, "epoch": record.epoch,
        "query": record.query, "answer": _json(record.answer), "final_answer": record.final_answer,
        "messages": [*map(_message, conversation(calls))], "score": record.score,
        "advantage": record.advantage,
        "status": record.shown_status, "trained": record.trained_count > 0, "trained_at_steps": list(steps),
        "min_policy_version": record.min_version, "max_policy_version": record.max_version,
        "turns": record.turns, "tool_calls": record.tool_calls, "generated_tokens": record.generated_tokens,
        "stop_reason": None if record.stop_reason is None else str(record.stop_reason),
        "created_at": record.created_at,
    }  # fmt: skip


def _message(message: Mapping[str, Any]) -> Json:
    thought, calls = message.get("reasoning_content"), message.get("tool_calls")
    return {
        "role": str(message.get("role", "?")),
        "content": str(text_of(message.get("content"))),
        "reasoning_content": None if thought is None else str(text_of(thought)),
        "tool_calls": _json(calls) if calls else None,
    }


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False, default=str)


def _schema() -> Any:
    """Return the columns; messages have the same fields in every row."""
    import pyarrow as pa

    message = pa.struct(
        [(name, pa.string()) for name in ("role", "content", "reasoning_content", "tool_calls")]
    )
    text, whole, real = pa.string(), pa.int64(), pa.float64()
    return pa.schema(
        {
            "id": text, "task_id": text, "split": text, "epoch": whole, "query": text, "answer": text,
            "final_answer": text, "messages": pa.list_(message), "score": real, "advantage": real,
            "status": text, "trained": pa.bool_(), "trained_at_steps": pa.list_(whole),
            "min_policy_version": whole, "max_policy_version": whole, "turns": whole, "tool_calls": whole,
            "generated_tokens": whole, "stop_reason": text, "created_at": pa.timestamp("ms", tz="UTC"),
        }
    )  # fmt: skip
