"""Archive what commands have changed in a container, and put it into a new container of the same image.

Every back end runs commands and copies folders, and no more is needed here: no back end but Docker lists what
has changed, and none of them where volumes are mounted. The image needs ``find``, ``stat`` and ``tar``.

An archive comes from a container and goes into one: nothing of it is unpacked on this machine.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentrl.errors import ToolServerError
from agentrl.worlds.containers.container import Container, Execution, FilesTooLargeError

_STAGE: Final = "/tmp/.agentrl-changes"
_CHANGES, _DELETED = "changes.tar", "deleted.json"
_MARK: Final = "\1"
"""Begins each file of a listing: a name may hold line breaks."""
_LIST: Final = (
    "echo /proc/[0-9]*; shm=; [ -d /dev/shm ] && shm=/dev/shm;"
    f" exec find / $shm \\( -path /proc -o -path /sys -o -path /dev -o -path {_STAGE} \\) -prune -o"
    f' -exec stat -c "{_MARK}%f|%u|%g|%s|%i|%z|%n" {{}} +'
)
_PACK: Final = (
    f"rm -rf {_STAGE}; mkdir -m 700 {_STAGE} || exit; ulimit -f $1 2>/dev/null;"
    f" exec tar --no-recursion -cf {_STAGE}/{_CHANGES} -C / -T -"
)
"""A container whose own limit is lower keeps it: it cannot be raised."""
_CLEAR: Final = f"rm -rf {_STAGE}"
_DELETE: Final = 'while IFS= read -r name; do rm -rf -- "/$name"; done'
_ROOT: Final = "0"
_LIST_BYTES: Final = 64 << 20
_DELETED_BYTES: Final = 16 << 20
_SECONDS: Final = 120.0
_BLOCK: Final = 512
_OF_BACK_END: Final = frozenset({"", "dev/shm", "etc/hosts", "etc/hostname", "etc/resolv.conf"})
"""Files that the back end mounts, or writes for each container."""


class NotKeptError(Exception):
    """Why the changes cannot be archived."""


@dataclass(frozen=True, slots=True)
class _Listing:
    """The files of a container with their status as text, and how many processes it runs."""

    files: dict[str, str]
    processes: int


class Changes:
    """What commands change in one container after ``begin``. Run no command meanwhile."""

    def __init__(self, container: Container, folder: Path) -> None:
        """``folder`` is for temporary files."""
        self._container = container
        self._folder = folder
        self._begun: str | None = None
        """The listing of the beginning, in a file: it may have megabytes."""

    async def begin(self) -> None:
        """Note what the container holds. Raises ToolServerError, and NotKeptError without the programs."""
        listed = await self._list()
        path = self._folder / "begun"
        await asyncio.to_thread(path.write_text, listed, "utf-8")
        self._begun = str(path)

    async def save(self, archive: Path, limit: int) -> None:
        """Write the changes into ``archive``, of at most about ``limit`` bytes.

        Raises NotKeptError if they cannot be restored from an archive: they are larger, programs run in the
        background, or a name has a line break or a backslash, which ``tar`` reads otherwise.
        """
        if self._begun is None:
            raise NotKeptError("what it began with is not known")
        begun, listed = Path(self._begun), await self._list()
        changed, deleted = await asyncio.to_thread(_compared, begun, listed)
        packed = self._folder / "packed.tar"
        try:
            if changed:
                names = "".join(f"./{name}\n" for name in changed).encode()
                blocks = str(limit // _BLOCK + 1)
                done = await self._shell(_PACK, blocks, stdin=names)
                if not done.succeeded:
                    said = _why(done, f"exit code {done.exit_code}")
                    raise NotKeptError(f"they have more than {limit:,} bytes, or cannot be read: {said}")
                await self._container.copy(packed, out_of=_STAGE, limit=limit)
            await asyncio.to_thread(join, archive, packed if changed else None, deleted, limit)
        except FilesTooLargeError as error:
            raise NotKeptError(f"they have more than {limit:,} bytes") from error
        finally:
            if changed:
                await self._shell(_CLEAR)
            await asyncio.to_thread(packed.unlink, missing_ok=True)

    async def apply(self, archive: Path) -> None:
        """Make the changes of an archive in a container that has just begun. Raises ToolServerError."""
        packed = self._folder / "packed.tar"
        try:
            try:
                deleted, has_changes = await asyncio.to_thread(_split, archive, packed)
            except (tarfile.TarError, ValueError, OverflowError, KeyError) as error:
                raise ToolServerError(f"the archive of a container cannot be read: {error}") from error
            if deleted:
                done = await self._shell(_DELETE, stdin="".join(f"{name}\n" for name in deleted).encode())
                if not done.succeeded:
                    raise ToolServerError(f"files of a container cannot be deleted: {_why(done, '')}")
            if has_changes:
                await self._container.copy(packed, into="/")
        finally:
            await asyncio.to_thread(packed.unlink, missing_ok=True)

    async def _list(self) -> str:
        done = await self._shell(_LIST, output_bytes=_LIST_BYTES)
        if not done.succeeded:
            raise NotKeptError(_why(done, "its files cannot be listed"))
        return done.stdout

    async def _shell(
        self, line: str, *arguments: str, stdin: bytes = b"", output_bytes: int = 1 << 20
    ) -> Execution:
        return await self._container.run(
            ["/bin/sh", "-c", line, "sh", *arguments], seconds=_SECONDS, workdir="/", stdin=stdin,
            user=_ROOT if self._container.takes_users else None, output_bytes=output_bytes,
        )  # fmt: skip


def _why(done: Execution, otherwise: str) -> str:
    return done.exceeded or done.stderr.strip()[-300:] or otherwise


def _read(listed: str) -> _Listing:
    processes, *entries = listed.split(_MARK)
    files = {}
    for entry in entries:
        *status, name = entry.removesuffix("\n").split("|", 6)
        files[name.strip("/")] = "|".join(status)
    return _Listing(files, len(processes.split()))


def _compared(begun: Path, listed: str) -> tuple[list[str], list[str]]:
    """Return the names of what is new or has changed, and of what is gone; NotKeptError as ``save``."""
    before, after = _read(begun.read_text("utf-8")), _read(listed)
    if after.processes > before.processes:
        raise NotKeptError("programs run in the background")
    changed = [
        name for name, status in after.files.items()
        if before.files.get(name) != status and name not in _OF_BACK_END
    ]  # fmt: skip
    # Delete what is of another kind now too: a folder cannot be written over a file.
    deleted = [
        name for name, status in before.files.items()
        if name not in _OF_BACK_END and _kind(after.files.get(name, "")) != _kind(status)
    ]  # fmt: skip
    for name in (*changed, *deleted):
        if not name.isprintable() or "\\" in name or "\N{REPLACEMENT CHARACTER}" in name:
            raise NotKeptError(f"a name cannot be archived: {name[:100]!a}")
    return changed, deleted


def _kind(status: str) -> str:
    """Return the kind in a file's mode, which ``stat`` writes as hexadecimal digits; empty without a file."""
    return status.partition("|")[0][:-3]


def join(archive: Path, packed: Path | None, deleted: Sequence[str], limit: int) -> None:
    """Write an archive of the changes that a container has packed, and of the names that are gone.

    What it has packed may be anything. Raises NotKeptError if it is not a file of at most ``limit`` bytes.
    """
    content = json.dumps(deleted).encode()
    if len(content) > _DELETED_BYTES:
        raise NotKeptError(f"{len(deleted):,} files are gone")
    with tarfile.open(archive, "w", format=tarfile.GNU_FORMAT) as target:
        target.addfile(_member(_DELETED, len(content)), io.BytesIO(content))
        if packed is None:
            return
        try:
            with tarfile.open(packed, "r:") as source:
                found = next(each for each in source if os.path.normpath(each.name) == _CHANGES)
                # Refuse a sparse file too: a few bytes of it may stand for any number.
                if not found.isreg() or found.issparse() or found.size > limit:
                    raise NotKeptError(f"the container has packed no file of at most {limit:,} bytes")
                target.addfile(_member(_CHANGES, found.size), source.extractfile(found))
        except (tarfile.TarError, ValueError, OverflowError, StopIteration) as error:
            raise NotKeptError("the container has packed nothing that can be read") from error


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = size
    return member


def _split(archive: Path, packed: Path) -> tuple[list[str], bool]:
    """Return the names to delete, and whether there are changes, which are written to ``packed``."""
    with tarfile.open(archive, "r:") as source:
        reader = source.extractfile(_DELETED)
        names = json.loads(reader.read(_DELETED_BYTES)) if reader is not None else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("it does not say what was deleted")
        if _CHANGES not in source.getnames():
            return names, False
        content = source.extractfile(_CHANGES)
        if content is None:
            raise ValueError("its changes are no file")
        with packed.open("wb") as target:
            while chunk := content.read(1 << 20):
                target.write(chunk)
    return names, True
