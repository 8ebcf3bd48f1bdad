"""Describe a model call: the turn that its agent sees, its message, and the document that is stored."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from agentrl.chat.chat_format import ChatFormat, Message
from agentrl.chat.parsers.base import ParsedMessage, ToolCall
from agentrl.documents.base import replace_surrogates, sanitize_bson
from agentrl.documents.images import Image, ImageSpan
from agentrl.documents.model_call import (
    DispatchedSamplingTask,
    FixedModelCall,
    ToolExecution,
    pack_floats,
    pack_ids,
    storable_message,
    strip_tool_results,
)
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import CallStatus
from agentrl.errors import TrajectoryError
from agentrl.inference.engine import Generation
from agentrl.rollout.prompts import Prompt
from agentrl.tools.base import Schema
from agentrl.user_code import contain_call

if TYPE_CHECKING:
    from agentrl.store.images import Images

T = TypeVar("T")


class Hold(Protocol):
    """Makes a call; repeats it while what it needs is down."""

    async def __call__(self, call: Callable[[], Awaitable[T]], /) -> T:
        """Return the result of ``call``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One parsed model call. ``times_seen`` counts its text in the trajectory, this call included.

    A turn that was cut (``finish_reason`` ``length``) has neither an answer nor tool calls. One with a
    malformed call (``error``) has no answer: ``content`` holds the call, whose arguments do not count.
    """

    text: str
    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    error: str | None
    answer: str | None
    finish_reason: str
    times_seen: int
    prompt_tokens: int
    output_tokens: int

    @property
    def is_cut(self) -> bool:
        """Return whether the length limit of the model call ended the turn."""
        return self.finish_reason == "length"


@dataclass(slots=True, kw_only=True)
class PendingCall:
    """A model call that is not stored yet: its tools may still run."""

    record: str
    index: int | None = None
    """Its index among the stored calls; None until it is stored."""
    prompt: Prompt
    role: str | None
    tools: Sequence[Schema]
    params: SamplingParams
    generation: Generation
    response: Message
    error: str | None = None
    repeated: bool = False
    read: Sequence[ToolExecution] = ()
    """The tool runs of its parent, whose results its prompt has."""
    executions: list[ToolExecution] = field(default_factory=list)
    tool_seconds: float = 0.0
    settled: bool = False
    """Whether no tool call is left to run."""
    fixed: FixedModelCall | None = None

    @property
    def id(self) -> str:
        """Return the id of its document."""
        return f"{self.record}/{self.index or 0}"

    @property
    def status(self) -> CallStatus:
        """Return the status by the first error: of its format, of a repetition, of a tool."""
        if self.error is not None:
            return CallStatus.FORMAT_ERROR
        if self.repeated:
            return CallStatus.REPEAT_ERROR
        if any(execution.error for execution in self.executions):
            return CallStatus.TOOL_FAILED
        return CallStatus.COMPLETED

    def refuse(self, problem: str) -> str:
        """Keep the first problem of the format; return the text that the model reads."""
        self.error = self.error or problem
        return f"Error: {problem}"

    def document(self) -> DispatchedSamplingTask:
        """Return the document of this call."""
        generation, prompt = self.generation, self.prompt
        return DispatchedSamplingTask(
            id=self.id,
            record=self.record,
            index=self.index or 0,
            role=self.role,
            parent=prompt.parent,
            follows=prompt.follows,
            drops_thoughts=prompt.drops_thoughts,
            opens_branch=prompt.opens_branch,
            fixed=self.fixed,
            status=self.status,
            messages=tuple(map(storable_message, strip_tool_results(prompt.new_messages, self.read))),
            response=storable_message(self.response),
            tool_executions=tuple(self.executions),
            tools=None if prompt.parent else tuple(map(sanitize_bson, self.tools)),
            error=self.error,
            finish_reason=generation.finish_reason,
            versions=generation.versions,
            prompt_tokens=generation.prompt_tokens,
            generated_tokens=len(generation.output_ids),
            cached_tokens=generation.cached_tokens,
            engine=generation.engine_url,
            sampling_params=sanitize_bson(self.fixed.params if self.fixed else self.params.to_request()),
            generate_seconds=generation.seconds,
            tool_seconds=self.tool_seconds,
            context_ids=pack_ids(prompt.context_ids),
            output_ids=pack_ids(generation.output_ids),
            logprobs=pack_floats(generation.logprobs),
            logprobs_of=generation.logprobs_of,
            sampling_mask=generation.sampling_mask,
            routing=generation.routing,
            images=prompt.context_images,
        )


def parse(
    chat_format: ChatFormat, prompt: Prompt, generation: Generation, tools: Sequence[Schema]
) -> ParsedMessage:
    """Return the message of a generation, storable; a cut one has no tool calls. Raises TrajectoryError."""
    parsed = contain_call(
        lambda: cleaned(chat_format.parse(generation.output_ids, tools, prompt.ids)),
        "the tool-call parser",
        TrajectoryError,
    )
    return replace(parsed, tool_calls=(), error=None) if generation.finish_reason == "length" else parsed


def message_of(parsed: ParsedMessage, call_id: str) -> Message:
    """Return the assistant's message; ``call_id`` begins the ids of its tool calls."""
    message: Message = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [
            {
                "id": f"{call_id}{index % 100:02d}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(parsed.tool_calls)
        ]
    return message


def with_text_arguments(message: Message) -> Message:
    """Return the message as the OpenAI API has it: the arguments of tool calls are JSON text."""
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = [
        {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
        for call in message.get("tool_calls") or ()
        for function in (call["function"],)
    ]
    return {**plain, "tool_calls": calls} if calls else plain


async def images_of(store: Images, spans: Sequence[ImageSpan]) -> list[Image]:
    """Return the images of a prompt, in order."""
    if not spans:
        return []
    by_hash = await store.get({span.sha256 for span in spans})
    return [by_hash[span.sha256] for span in spans]


def cleaned(parsed: ParsedMessage) -> ParsedMessage:
    """Return the message with texts that can be stored."""
    calls = tuple(
        ToolCall(replace_surrogates(call.name), replace_surrogates(call.arguments))
        for call in parsed.tool_calls
    )
    return replace(
        parsed,
        content=replace_surrogates(parsed.content),
        tool_calls=calls,
        error=replace_surrogates(parsed.error),
    )
