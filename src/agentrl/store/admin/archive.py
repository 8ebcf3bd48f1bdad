"""The folder of an exported run: a file of canonical extended JSON per collection, a manifest of checksums.

A document that extended JSON cannot hold exactly (one of its keys looks like a type, such as ``$date``) is
written as ``{"bson": …}``, the base64 of its bytes, so that reading restores every byte.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import bson
from bson import json_util
from bson.codec_options import CodecOptions, DatetimeConversion

from agentrl.documents.base import excerpt
from agentrl.errors import StoreError
from agentrl.store.names import SCHEMA_VERSION

MANIFEST: Final = "manifest.json"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFile:
    """One collection in the folder: ``file`` holds ``documents`` lines."""

    collection: str
    file: str
    documents: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of the folder, without the run's name and the time: equal runs make equal folders."""

    format: int = FORMAT
    schema: int
    collections: tuple[ExportedFile, ...] = field(default=())

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
            with (folder / item.file).open("rb") as stream:
                while block := stream.read(_READ_BYTES):
                    digest.update(block)
                    size += len(block)
                    lines += block.count(b"\n")
        except OSError as error:
            raise StoreError(f"{folder / item.file} cannot be read: {error.strerror}") from error
        if (size, lines, digest.hexdigest()) != (item.bytes, item.documents, item.sha256):
            raise StoreError(
                f"{folder / item.file} differs from {MANIFEST}: {size} bytes, {lines} documents and"
                f" SHA-256 {digest.hexdigest()[:12]}…, not {item.bytes}, {item.documents} and"
                f" {item.sha256[:12]}…",
                hint="copy the folder again; nothing has been written to the database",
            )
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of an exported folder. Raises StoreError if it is missing or invalid."""
    path = folder / MANIFEST
    try:
        manifest = _manifest(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise StoreError(
            f"{path} cannot be read: {error.strerror}", hint="give the folder of a complete export"
        ) from error
    except RecursionError as error:
        raise StoreError(f"{path} is not the manifest of an export: it is nested too deeply") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StoreError(f"{path} is not the manifest of an export: {error}") from error
    if (found := (manifest.format, manifest.schema)) != (FORMAT, SCHEMA_VERSION):
        number, schema = (excerpt(value, _LONGEST) for value in found)
        raise StoreError(
            f"{folder} has format {number} and schema version {schema}, and this AgentRL reads {FORMAT} and"
            f" {SCHEMA_VERSION} only",
            hint="import it with the AgentRL that wrote it",
        )
    return manifest


def _manifest(content: dict[str, Any]) -> Manifest:
    """Return the manifest of parsed JSON. Raises ValueError, TypeError or KeyError for one of no export."""
    files = tuple(ExportedFile(**item) for item in content.pop("collections"))
    manifest = Manifest(**content, collections=files)
    for what, number, least in (
        ("format", manifest.format, 1),
        ("schema", manifest.schema, 1),
        *(("documents", item.documents, 0) for item in files),
        *(("bytes", item.bytes, 0) for item in files),
    ):
        if type(number) is not int or number < least:
            raise ValueError(
                f"{what} is {excerpt(number, _LONGEST)}; expected a whole number, {least} or more"
            )
    for item in files:
        if not is_collection_name(item.collection) or item.file != f"{item.collection}.jsonl":
            names = f"collection {excerpt(item.collection, _LONGEST)} and file {excerpt(item.file, _LONGEST)}"
            raise ValueError(f"it names {names}; no export writes them")
        if not isinstance(item.sha256, str) or not _SHA256.fullmatch(item.sha256):
            found = excerpt(item.sha256, _LONGEST)
            raise ValueError(f"the sha256 of {item.file} is {found}; expected 64 hex digits")
    if len({item.collection for item in files}) != len(files):
        raise ValueError("it names a collection twice")
    return manifest


def is_collection_name(name: object) -> bool:
    """Return whether an export may hold a collection of this name; the server's own are excluded."""
    return isinstance(name, str) and bool(_NAME.fullmatch(name)) and not name.startswith("system.")


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
    with file.open("rb") as stream:
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


class LineWriter:
    """Writes lines, and counts their number and bytes and computes their SHA-256."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self.lines = 0
        self.bytes = 0

    def line(self, line: bytes) -> None:
        """Write one line."""
        self._stream.write(line)
        self._digest.update(line)
        self.lines += 1
        self.bytes += len(line)

    @property
    def sha256(self) -> str:
        """The SHA-256 of all lines so far."""
        return self._digest.hexdigest()


def file_name(collection: str) -> str:
    """Return the file name of a collection. Raises StoreError if its name cannot be one."""
    if not is_collection_name(collection):
        raise StoreError(f"collection {collection!r} has a name that cannot be a file name")
    return f"{collection}.jsonl"


def require_empty(folder: Path) -> None:
    """Raise StoreError if the folder exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StoreError(f"{folder} exists and is not empty", hint="give a folder that does not exist")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, after all other files."""
    (folder / MANIFEST).write_bytes(json.dumps(asdict(manifest), indent=1).encode() + b"\n")
