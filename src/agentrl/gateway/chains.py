"""Rebuild the conversation up to a model call from stored documents, and cache it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from agentrl.chat.chat_format import ChatFormat, Message
from agentrl.documents.images import ImageSpan
from agentrl.documents.model_call import DispatchedSamplingTask, full_messages, unpack_ids
from agentrl.errors import ImageError, StoreError, TrajectoryError
from agentrl.gateway.dialects.images import joined
from agentrl.inference.engine import EncodedIds
from agentrl.tools.base import Schema

if TYPE_CHECKING:
    from agentrl.store.client import Store

_CACHED_TOKENS = 4_000_000
"""Tokens in all cached conversations; an older one is read again from the database."""
_OBJECT_TOKENS = 100
"""What a conversation costs beside its tokens, as many of them: short ones are bounded too."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A conversation that ends with a model call: what its prompt and its output hold."""

    call: str
    prompt_ids: list[int]
    output_ids: list[int]
    messages: list[Message]
    """All messages, the answer included, with the thoughts that a client does not send back."""
    encoded: EncodedIds = field(default_factory=EncodedIds)
    """The JSON of its prompt, which the next prompt extends."""
    images: tuple[ImageSpan, ...] = ()
    """Of its prompt."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a new call and its place in the token tree."""

    ids: list[int]
    context_ids: list[int]
    messages: list[Message]
    """All messages of the conversation."""
    new_messages: list[Message]
    """Those that the parent does not have."""
    parent: str | None
    follows: str | None
    encoded: EncodedIds
    digest: str = ""
    """Digest of the request's conversation."""
    images: tuple[ImageSpan, ...] = ()
    """Of the prompt."""
    context_images: tuple[ImageSpan, ...] = ()
    """Of ``context_ids``."""


class Chains:
    """The conversations of a process's latest calls, by model call. A cache of immutable documents."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._cached: OrderedDict[str, Chain] = OrderedDict()
        self._ends: dict[tuple[str, str], Chain] = {}
        self._keys: dict[str, tuple[str, str]] = {}
        self._tokens = 0

    async def longest(self, record_id: str, digests: Sequence[str]) -> tuple[int, Chain | None]:
        """Return the longest of the conversations with ``digests`` that ends with an answer, and its place.

        The place counts from 1; without such a conversation it is 0.
        """
        if not digests:
            return 0, None
        chain = self._ends.get((record_id, digests[-1]))
        if chain is not None:
            self._cached.move_to_end(chain.call)
            return len(digests), chain
        found = await self._store.gateways.latest_after(record_id, digests)
        for place in range(len(digests), 0, -1):
            call = found.get(digests[place - 1])
            if call is not None:
                return place, await self.get(record_id, str(call.call))
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


def chain_of(calls: Mapping[str, DispatchedSamplingTask], call_id: str) -> Chain:
    """Return the conversation of a call, from the call without a parent on. Raises StoreError."""
    path: list[DispatchedSamplingTask] = []
    wanted: str | None = call_id
    while wanted is not None:
        if wanted not in calls:
            raise StoreError(f"model call {wanted} is missing", hint="look for more: agentrl db check")
        path.append(calls[wanted])
        wanted = calls[wanted].parent
    prompt: list[int] = []
    messages: list[Message] = []
    output: list[int] = []
    before: DispatchedSamplingTask | None = None
    images: list[ImageSpan] = []
    for call in reversed(path):
        prompt += output
        images += [image.moved(len(prompt)) for image in call.images]
        prompt += unpack_ids(call.context_ids).tolist()
        output = unpack_ids(call.output_ids).tolist()
        messages += [*full_messages(call, before), {"role": "assistant", **call.response}]
        before = call
    return Chain(call_id, prompt, output, messages, images=tuple(images))


def prompt_of(
    chat_format: ChatFormat,
    chain: Chain | None,
    known: int,
    messages: Sequence[Message],
    tools: Sequence[Schema],
) -> Prompt:
    """Return the prompt of a request whose first ``known`` messages are those of ``chain``.

    It goes on from the sampled ids. Where the chat format drops earlier thoughts, or cannot extend a prompt
    by these messages, it is rendered anew, as a branch. Raises TrajectoryError if it cannot be rendered.
    """
    if chain is None:
        return _rendered(chat_format, list(messages), tools, None)
    new = list(messages[known:])
    whole = [*chain.messages, *new]
    shown = one_system(chain.messages)
    try:
        added = chat_format.next_prompt(chain.prompt_ids, chain.output_ids, shown, new, tools)
    except ImageError:
        raise
    except TrajectoryError:
        added = None
    if added is None:
        return _rendered(chat_format, whole, tools, chain.call)
    ids = [*chain.prompt_ids, *chain.output_ids, *added]
    spans = chat_format.locate_images(added, [chain.messages[-1], *new])
    before = len(ids) - len(added)
    return Prompt(
        ids, added, whole, new, chain.call, None, chain.encoded,
        images=(*chain.images, *(span.moved(before) for span in spans)), context_images=spans,
    )  # fmt: skip


def _rendered(
    chat_format: ChatFormat, messages: list[Message], tools: Sequence[Schema], follows: str | None
) -> Prompt:
    """Return the prompt of a whole conversation."""
    ids = chat_format.render(one_system(messages), tools)
    spans = chat_format.locate_images(ids, messages)
    return Prompt(
        ids, ids, messages, messages, None, follows, EncodedIds(), images=spans, context_images=spans
    )


def one_system(messages: Sequence[Message]) -> list[Message]:
    """Return the messages that a chat template is given: the leading ones of the system are one.

    Clients such as Codex send several. Many templates refuse a second one, or leave it out.
    """
    of_system = takewhile(lambda message: message["role"] == "system", messages)
    leading = [message["content"] for message in of_system]
    if len(leading) < 2:
        return list(messages)
    pieces = [piece for content in leading for piece in ([content] if isinstance(content, str) else content)]
    content = joined([piece for piece in pieces if piece], "\n\n")
    return [{"role": "system", "content": content}, *messages[len(leading) :]]
