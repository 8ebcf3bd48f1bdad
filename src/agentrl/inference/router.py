"""Route model calls: each trajectory goes to the least loaded engine, and to another one if it fails."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from agentrl.documents.model_call import VersionSpan
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.serving import InferenceService
from agentrl.documents.status import ServiceStatus
from agentrl.errors import ENGINES, EngineError
from agentrl.inference.client import EngineRefusedError, FinishReason, Generation
from agentrl.inference.engines.clients import engine_client
from agentrl.store.retry import log_store_errors

log = logging.getLogger(__name__)

LiveEngines = Callable[[], Awaitable[Sequence[InferenceService]]]

_USABLE = (ServiceStatus.READY, ServiceStatus.UPDATING)
_LOG_SECONDS = 30.0


class Client(Protocol):
    """The part of an engine client that the router needs."""

    async def generate(self, input_ids: Sequence[int], params: SamplingParams, rid: str) -> Generation:
        """Sample a continuation of ``input_ids``."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


class Tokens(Protocol):
    """The part of a chat format with which the router detects the end of a generation."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Return the ids that end a generation."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``."""
        ...


class EngineRouter:
    """Distributes trajectories over the live engines; their generations survive pauses and failures."""

    def __init__(
        self,
        live: LiveEngines,
        *,
        request_timeout: float = 600.0,
        wait_seconds: float = 300.0,
        vocab_size: int | None = None,
        max_age: float = 1.0,
        backoff: float = 0.5,
        suspect_seconds: float = 5.0,
        client: Callable[[InferenceService], Client] | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        """Create a router over the engines that ``live`` lists; the list is cached for ``max_age`` seconds.

        ``tokens`` has the end-of-sequence ids, and decodes text to find stop strings; without it an aborted
        generation is complete only at ``stop_token_ids``.

        A generation fails if it receives no new token for ``wait_seconds``, because there is no engine or
        the engines fail. A failed engine is avoided for ``suspect_seconds``.
        """
        self._live = live
        self._wait_seconds = wait_seconds
        self._max_age = max_age
        self._backoff = backoff
        self._suspect_seconds = suspect_seconds
        self._new_client = client or (
            lambda service: engine_client(
                service.engine,
                service.url,
                request_timeout,
                vocab_size=vocab_size,
                instance=service.instance,
            )
        )
        self._tokens = tokens
        self._clients: dict[str, Client] = {}
        self._services: tuple[InferenceService, ...] = ()
        self._refreshed_at = float("-inf")
        self._refresh_lock = asyncio.Lock()
        self._refresh_task: asyncio.Task[None] | None = None
        self._sessions: Counter[str] = Counter()
        self._avoided_until: dict[str, float] = {}
        self._logged_at = float("-inf")

    @asynccontextmanager
    async def session(self, traj_id: str) -> AsyncIterator[EngineSession]:
        """Open a session whose model calls go to one engine, so that its prefix cache is used."""
        session = EngineSession(self, traj_id)
        try:
            yield session
        finally:
            self._assign(session, None)

    def policy_versions(self) -> frozenset[int]:
        """Return the policy versions that usable engines serve; empty while none is known.

        It returns at once, from the cached list of engines, and starts a refresh if the list is too old.
        """
        if time.monotonic() - self._refreshed_at >= self._max_age and (
            self._refresh_task is None or self._refresh_task.done()
        ):
            self._refresh_task = asyncio.get_running_loop().create_task(self._refresh_quietly())
        return frozenset(s.policy_version for s in self._usable() if s.policy_version is not None)

    async def close(self) -> None:
        """Close every engine's connections."""
        if self._refresh_task is not None:
            self._refresh_task.cancel()
        clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            await client.close()

    async def _pick(self, session: EngineSession, deadline: float) -> Client:
        """Return the session's engine, else the least loaded one; EngineError after ``deadline``."""
        while True:
            await self._refresh()
            urls = {service.url: service for service in self._usable()}
            if session.url not in urls:
                chosen = min(urls.values(), key=self._load, default=None)
                self._assign(session, chosen.url if chosen else None)
            if session.url is not None:
                return self._client(urls[session.url])
            await self._wait(f"{session.traj_id} is waiting for a live engine", deadline)

    async def _refresh_quietly(self) -> None:
        with log_store_errors(log, "the engines cannot be listed", outages=True):
            await self._refresh()

    async def _refresh(self) -> None:
        async with self._refresh_lock:
            if time.monotonic() - self._refreshed_at < self._max_age:
                return
            self._services = tuple(await self._live())
            self._refreshed_at = time.monotonic()

    def _usable(self) -> list[InferenceService]:
        now = time.monotonic()
        return [
            s for s in self._services if s.status in _USABLE and self._avoided_until.get(s.url, 0.0) <= now
        ]

    def _load(self, service: InferenceService) -> tuple[bool, int, str]:
        load = max(service.running_requests, self._sessions[service.url])
        return service.status is not ServiceStatus.READY, load, service.url

    def _assign(self, session: EngineSession, url: str | None) -> None:
        if session.url is not None:
            self._sessions[session.url] -= 1
        if url is not None:
            self._sessions[url] += 1
        session.url = url

    def _client(self, service: InferenceService) -> Client:
        if service.id not in self._clients:
            self._clients[service.id] = self._new_client(service)
        return self._clients[service.id]

    def _avoid(self, session: EngineSession) -> None:
        if session.url is not None:
            self._avoided_until[session.url] = time.monotonic() + self._suspect_seconds
        self._assign(session, None)

    async def _wait(self, why: str, deadline: float, attempt: int = 1) -> None:
        """Sleep before the next attempt, with exponential backoff; EngineError at ``deadline``."""
        now = time.monotonic()
        if now >= deadline:
            raise EngineError(
                f"{why}: no new token for {self._wait_seconds:g} s (--engine_wait_seconds)",
                hint="start an engine: agentrl serve --run_name … --model_name_or_path …",
                outage=ENGINES,
            )
        if now - self._logged_at >= _LOG_SECONDS:
            self._logged_at = now
            log.warning("%s; waiting up to %.0f s more", why, deadline - now)
        await asyncio.sleep(min(self._backoff * 2 ** min(attempt - 1, 4), max(deadline - now, 0.0)))


class EngineSession:
    """The model calls of one trajectory; created by ``EngineRouter.session``."""

    def __init__(self, router: EngineRouter, traj_id: str) -> None:
        self.traj_id = traj_id
        self.url: str | None = None
        self._router = router

    async def generate(self, input_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Return one complete generation, resumed as often as engines abort it or fail.

        An aborted generation continues from its tokens so far, on the same or another engine, unless they
        already end at a stop: an engine may report the abort instead of the stop. After a failure it
        continues from the last tokens received. Penalties then count only the tokens of the last part.
        Raises EngineError if an engine refuses the request, or if no token arrives for ``wait_seconds``.
        """
        router = self._router
        parts: list[Generation] = []
        done: list[int] = []
        start = time.monotonic()
        deadline = start + router._wait_seconds
        failures = 0
        while True:
            client = await router._pick(self, deadline)
            rid = f"{uuid.uuid4().hex}-{self.traj_id}"
            try:
                part = await client.generate([*input_ids, *done], _remaining(params, len(done)), rid)
            except EngineRefusedError:
                raise
            except EngineError as error:
                log.warning("%s: %s", self.traj_id, error.message)
                router._avoid(self)
                failures += 1
                await router._wait(f"{self.traj_id}: {error.message}", deadline, failures)
                continue
            parts.append(part)
            done.extend(part.output_ids)
            reason = _reason(part, done, params, router._tokens)
            if reason != "abort":
                return _joined(parts, reason, len(input_ids), time.monotonic() - start)
            if part.output_ids:
                deadline, failures = time.monotonic() + router._wait_seconds, 0
            failures += 1
            await router._wait(f"{self.traj_id} was aborted by {self.url}", deadline, failures)


def _reason(
    part: Generation, done: Sequence[int], params: SamplingParams, tokens: Tokens | None
) -> FinishReason:
    """Return the finish reason after ``part``; ``abort`` if the generation has to be resumed."""
    if part.finish_reason != "abort":
        return part.finish_reason
    if part.output_ids and _stops(done, params, tokens):
        return "stop"
    return "length" if len(done) >= params.max_new_tokens else "abort"


def _stops(done: Sequence[int], params: SamplingParams, tokens: Tokens | None) -> bool:
    """Return whether the ids ``done`` end in a stop token or contain a stop string, by SGLang's rules.

    Stop tokens do not count with ``ignore_eos``. A string of ``stop`` and a match of ``stop_regex`` count at
    any position, because a generation ends at the first one.
    """
    extra = params.extra
    own = tokens.stop_ids if tokens is not None else frozenset()
    if not extra.get("ignore_eos") and done[-1] in own.union(params.stop_token_ids):
        return True
    patterns = [*map(re.escape, _strings(extra.get("stop"))), *_strings(extra.get("stop_regex"))]
    if not patterns or tokens is None:
        return False
    text = tokens.decode(done)
    return any(re.search(pattern, text) for pattern in patterns)


def _strings(value: Any) -> list[str]:
    """Return a parameter that is a string, or a list of strings, as a list."""
    return [value] if isinstance(value, str) else list(value or ())


def _remaining(params: SamplingParams, done: int) -> SamplingParams:
    """Return the parameters for the rest of a generation after ``done`` tokens; advance its seed."""
    if not done:
        return params
    extra = dict(params.extra)
    if "sampling_seed" in extra:
        extra["sampling_seed"] += done
    return params.replace(max_new_tokens=params.max_new_tokens - done, extra=extra)


def _joined(
    parts: Sequence[Generation], reason: FinishReason, prompt_tokens: int, seconds: float
) -> Generation:
    """Concatenate the consecutive parts of one generation."""
    spans: list[VersionSpan] = []
    offset = 0
    for part in parts:
        for span in part.versions:
            start = offset + span.start
            if spans and spans[-1].version == span.version:
                start = spans.pop().start
            spans.append(VersionSpan(version=span.version, start=start, end=offset + span.end))
        offset += len(part.output_ids)
    kinds = {part.logprobs_of for part in parts if part.output_ids} or {parts[-1].logprobs_of}
    return Generation(
        output_ids=tuple(token for part in parts for token in part.output_ids),
        logprobs=tuple(logprob for part in parts for logprob in part.logprobs),
        versions=tuple(spans),
        finish_reason=reason,
        prompt_tokens=prompt_tokens,
        cached_tokens=parts[0].cached_tokens,
        seconds=seconds,
        engine_url=parts[-1].engine_url,
        logprobs_of=kinds.pop() if len(kinds) == 1 else "other",
    )
