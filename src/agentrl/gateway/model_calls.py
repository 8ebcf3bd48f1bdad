"""Answer one request: find the call that it continues, generate, store the model call, return the answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from agentrl.chat.call_shape import CallShape, call_shape
from agentrl.chat.chat_format import ChatFormat
from agentrl.chat.parsers.base import ParsedMessage
from agentrl.chat.parsers.reasoning import REASONING_TAGS, opens_thought
from agentrl.config.schema import AgentConfig
from agentrl.documents.gateway import GatewayCall
from agentrl.documents.images import Image, text_of
from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.task import Claim
from agentrl.errors import (
    ContextFullError,
    FailureError,
    LeaseLostError,
    StoreUnavailableError,
    TrajectoryError,
)
from agentrl.gateway.answers import grammar_of, response_of, unmet
from agentrl.gateway.chains import Chain, Chains, Prompt, prompt_of
from agentrl.gateway.errors import GatewayError, invalid
from agentrl.gateway.history import digest_after, prefix_digests
from agentrl.gateway.images import store_images
from agentrl.gateway.request import GatewayRequest, aside
from agentrl.inference.engine import Engine, EngineRefusedError, Generation, Progress, Router
from agentrl.rollout.budget import Budget
from agentrl.rollout.images import images_of
from agentrl.rollout.model_call import PendingCall
from agentrl.rollout.trace import end_model_call, gateway_call_span
from agentrl.store.mechanics.lease import RENEWALS_PER_LEASE, keep_renewed
from agentrl.user_code import contain_call

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

OnPrompt = Callable[[list[int]], None]

ATTEMPTS = 4
"""Answers that are sampled for a request that demands a tool call or a schema; the last one is answered."""

ASKED_AGAIN = "asked_again"
"""The stored parameter that counts the answers before this one that were not what the request demands."""


@dataclass(frozen=True, kw_only=True)
class Answerer:
    """Answers requests of any trajectory of a run. Its only state is a cache of stored conversations."""

    store: Store
    router: Router
    chat_format: ChatFormat
    params: SamplingParams
    agent: AgentConfig
    seed: int
    chains: Chains
    writing: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    """A lock for each trajectory: two writes at a time would only conflict in the database."""
    lease_seconds: float = 15.0
    """Time after which another gateway may take a request over; renewed while it is answered."""

    async def answer(
        self,
        claim: Claim,
        request: GatewayRequest,
        call: GatewayCall,
        prompting: Awaitable[Prompt],
        checking: Awaitable[None],
        on_prompt: OnPrompt,
        progress: Progress | None,
    ) -> DispatchedSamplingTask:
        """Generate and store the answer of a request behind the prompt ``prompting``; return its model call.

        It is stored when ``checking`` has ended without an exception.
        ``on_prompt`` receives the prompt before generation begins. Raises GatewayError; the request is then
        marked as failed.
        """
        try:
            async with self._renewing(call):
                prompt = await prompting
                return await self._answer(claim, request, call, prompt, checking, on_prompt, progress)
        except LeaseLostError as error:
            raise dead_url() from error
        except BaseException as error:
            with contextlib.suppress(Exception):
                await asyncio.shield(self.store.gateways.fail(call))
            raise _as_gateway_error(error) from error

    async def resolve(self, claim: Claim, request: GatewayRequest) -> GatewayRequest:
        """Return the request with the conversation of its ``previous`` answer in its messages.

        Its own system message replaces that of the conversation. Raises GatewayError for an unknown id.
        """
        request = await store_images(request, self.chat_format, self.store.images)
        if request.previous is None:
            return request
        found = (await self.store.gateways.by_answer(claim.record_id, [request.previous])).values()
        call = next((item.call for item in found), None)
        if call is None:
            raise GatewayError(
                "not_found",
                "previous_response_id names no answer of this trajectory",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        earlier = (await self.chains.get(claim.record_id, call)).messages
        own = list(request.messages)
        system = [own.pop(0)] if own and own[0]["role"] == "system" else []
        if earlier[0]["role"] == "system":
            earlier = earlier[1:]
        return replace(request, messages=[*system, *earlier, *own], previous=None)

    async def count_tokens(self, claim: Claim, request: GatewayRequest) -> int:
        """Return the length of the prompt that a request would have, in tokens. Raises GatewayError."""
        request = await store_images(request, self.chat_format, self.store.images)
        try:
            return len((await self._prompt(claim, request)).ids)
        except FailureError as error:
            raise _as_gateway_error(error) from error

    async def _answer(
        self,
        claim: Claim,
        request: GatewayRequest,
        call: GatewayCall,
        prompt: Prompt,
        checking: Awaitable[None],
        on_prompt: OnPrompt,
        progress: Progress | None,
    ) -> DispatchedSamplingTask:
        with contextlib.ExitStack() as stack:
            async with self.router.session(claim.record_id, claim.record_id) as engine:
                budget = Budget(self.agent, engine.context_length)
                if len(prompt.ids) > budget.prompt_limit:
                    raise ContextFullError(budget.name_limit(len(prompt.ids)))
                params = request.params(self.params).seeded(self.seed, call.id)
                params = budget.clamp(params, len(prompt.ids))
                span = stack.enter_context(gateway_call_span(claim, params, call.dialect))
                on_prompt(prompt.ids)
                images = await images_of(self.store.images, prompt.images)
                generation, params = await self._sample(
                    engine, request, call, prompt, params, progress, images
                )
            await checking
            stored = await self._store(claim, request, call, prompt, params, generation)
            end_model_call(span, generation, prompt.new_messages, stored.response, stored.id)
            span.set({"agentrl.parent_call": stored.parent or stored.follows})
        return stored

    async def _sample(
        self,
        engine: Engine,
        request: GatewayRequest,
        call: GatewayCall,
        prompt: Prompt,
        params: SamplingParams,
        progress: Progress | None,
        images: Sequence[Image],
    ) -> tuple[Generation, SamplingParams]:
        """Return a generation and the parameters to store with it.

        Where the request demands a tool call or a schema, the engine samples by a grammar if it has one;
        else the model is asked again, up to ``ATTEMPTS`` times. A later answer is chosen by its text: its
        parameters say so, and it is context. Nothing of these answers is streamed before it is chosen.
        """

        def generate(params: SamplingParams, progress: Progress | None = None) -> Awaitable[Generation]:
            return engine.generate(prompt.ids, params, progress, images, prompt.encoded)

        if not request.must_call and request.schema is None:
            return await generate(params, progress), params
        if (grammar := await self._grammar(request, prompt)) is not None:
            constrained = params.replace(extra={**params.extra, **grammar})
            with contextlib.suppress(EngineRefusedError):
                return await generate(constrained), constrained
        sent = params
        for attempt in range(1 if params.temperature == 0 else ATTEMPTS):
            if attempt:
                extra = {name: value for name, value in params.extra.items() if name != "sampling_seed"}
                sent = params.replace(extra=extra).seeded(self.seed, call.id, attempt)
            generation = await generate(sent)
            is_cut = generation.finish_reason == "length"
            if not is_cut and unmet(self._parse(request, prompt, generation), request) is None:
                break
        if not attempt:
            return generation, sent
        noted = sent.replace(extra={**sent.extra, ASKED_AGAIN: attempt})
        return replace(generation, logprobs_of="other"), noted

    def _parse(self, request: GatewayRequest, prompt: Prompt, generation: Generation) -> ParsedMessage:
        return contain_call(
            lambda: self.chat_format.parse(generation.output_ids, request.tools, prompt.ids),
            "the tool-call parser",
            TrajectoryError,
        )

    async def _grammar(self, request: GatewayRequest, prompt: Prompt) -> dict[str, str] | None:
        """Return the sampling parameter for the engine's grammar; None if the demand cannot be one."""
        end = self.chat_format.decode(prompt.ids[-8:])
        in_thought = any(opens_thought(end, tags) for tags in REASONING_TAGS)
        shape = await asyncio.to_thread(lambda: self._call_shape)
        return grammar_of(request, shape, in_thought=in_thought)

    @cached_property
    def _call_shape(self) -> CallShape | None:
        return call_shape(self.chat_format)

    async def _store(
        self,
        claim: Claim,
        request: GatewayRequest,
        call: GatewayCall,
        prompt: Prompt,
        params: SamplingParams,
        generation: Generation,
    ) -> DispatchedSamplingTask:
        """Parse an answer and store its model call; return it."""
        parsed = self._parse(request, prompt, generation)
        response, error = response_of(parsed, request, generation, call, self.chat_format)
        pending = PendingCall(
            record=claim.record_id,
            role=request.role,
            parent=prompt.parent,
            follows=prompt.follows,
            drops_thoughts=prompt.follows is not None,
            opens_branch=prompt.parent is None and prompt.follows is None,
            messages=tuple(prompt.new_messages),
            tools=None if prompt.parent else tuple(request.tools),
            context_ids=prompt.context_ids,
            images=prompt.context_images,
            params=params,
            generation=generation,
            response=response,
            error=error,
        )
        after = digest_after(prompt.digest, response)
        async with self.writing.setdefault(claim.record_id, asyncio.Lock()):
            stored = await self.store.model_calls.answer(claim, pending.document(), call, after)
        messages, output = [*prompt.messages, response], list(generation.output_ids)
        chain = Chain(stored.id, prompt.ids, output, messages, prompt.encoded, prompt.images)
        self.chains.add(chain, (claim.record_id, after))
        return stored

    async def prompt(self, claim: Claim, request: GatewayRequest) -> Prompt:
        """Return the prompt; refuse by its size one that is far above the limit before it is tokenized."""
        limit = self.agent.max_prompt_tokens
        if request.size > limit:
            fewest = await aside(request.size, self._fewest_tokens, request)
            if fewest > limit:
                raise ContextFullError(
                    f"the next prompt has at least {fewest:,} tokens, and --max_prompt_tokens is {limit:,}"
                )
        return await self._prompt(claim, request)

    def _fewest_tokens(self, request: GatewayRequest) -> int:
        """Return how many tokens a prompt has at least; templates rewrite messages of assistants only."""
        contents = (message.get("content") for message in request.messages if message["role"] != "assistant")
        return sum(self.chat_format.tokens.fewest_tokens(text_of(content).strip()) for content in contents)

    async def _prompt(self, claim: Claim, request: GatewayRequest) -> Prompt:
        """Return the prompt: behind the latest sampled answer that the request's messages begin with."""
        messages, tools = request.messages, request.tools
        if messages[-1]["role"] == "assistant":
            raise invalid(
                "the last message is an assistant's; end with a user or tool message",
                "messages",
                code="no_new_message",
            )
        digests = await aside(request.size, prefix_digests, messages, tools, request.role)
        ends = [place + 1 for place, message in enumerate(messages) if message["role"] == "assistant"]
        found, chain = await self.chains.longest(claim.record_id, [digests[end] for end in ends])
        known = ends[found - 1] if found else 0
        prompt = await aside(request.size, prompt_of, self.chat_format, chain, known, messages, tools)
        return replace(prompt, digest=digests[-1])

    @contextlib.asynccontextmanager
    async def _renewing(self, call: GatewayCall) -> AsyncIterator[None]:
        what = f"the lease of {call.id}"
        renewing = keep_renewed(
            lambda: self.store.gateways.renew(call, self.lease_seconds),
            self.lease_seconds / RENEWALS_PER_LEASE, what,
        )  # fmt: skip
        task = asyncio.create_task(renewing, name=what)
        try:
            yield
        finally:
            task.cancel()


def dead_url() -> GatewayError:
    """Return the error for a URL whose trajectory has ended, and for one that never was."""
    return GatewayError(
        "authentication",
        "this URL belongs to no running trajectory: it has ended, its lease was lost, or the token is wrong",
        code="dead_token",
    )


def _as_gateway_error(error: BaseException) -> BaseException:
    """Return the error to answer for a failure; cancellations stay as they are."""
    if isinstance(error, GatewayError) or not isinstance(error, Exception):
        return error
    if isinstance(error, ContextFullError):
        return GatewayError("invalid", error.message, code="context_length_exceeded", param="messages")
    if isinstance(error, EngineRefusedError):
        return invalid(f"the engine refused the request: {error.message}", code="engine_refused")
    if isinstance(error, TrajectoryError):
        return GatewayError("invalid", error.message, code="cannot_render", param="messages", hint=error.hint)
    if isinstance(error, (FailureError, StoreUnavailableError)):
        return GatewayError("unavailable", error.message, code="unavailable", hint="send the request again")
    logger.error("a request failed", exc_info=error)
    return GatewayError(
        "internal", f"the gateway failed: {type(error).__name__}", code="internal", hint="see its log"
    )
