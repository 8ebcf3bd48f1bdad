"""Choose an engine for each trajectory: the one with the fewest tokens in flight; it keeps its engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext

from agentrl.chat.chat_format import ChatFormat
from agentrl.concurrency import end_tasks
from agentrl.documents.model_call import PartialGeneration
from agentrl.documents.routing import ExpertShape
from agentrl.documents.run import InferenceService
from agentrl.documents.status import ServiceStatus
from agentrl.errors import ENGINES, EngineError
from agentrl.inference.client import EngineClient
from agentrl.inference.engine import Held, adapter_version
from agentrl.inference.engines.clients import engine_client
from agentrl.inference.session import EngineSession
from agentrl.rollout.outages import Outages
from agentrl.store.mechanics.retry import log_store_errors

log = logging.getLogger(__name__)

LiveEngines = Callable[[], Awaitable[Sequence[InferenceService]]]

_USABLE = (ServiceStatus.READY, ServiceStatus.UPDATING)
_LOG_SECONDS = 30.0
_MOST_AGES = 3
"""Multiple of ``max_age`` up to which a model call does not wait for a refresh of the list of engines."""
_VERSIONS_AGE = 0.25
"""Fraction of ``max_age`` after which the versions that engines serve are read anew: work waits for it."""
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
        """Create a router over the engines that ``live`` lists; the list is cached for ``max_age`` seconds.
        A model call does not wait for a newer list until it is three times as old.

        ``tokens`` has the end-of-sequence ids, and decodes text to find stop strings; without it an aborted
        generation is complete only at ``stop_token_ids``. An engine with another ``tokenizer`` (its
        fingerprint) gets no calls. ``max_model_len`` limits the context below that of the engines.

        A generation fails if it receives no new token for ``wait_seconds``, because there is no engine or
        the engines fail. A failed engine is avoided for ``suspect_seconds``.

        With ``router_url`` all calls go there, to a router with SGLang's API that chooses the engine; none
        goes there while one of the engines has another tokenizer. ``outages`` is told whether any engine
        generates. With ``experts``, the shape of a mixture, its routing is asked for.
        """
        self.tokens = tokens
        self.wait_seconds = wait_seconds
        self._live = live
        self._max_age = max_age
        self._backoff = backoff
        self._suspect_seconds = suspect_seconds
        self._new_client = client or (
            lambda service: engine_client(
                service.engine,
                service.url,
                token_timeout,
                vocab_size=vocab_size,
                instance=service.instance,
                experts=experts,
            )
        )
        self._front: EngineClient | None = None
        if router_url is not None:
            self._front = engine_client(
                "sglang", router_url, token_timeout, vocab_size=vocab_size, experts=experts
            )
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._outages = outages
        self._clients: dict[str, EngineClient] = {}
        self._services: tuple[InferenceService, ...] = ()
        self._context_length = max_model_len or None
        self._foreign: dict[str, str] = {}
        """Id of an engine with another tokenizer → why it gets no calls."""
        self._had_engine = False
        """Whether an engine has been usable since this process began."""
        self._lent_at = float("-inf")
        """When the trainer was last seen to have the devices of all engines; limits count from then."""
        self._refreshed_at = float("-inf")
        self._refresh_lock = asyncio.Lock()
        self._refresh_task: asyncio.Task[None] | None = None
        self._sessions: set[EngineSession] = set()
        self._groups: dict[str, set[str]] = {}
        """Group → engines that have its prompt in the cache."""
        self._avoided_until: dict[str, float] = {}
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
        await self.refresh()
        session = EngineSession(self, traj_id, group, partial, held)
        try:
            yield session
        finally:
            self.assign(session, None)

    @property
    def context_length(self) -> int | None:
        """Return the largest number of tokens of a prompt and its continuation; None if it is unknown."""
        return self._context_length

    def policy_versions(self) -> frozenset[int]:
        """Return the policy versions that usable and lent engines serve; empty while none is known.

        It returns at once, from the cached list of engines, and starts a refresh if the list is too old.
        """
        self._start_refresh(_VERSIONS_AGE * self._max_age)
        engines = (*self._usable(), *self._lent())
        return frozenset(s.policy_version for s in engines if s.policy_version is not None)

    async def close(self) -> None:
        """Close every engine's connections."""
        if self._refresh_task is not None:
            await end_tasks(self._refresh_task)
        clients, self._clients = list(self._clients.values()), {}
        for client in (*clients, *([self._front] if self._front is not None else [])):
            await client.close()

    async def refresh(self, max_age: float | None = None) -> None:
        """Read the list of engines, unless it is newer than ``max_age``; None: that of the router."""
        async with self._refresh_lock:
            if time.monotonic() - self._refreshed_at < (self._max_age if max_age is None else max_age):
                return
            self._services = tuple(await self._live())
            lengths = (self._max_model_len, *(service.context_length for service in self._services))
            self._context_length = min(filter(None, lengths), default=None)
            self._foreign = {
                service.id: self._why_foreign(service)
                for service in self._services
                if None not in (service.tokenizer, self._tokenizer) and service.tokenizer != self._tokenizer
            }
            self._had_engine = self._had_engine or bool(self._usable())
            adapters = [service.adapter for service in self._usable() if service.adapter is not None]
            if self._front is not None and adapters:  # the oldest, which every engine still has
                self._front.adapter = min(adapters, key=adapter_version)
            if self._is_lent():
                self._lent_at = time.monotonic()
            self._refreshed_at = time.monotonic()

    async def pick(self, session: EngineSession, tokens: int, deadline: float) -> EngineClient:
        """Return the session's engine, else the least loaded one; EngineError after ``deadline``.

        ``tokens`` is the length of the prompt that the engine will get. Waits without limit while the trainer
        has the devices of all engines.
        """
        while True:
            if not self._refresh_in_background():
                await self.refresh()
            if self._is_lent():
                with session.held():
                    while self._is_lent():
                        await asyncio.sleep(self._backoff)
                        await self.refresh()
            if self._front is not None and not self._foreign:
                return self._front
            if self._front is not None:  # it may pass the call to any engine
                await self.wait(self._no_engine(session), deadline)
                continue
            urls = {service.url: service for service in self._usable()}
            if session.url not in urls:
                in_flight = self._tokens_in_flight()
                chosen = min(
                    urls.values(), key=lambda item: self._cost(item, in_flight, session, tokens), default=None
                )
                self.assign(session, chosen.url if chosen else None)
            if session.url is not None:
                session.tokens = max(session.tokens, tokens)
                return self._client(urls[session.url])
            await self.wait(self._no_engine(session), deadline)

    def assign(self, session: EngineSession, url: str | None) -> None:
        """Move the session to the engine at ``url``; None detaches it."""
        self._sessions.discard(session)
        session.url = url
        if url is not None:
            self._sessions.add(session)
            if session.group is not None:
                self._groups.setdefault(session.group, set()).add(url)
                while len(self._groups) > _GROUPS_KEPT:
                    self._groups.pop(next(iter(self._groups)))

    def avoid(self, session: EngineSession) -> None:
        """Detach the session from its engine, which failed and gets no session for a while."""
        if session.url is not None:
            self._avoided_until[session.url] = time.monotonic() + self._suspect_seconds
            for engines in self._groups.values():
                engines.discard(session.url)
        self.assign(session, None)

    async def wait(self, why: str, deadline: float, attempt: int = 1) -> None:
        """Sleep before the next attempt, with exponential backoff; EngineError at ``deadline``."""
        now = time.monotonic()
        deadline = max(deadline, self._lent_at + self.wait_seconds)
        is_down = bool(attempt > 1 or self._foreign) if self._front is not None else not self._usable()
        is_down = is_down and not self._is_lent()
        is_first = is_down and not (self._had_engine or self._foreign or self._front is not None)
        if self._outages is not None and is_first:
            self._outages.breaker(ENGINES).not_up_yet()
        elif self._outages is not None and is_down:
            self._outages.breaker(ENGINES).failed(why)
        if now >= deadline:
            raise EngineError(
                f"{why}: no new token for {self.wait_seconds:g} s (--engine_wait_seconds)",
                hint=_FOREIGN_HINT if self._foreign and is_down else _NONE_HINT,
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

    def _refresh_in_background(self) -> bool:
        """Return whether the list of engines is new enough for a model call; start a refresh if it is due."""
        age = time.monotonic() - self._refreshed_at
        if age >= _MOST_AGES * self._max_age or not self._usable():
            return False
        self._start_refresh(self._max_age)
        return True

    def _start_refresh(self, max_age: float) -> None:
        """Start a refresh if the list of engines is older than ``max_age`` and none runs."""
        is_running = self._refresh_task is not None and not self._refresh_task.done()
        if time.monotonic() - self._refreshed_at >= max_age and not is_running:
            self._refresh_task = asyncio.get_running_loop().create_task(self._refresh_quietly(max_age))

    async def _refresh_quietly(self, max_age: float) -> None:
        with log_store_errors(log, "the engines cannot be listed", outages=True):
            await self.refresh(max_age)

    def _usable(self) -> list[InferenceService]:
        now = time.monotonic()
        return [
            s
            for s in self._services
            if s.status in _USABLE
            and self._avoided_until.get(s.url, 0.0) <= now
            and s.id not in self._foreign
        ]

    def _lent(self) -> list[InferenceService]:
        """Return the engines whose device the trainer has."""
        return [s for s in self._services if s.status is ServiceStatus.LENT and s.id not in self._foreign]

    def _is_lent(self) -> bool:
        """Return whether the trainer has the devices of all engines."""
        return not self._usable() and bool(self._lent())

    def _why_foreign(self, service: InferenceService) -> str:
        why = (
            f"engine {service.url} serves {service.model} with another tokenizer ({service.tokenizer}) than"
            f" this sampler ({self._tokenizer}); it gets no calls"
        )
        if service.id not in self._foreign:
            log.error(why)
        return why

    def _no_engine(self, session: EngineSession) -> str:
        return "; ".join([f"{session.traj_id} is waiting for a live engine", *self._foreign.values()])

    def _tokens_in_flight(self) -> Counter[str]:
        """Return the tokens in the contexts of this process's trajectories, by engine."""
        tokens: Counter[str] = Counter()
        for session in self._sessions:
            if session.url is not None:
                tokens[session.url] += session.tokens
        return tokens

    def _cost(
        self, service: InferenceService, in_flight: Counter[str], session: EngineSession, tokens: int
    ) -> tuple[bool, int, int, str]:
        cached = session.group is not None and service.url in self._groups.get(session.group, ())
        load = max(service.running_tokens, in_flight[service.url]) + (0 if cached else tokens)
        return service.status is not ServiceStatus.READY, load, service.running_requests, service.url

    def _client(self, service: InferenceService) -> EngineClient:
        if service.id not in self._clients:
            self._clients[service.id] = self._new_client(service)
        client = self._clients[service.id]
        client.adapter = service.adapter
        return client
