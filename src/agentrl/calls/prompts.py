"""From messages to the ids of a prompt: behind the longest known conversation, within the model's context.

Generated ids stay as the engine returned them: they are never decoded and encoded again. Where the chat
format drops earlier thoughts, the next prompt is a rendering of its own: a new branch of the token tree. An
agent's own conversation grows in place; that of a client, which sends it whole, is found by its digest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Final

from agentrl.base.concurrency import PROMPT_THREADS
from agentrl.chat.chat_format import ChatFormat, Message, ToolSchemas
from agentrl.config.schema import AgentConfig, SamplingConfig
from agentrl.documents.images import ImageSpan, joined, text_of
from agentrl.documents.model_call import DispatchedSamplingTask, full_messages, unpack_ids
from agentrl.documents.sampling import SamplingParams
from agentrl.errors import ImageError, StoreError, TrajectoryError
from agentrl.inference.engine import EncodedIds
from agentrl.tools.tool import Schema

LARGE_TEXT = 32 << 10
"""Characters that take longer to tokenize than a thread takes to start."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A conversation that ends with a model call: what its prompt and its output hold."""

    call: str
    """The id of the call; empty for one that is not stored yet."""
    prompt_ids: list[int]
    output_ids: list[int]
    messages: list[Message]
    """All messages, the answer included, with the thoughts that a client does not send back."""
    encoded: EncodedIds | None = None
    """The JSON of its prompt, which the next prompt extends: encoding it anew each turn is quadratic."""
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


class Conversation:
    """A conversation that grows by generations and messages.

    ``messages`` is for people, ``prompt`` for the engine. To reset the context, create a new object.
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
        self._chain: Chain | None = None
        """The conversation up to the last generation."""
        self._answered = 0
        """Number of messages up to the last answer."""
        self._prompt: Prompt | None = None

    @property
    def prompt(self) -> Prompt:
        """Return the prompt of the next generation, made once: do not change its lists.

        The id of its parent is empty: the caller knows it. Raises TrajectoryError for messages that cannot be
        rendered.
        """
        if self._prompt is None:
            self._prompt = self._made(self._chain, self.messages, self._answered)
        return self._prompt

    async def render(self) -> None:
        """Make the prompt, in a thread if it has much new text: other trajectories go on meanwhile."""
        while self._prompt is None and self._is_large:
            state = self._chain, list(self.messages), self._answered
            made = await PROMPT_THREADS.run(self._made, *state)
            # Compare: messages may have come meanwhile. Nor may a thread whose caller was cancelled store it.
            if self._prompt is None and state == (self._chain, self.messages, self._answered):
                self._prompt = made

    @property
    def _is_large(self) -> bool:
        return sum(len(text_of(message.get("content"))) for message in self.unseen) > LARGE_TEXT

    def _made(self, chain: Chain | None, messages: Sequence[Message], answered: int) -> Prompt:
        """Return the prompt of ``messages``, of which ``chain`` ends with the first ``answered``."""
        prompt = None
        if chain is not None:
            # Raise where ``prompt_of`` renders anew: a template that cannot extend an agent's own
            # messages is a mistake in the settings, and a branch for each turn would hide it.
            prompt = extended(self._format, chain, list(messages[answered:]), self.tools)
        return rendered(self._format, messages, self.tools) if prompt is None else prompt

    @property
    def starts_branch(self) -> bool:
        """Return whether the next prompt does not continue the last generation."""
        return self.prompt.parent is None

    @property
    def unseen(self) -> list[Message]:
        """Return the messages since the last answer; all messages before the first."""
        return self.messages[self._answered :]

    def append_generation(self, ids: Sequence[int], message: Message) -> None:
        """Append one generation: ``ids`` as generated, ``message`` as parsed."""
        prompt = self.prompt
        self.append_message(message)
        self._chain = Chain("", prompt.ids, list(ids), list(self.messages), prompt.encoded, prompt.images)

    def append_message(self, message: Message) -> None:
        """Append the answer of another model: it has no ids of the policy."""
        self.messages.append(dict(message))
        self._answered = len(self.messages)
        self._prompt = None

    def append_messages(self, messages: Sequence[Message]) -> None:
        """Append messages that the model did not generate: tool results, user messages."""
        self.messages.extend(dict(message) for message in messages)
        self._prompt = None

    def change_new_messages(self, change: Callable[[Message], Message]) -> None:
        """Replace each message since the last generation by what ``change`` returns for it."""
        self.messages[self._answered :] = map(change, self.unseen)
        self._prompt = None


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
    return Chain(call_id, prompt, output, messages, EncodedIds(), tuple(images))


def continued(before: Chain, call: DispatchedSamplingTask) -> Chain:
    """Return the conversation of ``call``, whose parent ends ``before`` and has run no tools."""
    known = [*before.prompt_ids, *before.output_ids]
    images = (*before.images, *(image.moved(len(known)) for image in call.images))
    return Chain(
        call.id, [*known, *unpack_ids(call.context_ids).tolist()], unpack_ids(call.output_ids).tolist(),
        [*before.messages, *full_messages(call, None), call.message], before.encoded, images,
    )  # fmt: skip


def prompt_of(
    chat_format: ChatFormat,
    chain: Chain | None,
    known: int,
    messages: Sequence[Message],
    tools: Sequence[Schema],
) -> Prompt:
    """Return the prompt of a client's request whose first ``known`` messages are those of ``chain``.

    It goes on from the sampled ids. Where the chat format drops earlier thoughts, or cannot extend a prompt
    by these messages, it is rendered anew, as a branch. Raises TrajectoryError if it cannot be rendered.
    """
    new = list(messages[known:])
    if chain is None:
        return rendered(chat_format, new, tools, shown=one_system(new))
    history = one_system(chain.messages)
    try:
        prompt = extended(chat_format, chain, new, tools, shown=history)
    # Let image errors pass: the whole would meet them again. Others may be of the extension alone, and a
    # client may send anything.
    except ImageError:
        raise
    except TrajectoryError:
        prompt = None
    if prompt is not None:
        return prompt
    drops = chat_format.drops_thought(history, new)
    whole = rendered(chat_format, [*chain.messages, *new], tools, shown=[*history, *new])
    return replace(whole, follows=chain.call, drops_thoughts=drops, opens_branch=not drops)


def extended(
    chat_format: ChatFormat,
    chain: Chain,
    new: list[Message],
    tools: ToolSchemas,
    *,
    shown: Sequence[Message] | None = None,
) -> Prompt | None:
    """Return the prompt that continues the sampled ids of ``chain`` by ``new`` messages.

    ``shown`` are the chain's messages as the template is given them. None where the chat format drops earlier
    thoughts, or cannot extend the prompt: it must be rendered anew.
    """
    history = chain.messages if shown is None else shown
    added = chat_format.next_prompt(chain.prompt_ids, chain.output_ids, history, new, tools)
    if added is None:
        return None
    encoded = chain.encoded or EncodedIds()
    ids = encoded.grow(chain.prompt_ids, [*chain.output_ids, *added])
    # Begin with the last answer: results, and so their images, are rendered in the order of its calls.
    spans = chat_format.locate_images(added, [chain.messages[-1], *new])
    before = len(ids) - len(added)
    return Prompt(
        ids=ids, context_ids=added, messages=[*chain.messages, *new], new_messages=new, parent=chain.call,
        encoded=encoded, images=(*chain.images, *(span.moved(before) for span in spans)),
        context_images=spans,
    )  # fmt: skip


def rendered(
    chat_format: ChatFormat,
    messages: Sequence[Message],
    tools: ToolSchemas,
    *,
    shown: Sequence[Message] | None = None,
) -> Prompt:
    """Return the prompt of a whole conversation, a new branch; ``shown`` are the template's messages."""
    messages = list(messages)
    ids = chat_format.render(messages if shown is None else shown, tools)
    spans = chat_format.locate_images(ids, messages)
    return Prompt(
        ids=ids, context_ids=ids, messages=messages, new_messages=messages, opens_branch=True,
        encoded=EncodedIds(), images=spans, context_images=spans,
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


_SMALLEST_SHARE = 4
"""In a context shorter than the limits allow for, the reserve is at most this fraction: a quarter."""


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


CONTEXT_LIMITS: Final = frozenset({"max_prompt_tokens", "max_new_tokens"})
"""The flags of which ``context_problem`` speaks."""


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
