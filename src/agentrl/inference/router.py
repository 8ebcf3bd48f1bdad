"""Choose an engine for each trajectory: the one with the fewest tokens in flight; it keeps its engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from functools import partial

from agentrl.chat.chat_format import ChatFormat
from agentrl.documents.model_call import PartialGeneration
from agentrl.documents.routing import ExpertShape
from agentrl.documents.run import InferenceService
from agentrl.documents.status import ServiceStatus
from agentrl.errors import ENGINES, EngineError
from agentrl.inference.client import EngineClient
from agentrl.inference.engine import Held
from agentrl.inference.engine_list import EngineList, LiveEngines
from agentrl.inference.engines.clients import engine_client
from agentrl.inference.session import EngineSession
from agentrl.rollout.outages import Outages

log = logging.getLogger(__name__)

_LOG_SECONDS = 30.0
_NONE_HINT = "start an engine: agentrl serve --run_name … --model_name_or_path …"
_FOREIGN_HINT = (
    "give `agentrl serve` and `agentrl sample` the same --model_name_or_path, or folders with the same"
    " tokenizer.json"
)
_GROUPS_KEPT = 4096
"""Groups whose engines are remembered; an engine's cache holds fewer."""


class EngineRouter:
    """Distributes trajectories over the live engines; their generations survive pauses and failures.

    A trajectory stays at its engine, which has its prefix in the cache. A new one goes where the fewest
    tokens are in flight. Its prompt counts too, unless a trajectory of its group has sent the same prompt to
    that engine before: so a group shares an engine, as long as that engine's lead in tokens is smaller than
    the prompt.
    """

    def __init__(
        self,
        live: LiveEngines,
        *,
        token_timeout: float = 120.0,
        wait_seconds: float = 300.0,
        vocab_size: int | None = None,
        max_age: float = 1.0,
        backoff: float = 0.5,
        suspect_seconds: float = 5.0,
        client: Callable[[InferenceService], EngineClient] | None = None,
        tokens: ChatFormat | None = None,
        tokenizer: str | None = None,
        max_model_len: int | None = None,
        router_url: str | None = None,
        outages: Outages | None = None,
        experts: ExpertShape | None = None,
    ) -> None:
        """Create a router over the engines of ``EngineList(live, …)``.

        ``tokens`` has the end-of-sequence ids, and decodes text to find stop strings; without it an aborted
        generation is complete only at ``stop_token_ids``.

        A generation fails if it receives no new token for ``wait_seconds``, because there is no engine or
        the engines fail. A failed engine is avoided for ``suspect_seconds``.

        With ``router_url`` all calls go there, to a router with SGLang's API that chooses the engine; none
        goes there while one of the engines has another tokenizer. ``outages`` is told whether any engine
        generates. With ``experts``, the shape of a mixture, its routing is asked for.
        """
        self.engines = EngineList(live, max_age=max_age, tokenizer=tokenizer, max_model_len=max_model_len)
        self.tokens = tokens
        self.wait_seconds = wait_seconds
        self._backoff = backoff
        self._suspect_seconds = suspect_seconds
        self._outages = outages
        connect = partial(engine_client, timeout=token_timeout, vocab_size=vocab_size, experts=experts)
        self._new_client = client or (lambda each: connect(each.engine, each.url, instance=each.instance))
        self._clients: dict[str, EngineClient] = {}
        self._front = None if router_url is None else connect("sglang", router_url)
        self._sessions: set[EngineSession] = set()
        self._groups: dict[str, set[str]] = {}
        """Group → engines that have its prompt in the cache."""
        self._logged_at = float("-inf")

    @asynccontextmanager
    async def session(
        self,
        traj_id: str,
        group: str | None = None,
        partial: PartialGeneration | None = None,
        held: Held = nullcontext,
    ) -> AsyncIterator[EngineSession]:
        """Open a session, whose calls go to one engine; ``group`` names the trajectories of one prompt.

        The first call with the prompt of ``partial`` resumes it. Calls wait in a block of ``held`` while the
        trainer has the devices of all engines.
        """
        await self.engines.refresh()
        session = EngineSession(self, traj_id, group, partial, held)
        try:
            yield session
        finally:
            self._assign(session, None)

    async def close(self) -> None:
        """Close every engine's connections."""
        await self.engines.close()
        clients, self._clients = list(self._clients.values()), {}
        for client in (*clients, *([self._front] if self._front is not None else [])):
            await client.close()

    async def pick(self, session: EngineSession, tokens: int, deadline: float) -> EngineClient:
        """Return the session's engine, else the least loaded one; EngineError after ``deadline``.

        ``tokens`` is the length of the prompt that the engine will get. Waits without limit while the trainer
        has the devices of all engines.
        """
        while True:
            await self.engines.fresh_for_call()
            if self.engines.is_lent():
                with session.held():
                    while self.engines.is_lent():
                        await asyncio.sleep(self._backoff)
                        await self.engines.refresh()
            front = self._front
            client = self._choose(session, tokens) if front is None else self._through(front)
            if client is not None:
                return client
            why = f"{session.traj_id} is waiting for a live engine"
            await self.wait("; ".join([why, *self.engines.foreign.values()]), deadline)

    def avoid(self, session: EngineSession) -> None:
        """Detach the session from its engine, which failed and gets no session for a while."""
        if session.url is not None:
            self.engines.avoid(session.url, self._suspect_seconds)
            for engines in self._groups.values():
                engines.discard(session.url)
        self._assign(session, None)

    async def wait(self, why: str, deadline: float, attempt: int = 1) -> None:
        """Sleep before the next attempt, with exponential backoff; EngineError at ``deadline``."""
        now, engines = time.monotonic(), self.engines
        deadline = max(deadline, engines.lent_at + self.wait_seconds)
        is_down = bool(attempt > 1 or engines.foreign) if self._front is not None else not engines.usable()
        is_down = is_down and not engines.is_lent()
        is_first = is_down and not (engines.had_engine or engines.foreign or self._front is not None)
        if self._outages is not None and is_first:
            self._outages.breaker(ENGINES).not_up_yet()
        elif self._outages is not None and is_down:
            self._outages.breaker(ENGINES).failed(why)
        if now >= deadline:
            raise EngineError(
                f"{why}: no new token for {self.wait_seconds:g} s (--engine_wait_seconds)",
                hint=_FOREIGN_HINT if engines.foreign and is_down else _NONE_HINT,
                outage=ENGINES,
            )
        if is_first and self._logged_at == float("-inf"):
            log.info("waiting up to %.0f s for the first engine (--engine_wait_seconds)", deadline - now)
            self._logged_at = now
        elif not is_first and now - self._logged_at >= _LOG_SECONDS:
            self._logged_at = now
            log.warning("%s; waiting up to %.0f s more", why, deadline - now)
        await asyncio.sleep(min(self._backoff * 2 ** min(attempt - 1, 4), max(deadline - now, 0.0)))

    def generated(self) -> None:
        """Record that an engine has generated."""
        if self._outages is not None:
            self._outages.breaker(ENGINES).succeeded()

    def _through(self, front: EngineClient) -> EngineClient | None:
        """Return ``front`` for a call to any engine behind it; None while one has another tokenizer."""
        front.adapter = self.engines.oldest_adapter
        return None if self.engines.foreign else front

    def _choose(self, session: EngineSession, tokens: int) -> EngineClient | None:
        """Return the client of the session's engine, else of the least loaded one; None without any."""
        urls = {service.url: service for service in self.engines.usable()}
        if session.url not in urls:
            in_flight: Counter[str | None] = Counter()
            for other in self._sessions:
                in_flight[other.url] += other.tokens

            def cost(service: InferenceService) -> tuple[bool, int, int, str]:
                cached = session.group is not None and service.url in self._groups.get(session.group, ())
                load = max(service.running_tokens, in_flight[service.url]) + (0 if cached else tokens)
                return service.status is not ServiceStatus.READY, load, service.running_requests, service.url

            chosen = min(urls.values(), key=cost, default=None)
            self._assign(session, chosen.url if chosen else None)
        if session.url is None:
            return None
        session.tokens = max(session.tokens, tokens)
        service = urls[session.url]
        if service.id not in self._clients:
            self._clients[service.id] = self._new_client(service)
        client = self._clients[service.id]
        client.adapter = service.adapter
        return client

    def _assign(self, session: EngineSession, url: str | None) -> None:
        """Move the session to the engine at ``url``; None detaches it."""
        self._sessions.discard(session)
        session.url = url
        if url is not None:
            self._sessions.add(session)
            if session.group is not None:
                self._groups.setdefault(session.group, set()).add(url)
                while len(self._groups) > _GROUPS_KEPT:
                    self._groups.pop(next(iter(self._groups)))
