"""Push changes of a run to open pages: server-sent events, fed by one change stream per run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from agentrl.dashboard.stores import StorePool
from agentrl.errors import AgentRLError
from agentrl.store.client import Store
from agentrl.store.mechanics.change_stream import WATCHED

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
        followers = [feed.follower for feed in self._feeds.values() if feed.follower is not None]
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)

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
