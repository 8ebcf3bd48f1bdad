"""Wait for changes in the database: by one change stream per machine, or by polling if there is none.

Every write to a MongoDB server wakes every change stream, despite its filter. The cost of a write grows with
the number of streams, so a machine opens one per set of collections instead of one per process.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import random
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

from pymongo.errors import PyMongoError

from agentrl.base.concurrency import background
from agentrl.documents.status import DataStatus, TaskStatus, VersionStatus
from agentrl.errors import StoreUnavailableError
from agentrl.store.mechanics.connection import COLUMN, DATA, STEP, TASK, VERSION, Connection, Json

_log = logging.getLogger(__name__)
_POLL_SECONDS = 2.0
_REST_SECONDS = 0.05
_CANCEL_SECONDS = 0.5
_LONGEST_AWAIT_MS = 10_000
WATCHED = (TASK, DATA, VERSION, STEP, COLUMN)
_IGNORED = [TaskStatus.WAITING.value, DataStatus.PLANNED.value]
"""Statuses that do not wake: the process that completes a group finalizes it itself."""
_RELEVANT = {
    "fullDocument.status": {"$ne": VersionStatus.RESERVED.value},
    "$or": [
        {"ns.coll": {"$in": [VERSION, STEP]}},
        {"operationType": {"$ne": "update"}},
        {"updateDescription.updatedFields.status": {"$exists": True, "$nin": _IGNORED}},
    ],
}
"""Of updates of Tasks, data and columns, only status changes wake; renewed leases do not. A reserved version
does not either: its publication soon does."""

Notify = Callable[[Sequence[str]], Awaitable[None]]
"""Called with the names of changed collections."""
Follow = Callable[[Notify], Awaitable[None]]
"""Reads the change stream and calls its argument for each change, until it is cancelled."""

_FLUSH_SECONDS = 0.05
_HEARTBEAT_SECONDS = 1.0
SILENT_SECONDS = 5.0
"""After this silence of the leader a process assumes that everything has changed, and again this often."""

_CONNECT_SECONDS = 5.0
_BACKLOG = 1024
_MAX_UNREAD_BYTES = 65536


class Changes:
    """Counts the changes of each collection of ``WATCHED`` and wakes the coroutines that wait for them.

    A coroutine that waits in a loop misses no change: if something changed since its last wait returned, the
    next wait returns at once. ``_REST_SECONDS`` limits how often.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._counts: Counter[str] = Counter()
        self._seen: WeakKeyDictionary[asyncio.Task[object], Counter[str]] = WeakKeyDictionary()
        self._returned: WeakKeyDictionary[asyncio.Task[object], float] = WeakKeyDictionary()
        self._changed = asyncio.Condition()
        self._follower: asyncio.Task[None] | None = None
        self._watched: frozenset[str] = frozenset()
        """The collections in the stream: all that this process has waited for."""
        self._restarting = asyncio.Lock()

    async def wait(self, *collections: str, timeout: float) -> bool:
        """Return True after a change in one of ``collections``, False after ``timeout`` seconds without."""
        unknown = set(collections) - set(WATCHED)
        if unknown:
            raise ValueError(f"these collections are not watched: {sorted(unknown)}")
        if not self._watched.issuperset(collections) or self._has_failed():
            self._watched |= set(collections)
            await self._restart()
        caller = asyncio.current_task()
        seen = self._seen.get(caller, self._counts.copy()) if caller else self._counts.copy()
        changed = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                async with self._changed:
                    await self._changed.wait_for(
                        lambda: any(self._counts[name] > seen[name] for name in collections)
                    )
                changed = True
                if caller:
                    # Rest only after a recent wake: the first change after a quiet time is passed on at once.
                    rested = time.monotonic() - self._returned.get(caller, -_REST_SECONDS)
                    await asyncio.sleep(max(0.0, _REST_SECONDS - rested))
        if caller:
            self._seen[caller] = self._counts.copy()
            self._returned[caller] = time.monotonic()
        return changed

    def _has_failed(self) -> bool:
        """Return whether the stream has ended by an error, which is logged; then it is begun again."""
        follower = self._follower
        if follower is None or not follower.done() or follower.cancelled():
            return False
        _log.error("the change stream failed and is begun again", exc_info=follower.exception())
        return True

    async def _restart(self) -> None:
        async with self._restarting:
            await self.close()
            names = sorted(self._watched)
            key = f"{self._connection.host}/{self._connection.database.name}"
            feed = HostFeed(key, names, partial(self._follow, names), self._notify)
            self._follower = asyncio.create_task(feed.run(), name="agentrl-changes")

    async def close(self) -> None:
        """End the change stream. Repeats the cancellation, because the driver may swallow it."""
        while self._follower is not None and not self._follower.done():
            self._follower.cancel()
            await asyncio.wait([self._follower], timeout=_CANCEL_SECONDS)

    async def _follow(self, watched: Sequence[str], notify: Notify) -> None:
        """Call ``notify`` for each change, and for all collections after an interruption of the stream."""
        wait_ms = max(100, min(_LONGEST_AWAIT_MS, int(self._connection.timeout * 500)))
        pipeline: list[Json] = [
            {"$match": {"ns.coll": {"$in": list(watched)}, **_RELEVANT}},
            # Send the name alone: an inserted document would come whole, and only its collection is used.
            {"$project": {"ns": 1}},
        ]
        while True:
            try:
                async with await self._connection.database.watch(
                    pipeline, max_await_time_ms=wait_ms
                ) as stream:
                    self._connection.outage.call_succeeded()
                    await notify(watched)
                    while stream.alive:
                        change = await stream.try_next()
                        if change is not None:
                            await notify([change["ns"]["coll"]])
            except PyMongoError as error:
                failure = self._connection.error("watching for changes", error)
                if not isinstance(failure, StoreUnavailableError):
                    _log.warning("no change stream, polling instead: %s", failure.message)
            await asyncio.sleep(_POLL_SECONDS)
            await notify(watched)

    async def _notify(self, names: Sequence[str]) -> None:
        async with self._changed:
            self._counts.update(names)
            self._changed.notify_all()


class HostFeed:
    """The changes of ``collections``, for all processes with the same ``key``.

    The process that holds the lock file leads: it reads the change stream and serves a Unix socket. When it
    ends, the kernel releases the lock, and another process leads. While the leader is silent, the others
    assume every few seconds that everything has changed, so that a busy machine opens no further streams. If
    the lock file or the socket cannot be created, a process reads a change stream of its own.
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
        """Call ``notify`` for every change, until cancelled."""
        while self._lock_file is not None and self._socket is not None:
            try:
                led = await self._try_to_lead(self._lock_file, self._socket)
            except OSError:
                break
            if not led and not await self._listen(self._socket):
                await self._notify(self._collections)
                # Poll meanwhile: at load 20, 790 of 1,000 samplers had opened streams, and slowed the server.
                await asyncio.sleep(SILENT_SECONDS * random.uniform(0, 1))
            await asyncio.sleep(random.uniform(0, _FLUSH_SECONDS))
        await self._follow(self._notify)

    async def _try_to_lead(self, lock_file: Path, path: Path) -> bool:
        """Lead until cancelled; return False if another process leads."""
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
        # Raise the backlog from 100: when another leads, all processes connect at the same moment.
        server = await asyncio.start_unix_server(self._accept, path, backlog=_BACKLOG)
        try:
            async with background(self._send_pending()):
                await self._follow(self._publish)
        finally:
            server.close()
            _remove(path)
            handlers = list(self._listeners.values())
            for writer in list(self._listeners):
                writer.close()
            await asyncio.gather(*handlers, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handler = asyncio.current_task()
        if handler is None:
            return
        self._listeners[writer] = handler
        try:
            writer.write(_line(self._collections))
            # Wait for the end of the connection: a listener sends nothing.
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
        """Send the changed collections, or an empty line after each second without a change."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HEARTBEAT_SECONDS):
                    await self._has_pending.wait()
            self._has_pending.clear()
            line = _line(sorted(self._pending))
            self._pending.clear()
            for writer in list(self._listeners):
                # Drop a frozen listener, whose lines would pile up here: it connects again when it goes on.
                if writer.transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
                    writer.transport.abort()
                else:
                    writer.write(line)
            await asyncio.sleep(_FLUSH_SECONDS)

    async def _listen(self, path: Path) -> bool:
        """Call ``notify`` for the leader's changes; return True when it has ended, False if it is silent."""
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
    """Connect to the leader; retry while it has not created its socket yet."""
    while True:
        try:
            return await asyncio.open_unix_connection(path)
        except OSError:
            await asyncio.sleep(_FLUSH_SECONDS)


def _try_lock(path: Path) -> int | None:
    """Return the descriptor of the locked file; None if another process holds the lock.

    A leader removes the file when it ends, so the locked file may have been replaced: then try again.
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
    """Return a folder that only this user can write to; None if it cannot be created."""
    folder = Path(tempfile.gettempdir()) / f"agentrl-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        # Look at the name itself: another user may have made a link of it to a private folder of ours.
        state = folder.lstat()
    except OSError:
        return None
    is_private = stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and not state.st_mode & 0o077
    return folder if is_private else None


def _network() -> str:
    """Return the network namespace: in two containers, one address may be two servers."""
    with contextlib.suppress(OSError):
        return Path("/proc/self/ns/net").readlink().name
    return ""
