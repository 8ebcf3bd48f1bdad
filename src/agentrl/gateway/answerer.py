"""Answer one request behind its prompt: generate, by a grammar or again if need be, and store the call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from agentrl.chat.chat_format import ChatFormat
from agentrl.config.schema import AgentConfig
from agentrl.documents.gateway import GatewayCall
from agentrl.documents.images import Image
from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.task import Claim
from agentrl.errors import ContextFullError, LeaseLostError
from agentrl.gateway.answers import CallShape, call_shape, grammar_of, response_of, unmet
from agentrl.gateway.request import GatewayRequest, as_gateway_error, dead_url
from agentrl.gateway.request_prompts import RequestPrompts
from agentrl.inference.engine import Engine, EngineRefusedError, Generation, Progress, Router
from agentrl.rollout.model_call import PendingCall, images_of, parse
from agentrl.rollout.prompts import Budget, Chain, Prompt, digest_after
from agentrl.rollout.trace import end_model_call, gateway_call_span
from agentrl.store.mechanics.lease import renewed

if TYPE_CHECKING:
    from agentrl.store.client import Store

ATTEMPTS = 4
"""Answers that are sampled for a request that demands a tool call or a schema; the last one is answered."""

ASKED_AGAIN = "asked_again"
"""The stored parameter that counts the answers before this one that were not what the request demands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request under way: its trajectory, its document, and what receives its prompt and its tokens."""

    claim: Claim
    request: GatewayRequest
    call: GatewayCall
    on_prompt: Callable[[list[int]], None]
    """Called before generation begins."""
    progress: Progress


@dataclass(frozen=True, kw_only=True)
class Answerer:
    """Answers requests of any trajectory of a run, from prompt to stored model call."""

    store: Store
    router: Router
    chat_format: ChatFormat
    params: SamplingParams
    agent: AgentConfig
    seed: int
    writing: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    """A lock for each trajectory: two writes at a time would only conflict in the database."""
    lease_seconds: float = 15.0
    """Time after which another gateway may take a request over; renewed while it is answered."""

    @cached_property
    def prompts(self) -> RequestPrompts:
        """How requests become prompts."""
        return RequestPrompts(store=self.store, chat_format=self.chat_format, agent=self.agent)

    async def answer(
        self, ask: Ask, prompting: Awaitable[Prompt], checking: Awaitable[None]
    ) -> DispatchedSamplingTask:
        """Generate and store the answer of a request behind the prompt ``prompting``; return its model call.

        It is stored when ``checking`` has ended without an exception. Raises GatewayError; the request is
        then marked as failed.
        """
        try:
            renew = partial(self.store.gateways.renew, ask.call, self.lease_seconds)
            async with renewed(renew, self.lease_seconds, f"the lease of {ask.call.id}"):
                return await self._answer(ask, await prompting, checking)
        except LeaseLostError as error:
            raise dead_url() from error
        except BaseException as error:
            with contextlib.suppress(Exception):
                await asyncio.shield(self.store.gateways.fail(ask.call))
            raise as_gateway_error(error) from error

    async def _answer(self, ask: Ask, prompt: Prompt, checking: Awaitable[None]) -> DispatchedSamplingTask:
        claim = ask.claim
        with contextlib.ExitStack() as stack:
            async with self.router.session(claim.record_id, claim.record_id) as engine:
                budget = Budget(self.agent, engine.context_length)
                if len(prompt.ids) > budget.prompt_limit:
                    raise ContextFullError(budget.name_limit(len(prompt.ids)))
                params = ask.request.params(self.params).seeded(self.seed, ask.call.id)
                params = budget.clamp(params, len(prompt.ids))
                span = stack.enter_context(gateway_call_span(claim, params, ask.call.dialect))
                ask.on_prompt(prompt.ids)
                images = await images_of(self.store.images, prompt.images)
                generation, params = await self._sample(engine, ask, prompt, params, images)
            await checking
            stored = await self._store(ask, prompt, params, generation)
            end_model_call(span, generation, prompt.new_messages, stored.response, stored.id)
            span.set({"agentrl.parent_call": stored.parent or stored.follows})
        return stored

    async def _sample(
        self, engine: Engine, ask: Ask, prompt: Prompt, params: SamplingParams, images: Sequence[Image]
    ) -> tuple[Generation, SamplingParams]:
        """Return a generation and the parameters to store with it.

        Where the request demands a tool call or a schema, the engine samples by a grammar if it has one;
        else the model is asked again, up to ``ATTEMPTS`` times. A later answer is chosen by its text: its
        parameters say so, and it is context. Nothing of these answers is streamed before it is chosen.
        """

        def generate(params: SamplingParams, progress: Progress | None = None) -> Awaitable[Generation]:
            return engine.generate(
                prompt.ids, params, progress, images, prompt.encoded, routed_from=prompt.routed_from
            )

        request = ask.request
        if not request.must_call and request.schema is None:
            return await generate(params, ask.progress), params
        if (grammar := await self._grammar(request, prompt)) is not None:
            constrained = params.replace(extra={**params.extra, **grammar})
            with contextlib.suppress(EngineRefusedError):
                return await generate(constrained), constrained
        sent = params
        for attempt in range(1 if params.temperature == 0 else ATTEMPTS):
            if attempt:
                extra = {name: value for name, value in params.extra.items() if name != "sampling_seed"}
                sent = params.replace(extra=extra).seeded(self.seed, ask.call.id, attempt)
            generation = await generate(sent)
            is_cut = generation.finish_reason == "length"
            if (
                not is_cut
                and unmet(parse(self.chat_format, prompt, generation, request.tools), request) is None
            ):
                break
        if not attempt:
            return generation, sent
        noted = sent.replace(extra={**sent.extra, ASKED_AGAIN: attempt})
        return replace(generation, logprobs_of="other", sampling_mask=b""), noted

    async def _grammar(self, request: GatewayRequest, prompt: Prompt) -> dict[str, str] | None:
        """Return the sampling parameter for the engine's grammar; None if the demand cannot be one."""
        shape = await asyncio.to_thread(lambda: self._call_shape)
        in_thought = self.chat_format.opened_thought(prompt.ids) is not None
        return grammar_of(request, shape, in_thought=in_thought)

    @cached_property
    def _call_shape(self) -> CallShape | None:
        return call_shape(self.chat_format)

    async def _store(
        self, ask: Ask, prompt: Prompt, params: SamplingParams, generation: Generation
    ) -> DispatchedSamplingTask:
        """Parse an answer and store its model call; return it."""
        claim, request = ask.claim, ask.request
        parsed = parse(self.chat_format, prompt, generation, request.tools)
        response, error = response_of(parsed, request, generation, ask.call, self.chat_format)
        pending = PendingCall(
            record=claim.record_id, prompt=prompt, role=request.role, tools=request.tools, params=params,
            generation=generation, response=response, error=error,
        )  # fmt: skip
        after = digest_after(prompt.digest, response)
        async with self.writing.setdefault(claim.record_id, asyncio.Lock()):
            stored = await self.store.model_calls.answer(claim, pending.document(), ask.call, after)
        messages, output = [*prompt.messages, response], list(generation.output_ids)
        chain = Chain(stored.id, prompt.ids, output, messages, prompt.encoded, prompt.images)
        self.prompts.chains.add(chain, (claim.record_id, after))
        return stored
