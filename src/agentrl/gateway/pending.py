"""Hold the answers that this process generates; a client that goes away does not end them."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from agentrl.base.concurrency import end_tasks
from agentrl.calls.prompts import Prompt
from agentrl.chat.renderer import CLOCK
from agentrl.config.sampling import GatewayConfig
from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.record import GatewayCall, GatewayCallStatus, GatewaySession
from agentrl.errors import LeaseLostError, StoreError
from agentrl.gateway.answerer import Answerer, Ask
from agentrl.gateway.replay import request_key
from agentrl.gateway.request import Caller, GatewayError, GatewayRequest, dead_url
from agentrl.store.gateways import CallRequest

_FIRST_LOOK, _LONGEST_LOOK = 0.02, 0.5
"""Seconds between looks at a request that another gateway answers."""

_NOTED = {"context_length_exceeded": "length", "unavailable": "unavailable"}
"""Code of an error → what its trajectory notes as ``stopped_by``."""

_KNOWN = 4096
"""Sessions of which a process keeps the number of calls."""
_FLUSH_SECONDS = 0.02
"""Time for which the tokens of a stream are collected: each piece that is sent costs CPU time."""


class PendingAnswer:
    """An answer under way in this process: its prompt, its tokens so far, and its model call at the end."""

    def __init__(self, session: GatewaySession) -> None:
        self.session = session
        self.call: GatewayCall
        """The document of the request, set before the prompt and the result."""
        self.task: asyncio.Task[DispatchedSamplingTask]
        self._prompt: list[int] | None = None
        self._is_allowed = False
        self._events: list[tuple[int, Sequence[int]]] = []
        self._changed = asyncio.Event()

    def start(self, work: Coroutine[Any, Any, DispatchedSamplingTask]) -> None:
        """Run ``work``, which generates and stores the answer."""
        self.task = asyncio.create_task(work, name=f"answer for {self.session.record}")
        self.task.add_done_callback(self._ended)

    def prompted(self, prompt_ids: list[int]) -> None:
        """Note that generation begins."""
        self._prompt = prompt_ids
        self._wake()

    def allow(self) -> None:
        """Let readers have the tokens."""
        self._is_allowed = True
        self._wake()

    def generated(self, start: int, ids: Sequence[int]) -> None:
        """Note the tokens from place ``start`` on."""
        self._events.append((start, ids))
        self._wake()

    async def prompt(self) -> list[int]:
        """Return the prompt when generation begins; empty for an answer that exists. Raises GatewayError."""
        while not (self._is_allowed and self._prompt is not None) and not self.task.done():
            await self._changed.wait()
        if not self._is_allowed or self._prompt is None:
            await self.result()
        return self._prompt or []

    async def tokens(self) -> AsyncIterator[tuple[int, Sequence[int]]]:
        """Yield all tokens, from the first on, until the answer ends.

        The first ones come at once; those after them are collected for ``_FLUSH_SECONDS``.
        """
        seen = 0
        while True:
            changed = self._changed
            events = self._events[seen:]
            seen += len(events)
            for event in _joined(events):
                yield event
            if self.task.done() and seen == len(self._events):
                return
            if seen < len(self._events):
                continue
            await changed.wait()
            if seen:
                await asyncio.wait([self.task], timeout=_FLUSH_SECONDS)

    async def result(self) -> DispatchedSamplingTask:
        """Return the stored model call. Raises GatewayError."""
        await asyncio.wait([self.task])
        if self.task.cancelled():
            raise dead_url()
        return self.task.result()

    def _ended(self, task: asyncio.Task[DispatchedSamplingTask]) -> None:
        self._wake()
        if not task.cancelled():
            task.exception()  # ``result`` raises it; without a reader it is not worth a warning

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _body_digest(*parts: str | bytes) -> str:
    """Return the digest of a request's identity."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "big") + data)
    return state.hexdigest()[:40]


def _joined(events: Sequence[tuple[int, Sequence[int]]]) -> list[tuple[int, Sequence[int]]]:
    """Return the events with consecutive tokens in one."""
    joined: list[tuple[int, Sequence[int]]] = []
    for start, ids in events:
        if joined and start == joined[-1][0] + len(joined[-1][1]):
            before, known = joined.pop()
            start, ids = before, [*known, *ids]
        joined.append((start, ids))
    return joined


def _succeeded(task: asyncio.Task[Any]) -> bool:
    """Return whether a task that is done has a result; its exception counts as noticed."""
    return not task.cancelled() and task.exception() is None


class PendingAnswers:
    """The answers under way in this process; a retry joins the answer of the first request."""

    def __init__(
        self, answerer: Answerer, config: GatewayConfig, gateway: str, on_dead: Callable[[str], object]
    ) -> None:
        """``on_dead`` receives the id of a session that turns out to have ended."""
        self._answerer = answerer
        self._config = config
        self._gateway = gateway
        self._on_dead = on_dead
        self._running: dict[str, PendingAnswer] = {}
        self._counts: dict[str, int] = {}
        """Session → its calls when it was last checked."""

    def get(
        self, caller: Caller, dialect: str, request: GatewayRequest, identity: tuple[bytes, str | None]
    ) -> PendingAnswer:
        """Return the answer of a request: a new one, or that of the request that it repeats.

        ``identity`` is the body and the idempotency key.
        """
        body, key = identity
        identifying = ("key", key) if key else (body,)
        roles = () if request.role is None else ("role", request.role)
        claim = caller.claim
        # Seeds depend on it: nothing random.
        digest = _body_digest(claim.record_id, dialect, *roles, *identifying)
        if claim.attempt > claim.first_attempt:
            # Set it apart from those of earlier owners: their answers are no answers of retries.
            digest = f"{digest}.{claim.attempt}"
        running = self._running.get(digest)
        if running is not None:
            return running
        asked = CallRequest(
            record=claim.record_id,
            attempt=claim.attempt,
            digest=digest,
            dialect=dialect,
            answer_id=secrets.token_hex(12),
            gateway=self._gateway,
            has_key=bool(key),
        )
        pending = PendingAnswer(caller.session)
        self._running[digest] = pending
        pending.start(self._answer(pending, caller, request, asked))
        pending.task.add_done_callback(lambda _: self._running.pop(digest, None))
        return pending

    async def close(self, session_id: str | None = None) -> None:
        """Cancel the answers of one session, or all."""
        running = self._running.values()
        await end_tasks(*(pending.task for pending in running if session_id in (None, pending.session.id)))

    async def _answer(
        self, pending: PendingAnswer, caller: Caller, request: GatewayRequest, asked: CallRequest
    ) -> DispatchedSamplingTask:
        """Return the model call of a request: generate it, unless it exists or another gateway does."""
        gateways, answerer = self._answerer.store.gateways, self._answerer
        # Set it for this task: the server may run in the context of the trajectory that was served first.
        CLOCK.set(caller.session.created_at)
        prompting = asyncio.create_task(
            answerer.prompts.prompt(caller.claim, request), name=f"prompt for {asked.record}"
        )
        try:
            begun = await gateways.begin_first(asked, answerer.lease_seconds)
            is_mine = begun is not None
            while True:
                if begun is None:
                    begun, is_mine = await gateways.begin(
                        asked,
                        lease_seconds=answerer.lease_seconds,
                        retry_seconds=self._config.gateway_retry_seconds,
                    )
                pending.call = begun
                if is_mine:
                    replayed = await self._replay(pending, caller, request, prompting)
                    return replayed or await self._generate(pending, caller, request, prompting)
                await self._check_calls(caller.session, None)
                pending.allow()
                done = await self._follow(begun)
                if done is not None:
                    return done
                begun = None
        finally:
            await end_tasks(prompting)

    async def _replay(
        self, pending: PendingAnswer, caller: Caller, request: GatewayRequest, prompting: asyncio.Task[Prompt]
    ) -> DispatchedSamplingTask | None:
        """Return the model call that an earlier owner's equal request got; None if it must be generated."""
        if caller.claim.attempt == caller.claim.first_attempt:
            return None
        await asyncio.wait([prompting])
        if not _succeeded(prompting):
            return None  # ``_generate`` raises why
        prompt, store = prompting.result(), self._answerer.store
        earlier = await store.gateways.take_earlier(pending.call, request_key(request, prompt.digest))
        if earlier is None:
            return None
        await self._check_calls(caller.session, pending.call)
        try:
            await store.gateways.replay(pending.call, earlier)
        except LeaseLostError as error:
            raise dead_url() from error
        call = await store.model_calls.by_id(str(earlier.call))
        if call is not None:
            await self._answerer.prompts.chains.extend(call, str(earlier.after))
            await store.records.count_replayed(caller.claim, call.generated_tokens)
        pending.prompted(prompt.ids)
        pending.allow()
        return call

    async def _generate(
        self, pending: PendingAnswer, caller: Caller, request: GatewayRequest, prompting: asyncio.Task[Prompt]
    ) -> DispatchedSamplingTask:
        """Generate an answer; readers get its tokens, and it is stored, unless ``_check_calls`` refuses.

        Where the last call was far from the limit, the engine does not wait for the check.
        """
        session = caller.session
        is_far = self._counts.get(session.id, session.max_calls) + 1 < session.max_calls
        checking = asyncio.create_task(self._check_calls(session, pending.call), name="check of a request")
        checking.add_done_callback(lambda done: pending.allow() if _succeeded(done) else None)
        generating: asyncio.Task[DispatchedSamplingTask] | None = None
        try:
            if not is_far:
                await checking
            ask = Ask(
                claim=caller.claim, request=request, call=pending.call,
                on_prompt=pending.prompted, progress=pending.generated,
            )  # fmt: skip
            answer = self._answerer.answer(ask, prompting, checking)
            generating = asyncio.create_task(answer, name=f"generation for {session.record}")
            await checking
            return await generating
        except GatewayError as error:
            noted = _NOTED.get(error.code)
            if noted is not None:
                with suppress(StoreError):  # the client gets the first error
                    await self._answerer.store.gateways.stop_session(session.id, noted)
            raise
        finally:
            await end_tasks(checking, *([generating] if generating is not None else []))

    async def _check_calls(self, session: GatewaySession, mine: GatewayCall | None) -> None:
        """Raise GatewayError if the trajectory has ended, or has made all its model calls.

        ``mine`` is a request of this process that counts; the answer of an earlier one is always allowed. Of
        more requests at once than are left, the first ones pass: their order is asked for only then.
        """
        gateways = self._answerer.store.gateways
        count = await gateways.live_calls(session.id)
        self._note(session.id, count)
        if count is not None and (
            mine is None
            or count <= session.max_calls
            or await gateways.calls_before(mine) < session.max_calls
        ):
            return
        if mine is not None:
            await (gateways.forget(mine) if count is None else gateways.fail(mine))
        if count is None:
            self._on_dead(session.id)
            raise dead_url()
        await gateways.stop_session(session.id, "turns")
        raise GatewayError(
            "limit",
            f"the trajectory has made its {session.max_calls} model calls",
            code="turns_limit",
            hint="--max_turns, or max_turns of the task, sets the limit; side calls count too",
        )

    def _note(self, session: str, count: int | None) -> None:
        """Keep the latest number of a session's calls, of the latest sessions."""
        self._counts.pop(session, None)
        if count is not None:
            self._counts[session] = count
        while len(self._counts) > _KNOWN:
            self._counts.pop(next(iter(self._counts)))

    async def _follow(self, call: GatewayCall) -> DispatchedSamplingTask | None:
        """Wait for the answer of another gateway; None if it failed or is late."""
        store = self._answerer.store
        look = _FIRST_LOOK
        current: GatewayCall | None = call
        while current is not None:
            if current.status is GatewayCallStatus.DONE and current.call is not None:
                return await store.model_calls.by_id(current.call)
            await asyncio.sleep(look)
            look = min(2 * look, _LONGEST_LOOK)
            current, is_late = await store.gateways.get(call.id)
            if is_late or (current is not None and current.status is GatewayCallStatus.FAILED):
                return None
        return None
