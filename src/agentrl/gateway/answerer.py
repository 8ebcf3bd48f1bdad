"""From a request to its answer: its prompt, what it demands, the generation, and the call that is stored."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from jsonschema.exceptions import best_match
from referencing.exceptions import Unresolvable

from agentrl.base.concurrency import within_cpu
from agentrl.calls.prompts import (
    LARGE_TEXT,
    Budget,
    Chain,
    Prompt,
    chain_of,
    continued,
    prompt_of,
)
from agentrl.calls.trace import end_model_call, gateway_call_span
from agentrl.calls.turns import Turn, images_of, message_of, parse
from agentrl.chat.chat_format import ChatFormat, Message
from agentrl.chat.parsers.arguments import CHECK_SECONDS, validator_of
from agentrl.chat.parsers.parser import (
    REASONING_TAGS,
    CallSyntaxError,
    ParsedMessage,
    ReasoningTags,
    load_json,
)
from agentrl.config.schema import AgentConfig
from agentrl.documents.conversation import answered_prefixes, digest_after, prefix_digests
from agentrl.documents.document import replace_surrogates
from agentrl.documents.images import Image, has_images, image_of_url, text_of
from agentrl.documents.model_call import (
    DispatchedSamplingTask,
    read_digest,
    unanswered,
    unpack_floats,
    unpack_ids,
)
from agentrl.documents.record import GatewayCall
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.task import Claim
from agentrl.errors import ContextFullError, FailureError, ImageError, LeaseLostError, TrajectoryError
from agentrl.gateway.dialects.fields import refuse_media
from agentrl.gateway.replay import request_key, without_volatile
from agentrl.gateway.request import (
    LARGE_JSON,
    Answer,
    AnsweredToolCall,
    GatewayError,
    GatewayRequest,
    as_gateway_error,
    aside,
    dead_url,
    invalid,
)
from agentrl.inference.engine import Engine, EngineRefusedError, Generation, Progress, Router
from agentrl.store.mechanics.lease import renewed
from agentrl.tools.tool import schema_name

if TYPE_CHECKING:
    from agentrl.store.client import Store
    from agentrl.store.model_calls import Images

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

    async def longest(self, record_id: str, prefixes: Sequence[tuple[int, str]]) -> tuple[int, Chain | None]:
        """Return length and conversation of the first of ``prefixes`` that a call ends; else 0, None."""
        if not prefixes:
            return 0, None
        length, digest = prefixes[0]
        chain = self._ends.get((record_id, digest))
        if chain is not None:
            self._cached.move_to_end(chain.call)
            return length, chain
        latest = await self._store.gateways.latest_after(record_id, [digest for _, digest in prefixes])
        for length, digest in prefixes:
            if (call := latest.get(digest)) is not None:
                return length, await self.get(record_id, str(call.call))
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

    async def extend(self, call: DispatchedSamplingTask, after: str) -> None:
        """Keep the conversation of a call that has come back; its digest is ``after``.

        It grows by one call: reading all of them for each that comes back would be quadratic.
        """
        if call.id in self._cached:
            return
        if call.parent is None:
            chain = chain_of({call.id: call}, call.id)
        else:
            chain = continued(await self.get(call.record, call.parent), call)
        self.add(chain, (call.record, after))

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
        return await self._prompt(claim, request, self.agent.max_prompt_tokens)

    def _fewest_tokens(self, messages: Sequence[Message]) -> int:
        """Return how many tokens a prompt has at least; templates rewrite messages of assistants only."""
        contents = (message.get("content") for message in messages if message["role"] != "assistant")
        return sum(self.chat_format.tokens.fewest_tokens(text_of(content).strip()) for content in contents)

    async def _prompt(self, claim: Claim, request: GatewayRequest, limit: float = math.inf) -> Prompt:
        """Return the prompt: behind the latest sampled answer that the request's messages begin with."""
        messages, tools = request.messages, request.tools
        if messages[-1]["role"] == "assistant":
            raise invalid(
                "the last message is an assistant's; end with a user or tool message",
                "messages",
                code="no_new_message",
            )
        limit_aside = LARGE_TEXT if request.volatile else LARGE_JSON  # patterns search all texts
        digests = await aside(request.size > limit_aside, _digests, request)
        known, chain = await self.chains.longest(claim.record_id, answered_prefixes(messages, digests))
        unread = messages[known:]
        size = sum(len(text_of(message.get("content"))) for message in unread)
        if size > limit:
            fewest = await aside(size > LARGE_TEXT, self._fewest_tokens, unread)
            if fewest > limit:
                raise ContextFullError(
                    f"the next prompt has at least {fewest:,} tokens, and --max_prompt_tokens is {limit:,}"
                )
        changes_answer = any(message["role"] == "assistant" for message in unread)
        if chain is None or changes_answer or self.chat_format.keeps != "all":
            size = request.size  # the whole conversation may be tokenized
        prompt = await aside(size > LARGE_TEXT, prompt_of, self.chat_format, chain, known, messages, tools)
        return replace(prompt, digest=digests[-1])


def _digests(request: GatewayRequest) -> list[str]:
    """Return the digest of each prefix of the request's conversation, without its volatile text."""
    # Leave it out here too, not only where answers are looked up: a conversation goes on from the sampled ids
    # of an earlier owner though its program now writes another date into the first message.
    messages, tools = without_volatile([request.messages, request.tools], request.volatile)
    return prefix_digests(messages, tools, request.role)


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


_ID_DIGITS = 7
"""Some chat formats allow tool-call ids of 9 characters only: these and two for the index."""
_NAME, _FIELD, _VALUE, _THOUGHT = "sampleTool", "sampleField", 7301, "sampleThought"
_ARGUMENTS = re.compile(rf'\{{\s*"{_FIELD}"\s*:\s*{_VALUE}\s*\}}')
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A sample.",
        "parameters": {"type": "object", "properties": {_FIELD: {"type": "integer"}}, "required": [_FIELD]},
    },
}
_QUESTION: Message = {"role": "user", "content": "Call the tool."}
_CALL = {
    "id": "sample000",
    "type": "function",
    "function": {"name": _NAME, "arguments": {_FIELD: _VALUE}},
}


@dataclass(frozen=True, slots=True)
class CallShape:
    """The texts around the JSON arguments of a call, and those around a thought if the model may think.

    ``behind_thought`` stands between a closed thought and the call.
    """

    before_name: str
    before_arguments: str
    end: str
    tags: ReasoningTags | None
    behind_thought: str

    def begin(self, name: str) -> str:
        """Return the text before the arguments of a call of ``name``."""
        return f"{self.before_name}{name}{self.before_arguments}"


def answer_of(
    call: DispatchedSamplingTask, request: GatewayRequest, begun: GatewayCall, chat_format: ChatFormat
) -> Answer:
    """Return the answer that a model call holds: the same for every retry."""
    calls = tuple(
        AnsweredToolCall(
            id=item["id"],
            name=item["function"]["name"],
            arguments=json.dumps(item["function"]["arguments"], ensure_ascii=False),
        )
        for item in call.message.get("tool_calls") or ()
    )
    stopped = call.response.get("stop_sequence")
    reason = "length" if call.finish_reason == "length" else "tool_calls" if calls else "stop"
    logprobs = None
    if request.logprobs:
        ids, values = unpack_ids(call.output_ids).tolist(), unpack_floats(call.logprobs).tolist()
        texts = (chat_format.decode([token]) for token in ids)
        logprobs = tuple(zip(texts, values, strict=True))
    return Answer(
        id=begun.answer_id,
        created=int(begun.created_at.timestamp()),
        model=request.model,
        content=call.response.get("content") or "",
        reasoning=call.response.get("reasoning_content") or "",
        tool_calls=calls,
        finish_reason="stop_sequence" if stopped and reason == "stop" else reason,
        stop_sequence=stopped,
        prompt_tokens=call.prompt_tokens,
        generated_tokens=call.generated_tokens,
        cached_tokens=call.cached_tokens,
        logprobs=logprobs,
        left_out=request.left_out,
    )


def unmet(parsed: ParsedMessage, request: GatewayRequest) -> str | None:
    """Return what a parsed answer lacks of what the request demands; None if it has all."""
    names = [call.name for call in parsed.tool_calls]
    if request.no_calls and names:
        return f"a call of {names[0]}, and the request allows no tool call"
    if request.must_call and (not names or not set(names) <= set(request.must_call)):
        called = f"a call of {', '.join(names)}" if names else "no tool call"
        return f"{called}, and the request demands one of {', '.join(request.must_call)}"
    if request.schema is None or names:
        return None
    try:
        validator, value = validator_of(request.schema), load_json(parsed.content)
        problem = within_cpu(CHECK_SECONDS, lambda: best_match(validator.iter_errors(value)))
    except (CallSyntaxError, Unresolvable, RecursionError) as error:
        return f"the answer is not of the JSON schema: {error}"
    return None if problem is None else f"the answer is not of the JSON schema: {problem.message}"


def response_of(
    parsed: ParsedMessage,
    request: GatewayRequest,
    generation: Generation,
    call: GatewayCall,
    chat_format: ChatFormat,
) -> tuple[Message, str | None]:
    """Return the assistant's message and the problem of its format.

    A malformed call stays readable as text.
    """
    calls, error = parsed.tool_calls, parsed.error
    if generation.finish_reason != "length" and (problem := unmet(parsed, request)) is not None:
        error = error or problem
    if request.no_calls:
        calls = ()
    if request.one_call and len(calls) > 1:
        error = error or f"{len(calls)} tool calls, and the request allows one: the first is answered"
        calls = calls[:1]
    content = parsed.content
    if not content and not calls and not parsed.reasoning:
        content = chat_format.decode(generation.output_ids).strip()
    stop = min((s for s in request.stop if s in content), key=content.index, default=None)
    if stop is not None:
        content = content[: content.index(stop)]
    message = message_of(replace(parsed, content=content, tool_calls=calls), call.answer_id[:_ID_DIGITS])
    if stop is not None:
        message["stop_sequence"] = stop
    cleaned: Message = replace_surrogates(message)
    return cleaned, replace_surrogates(error)


JSON_SCHEMA, STRUCTURAL_TAG = "json_schema", "structural_tag"
"""The sampling parameters of SGLang that hold a grammar, as JSON text."""

Json = dict[str, Any]


def grammar_of(
    request: GatewayRequest, shape: CallShape | None, *, in_thought: bool
) -> dict[str, str] | None:
    """Return the sampling parameter by which the engine samples only what ``request`` demands.

    A demanded call is one call, and nothing but a thought stands before it. ``in_thought``: the prompt opens
    a thought. None if the request demands nothing, or the format's calls have no ``shape``.
    """
    if not request.must_call and request.schema is None:
        return None
    names = request.must_call or tuple(schema_name(tool) for tool in request.tools)
    thinks = shape is not None and shape.tags is not None
    if not names and not thinks:
        return None if in_thought else {JSON_SCHEMA: json.dumps(request.schema)}
    if shape is None or (in_thought and not thinks):
        return None
    answers = [_call(shape, tool) for tool in request.tools if schema_name(tool) in names]
    if not request.must_call:
        answers.append({"type": "json_schema", "json_schema": request.schema})
    answer = _any_of(answers)
    if shape.tags is not None:
        begin = "" if in_thought else shape.tags.open
        thought = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": shape.tags.close}
        space = [{"type": "const_string", "value": shape.behind_thought}] if shape.behind_thought else []
        thoughtful = {"type": "sequence", "elements": [thought, *space, answer]}
        answer = thoughtful if in_thought else _any_of([thoughtful, answer])
    return {STRUCTURAL_TAG: json.dumps({"type": "structural_tag", "format": answer})}


def _call(shape: CallShape, tool: Json) -> Json:
    schema = tool.get("function", tool).get("parameters") or {"type": "object"}
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": shape.begin(schema_name(tool)), "content": content, "end": shape.end}


def _any_of(formats: list[Json]) -> Json:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": formats}


def call_shape(chat_format: ChatFormat) -> CallShape | None:
    """Return the shape of the format's tool calls; None unless they hold their arguments as one JSON object.

    The format must read the rendered call back.
    """
    text = _rendered(chat_format, {"content": "", "tool_calls": [_CALL]})
    thinking = _rendered(chat_format, {"content": "", "reasoning_content": _THOUGHT, "tool_calls": [_CALL]})
    if text is None:
        return None
    tags = next((tags for tags in REASONING_TAGS if _closes(thinking or "", tags)), None)
    between = ""
    if thinking is not None and tags is not None:
        behind = thinking[thinking.index(tags.close, thinking.index(_THOUGHT)) + len(tags.close) :]
        between = behind[: len(behind) - len(behind.lstrip())]
        text = text[text.rfind(tags.close) + len(tags.close) :] if tags.close in text else text
    text = text.lstrip()
    arguments = _ARGUMENTS.search(text)
    if arguments is None or text.count(_NAME) != 1 or text.index(_NAME) > arguments.start():
        return None
    before, behind = text[: arguments.start()].split(_NAME)
    return CallShape(before, behind, text[arguments.end() :].rstrip(), tags, between)


def _closes(text: str, tags: ReasoningTags) -> bool:
    return _THOUGHT in text and text[text.index(_THOUGHT) + len(_THOUGHT) :].lstrip().startswith(tags.close)


def _rendered(chat_format: ChatFormat, message: Message) -> str | None:
    """Return the text of an assistant's message, if the format reads its call back."""
    try:
        whole = chat_format.tokenize([_QUESTION, {"role": "assistant", **message}], [_TOOL])
        ids = whole.input_ids[whole.is_trainable].tolist()
        parsed = chat_format.parse(ids, [_TOOL], chat_format.render([_QUESTION], [_TOOL]))
    except (TrajectoryError, ValueError):
        return None
    calls = [(call.name, call.arguments) for call in parsed.tool_calls]
    is_read = parsed.error is None and calls == [(_NAME, {_FIELD: _VALUE})]
    return chat_format.decode(ids) if is_read else None


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
                params = ask.request.params(self.params).seeded(self.seed, ask.call.place)
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
                sent = params.replace(extra=extra).seeded(self.seed, ask.call.place, attempt)
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
        turn = Turn(
            record=claim.record_id, attempt=claim.attempt, prompt=prompt, role=request.role,
            tools=request.tools, params=params, generation=generation, parsed=parsed, response=response,
            problem=error,
            anchor=read_digest(without_volatile(unanswered(prompt.messages), request.volatile)),
        )  # fmt: skip
        after = digest_after(prompt.digest, without_volatile(response, request.volatile))
        key = request_key(request, prompt.digest)
        async with self.writing.setdefault(claim.record_id, asyncio.Lock()):
            stored = await self.store.model_calls.answer(
                claim, turn.document(), ask.call, after=after, key=key
            )
        self.prompts.chains.add(replace(turn.chain, call=stored.id), (claim.record_id, after))
        return stored
