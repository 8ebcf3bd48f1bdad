"""Share among requests the Stores of runs, what they read and whole pages; push changes to open pages."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from agentrl.base.concurrency import end_tasks
from agentrl.config.run import EngineListConfig
from agentrl.config.schema import RunConfig
from agentrl.errors import AgentRLError
from agentrl.llm.agent_config import read_prices
from agentrl.screens.dashboard.render import THEME_COOKIE
from agentrl.screens.snapshot import Cache, SnapshotReader
from agentrl.store.client import Store, open_existing
from agentrl.store.mechanics.change_stream import WATCHED
from agentrl.store.mechanics.connection import Connection
from agentrl.store.run_list import Runs, RunSummary, connect_server

Page = Callable[[Request], Coroutine[Any, Any, Response]]

_SHARED_SECONDS = 1.0
_SPARK_STEPS = 48
"""Steps in the small curve of each run."""
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
            idle = [key for key, each in self._opened.items() if not each.users]
            for key in idle[: max(0, len(self._opened) - MAX_OPEN)]:
                await _close(self._opened.pop(key))

    async def forget(self, name: str) -> None:
        """Open run ``name`` anew at the next request: it was renamed or deleted."""
        opened = self._opened.pop(name, None)
        if opened is not None and not opened.users:
            await _close(opened)

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
    return SnapshotReader(store, cache_of(request), read_prices(pool_of(request).run.prices))


async def read_runs(request: Request, seconds: float) -> list[RunSummary]:
    """Return every run of the server, read anew if it was read more than ``seconds`` ago."""

    async def read() -> list[RunSummary]:
        server = await pool_of(request).server()
        return await Runs(server).all(EngineListConfig().alive_seconds, _SPARK_STEPS)

    return await cache_of(request).get("runs", seconds, read)


def shared(page: Page) -> Page:
    """Decorate a page: requests for the same address within a second get the same response.

    A thousand open pages of a run ask again at every change of it.
    """

    @functools.wraps(page)
    async def answer(request: Request) -> Response:
        key = ("page", request.url.path, request.url.query, request.cookies.get(THEME_COOKIE))
        response = await cache_of(request).get(key, _SHARED_SECONDS, lambda: page(request))
        return Response(response.body, response.status_code, media_type="text/html")

    return answer


logger = logging.getLogger(__name__)

MAX_CLIENTS = 2000
"""Open pages that receive changes; pages beyond the limit ask again every few seconds."""
_REST_SECONDS = 1.0
"""Shortest time between two events."""
_TICK_SECONDS = 15.0
"""An event comes this often without a change: heartbeats change no watched collection, and proxies close
silent connections."""
_RETRY_SECONDS = 2.0


@dataclass(slots=True, eq=False)
class _Feed:
    """The clients of one run, and the task that follows it."""

    clients: set[asyncio.Queue[str]] = field(default_factory=set)
    follower: asyncio.Task[None] | None = None


# one change stream a run, whatever the number of pages: a stream a page would take a connection each
class LiveUpdates:
    """Sends an event to the open pages of a run when it changes; a run without open pages is not followed."""

    def __init__(self, stores: StorePool) -> None:
        self._stores = stores
        self._feeds: dict[str, _Feed] = {}
        self._closing = asyncio.Event()

    @property
    def clients(self) -> int:
        """The number of open connections."""
        return sum(len(feed.clients) for feed in self._feeds.values())

    async def events(self, run: str) -> AsyncGenerator[str, None]:
        """Yield server-sent events until the client goes or the server stops."""
        feed = self._feeds.setdefault(run, _Feed())
        queue: asyncio.Queue[str] = asyncio.Queue(maxsize=1)
        feed.clients.add(queue)
        if feed.follower is None:
            feed.follower = asyncio.create_task(self._follow(run, feed), name=f"dashboard-{run}")
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            yield "retry: 2000\n\n"
            while not self._closing.is_set():
                getting = asyncio.ensure_future(queue.get())
                try:
                    await asyncio.wait({getting, closing}, return_when=asyncio.FIRST_COMPLETED)
                    if getting.done():
                        yield f"event: {getting.result()}\ndata: {run}\n\n"
                finally:
                    getting.cancel()
        finally:
            closing.cancel()
            feed.clients.discard(queue)
            if not feed.clients and feed.follower is not None:
                feed.follower.cancel()
                self._feeds.pop(run, None)

    def stop(self) -> None:
        """End every stream, so that the server can stop."""
        self._closing.set()

    async def close(self) -> None:
        """End every stream and stop following."""
        self.stop()
        feeds = self._feeds.values()
        await end_tasks(*(feed.follower for feed in feeds if feed.follower is not None))

    async def _follow(self, run: str, feed: _Feed) -> None:
        while True:
            try:
                async with self._stores.open(run) as store:
                    await self._push_changes(store, feed)
            except AgentRLError:
                pass
            except Exception:
                logger.exception("the changes of a run cannot be followed", extra={"run": run})
            _send(feed, "away")
            await asyncio.sleep(_RETRY_SECONDS)

    async def _push_changes(self, store: Store, feed: _Feed) -> None:
        while True:
            changed = await store.wait_for_change(*WATCHED, timeout=_TICK_SECONDS)
            if store.seconds_since_outage == 0.0:
                _send(feed, "away")
            else:
                _send(feed, "change" if changed else "tick")
            await asyncio.sleep(_REST_SECONDS)


def _send(feed: _Feed, event: str) -> None:
    """Give every client the event; a client that has not read the last one gets only the newest."""
    for queue in feed.clients:
        with contextlib.suppress(asyncio.QueueEmpty):
            queue.get_nowait()
        queue.put_nowait(event)


async def _events(request: Request) -> Response:
    updates: LiveUpdates = request.app.state.updates
    if updates.clients >= MAX_CLIENTS:
        return PlainTextResponse(
            f"This dashboard has {MAX_CLIENTS} open pages already; this one polls.\n",
            HTTPStatus.SERVICE_UNAVAILABLE,
            {"Retry-After": "60"},
        )
    run = request.path_params["run"]
    async with request.app.state.stores.open(run):
        pass  # an unknown run is a 404 instead of a stream without events
    return StreamingResponse(updates.events(run), media_type="text/event-stream")


routes = [Route("/runs/{run}/events", _events)]
