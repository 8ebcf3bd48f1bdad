"""Wait for changes in the database: by one change stream per machine, or by polling if there is none."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from weakref import WeakKeyDictionary

from pymongo.errors import PyMongoError

from agentrl.documents.status import DataStatus, TaskStatus
from agentrl.errors import StoreUnavailableError
from agentrl.store.connection import Connection, Json
from agentrl.store.names import DATA, STEP, TASK, VERSION
from agentrl.store.shared_change_stream import HostFeed, Notify

_log = logging.getLogger(__name__)
_POLL_SECONDS = 2.0
_REST_SECONDS = 0.05
_CANCEL_SECONDS = 0.5
_LONGEST_AWAIT_MS = 10_000
WATCHED = (TASK, DATA, VERSION, STEP)
_IGNORED = [TaskStatus.WAITING.value, DataStatus.PLANNED.value]
"""Statuses that do not wake: the process that completes a group finalizes it itself."""
_RELEVANT = {
    "$or": [
        {"ns.coll": {"$in": [VERSION, STEP]}},
        {"operationType": {"$ne": "update"}},
        {"updateDescription.updatedFields.status": {"$exists": True, "$nin": _IGNORED}},
    ]
}
"""Of updates of Tasks and data, only status changes wake; renewed leases do not."""


class Changes:
    """Counts the changes of each collection of ``WATCHED`` and wakes the coroutines that wait for them.

    A coroutine that waits in a loop misses no change: if something changed since its last wait returned, the
    next wait returns at once. ``_REST_SECONDS`` limits how often.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._counts: Counter[str] = Counter()
        self._seen: WeakKeyDictionary[asyncio.Task[object], Counter[str]] = WeakKeyDictionary()
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
        if not self._watched.issuperset(collections):
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
                await asyncio.sleep(_REST_SECONDS)
        if caller:
            self._seen[caller] = self._counts.copy()
        return changed

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
