"""DispatchedSamplingTask: one model call of a trajectory, holding only what is new since its parent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from agentrl.documents.base import Document, Root, now
from agentrl.documents.sampling import LogprobsOf
from agentrl.documents.status import CallStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan(Document):
    """Generated tokens ``[start, end)`` of a call, sampled under one policy version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolExecution(Document):
    """One tool call as it ran. ``error`` tells a tool's own error text from a result."""

    name: str
    arguments: dict[str, Any]
    result: str
    error: bool
    seconds: float
    server: str | None = None

    @property
    def text(self) -> str:
        """What the model reads of it."""
        return f"Error: {self.result}" if self.error else self.result


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchedSamplingTask(Root):
    """One model call. ``id`` is ``record_id/index``.

    The call's prompt is: the parent's prompt, the parent's output, then ``context_ids``. With no parent
    (the first call, or the first after a context reset) ``context_ids`` is the whole prompt.
    """

    id: str
    record: str
    index: int
    parent: str | None
    status: CallStatus
    messages: tuple[dict[str, Any], ...]
    """The messages added since the parent, before the model spoke.

    What a tool answered is kept once, with the execution: its message has ``execution``, a place in the
    parent's ``tool_executions``, instead of ``content`` (``full_messages`` puts it back).
    """
    response: dict[str, Any]
    """The assistant message: ``content``, ``tool_calls``."""
    tool_executions: tuple[ToolExecution, ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None
    """Tool schemas offered; only on calls without a parent."""
    error: str | None = None
    finish_reason: str
    versions: tuple[VersionSpan, ...]
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int = 0
    engine: str
    sampling_params: dict[str, Any] = field(default_factory=dict)
    generate_seconds: float
    tool_seconds: float = 0.0
    created_at: datetime = field(default_factory=now)
    context_ids: bytes
    """int32 ids since the parent's output (little-endian)."""
    output_ids: bytes
    """int32 ids that the engine generated."""
    logprobs: bytes
    """float32 logprob of each output id; ``logprobs_of`` names the distribution."""
    logprobs_of: LogprobsOf = "policy"


def strip_tool_results(
    messages: Iterable[dict[str, Any]], executions: Sequence[ToolExecution]
) -> tuple[dict[str, Any], ...]:
    """Messages as a call stores them: those that hold what ``executions`` answered, in order, name them."""
    stored, place = [], 0
    for message in messages:
        answered = place < len(executions) and message.get("role") == "tool"
        if answered and message.get("content") == executions[place].text:
            message = {key: value for key, value in message.items() if key != "content"}
            message["execution"] = place
            place += 1
        stored.append(message)
    return tuple(stored)


def full_messages(
    call: DispatchedSamplingTask, parent: DispatchedSamplingTask | None
) -> tuple[dict[str, Any], ...]:
    """The messages of ``call`` as the model read them; inverse of ``strip_tool_results``."""
    executions = parent.tool_executions if parent is not None else ()
    return tuple(
        {**{key: value for key, value in message.items() if key != "execution"},
         "content": executions[message["execution"]].text}
        if "execution" in message and message["execution"] < len(executions)
        else message
        for message in call.messages
    )  # fmt: skip
