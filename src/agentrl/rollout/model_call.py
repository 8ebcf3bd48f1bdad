"""Describe one model call of a trajectory: the turn that its agent sees, and the document that is stored."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentrl.chat.chat_format import Message
from agentrl.chat.parsers.base import ToolCall
from agentrl.documents.base import sanitize_bson
from agentrl.documents.images import ImageSpan
from agentrl.documents.model_call import (
    DispatchedSamplingTask,
    FixedModelCall,
    ToolExecution,
    pack_floats,
    pack_ids,
)
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import CallStatus
from agentrl.inference.engine import Generation
from agentrl.tools.base import Schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One parsed model call. ``times_seen`` counts its text in the trajectory, this call included.

    A turn that was cut (``finish_reason`` ``length``) has neither an answer nor tool calls.
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
    """Its place among the stored calls; None until it is stored."""
    role: str | None = None
    parent: str | None
    follows: str | None = None
    drops_thoughts: bool = False
    opens_branch: bool = False
    messages: tuple[Message, ...]
    tools: tuple[Schema, ...] | None
    context_ids: list[int]
    images: tuple[ImageSpan, ...] = ()
    params: SamplingParams
    generation: Generation
    response: Message
    error: str | None = None
    repeated: bool = False
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
        generation = self.generation
        return DispatchedSamplingTask(
            id=self.id,
            record=self.record,
            index=self.index or 0,
            role=self.role,
            parent=self.parent,
            follows=self.follows,
            drops_thoughts=self.drops_thoughts,
            opens_branch=self.opens_branch,
            fixed=self.fixed,
            status=self.status,
            messages=tuple(sanitize_bson(message) for message in self.messages),
            response=sanitize_bson(self.response),
            tool_executions=tuple(self.executions),
            tools=None if self.tools is None else tuple(map(sanitize_bson, self.tools)),
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
            context_ids=pack_ids(self.context_ids),
            output_ids=pack_ids(generation.output_ids),
            logprobs=pack_floats(generation.logprobs),
            logprobs_of=generation.logprobs_of,
            images=self.images,
        )
