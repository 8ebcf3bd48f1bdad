"""From messages to the ids of a prompt: behind the longest known conversation, within the model's context.

Generated ids stay as the engine returned them: they are never decoded and encoded again. Where the chat
format drops earlier thoughts, the next prompt is a rendering of its own: a new branch of the token tree.

A conversation is found again by its digest. Its prompt continues the ids that were sampled, which are never
decoded and encoded again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import orjson

from agentrl.chat.chat_format import ChatFormat, Message, ToolSchemas
from agentrl.config.schema import AgentConfig, SamplingConfig
from agentrl.documents.images import ImageSpan, joined
from agentrl.documents.model_call import DispatchedSamplingTask, full_messages, unpack_ids
from agentrl.documents.sampling import SamplingParams
from agentrl.errors import ImageError, StoreError, TrajectoryError
from agentrl.inference.engine import EncodedIds
from agentrl.tools.tool import Schema


class Conversation:
    """A conversation that grows by generations and messages.

    ``messages`` is for people, ``prompt_ids()`` for the engine. To reset the context, create a new object:
    it starts a new prefix.
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        messages: Sequence[Message],
        tools: ToolSchemas | None = None,
    ) -> None:
        """Start from ``messages``. ``tools`` are the function schemas that the format renders."""
        self._format = chat_format
        self.tools = tuple(dict(tool) for tool in tools or ())
        self.messages: list[Message] = [dict(message) for message in messages]
        self._prompt: list[int] = []
        self._output: list[int] = []
        """The last prompt and what was generated after it."""
        self._seen = 0
        """Number of messages that the last prompt and its output hold."""
        self._context: list[int] | None = None
        self._next_prompt: list[int] | None = None
        self._starts_branch = True
        self._images: tuple[ImageSpan, ...] = ()
        """The images of the last prompt."""

    @property
    def starts_branch(self) -> bool:
        """Return whether the next prompt does not continue the last generation."""
        self.context_ids()
        return self._starts_branch

    @property
    def new_messages(self) -> tuple[Message, ...]:
        """Messages since the last generation; all messages if the next prompt starts a branch."""
        return tuple(self.messages if self.starts_branch else self.messages[self._seen :])

    def context_ids(self) -> list[int]:
        """Return the ids between the last generation and the next; the whole prompt of a new branch.

        Do not change the list, nor that of ``prompt_ids``: each is made once.
        """
        if self._context is None:
            context, history = None, self.messages[: self._seen]
            if history:
                new = self.messages[self._seen :]
                context = self._format.next_prompt(self._prompt, self._output, history, new, self.tools)
            self._starts_branch = context is None
            self._context = self._format.render(self.messages, self.tools) if context is None else context
        return self._context

    def prompt_ids(self) -> list[int]:
        """Return the prompt of the next generation."""
        context = self.context_ids()
        if self._starts_branch:
            return context
        if self._next_prompt is None:
            self._next_prompt = [*self._prompt, *self._output, *context]
        return self._next_prompt

    def context_images(self) -> tuple[ImageSpan, ...]:
        """Return the images in ``context_ids()``."""
        ids = self.context_ids()
        # Begin with the last answer: results, and so their images, are rendered in the order of its calls.
        first = 0 if self._starts_branch else self._seen - 1
        return self._format.locate_images(ids, self.messages[first:])

    def prompt_images(self) -> tuple[ImageSpan, ...]:
        """Return the images in ``prompt_ids()``."""
        added = self.context_images()
        if self._starts_branch:
            return added
        before = len(self._prompt) + len(self._output)
        return (*self._images, *(image.moved(before) for image in added))

    def append_generation(self, ids: Sequence[int], message: Message) -> None:
        """Append one generation: ``ids`` as generated, ``message`` as parsed."""
        # Locate images first: their indices count from the prompt and output that are replaced here.
        self._images = self.prompt_images()
        self._prompt, self._output = self.prompt_ids(), list(ids)
        self.append_message(message)

    @property
    def unseen(self) -> tuple[Message, ...]:
        """Return the messages since the last answer; all messages before the first."""
        return tuple(self.messages[self._seen :])

    def append_message(self, message: Message) -> None:
        """Append the answer of another model: it has no ids of the policy."""
        self.messages.append(dict(message))
        self._seen = len(self.messages)
        self._context = self._next_prompt = None

    def append_messages(self, messages: Sequence[Message]) -> None:
        """Append messages that the model did not generate: tool results, user messages."""
        self.messages.extend(dict(message) for message in messages)
        self._context = self._next_prompt = None

    def change_new_messages(self, change: Callable[[Message], Message]) -> None:
        """Replace each message since the last generation by what ``change`` returns for it."""
        self.messages[self._seen :] = [change(message) for message in self.messages[self._seen :]]
        self._context = self._next_prompt = None


_SMALLEST_SHARE = 4
"""In a context shorter than the limits allow for, the reserve is at most this fraction: a quarter."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A conversation that ends with a model call: what its prompt and its output hold."""

    call: str
    prompt_ids: list[int]
    output_ids: list[int]
    messages: list[Message]
    """All messages, the answer included, with the thoughts that a client does not send back."""
    encoded: EncodedIds | None = None
    """The JSON of its prompt, which the next prompt extends."""
    images: tuple[ImageSpan, ...] = ()
    """Of its prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The prompt of a new call and its place in the token tree."""

    ids: list[int]
    context_ids: list[int]
    """The ids after the parent's output; the whole prompt without a parent."""
    messages: Sequence[Message]
    """All messages of the conversation."""
    new_messages: Sequence[Message]
    """Those that the parent does not have."""
    parent: str | None = None
    follows: str | None = None
    drops_thoughts: bool = False
    opens_branch: bool = False
    encoded: EncodedIds | None = None
    digest: str = ""
    """Digest of the request's conversation."""
    images: tuple[ImageSpan, ...] = ()
    """Of the prompt."""
    context_images: tuple[ImageSpan, ...] = ()
    """Of ``context_ids``."""

    @property
    def routed_from(self) -> int:
        """Return the first token whose experts the call computes: the parent's last one, if it has one."""
        return max(0, len(self.ids) - len(self.context_ids) - 1)


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
        messages += [*full_messages(call, before), call.message]
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
    # Let image errors pass: the whole would meet them again. Others may be of the extension alone.
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
        ids=ids, context_ids=added, messages=whole, new_messages=new, parent=chain.call,
        encoded=chain.encoded, images=(*chain.images, *(span.moved(before) for span in spans)),
        context_images=spans,
    )  # fmt: skip


def _rendered(
    chat_format: ChatFormat, messages: list[Message], tools: Sequence[Schema], follows: str | None
) -> Prompt:
    """Return the prompt of a whole conversation."""
    ids = chat_format.render(one_system(messages), tools)
    spans = chat_format.locate_images(ids, messages)
    return Prompt(
        ids=ids, context_ids=ids, messages=messages, new_messages=messages, follows=follows,
        drops_thoughts=follows is not None, opens_branch=follows is None, encoded=EncodedIds(),
        images=spans, context_images=spans,
    )  # fmt: skip


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


def prefix_digests(
    messages: Sequence[Message], tools: Sequence[Schema], role: str | None = None
) -> list[str]:
    """Return a digest for each prefix of the conversation: the first for the role and the tools.

    Two prefixes have one digest if the model reads the same in both. The ids of tool calls, the white space
    around an assistant's text and its thoughts do not count, because clients change them in what they send
    back.
    """
    of_role = "" if role is None else f"role {role}\0"
    digests = [hashlib.sha256(of_role.encode() + _dump([dict(tool) for tool in tools])).hexdigest()]
    for message in messages:
        # Chain the digests: hashing each prefix from its start would cost a conversation's square.
        digests.append(digest_after(digests[-1], message))
    return digests


def digest_after(digest: str, message: Message) -> str:
    """Return the digest of a conversation with ``digest`` and one more message."""
    return hashlib.sha256(digest.encode() + _dump(_canonical(message))).hexdigest()


def _canonical(message: Message) -> list[Any]:
    content = message.get("content") or ""
    if message["role"] != "assistant":
        return [message["role"], content]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return ["assistant", content.strip(), [[call["name"], call.get("arguments") or {}] for call in calls]]


def _dump(value: Sequence[Any]) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # a lone surrogate, or an integer of more than 64 bits
        return json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Budget:
    """The tokens that a trajectory's prompts and generations may have.

    ``context_length`` is the largest number of tokens of a prompt and its continuation; None if unknown.
    """

    config: AgentConfig
    context_length: int | None

    @property
    def prompt_limit(self) -> int:
        """Return the length of the longest prompt, which leaves at least one token to generate."""
        if self.context_length is None:
            return self.config.max_prompt_tokens
        return min(self.config.max_prompt_tokens, self.context_length - 1)

    @property
    def full_at(self) -> int:
        """Return the length up to which a context is not full: the limit without the reserve."""
        limit, reserve = self.prompt_limit, self.config.prompt_reserve_tokens
        if limit < self.config.max_prompt_tokens:
            reserve = min(reserve, limit // _SMALLEST_SHARE)
        return limit - reserve

    def clamp(self, params: SamplingParams, prompt_tokens: int) -> SamplingParams:
        """Return ``params`` with ``max_new_tokens`` lowered to what the prompt leaves of the context."""
        if self.context_length is None or prompt_tokens + params.max_new_tokens <= self.context_length:
            return params
        return params.replace(max_new_tokens=max(1, self.context_length - prompt_tokens))

    def name_limit(self, prompt_tokens: int) -> str:
        """Return why a prompt of this length does not fit."""
        limit = f"{self.prompt_limit:,}"
        if self.prompt_limit == self.config.max_prompt_tokens:
            return f"the next prompt has {prompt_tokens:,} tokens, and --max_prompt_tokens is {limit}"
        return (
            f"the next prompt has {prompt_tokens:,} tokens, and the context of {self.context_length:,} tokens"
            f" (of the model, or a micro-batch of --max_tokens) allows {limit}"
        )


def context_problem(agent: AgentConfig, sampling: SamplingConfig, context_length: int | None) -> str | None:
    """Return why the limits exceed the context; None if they fit or the length is unknown."""
    longest = agent.max_prompt_tokens + sampling.max_new_tokens
    if context_length is None or longest <= context_length:
        return None
    budget = Budget(agent, context_length)
    left = context_length - budget.prompt_limit
    return (
        f"--max_prompt_tokens {agent.max_prompt_tokens} + --max_new_tokens {sampling.max_new_tokens} exceed"
        f" the context of {context_length} tokens (of the model, or a micro-batch of --max_tokens): a context"
        f" is full at {budget.full_at}, and the longest prompt leaves {left} tokens"
    )
