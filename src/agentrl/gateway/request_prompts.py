"""From a request to its prompt: an earlier answer's conversation, its images, the longest known chain."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from agentrl.chat.chat_format import ChatFormat, Message
from agentrl.config.schema import AgentConfig
from agentrl.documents.images import Image, has_images, image_of_url, text_of
from agentrl.documents.task import Claim
from agentrl.errors import ContextFullError, FailureError, ImageError
from agentrl.gateway.dialects.fields import refuse_media
from agentrl.gateway.request import GatewayError, GatewayRequest, as_gateway_error, aside, invalid
from agentrl.rollout.prompts import Chain, Prompt, chain_of, prefix_digests, prompt_of

if TYPE_CHECKING:
    from agentrl.store.client import Store
    from agentrl.store.images import Images

_CACHED_TOKENS = 4_000_000
"""Tokens in all cached conversations; an older one is read again from the database."""
_OBJECT_TOKENS = 100
"""What a conversation costs beside its tokens, as many of them: short ones are bounded too."""
MAX_REQUEST_IMAGES = 100
"""Images of one request."""


class Chains:
    """The conversations of a process's latest calls, by model call. A cache of immutable documents."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._cached: OrderedDict[str, Chain] = OrderedDict()
        self._ends: dict[tuple[str, str], Chain] = {}
        self._keys: dict[str, tuple[str, str]] = {}
        self._tokens = 0

    async def longest(self, record_id: str, digests: Sequence[str]) -> tuple[int, Chain | None]:
        """Return the longest of the conversations with ``digests`` that ends with an answer, and its number.

        It counts from 1; without such a conversation it is 0.
        """
        if not digests:
            return 0, None
        chain = self._ends.get((record_id, digests[-1]))
        if chain is not None:
            self._cached.move_to_end(chain.call)
            return len(digests), chain
        latest = await self._store.gateways.latest_after(record_id, digests)
        for count in range(len(digests), 0, -1):
            call = latest.get(digests[count - 1])
            if call is not None:
                return count, await self.get(record_id, str(call.call))
        return 0, None

    async def get(self, record_id: str, call_id: str) -> Chain:
        """Return the conversation up to a model call of a trajectory."""
        chain = self._cached.get(call_id)
        if chain is None:
            calls = await self._store.model_calls.by_record(record_id)
            chain = chain_of({call.id: call for call in calls}, call_id)
            self.add(chain)
        else:
            self._cached.move_to_end(call_id)
        return chain

    def add(self, chain: Chain, after: tuple[str, str] | None = None) -> None:
        """Keep a conversation, with ``after`` also by its record and digest; drop old ones over the limit."""
        if chain.call in self._cached:
            return
        self._cached[chain.call] = chain
        if after is not None:
            self._ends[after] = chain
            self._keys[chain.call] = after
        self._tokens += _size(chain)
        while self._tokens > _CACHED_TOKENS and len(self._cached) > 1:
            call, old = self._cached.popitem(last=False)
            self._tokens -= _size(old)
            key = self._keys.pop(call, None)
            if key is not None and self._ends.get(key) is old:
                del self._ends[key]


def _size(chain: Chain) -> int:
    return _OBJECT_TOKENS + len(chain.prompt_ids) + len(chain.output_ids)


@dataclass(frozen=True, kw_only=True)
class RequestPrompts:
    """Makes the prompts of requests. Its only state is a cache of stored conversations."""

    store: Store
    chat_format: ChatFormat
    agent: AgentConfig

    @cached_property
    def chains(self) -> Chains:
        """The conversations that later requests continue."""
        return Chains(self.store)

    async def resolve(self, claim: Claim, request: GatewayRequest) -> GatewayRequest:
        """Return the request with the conversation of its ``previous`` answer in its messages.

        Its own system message replaces that of the conversation. Raises GatewayError for an unknown id.
        """
        request = await store_images(request, self.chat_format, self.store.images)
        if request.previous is None:
            return request
        answered = await self.store.gateways.by_answer(claim.record_id, [request.previous])
        call = next((item.call for item in answered.values()), None)
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
            raise as_gateway_error(error) from error

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
        ends = [index + 1 for index, message in enumerate(messages) if message["role"] == "assistant"]
        count, chain = await self.chains.longest(claim.record_id, [digests[end] for end in ends])
        known = ends[count - 1] if count else 0
        prompt = await aside(request.size, prompt_of, self.chat_format, chain, known, messages, tools)
        return replace(prompt, digest=digests[-1])


async def store_images(request: GatewayRequest, chat_format: ChatFormat, store: Images) -> GatewayRequest:
    """Return the request with its images stored. Raises GatewayError for one that is not allowed."""
    if not has_images(request.messages):
        return request
    if chat_format.vision is None:
        raise _text_only(request.messages)
    try:
        messages, images = await asyncio.to_thread(_decoded, request.messages)
    except ImageError as error:
        raise GatewayError(
            "invalid", error.message, code="invalid_image", param="messages", hint=error.hint
        ) from error
    await store.put(*images)
    return replace(request, messages=messages)


def _decoded(messages: list[Message]) -> tuple[list[Message], list[Image]]:
    images: list[Image] = []

    def named(part: dict[str, Any]) -> dict[str, Any]:
        if part.get("type") != "image" or "url" not in part:
            return part
        if len(images) == MAX_REQUEST_IMAGES:
            raise ImageError(f"the request shows more than {MAX_REQUEST_IMAGES} images", hint="show fewer")
        images.append(image_of_url(part["url"], where=part["where"]))
        return images[-1].ref.part()

    named_messages = [
        {**message, "content": [named(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
    return named_messages, images


def _text_only(messages: list[Message]) -> GatewayError:
    where = next(
        (
            str(part.get("where", "messages"))
            for message in messages
            if isinstance(message.get("content"), list)
            for part in message["content"]
            if part.get("type") == "image"
        ),
        "messages",
    )
    return refuse_media("image", where)
