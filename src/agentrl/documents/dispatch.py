"""DispatchedSamplingTask: one model call of a trajectory, holding only what is new since its parent."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from agentrl.documents.base import Document, Root, now
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
    """The messages added since the parent, before the model spoke."""
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
    """float32 logprob of each output id under the policy that sampled it."""
