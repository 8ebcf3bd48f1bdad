"""Checksum the files of a model folder when it is published; verify them before they are loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agentrl.documents.run import FileChecksum
from agentrl.errors import PublishError

MANIFEST = "manifest.json"
_PARALLEL_FILES = 4
_CHUNK_BYTES = 1 << 20


def checksums(folder: Path) -> tuple[FileChecksum, ...]:
    """Return SHA-256 and size of each regular file in ``folder``, ordered by name; hidden files are left out.

    Several files are read at a time, in chunks: hashing releases the interpreter lock.
    """
    try:
        paths = sorted(path for path in folder.iterdir() if _belongs(path))
        with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
            return tuple(pool.map(_checksum, paths))
    except OSError as error:
        raise PublishError(
            f"{error.filename or folder} cannot be read: {error.strerror}",
            hint="check that the folder exists and that this user may read it",
        ) from error


def write_manifest(
    folder: Path, *, version: int, files: Sequence[FileChecksum] | None = None
) -> tuple[FileChecksum, ...]:
    """Write ``manifest.json`` (the version, each file's size and SHA-256) and return the checksums.

    Pass ``files`` if the checksums are already known.
    """
    files = checksums(folder) if files is None else tuple(files)
    content = {"version": version, "files": [file.to_document() for file in files]}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return files


def verify(folder: str | Path, files: Sequence[FileChecksum]) -> None:
    """Raise PublishError if a file of ``folder`` is missing or differs from its checksum."""
    folder = Path(folder)
    for expected in files:
        try:
            size = (folder / expected.name).stat().st_size
        except OSError as error:
            raise _mismatch(folder, expected.name, "the file", error.strerror or "no file") from error
        if size != expected.bytes:
            raise _mismatch(folder, expected.name, f"{expected.bytes} bytes", f"{size} bytes")
    with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
        for expected, actual in zip(files, pool.map(_checksum, _paths(folder, files)), strict=True):
            if actual.sha256 != expected.sha256:
                raise _mismatch(folder, expected.name, f"sha256 {expected.sha256}", f"sha256 {actual.sha256}")


def _paths(folder: Path, files: Iterable[FileChecksum]) -> list[Path]:
    return [folder / file.name for file in files]


def _belongs(path: Path) -> bool:
    return path.is_file() and path.name != MANIFEST and not path.name.startswith(".")


def _checksum(path: Path) -> FileChecksum:
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return FileChecksum(name=path.name, bytes=size, sha256=digest.hexdigest())


def _mismatch(folder: Path, name: str, expected: str, actual: str) -> PublishError:
    return PublishError(
        f"{folder / name} differs from what was published: expected {expected}, found {actual}",
        hint="these weights are not loaded; the trainer's next version replaces them",
    )
