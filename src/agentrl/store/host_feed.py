"""One feed of changes for a machine: one process follows the server and tells the others over a socket.

Every write to a MongoDB server wakes every change stream on it, whatever the stream filters for. So the cost
of a write grows with the number of streams, and a machine opens one for each set of collections, not one for
each process.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import random
import stat
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

Notify = Callable[[Sequence[str]], Awaitable[None]]
"""Is told the names of collections that have changed."""
Follow = Callable[[Notify], Awaitable[None]]
"""Follows the server and tells its argument what changes; it ends only with its caller."""

_FLUSH_SECONDS = 0.05
_BEAT_SECONDS = 1.0
SILENT_SECONDS = 5.0
"""How long a leader may say nothing before a process looks for changes by itself, and how often it does."""

_CONNECT_SECONDS = 5.0
_BACKLOG = 1024
_MOST_UNREAD_BYTES = 65536


class HostFeed:
    """The changes of ``collections``, for this process and for every other with the same ``key``.

    The process that holds the lock file leads: it follows the server and serves a Unix socket. When it ends,
    the kernel frees the lock, and another process leads. While the leader is silent, a process takes it that
    everything has changed, every few seconds: a machine too busy to pass changes on opens no more streams.
    Where the two files cannot be made, a process follows the server by itself.
    """

    def __init__(self, key: str, collections: Sequence[str], follow: Follow, notify: Notify) -> None:
        self._collections = collections
        self._follow = follow
        self._notify = notify
        digest = hashlib.sha256("\n".join([key, _network(), *collections]).encode()).hexdigest()[:24]
        folder = _private_folder()
        self._lock_file = folder / f"{digest}.lock" if folder else None
        self._socket = folder / f"{digest}.sock" if folder else None
        self._pending: set[str] = set()
        self._has_pending = asyncio.Event()
        self._listeners: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Notify of every change until cancelled."""
        while self._lock_file is not None and self._socket is not None:
            try:
                led = await self._try_to_lead(self._lock_file, self._socket)
            except OSError:
                break
            if not led and not await self._listen(self._socket):
                await self._notify(self._collections)
                await asyncio.sleep(SILENT_SECONDS * random.uniform(0, 1))
            await asyncio.sleep(random.uniform(0, _FLUSH_SECONDS))
        await self._follow(self._notify)

    async def _try_to_lead(self, lock_file: Path, path: Path) -> bool:
        """Lead until cancelled; False where another process does."""
        lock = _try_lock(lock_file)
        if lock is None:
            return False
        try:
            await self._lead(path)
        finally:
            _remove(lock_file)
            os.close(lock)
        return True

    async def _lead(self, path: Path) -> None:
        _remove(path)
        server = await asyncio.start_unix_server(self._accept, path, backlog=_BACKLOG)
        sending = asyncio.create_task(self._send_pending(), name="agentrl-changes-feed")
        try:
            await self._follow(self._publish)
        finally:
            sending.cancel()
            server.close()
            _remove(path)
            handlers = list(self._listeners.values())
            for writer in list(self._listeners):
                writer.close()
            await asyncio.gather(sending, *handlers, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handler = asyncio.current_task()
        if handler is None:
            return
        self._listeners[writer] = handler
        try:
            writer.write(_line(self._collections))
            await reader.read()
        except ConnectionError:
            pass
        finally:
            del self._listeners[writer]
            writer.close()

    async def _publish(self, names: Sequence[str]) -> None:
        await self._notify(names)
        self._pending.update(names)
        self._has_pending.set()

    async def _send_pending(self) -> None:
        """Send what has changed, and an empty line each second in which nothing has."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_BEAT_SECONDS):
                    await self._has_pending.wait()
            self._has_pending.clear()
            line = _line(sorted(self._pending))
            self._pending.clear()
            for writer in list(self._listeners):
                if writer.transport.get_write_buffer_size() > _MOST_UNREAD_BYTES:
                    writer.transport.abort()
                else:
                    writer.write(line)
            await asyncio.sleep(_FLUSH_SECONDS)

    async def _listen(self, path: Path) -> bool:
        """Pass on what the leader says; True once it has ended, False where it does not answer."""
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                reader, writer = await _connect(path)
        except TimeoutError:
            return False
        try:
            while True:
                async with asyncio.timeout(SILENT_SECONDS):
                    line = await reader.readline()
                if not line:
                    return True
                if names := line.decode().split():
                    await self._notify(names)
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        finally:
            writer.close()


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _line(names: Sequence[str]) -> bytes:
    return (" ".join(names) + "\n").encode()


async def _connect(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The connection to a leader, which may be about to make its socket."""
    while True:
        try:
            return await asyncio.open_unix_connection(path)
        except OSError:
            await asyncio.sleep(_FLUSH_SECONDS)


def _try_lock(path: Path) -> int | None:
    """The descriptor of the locked file; None while another process holds it.

    A leader removes the file as it ends, so that the one that was locked may not be there any more.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        os.close(descriptor)


def _private_folder() -> Path | None:
    """A folder for this user's sockets that no other user can write to; None where it cannot be had."""
    folder = Path(tempfile.gettempdir()) / f"agentrl-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    is_private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return folder if is_private else None


def _network() -> str:
    """Names this process's network: one address may be two servers in two containers."""
    with contextlib.suppress(OSError):
        return Path("/proc/self/ns/net").readlink().name
    return ""
