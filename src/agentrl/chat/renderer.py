"""Define messages and renderers, and rewrite messages into the form that one renderer loses nothing of."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from agentrl.chat.control_tokens import ControlTokens
from agentrl.chat.parsers.base import ParsedMessage
from agentrl.chat.parsers.reasoning import THINK, ReasoningTags, opens_thought
from agentrl.documents.images import ImageSpan

Message = dict[str, Any]
"""One chat message, as in an OpenAI request; ``reasoning_content`` holds an assistant's thought."""

ToolSchemas = Sequence[Mapping[str, Any]]
"""The function schemas of the tools offered, as in an OpenAI request."""

TRAIN = "train"
"""Field of an assistant message: false makes it context of a conversation for fine-tuning."""


_PROMPT_END = 16
"""Tokens at the end of a prompt in which a template may open a thought."""


@dataclass(frozen=True)
class TokenizedConversation:
    """``input_ids`` int64[n]; ``is_trainable`` bool[n] marks the tokens of trained assistant messages.

    ``images`` are the tokens that stand for images.
    """

    input_ids: NDArray[np.int64]
    is_trainable: NDArray[np.bool_]
    images: tuple[ImageSpan, ...] = ()


def split_train(messages: Sequence[Message]) -> tuple[list[Message], list[bool]]:
    """Return the messages without the field ``train``, and whether each is a trained assistant message."""
    flags = [m.get("role") == "assistant" and m.get(TRAIN, True) is True for m in messages]
    return [{key: value for key, value in m.items() if key != TRAIN} for m in messages], flags


class Renderer(ABC):
    """Renders messages as token ids. Text inside messages never becomes a control token."""

    name: str
    """The name for ``--chat_format``."""
    description: str
    """One line about the renderer."""
    agreed_settings: dict[str, str]
    """What all samplers of a run must have in common."""
    call_marks: tuple[str, ...] | None = None
    """The texts with which a tool call may begin; None if any text may be one."""

    def __init__(self, tokens: ControlTokens, stop_ids: Iterable[int]) -> None:
        """``stop_ids`` close an assistant turn."""
        self.tokens = tokens
        self.stop_ids = frozenset(stop_ids)
        self._decoded: tuple[Sequence[int], str] = ((), "")
        """The last ids given to ``decode`` and their text."""

    @abstractmethod
    def render(
        self, messages: Sequence[Message], tools: ToolSchemas | None, *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return a conversation, up to where the assistant continues with ``add_generation_prompt``.

        Raises TrajectoryError if the conversation cannot be rendered.
        """

    @abstractmethod
    def extend(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: ToolSchemas | None,
    ) -> list[int] | None:
        """Return the ids between a generation and the next one: prompt, output, *these ids*, next output.

        ``history`` ends with the message that ``output_ids`` were parsed into; ``new_messages`` follow it.
        None if the renderer cannot extend the prompt.
        """

    @abstractmethod
    def parse(
        self, output_ids: Sequence[int], tools: ToolSchemas, prompt_ids: Sequence[int] = ()
    ) -> ParsedMessage:
        """Return the message that was generated after ``prompt_ids``; its ``error`` reports a bad call."""

    @abstractmethod
    def tokenize(self, messages: Sequence[Message], tools: ToolSchemas | None) -> TokenizedConversation:
        """Return a whole conversation and a mask of what the assistant says, for fine-tuning.

        Assistant messages with ``train: false`` are not in the mask. Raises ValueError or TrajectoryError
        for a conversation whose tokens cannot be attributed.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of generated ids with special tokens, without the ids that close the turn."""
        last, text = self._decoded
        if isinstance(ids, tuple) and ids is last:
            return text
        end = len(ids)
        while end and ids[end - 1] in self.stop_ids:
            end -= 1
        text = self.tokens.decode(ids[:end])
        self._decoded = (ids, text)
        return text

    def opens_thought(self, prompt_ids: Sequence[int], tags: ReasoningTags) -> bool:
        """Return whether a prompt ends inside a thought, as templates of thinking models write it."""
        return opens_thought(self.tokens.decode(prompt_ids[-_PROMPT_END:]), tags)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptation:
    """How messages are rewritten for one template. By default only reasoning is put where it is read."""

    reasoning: Literal["field", "text"] = "field"
    """Reasoning is a field of its message (``reasoning_content``, ``thinking``), or tagged text before the
    content."""
    tags: ReasoningTags = THINK
    arguments_as_text: bool = False
    """Arguments are JSON text, not an object."""
    content_apart: bool = False
    """Text beside calls becomes a message of its own before them."""
    one_call_each: bool = False
    """Parallel calls become one message each, with the result behind it."""
    orphans_as_user: bool = False
    """A tool message without a call becomes a user message."""
    calls_as_text: bool = False
    """Calls become text of the content, in the Hermes form."""
    kimi_ids: bool = False
    """Calls have Kimi's ids, ``functions.NAME:NUMBER``, by which its results name them."""

    def with_ids(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return a whole conversation with the ids that the model writes."""
        return with_kimi_ids(messages) if self.kimi_ids else messages

    def apply(self, messages: Iterable[Message]) -> list[Message]:
        """Return the messages in this form, with results in the order of their calls."""
        adapted = [self.apply_to_one(message) for message in in_call_order(messages)]
        if self.content_apart:
            adapted = [part for message in adapted for part in _content_apart(message)]
        if self.one_call_each:
            adapted = _one_call_each(adapted)
        if not self.orphans_as_user:
            return adapted
        return [
            {"role": "user", "content": message.get("content")}
            if message.get("role") == "tool" and not message.get("tool_call_id")
            else message
            for message in adapted
        ]

    def describe(self) -> str:
        """Return what is changed, as the end of a sentence; empty if nothing is."""
        changes = [
            (self.arguments_as_text, "arguments as JSON text"),
            (self.content_apart, "text beside calls as a message before them"),
            (self.one_call_each, "parallel calls as one message each"),
            (self.orphans_as_user, "errors of malformed calls as user messages"),
            (self.calls_as_text, "calls as text in the Hermes form"),
        ]
        return ", ".join(text for is_changed, text in changes if is_changed)

    def apply_to_one(self, message: Message) -> Message:
        """Return one message in this form, with all its calls in it."""
        if message.get("role") != "assistant":
            return message
        adapted = dict(message)
        reasoning = adapted.pop("reasoning_content", None) or adapted.pop("thinking", None)
        adapted.pop("thinking", None)
        content = adapted.get("content") or ""
        if reasoning and self.reasoning == "text":
            content = f"{self.tags.open}\n{reasoning}\n{self.tags.close}\n\n{content}"
        elif reasoning:
            adapted |= {"reasoning_content": reasoning, "thinking": reasoning}
        calls = [self._call(call) for call in adapted.pop("tool_calls", None) or ()]
        if calls and self.calls_as_text:
            content = "\n".join([*([content] if content else []), *map(_call_text, calls)])
        elif calls:
            adapted["tool_calls"] = calls
        adapted["content"] = content
        return adapted

    def _call(self, call: Any) -> dict[str, Any]:
        function = dict(call.get("function") or call)
        arguments = function.get("arguments")
        if self.arguments_as_text and not isinstance(arguments, str):
            function["arguments"] = json.dumps(arguments or {}, ensure_ascii=False)
        elif not self.arguments_as_text and isinstance(arguments, str):
            function["arguments"] = _decoded(arguments)
        return {"type": "function", **{k: v for k, v in call.items() if k == "id"}, "function": function}


def with_kimi_ids(messages: Sequence[Message]) -> list[Message]:
    """Return a whole conversation whose calls are numbered from 0, and whose results name them by number."""
    renamed: list[Message] = []
    ids: dict[Any, str] = {}
    count = 0
    for message in messages:
        changed = dict(message)
        if message.get("tool_calls"):
            ids, calls = {}, []
            for call in message["tool_calls"]:
                name = (call.get("function") or call).get("name")
                ids[call.get("id")] = f"functions.{name}:{count}"
                calls.append({**call, "id": ids[call.get("id")]})
                count += 1
            changed["tool_calls"] = calls
        if message.get("tool_call_id") in ids:
            changed["tool_call_id"] = ids[message["tool_call_id"]]
        renamed.append(changed)
    return renamed


def in_call_order(messages: Iterable[Message]) -> list[Message]:
    """Return the messages with the results behind parallel calls in the order of these calls.

    Templates that find a result by its position would attribute it to another call. Results without the id of
    a call stay behind the others.
    """
    ordered: list[Message] = []
    indices: dict[Any, int] = {}
    start = 0
    for message in messages:
        ordered.append(message)
        if message.get("role") != "tool":
            calls = message.get("tool_calls") or ()
            indices = {call["id"]: index for index, call in enumerate(calls) if call.get("id")}
            start = len(ordered)
        elif len(indices) > 1:
            ordered[start:] = sorted(
                ordered[start:], key=lambda result: indices.get(result.get("tool_call_id"), len(indices))
            )
    return ordered


def _call_text(call: Message) -> str:
    function = {"name": call["function"]["name"], "arguments": call["function"].get("arguments") or {}}
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _content_apart(message: Message) -> list[Message]:
    """Return the message in two if it has both text and calls; content beside calls is None then."""
    if not message.get("tool_calls"):
        return [message]
    spoken = {key: value for key, value in message.items() if key != "tool_calls"}
    called = {"role": "assistant", "content": None, "tool_calls": message["tool_calls"], **_train(message)}
    return [spoken, called] if message.get("content") else [{**spoken, **called}]


def _train(message: Message) -> Message:
    return {TRAIN: message[TRAIN]} if TRAIN in message else {}


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Give each call a message of its own, followed by its result."""
    separate: list[Message] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        calls = message.get("tool_calls") or []
        if not calls:
            separate.append(message)
            continue
        results = list(takewhile(lambda result: result.get("role") == "tool", messages[index:]))
        index += len(results)
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        for call, answers in zip(calls, _by_call(calls, results), strict=True):
            separate += [{**rest, "tool_calls": [call]}, *answers]
            content = None if rest.get("content") is None else ""
            rest = {"role": "assistant", "content": content, **_train(message)}
    return separate


def _by_call(calls: Sequence[Message], results: Sequence[Message]) -> list[list[Message]]:
    """Return the results of each call, by id or, without ids, by order; the last also gets the others."""
    ids = [call.get("id") for call in calls]
    answers: list[list[Message]] = [[] for _ in calls]
    for index, result in enumerate(results):
        if any(ids):
            index = ids.index(result["tool_call_id"]) if result.get("tool_call_id") in ids else len(calls)
        answers[min(index, len(calls) - 1)].append(result)
    return answers
