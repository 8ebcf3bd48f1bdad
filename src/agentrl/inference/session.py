"""Make the model calls of a trajectory: choose an engine; survive aborts, pauses and engines that die."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from agentrl.base.concurrency import Backoff, end_tasks
from agentrl.chat.chat_format import ChatFormat
from agentrl.documents.images import Image
from agentrl.documents.model_call import (
    ExpertShape,
    PartialGeneration,
    SamplingMask,
    VersionSpan,
    append_span,
    pack_floats,
    pack_ids,
    prompt_digest,
    routed_tokens,
    unpack_floats,
    unpack_ids,
)
from agentrl.documents.run import InferenceService
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import ServiceStatus
from agentrl.errors import ENGINES, ContextFullError, EngineError
from agentrl.inference.client import EngineClient
from agentrl.inference.engine import (
    EncodedIds,
    EngineInterruptedError,
    EngineRefusedError,
    FinishReason,
    Generation,
    Held,
    Progress,
    adapter_version,
)
from agentrl.inference.engines.clients import engine_client
from agentrl.store.mechanics.retry import log_store_errors

if TYPE_CHECKING:
    from agentrl.columns.outages import Outages

log = logging.getLogger(__name__)

LiveEngines = Callable[[], Awaitable[Sequence[InferenceService]]]

_USABLE = (ServiceStatus.READY, ServiceStatus.UPDATING)
_MOST_AGES = 3
"""Multiple of ``max_age`` up to which a model call does not wait for a refresh of the list."""
_VERSIONS_AGE = 0.25
"""Fraction of ``max_age`` after which the versions that engines serve are read anew: work waits for it."""


class EngineList:
    """The engines that ``live`` returned last."""

    def __init__(
        self,
        live: LiveEngines,
        *,
        max_age: float = 1.0,
        tokenizer: str | None = None,
        max_model_len: int | None = None,
    ) -> None:
        """Cache the list for ``max_age`` seconds.

        A model call does not wait for a newer one until it is three times as old. An engine with another
        ``tokenizer`` (its fingerprint) takes no calls. ``max_model_len`` limits the context below that of the
        engines.
        """
        self._live = live
        self._max_age = max_age
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._services: tuple[InferenceService, ...] = ()
        self.ids: frozenset[str] = frozenset()
        """Of all engines in the list."""
        self.context_length = max_model_len or None
        """The largest number of tokens of a prompt and its continuation; None if it is unknown."""
        self.foreign: dict[str, str] = {}
        """Id of an engine with another tokenizer → why it gets no calls."""
        self.oldest_adapter: str | None = None
        """The oldest adapter of the engines that were usable last: each of them still has it."""
        self.had_engine = False
        """Whether an engine has been usable since this process began."""
        self.lent_at = float("-inf")
        """When the trainer was last seen to have the devices of all engines, in ``time.monotonic``."""
        self._avoided_until: dict[str, float] = {}
        self._refreshed_at = float("-inf")
        self._refresh_lock = asyncio.Lock()
        self._refresh_task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Stop a refresh in the background."""
        if self._refresh_task is not None:
            await end_tasks(self._refresh_task)

    def usable(self) -> list[InferenceService]:
        """Return the engines that take calls."""
        now = time.monotonic()
        return [
            s
            for s in self._services
            if s.status in _USABLE and self._avoided_until.get(s.url, 0.0) <= now and s.id not in self.foreign
        ]

    def listed(self) -> list[InferenceService]:
        """Return the engines with this sampler's tokenizer, whatever they do now."""
        return [service for service in self._services if service.id not in self.foreign]

    def is_lent(self) -> bool:
        """Return whether the trainer has the devices of all engines."""
        return not self.usable() and bool(self._lent())

    def policy_versions(self) -> frozenset[int]:
        """Return the policy versions that usable and lent engines serve; empty while none is known.

        It returns at once, and starts a refresh if the list is too old.
        """
        self._start_refresh(_VERSIONS_AGE * self._max_age)
        engines = (*self.usable(), *self._lent())
        return frozenset(s.policy_version for s in engines if s.policy_version is not None)

    def avoid(self, url: str, seconds: float) -> None:
        """Let the engine at ``url`` take no calls for ``seconds``."""
        self._avoided_until[url] = time.monotonic() + seconds

    async def fresh_for_call(self) -> None:
        """Wait until the list is new enough for a model call; start a refresh if one is due."""
        age = time.monotonic() - self._refreshed_at
        if age < _MOST_AGES * self._max_age and self.usable():
            self._start_refresh(self._max_age)
        else:
            await self.refresh()

    async def refresh(self, max_age: float | None = None) -> None:
        """Read the list, unless it is newer than ``max_age`` seconds; None: that of the list."""
        async with self._refresh_lock:
            # Look at the age under the lock: whoever waited for it shares the refresh that just ended.
            if time.monotonic() - self._refreshed_at < (self._max_age if max_age is None else max_age):
                return
            self._services = tuple(await self._live())
            self.ids = frozenset(service.id for service in self._services)
            lengths = (self._max_model_len, *(service.context_length for service in self._services))
            self.context_length = min(filter(None, lengths), default=None)
            self.foreign = {
                service.id: self._why_foreign(service)
                for service in self._services
                if None not in (service.tokenizer, self._tokenizer) and service.tokenizer != self._tokenizer
            }
            adapters = [service.adapter for service in self.usable() if service.adapter is not None]
            self.oldest_adapter = min(adapters, key=adapter_version, default=self.oldest_adapter)
            self.had_engine = self.had_engine or bool(self.usable())
            if self.is_lent():
                self.lent_at = time.monotonic()
            self._refreshed_at = time.monotonic()

    def _start_refresh(self, max_age: float) -> None:
        """Start a refresh if the list is older than ``max_age`` and none runs."""
        is_running = self._refresh_task is not None and not self._refresh_task.done()
        if time.monotonic() - self._refreshed_at >= max_age and not is_running:
            self._refresh_task = asyncio.get_running_loop().create_task(self._refresh_quietly(max_age))

    async def _refresh_quietly(self, max_age: float) -> None:
        with log_store_errors(log, "the engines cannot be listed", outages=True):
            await self.refresh(max_age)

    def _lent(self) -> list[InferenceService]:
        """Return the engines whose device the trainer has."""
        return [s for s in self._services if s.status is ServiceStatus.LENT and s.id not in self.foreign]

    def _why_foreign(self, service: InferenceService) -> str:
        why = (
            f"engine {service.url} serves {service.model} with another tokenizer ({service.tokenizer}) than"
            f" this sampler ({self._tokenizer}); it gets no calls"
        )
        if service.id not in self.foreign:
            log.error(why)
        return why


_LARGEST_MASK = 4 * 2**20
"""Bytes of a sampling mask that is kept with a partial generation, within the document of its Record."""


@dataclass(slots=True)
class GenerationParts:
    """The parts of one generation so far. An abort or a failure of an engine ends each part but the last."""

    input_ids: Sequence[int]
    params: SamplingParams
    chat_format: ChatFormat | None
    """Says where a generation stops; None: at ``stop_token_ids`` only."""
    routed_from: int | None
    """The first token whose experts are wanted."""
    output_ids: list[int] = field(default_factory=list)
    reason: FinishReason = "abort"
    """Why the generation has ended; ``abort``: it has not."""
    _parts: list[Generation] = field(default_factory=list)

    def add(self, part: Generation) -> None:
        """Append a part. An engine may report an abort where the tokens already end at a stop."""
        self.keep(part)
        self.reason = part.finish_reason
        if self.reason == "abort" and part.output_ids and self._stops():
            self.reason = "stop"
        elif self.reason == "abort" and len(self.output_ids) >= self.params.max_new_tokens:
            self.reason = "length"

    def keep(self, part: Generation) -> None:
        """Append what a cancelled request has sent: whether it stops there no longer matters."""
        self._parts.append(part)
        self.output_ids += part.output_ids

    def resume(self, partial: PartialGeneration) -> None:
        """Begin with the tokens of an earlier call, if it had the same prompt."""
        if partial.prompt != prompt_digest(self.input_ids):
            return
        self.add(
            Generation(
                output_ids=tuple(unpack_ids(partial.output_ids).tolist()),
                logprobs=tuple(unpack_floats(partial.logprobs).tolist()),
                versions=partial.versions,
                finish_reason="abort",
                prompt_tokens=len(self.input_ids),
                cached_tokens=partial.cached_tokens,
                seconds=0.0,
                engine_url="",
                logprobs_of=partial.logprobs_of,
                sampling_mask=partial.sampling_mask,
            )
        )

    @property
    def tokens(self) -> int:
        """The number of tokens in the prompt and the parts."""
        return len(self.input_ids) + len(self.output_ids)

    @property
    def next_prompt(self) -> Sequence[int]:
        """The prompt of a request for the rest."""
        return [*self.input_ids, *self.output_ids] if self.output_ids else self.input_ids

    @property
    def next_params(self) -> SamplingParams:
        """The parameters of a request for the rest, with an advanced seed."""
        done = len(self.output_ids)
        if not done:
            return self.params
        extra = dict(self.params.extra)
        if "sampling_seed" in extra:
            # Advance the seed: with the same one the local engine would draw the first tokens' numbers again.
            extra["sampling_seed"] += done
        return self.params.replace(max_new_tokens=self.params.max_new_tokens - done, extra=extra)

    @property
    def next_routed_from(self) -> int | None:
        """The first token whose experts no part has; None if they are not wanted."""
        if self.routed_from is None:
            return None
        return self.routed_from + sum(routed_tokens(part.routing) for part in self._parts)

    def whole(self, seconds: float) -> Generation:
        """Return the generation, made in ``seconds``; its routing is complete or left out."""
        joined = self._joined(seconds)
        wanted = self.tokens - 1 - (self.routed_from or 0)
        is_complete = not joined.routing or routed_tokens(joined.routing) == wanted
        return joined if is_complete else replace(joined, routing=b"")

    def kept(self) -> PartialGeneration | None:
        """Return what a later call with the same prompt resumes; None without a token."""
        if not self.output_ids:
            return None
        joined = self._joined(0.0)
        if len(joined.sampling_mask) > _LARGEST_MASK:
            joined = replace(joined, logprobs_of="other", sampling_mask=b"")
        return PartialGeneration(
            prompt=prompt_digest(self.input_ids),
            output_ids=pack_ids(joined.output_ids),
            logprobs=pack_floats(joined.logprobs),
            logprobs_of=joined.logprobs_of,
            sampling_mask=joined.sampling_mask,
            versions=joined.versions,
            # Skip parts without a token: an engine that failed before its first one reports no cache.
            cached_tokens=next(part.cached_tokens for part in self._parts if part.output_ids),
        )

    def _joined(self, seconds: float) -> Generation:
        parts = self._parts
        spans: list[VersionSpan] = []
        offset = 0
        for part in parts:
            for span in part.versions:
                append_span(spans, span.version, offset + span.start, offset + span.end)
            offset += len(part.output_ids)
        kinds = {part.logprobs_of for part in parts if part.output_ids} or {parts[-1].logprobs_of}
        kind = kinds.pop() if len(kinds) == 1 else "other"
        masks = [SamplingMask.unpack(part.sampling_mask, len(part.output_ids)) for part in parts]
        return Generation(
            output_ids=tuple(self.output_ids),
            logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
            versions=tuple(spans),
            finish_reason=self.reason,
            prompt_tokens=len(self.input_ids),
            cached_tokens=parts[0].cached_tokens,
            seconds=seconds,
            engine_url=parts[-1].engine_url,
            logprobs_of=kind,
            sampling_mask=SamplingMask.join(masks).pack() if kind == "truncated" else b"",
            routing=b"".join(part.routing for part in parts),
        )

    def _stops(self) -> bool:
        """Return whether the output ends in a stop token or contains a stop string, by SGLang's rules.

        Stop tokens do not count with ``ignore_eos``. A string of ``stop`` and a match of ``stop_regex`` count
        at any position, because a generation ends at the first one.
        """
        chat_format, extra = self.chat_format, self.params.extra
        own = frozenset() if chat_format is None else chat_format.stop_ids
        if not extra.get("ignore_eos") and self.output_ids[-1] in own.union(self.params.stop_token_ids):
            return True
        patterns = [*map(re.escape, _strings(extra.get("stop"))), *_strings(extra.get("stop_regex"))]
        if not patterns or chat_format is None:
            return False
        text = chat_format.decode(self.output_ids)
        return any(re.search(pattern, text) for pattern in patterns)


def _strings(value: Any) -> list[str]:
    """Return a parameter that is a string, or a list of strings, as a list."""
    return [value] if isinstance(value, str) else list(value or ())


class SessionRouter(Protocol):
    """The part of the router that a session needs."""

    engines: EngineList
    tokens: ChatFormat | None
    wait_seconds: float

    async def pick(self, session: EngineSession, tokens: int, deadline: float) -> EngineClient:
        """Return the client of the session's engine, which gets ``tokens`` tokens."""
        ...

    def avoid(self, session: EngineSession) -> None:
        """Detach the session from its engine, which failed."""
        ...

    def generated(self) -> None:
        """Record that an engine has generated."""
        ...

    def wait(self, why: str, deadline: float, attempt: int = 1) -> Awaitable[None]:
        """Sleep before the next attempt; EngineError at ``deadline``."""
        ...


class EngineSession:
    """The model calls of one trajectory; created by ``EngineRouter.session``.

    ``url`` is the engine that has the trajectory's prefix in its cache, ``tokens`` the length of its context.
    ``partial`` holds the tokens of a call that was cancelled or failed; one with the same prompt resumes it.
    The router waits in ``held`` while the trainer has the engines' devices.
    """

    def __init__(
        self,
        router: SessionRouter,
        traj_id: str,
        group: str | None,
        partial: PartialGeneration | None,
        held: Held = nullcontext,
    ) -> None:
        self.traj_id = traj_id
        self.group = group
        self.url: str | None = None
        self.tokens = 0
        self.partial = partial
        self.held = held
        self._router = router
        self._encoded = EncodedIds()

    @property
    def context_length(self) -> int | None:
        """Return the largest number of tokens of a prompt and its continuation; None if it is unknown."""
        return self._router.engines.context_length

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        progress: Progress | None = None,
        images: Sequence[Image] = (),
        encoded: EncodedIds | None = None,
        *,
        routed_from: int | None = None,
    ) -> Generation:
        """Return one complete generation, resumed as often as engines abort it or fail.

        ``images`` are those of the prompt, in order. ``encoded`` is the JSON of an earlier prompt that this
        one continues; without it, that of the last call is tried. The routing from token ``routed_from`` on
        is complete or left out. A part asks for all that the parts before it lack: an engine that continues
        a generation has computed, or computes, every token before.

        An aborted generation continues from its tokens so far, on the same or another engine, unless they
        already end at a stop: an engine may report the abort instead of the stop. After a failure it
        continues from the last token received. Penalties then count only the tokens of the last part.
        Raises ContextFullError if the prompt leaves no token of the context, EngineRefusedError if an engine
        refuses the request, and EngineError, with the engines as its outage, if no token arrives for
        ``wait_seconds``. ``progress`` receives the tokens while they are generated.
        """
        limit = self.context_length
        if limit is not None and len(input_ids) >= limit:
            raise ContextFullError(
                f"a prompt of {len(input_ids):,} tokens leaves nothing of the context of {limit:,} tokens"
            )
        self._encoded = encoded or self._encoded
        made = GenerationParts(input_ids, params, self._router.tokens, routed_from)
        if self.partial is not None:
            made.resume(self.partial)
            self.partial = None
        start = time.monotonic()
        try:
            await self._complete(made, progress, images)
        # Keep no tokens of a refused request: whoever resumed them would be refused as well.
        except EngineRefusedError:
            raise
        except BaseException:
            self.partial = made.kept()
            raise
        return made.whole(time.monotonic() - start)

    async def _complete(
        self, made: GenerationParts, progress: Progress | None, images: Sequence[Image]
    ) -> None:
        """Request the rest of ``made``, of one engine after another, until the generation has ended."""
        router = self._router
        deadline, failures = time.monotonic() + router.wait_seconds, 0
        if progress is not None and made.output_ids:
            # Pass a copy: the list grows under its receiver.
            progress(0, list(made.output_ids))
        while made.reason == "abort":
            client = await router.pick(self, made.tokens, deadline)
            before = made.tokens
            why = await self._request(client, made, progress, images)
            self.tokens = made.tokens
            if made.reason != "abort":
                return
            if made.tokens > before:
                deadline, failures = time.monotonic() + router.wait_seconds, 0
            failures += 1
            await router.wait(f"{self.traj_id}: {why}", deadline, failures)

    async def _request(
        self, client: EngineClient, made: GenerationParts, progress: Progress | None, images: Sequence[Image]
    ) -> str:
        """Add what one engine generates to ``made``; return why it is not the whole rest, if it is not."""
        try:
            part = await client.generate(
                made.next_prompt,
                made.next_params,
                # Put the random part first: SGLang aborts by prefix, and one id may begin another.
                f"{uuid.uuid4().hex}-{self.traj_id}",
                encoded=self._encoded,
                routing_key=self.group or self.traj_id,
                keep=made.keep,
                progress=None if progress is None else _shifted(progress, len(made.output_ids)),
                images=images,
                routed_from=made.next_routed_from,
            )
        except EngineRefusedError:
            raise
        except EngineError as error:
            log.warning("%s: %s", self.traj_id, error.message)
            self._router.avoid(self)
            if isinstance(error, EngineInterruptedError) and error.partial is not None:
                made.add(error.partial)
            return error.message
        self._router.generated()
        made.add(part)
        return f"aborted by {part.engine_url}"


def _shifted(progress: Progress, by: int) -> Progress:
    """Return ``progress`` for a request whose first token has the index ``by`` in the output."""
    return lambda start, ids: progress(by + start, ids)


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
        self.limits: Mapping[str, int] = {}
        """{URL of an engine: trajectories that it takes before others come first}; no entry: no limit."""
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

    def held(self) -> tuple[Counter[str], Counter[str]]:
        """Return {URL of an engine: trajectories that keep to it}, and {URL: tokens of their contexts}."""
        held, tokens = Counter[str](), Counter[str]()
        for session in self._sessions:
            if session.url is not None:
                held[session.url] += 1
                tokens[session.url] += session.tokens
        return held, tokens

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
                # Close the clients of engines that have ended: each keeps a connection per former request.
                if len(self._clients) > len(self.engines.ids):
                    ended = [self._clients.pop(each) for each in self._clients.keys() - self.engines.ids]
                    await asyncio.gather(*(each.close() for each in ended))
                return client
            why = f"{session.traj_id} is waiting for a live engine"
            await self.wait("; ".join([why, *self.engines.foreign.values()]), deadline)

    def avoid(self, session: EngineSession) -> None:
        """Detach the session from its engine, which failed and gets no session for a while."""
        if session.url is not None:
            self.engines.avoid(session.url, self._suspect_seconds)
            # Forget its cached prompts: an engine that comes back after a failure has an empty cache.
            for engines in self._groups.values():
                engines.discard(session.url)
        self._assign(session, None)

    async def wait(self, why: str, deadline: float, attempt: int = 1) -> None:
        """Sleep before the next attempt, with exponential backoff; EngineError at ``deadline``."""
        now, engines = time.monotonic(), self.engines
        # Count from the end of the trainer's turn: a call that waited it out has lost no engine.
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
        backoff = Backoff("an engine", self._backoff, 16 * self._backoff, attempts=attempt - 1)
        await asyncio.sleep(min(backoff.next(), max(deadline - now, 0.0)))

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
            held, in_flight = self.held()

            def cost(service: InferenceService) -> tuple[bool, bool, int, int, str]:
                cached = session.group is not None and service.url in self._groups.get(session.group, ())
                # Take the larger: the reported load is a heartbeat old, and ours lacks the other samplers'.
                load = max(service.running_tokens, in_flight[service.url]) + (0 if cached else tokens)
                is_full = held[service.url] >= self.limits.get(service.url, held[service.url] + 1)
                # Put the status first: a call to an engine that is being updated waits for the update.
                is_away = service.status is not ServiceStatus.READY
                return is_away, is_full, load, service.running_requests, service.url

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
