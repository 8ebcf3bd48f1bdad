"""Keep an engine registered at an sglang-router in front of the engines (``--router_url``)."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from agentrl.errors import EngineError
from agentrl.inference.engine import known_format
from agentrl.inference.http import EngineHttp

log = logging.getLogger(__name__)

CHECK_SECONDS = 10.0
"""Time between two looks whether the router still knows the engine."""
_LEAVE_SECONDS = 5.0


class FrontRouter:
    """The workers of one sglang-router (``/workers``)."""

    def __init__(self, url: str) -> None:
        self._http = EngineHttp(url)

    async def keep(self, worker_url: str) -> None:
        """Register ``worker_url``, and again whenever the router has lost it; run until cancelled."""
        failed = False
        while True:
            try:
                if await self._worker_id(worker_url) is None:
                    await self._http.respond("POST", "/workers", {"url": worker_url}, statuses=(200, 202))
                    log.info("registered at the router %s", self._http.url)
                failed = False
            except EngineError as error:
                if not failed:
                    log.warning("not registered at the router: %s; trying again", error.message)
                failed = True
            await asyncio.sleep(CHECK_SECONDS)

    async def leave(self, worker_url: str) -> None:
        """Remove ``worker_url`` from the router, so that it sends no more calls; then close."""
        with contextlib.suppress(EngineError, TimeoutError):  # the router's health check removes it later
            async with asyncio.timeout(_LEAVE_SECONDS):
                worker = await self._worker_id(worker_url)
                if worker is not None:
                    await self._http.respond("DELETE", f"/workers/{worker}", statuses=(200, 202))
        await self._http.close()

    async def _worker_id(self, worker_url: str) -> str | None:
        """Return the id of the worker at ``worker_url``; None if the router has none."""
        answer = await self._http.call("GET", "/workers")
        with known_format(f"{self._http.url}/workers", answer):
            return next((str(w["id"]) for w in answer.get("workers", []) if w["url"] == worker_url), None)
