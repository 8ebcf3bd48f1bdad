"""Keep the files of trajectories' tools where every sampler of the run finds them: in a folder or a bucket.

A snapshot is one archive, which a container has filled: it is only stored here, never unpacked. The reference
to it holds its size and digest, so that one that was cut off or changed is not restored.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentrl.base.folder_owner import OWNER_FILE, Owner, claim, confirm, foreign
from agentrl.documents.run import FileChecksum
from agentrl.errors import AgentRLError, ConfigError, PublishError
from agentrl.weights import storage

logger = logging.getLogger(__name__)

FLAG: Final = "--snapshots_to"
_KEPT: Final = 2
"""Snapshots of one owner that stay: the last may not be named by a stored model call yet."""
_MARGIN: Final = 2
"""Most bytes of an archive, in limits: headers and names come on top of what is kept."""
_FOLDER: Final = re.compile(r"[0-9a-f]{32}")
_REFERENCE: Final = re.compile(r"(\d+-\d+\.tar):(\d+):([0-9a-f]{64})")
_RECORD: Final = "record"
"""The file of a trajectory's folder with the id of its Record."""
_RECORD_BYTES: Final = 1 << 16


class Snapshots:
    """The snapshots of one run, in a folder for each trajectory."""

    def __init__(self, root: str, owner: Callable[[], Awaitable[Owner]], limit: int) -> None:
        """``root`` is a folder's path or a URL, which becomes the run's at the first snapshot.

        ``owner`` returns the run as the owner of folders; ``limit`` is in bytes, 0 keeps nothing. Raises
        ConfigError for a root that cannot be used; connects to nothing.
        """
        storage.require_storage(root)
        if root.startswith("http"):
            raise ConfigError(
                f"{FLAG} is {root}: a web server lists no files, so that none would be deleted",
                hint="give a folder, s3://BUCKET/FOLDER or gs://BUCKET/FOLDER",
            )
        self.root = root.rstrip("/") if storage.is_remote(root) else str(Path(root).resolve())
        self.limit = limit
        self._find_owner = owner
        self._owner: Owner | None = None

    def of(self, record: str, attempt: int) -> TrajectorySnapshots:
        """Return the snapshots of one trajectory; ``attempt`` is the claim that makes new ones."""
        return TrajectorySnapshots(self, record, attempt)

    def folder_of(self, record: str) -> str:
        """Return where the snapshots of a Record are: ids may be long, and hold any characters."""
        return f"{self.root}/{hashlib.sha256(record.encode()).hexdigest()[:32]}"

    async def delete(self, record: str) -> None:
        """Delete the snapshots of a trajectory that has ended. Errors are logged."""
        await self._delete(self.folder_of(record))

    async def sweep(self, unfinished: Callable[[Collection[str]], Awaitable[Collection[str]]]) -> int:
        """Delete what trajectories have left that are over; return how many. Errors are logged.

        ``unfinished`` returns those of some Records that may be gone on with.
        """
        try:
            names = filter(_FOLDER.fullmatch, await storage.folder_names(self.root))
            records = {f"{self.root}/{name}": await self._record(f"{self.root}/{name}") for name in names}
            owned = {folder: record for folder, record in records.items() if record is not None}
            over = set(owned.values()) - set(await unfinished(set(owned.values())))
        except AgentRLError as error:
            logger.warning("snapshots that were left are not deleted", extra={"why": error.message})
            return 0
        left = [folder for folder, record in owned.items() if record in over]
        for folder in left:
            await self._delete(folder)
        return len(left)

    async def confirm(self) -> None:
        """Make the place the run's, or check that it still is, before writing or deleting there.

        Raises ConfigError if it is another run's, and PublishError.
        """
        if self._owner is None:
            owner = await self._find_owner()
            await (self._claim_url(owner) if storage.is_remote(self.root) else self._claim_folder(owner))
            self._owner = owner
        elif not storage.is_remote(self.root):
            await asyncio.to_thread(confirm, Path(self.root), self._owner)

    async def _claim_folder(self, owner: Owner) -> None:
        try:
            await asyncio.to_thread(claim, Path(self.root), owner, FLAG)
        except OSError as error:
            raise ConfigError(
                f"{self.root} cannot be written: {error.strerror or error}", hint=f"give another {FLAG}"
            ) from error

    async def _claim_url(self, owner: Owner) -> None:
        place = f"{self.root}/{OWNER_FILE}"
        try:
            found = Owner.from_json(await storage.read(place), place)
        except PublishError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            await storage.write(place, owner.to_json())
            # Read it back: no storage creates atomically, and the last of two writers wins.
            found = Owner.from_json(await storage.read(place), place)
        if found != owner:
            raise foreign(self.root, found, owner, FLAG)

    async def _record(self, folder: str) -> str | None:
        """Return the id of the Record whose folder this is; None if it is none."""
        try:
            content = await storage.read(f"{folder}/{_RECORD}")
        except PublishError:
            return None
        record = content[:_RECORD_BYTES].decode("utf-8", "replace")
        return record if self.folder_of(record) == folder else None

    async def _delete(self, folder: str) -> None:
        if not storage.is_remote(folder) and not await asyncio.to_thread(os.path.isdir, folder):
            return
        try:
            await self.confirm()
        except AgentRLError as error:
            logger.warning("snapshots are not deleted", extra={"why": error.message})
            return
        await storage.delete(folder, ())


@dataclass
class TrajectorySnapshots:
    """The snapshots of one trajectory."""

    snapshots: Snapshots
    record: str
    attempt: int
    _count: int = 0

    @property
    def limit(self) -> int:
        """Return the largest size of a snapshot, in bytes."""
        return self.snapshots.limit

    async def put(self, archive: Path) -> str:
        """Store an archive, and delete older ones, those of earlier owners too; return the reference to it.

        Raises ConfigError if the place is another run's, PublishError and OSError if it cannot be written.
        """
        await self.snapshots.confirm()
        folder = self.snapshots.folder_of(self.record)
        self._count += 1
        name = f"{self.attempt}-{self._count}.tar"
        size, digest = await asyncio.to_thread(_measure, archive)
        if size > _MARGIN * self.limit:
            raise PublishError(f"a snapshot has {size:,} bytes, and the limit is {self.limit:,}")
        if storage.is_remote(folder):
            if self._count == 1:
                await storage.write(f"{folder}/{_RECORD}", self.record.encode())
            await storage.put(archive, f"{folder}/{name}")
        else:
            await asyncio.to_thread(_copy, archive, Path(folder), name, self.record)
        if self._count > _KEPT:
            await storage.delete_file(f"{folder}/{self.attempt}-{self._count - _KEPT}.tar")
        if self._count == _KEPT + 1:
            # Model calls name own ones by now. A trajectory may have had a hundred owners.
            for old in await storage.folder_names(folder):
                attempt = old.lstrip(".").partition("-")[0]
                if attempt.isdecimal() and int(attempt) < self.attempt:
                    await storage.delete_file(f"{folder}/{old}")
        return f"{name}:{size}:{digest}"

    async def get(self, reference: str, target: Path) -> bool:
        """Copy the archive of a reference to ``target``; return False if it is not there, or another."""
        found = _REFERENCE.fullmatch(reference)
        if found is None or int(found[2]) > _MARGIN * self.limit:
            return False
        file = FileChecksum(name=found[1], bytes=int(found[2]), sha256=found[3])
        try:
            await storage.download(self.snapshots.folder_of(self.record), [file], target.parent)
        except PublishError as error:
            logger.warning("a snapshot is not there", extra={"record": self.record, "why": error.message})
            return False
        await asyncio.to_thread((target.parent / file.name).replace, target)
        return True


def _measure(path: Path) -> tuple[int, str]:
    """Return the size and the digest of a file."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return stream.tell(), digest


def _copy(archive: Path, folder: Path, name: str, record: str) -> None:
    """Copy an archive into a folder, where it appears whole. Raises OSError."""
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / _RECORD).write_bytes(record.encode())
    partial = folder / f".{name}.part"
    try:
        shutil.copyfile(archive, partial)
        partial.replace(folder / name)
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()
