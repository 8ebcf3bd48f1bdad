"""DispatchedSamplingTask: one model call of a trajectory; it stores only what it adds to its parent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from agentrl.documents.base import Document, Root, now
from agentrl.documents.images import ImageRef, ImageSpan, Part
from agentrl.documents.sampling import LogprobsOf
from agentrl.documents.status import CallStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan(Document):
    """Generated tokens ``[start, end)`` of a model call, sampled under one policy version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BrowseCall(Document):
    """One question to the browse agent about one part of a tool's result; ``problem``: no model answered."""

    model: str | None = None
    reply: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    seconds: float
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Condensed(Document):
    """A tool's result that the browse agent condensed; without ``result`` the policy read the original."""

    purpose: str
    original: str
    """The first characters of the tool's own result."""
    chars: int
    """Length of the tool's own result."""
    tokens: int
    calls: tuple[BrowseCall, ...]
    """One for each part of the result."""
    result: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolExecution(Document):
    """One executed tool call. ``error``: ``result`` is the tool's error text."""

    name: str
    arguments: dict[str, Any]
    result: str
    error: bool
    seconds: float
    server: str | None = None
    reward: float | None = None
    """The reward that the tool itself gives to the call, if it gives one."""
    condensed: Condensed | None = None
    """Set if the browse agent was called; ``result`` is the text that the policy read."""
    images: tuple[ImageRef, ...] = ()
    """The images that the tool returned and the model reads, behind the text."""

    @property
    def text(self) -> str:
        """Return the text that the model reads."""
        return f"Error: {self.result}" if self.error else self.result

    @property
    def content(self) -> str | list[Part]:
        """Return the content of its message: the text, and the images if there are any."""
        if not self.images:
            return self.text
        text = [{"type": "text", "text": self.text}] if self.text else []
        return [*text, *(image.part() for image in self.images)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedModelCall(Document):
    """What a call of a model other than the policy took. Its tokens are never trained."""

    model: str
    base_url: str
    """Without user name, password and query."""
    params: dict[str, Any] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchedSamplingTask(Root):
    """One model call. ``id`` is ``record_id/index``.

    The prompt is the parent's prompt, the parent's output, then ``context_ids``. A call without a parent has
    the whole prompt in ``context_ids``: the first call, the first one after a context reset, and each one
    whose prompt drops earlier thoughts.
    """

    id: str
    record: str
    index: int
    role: str | None = None
    """The role of the trajectory that made it; None for the trajectory's own conversation."""
    parent: str | None
    opens_branch: bool = False
    """It begins a conversation beside the others: the first call of a role, or of an edited history."""
    fixed: FixedModelCall | None = None
    """Set if a model other than the policy answered: then it has no ids, and no tokens of the policy."""
    drops_thoughts: bool = False
    """The prompt leaves out thoughts of the call before, as the chat format does, and so continues none."""
    follows: str | None = None
    """The call whose conversation this one continues, where a new prompt was rendered: it has no parent."""
    status: CallStatus
    messages: tuple[dict[str, Any], ...]
    """The messages that were added after the parent's response.

    A tool result is stored once, in the parent's ``tool_executions``: its message has ``execution``, an index
    into them, instead of ``content``. ``full_messages`` restores the content.
    """
    response: dict[str, Any]
    """The assistant message: ``content``, ``tool_calls``."""
    tool_executions: tuple[ToolExecution, ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None
    """The tool schemas offered; stored only in calls without a parent."""
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
    """int32 ids of the prompt after the parent's output (little-endian)."""
    output_ids: bytes
    """int32 ids of the generated tokens."""
    logprobs: bytes
    """float32 logprob of each output id; ``logprobs_of`` names the distribution."""
    logprobs_of: LogprobsOf = "policy"
    images: tuple[ImageSpan, ...] = ()
    """Tokens of ``context_ids`` that stand for images."""
    checksums: dict[str, str] = field(default_factory=dict, compare=False)
    """See ``store.checksums``."""

    @property
    def is_context_reset(self) -> bool:
        """Return whether the prompt is the first of a context that a context manager started."""
        begins = self.parent is None and self.index > 0
        return begins and not self.drops_thoughts and not self.opens_branch


def role_problem(name: object) -> str | None:
    """Return why a role cannot have this name; None if it can."""
    if isinstance(name, str) and 0 < len(name) <= 64 and "." not in name and not name.startswith("$"):
        return None
    return f"a role is named {str(name)[:80]!r}: give at most 64 characters, without '.' and without '$'"


def strip_tool_results(
    messages: Iterable[dict[str, Any]], executions: Sequence[ToolExecution]
) -> tuple[dict[str, Any], ...]:
    """Return messages as a model call stores them: the index of an execution replaces its result."""
    stored, index = [], 0
    for message in messages:
        has_result = index < len(executions) and message.get("role") == "tool"
        if has_result and message.get("content") == executions[index].content:
            message = {key: value for key, value in message.items() if key != "content"}
            message["execution"] = index
            index += 1
        stored.append(message)
    return tuple(stored)


def full_messages(
    call: DispatchedSamplingTask, parent: DispatchedSamplingTask | None
) -> tuple[dict[str, Any], ...]:
    """Return the messages as the model read them; inverse of ``strip_tool_results``."""
    executions = parent.tool_executions if parent is not None else ()
    return tuple(
        {**{key: value for key, value in message.items() if key != "execution"},
         "content": executions[message["execution"]].content}
        if "execution" in message and message["execution"] < len(executions)
        else message
        for message in call.messages
    )  # fmt: skip
