"""Share among requests the Stores of runs, what they read, and whole pages."""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from agentrl.config.run import EngineListConfig
from agentrl.config.schema import RunConfig
from agentrl.dashboard.render import THEME_COOKIE
from agentrl.snapshot.snapshot import Cache, SnapshotReader
from agentrl.store.client import Store, open_existing
from agentrl.store.mechanics.connection import Connection
from agentrl.store.views.runs import Runs, RunSummary, connect_server

Page = Callable[[Request], Coroutine[Any, Any, Response]]

MAX_OPEN = 16
"""Runs whose connections stay open."""


@dataclass(slots=True)
class _Opened:
    """One run's Store and the number of requests that use it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    store: Store | None = None
    users: int = 0


class StorePool:
    """The Stores of the runs that were asked for last. The least recently used one is closed first."""

    def __init__(self, run: RunConfig) -> None:
        self.run = run
        self._opened: OrderedDict[str, _Opened] = OrderedDict()
        self._server: Connection | None = None
        self._connecting = asyncio.Lock()

    @asynccontextmanager
    async def open(self, name: str) -> AsyncIterator[Store]:
        """Yield the Store of run ``name``.

        Raises ConfigError for a malformed name, RunMissingError, SchemaVersionError and the other StoreErrors
        of ``open_existing``.
        """
        config = replace(self.run, run_name=name)
        opened = self._opened.setdefault(name, _Opened())
        self._opened.move_to_end(name)
        opened.users += 1
        try:
            async with opened.lock:
                if opened.store is None:
                    opened.store = await open_existing(config)
            yield opened.store
        finally:
            opened.users -= 1
            if not opened.users and self._opened.get(name) is not opened:
                await _close(opened)
            elif not opened.users and opened.store is None:
                self._opened.pop(name, None)
            await self._shrink()

    async def forget(self, name: str) -> None:
        """Open run ``name`` anew at the next request: it was renamed or deleted."""
        opened = self._opened.pop(name, None)
        if opened is not None and not opened.users:
            await _close(opened)

    async def _shrink(self) -> None:
        idle = [name for name, opened in self._opened.items() if not opened.users]
        for name in idle[: max(0, len(self._opened) - MAX_OPEN)]:
            await _close(self._opened.pop(name))

    async def server(self) -> Connection:
        """Return the connection for what concerns all runs."""
        async with self._connecting:
            if self._server is None:
                self._server = await connect_server(self.run)
            return self._server

    async def close(self) -> None:
        """Close every Store."""
        if self._server is not None:
            await self._server.close()
            self._server = None
        opened, self._opened = list(self._opened.values()), OrderedDict()
        for each in opened:
            await _close(each)


async def _close(opened: _Opened) -> None:
    if opened.store is not None:
        await opened.store.close()


def pool_of(request: Request) -> StorePool:
    """Return the application's StorePool."""
    pool: StorePool = request.app.state.stores
    return pool


@asynccontextmanager
async def open_run(request: Request, name: str | None = None) -> AsyncIterator[Store]:
    """Yield the Store of the run that the path names, or of run ``name``. Read only.

    Its errors become pages: 404 for no such run, 409 for another schema version, 403 for missing rights, 503
    for a database that does not answer.
    """
    wanted = request.path_params["run"] if name is None else name
    async with pool_of(request).open(wanted) as store:
        yield store


def cache_of(request: Request) -> Cache:
    """Return the application's cache."""
    cache: Cache = request.app.state.cache
    return cache


def reader_of(request: Request, store: Store) -> SnapshotReader:
    """Return the reader of a run's snapshots, whose cache all requests share."""
    return SnapshotReader(store, cache_of(request))


async def read_runs(request: Request, seconds: float) -> list[RunSummary]:
    """Return every run of the server, read anew if it was read more than ``seconds`` ago."""

    async def read() -> list[RunSummary]:
        return await Runs(await pool_of(request).server()).all(EngineListConfig().alive_seconds)

    return await cache_of(request).get("runs", seconds, read)


def shared(seconds: float) -> Callable[[Page], Page]:
    """Decorate a page: requests for the same address within ``seconds`` get the same response.

    A thousand open pages of a run ask again at every change of it.
    """

    def decorate(page: Page) -> Page:
        @functools.wraps(page)
        async def answer(request: Request) -> Response:
            theme = request.cookies.get(THEME_COOKIE)
            key = ("page", request.url.path, request.url.query, theme)
            found = await cache_of(request).get(key, seconds, lambda: page(request))
            return Response(found.body, found.status_code, media_type="text/html")

        return answer

    return decorate
