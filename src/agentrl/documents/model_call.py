"""DispatchedSamplingTask: one model call of a trajectory; with packed tokens, partial calls and branches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.documents.base import Document, Root, now, sanitize_bson
from agentrl.documents.images import ImageRef, ImageSpan, Part
from agentrl.documents.sampling import LogprobsOf
from agentrl.documents.status import CallStatus


def pack_ids(ids: Sequence[int] | NDArray[np.int32]) -> bytes:
    """Return the int32 bytes of token ids."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> NDArray[np.int32]:
    """Return int32[n] ids; inverse of ``pack_ids``."""
    return np.frombuffer(data, dtype="<i4").astype(np.int32, copy=False)


def pack_floats(values: Sequence[float] | NDArray[np.float32]) -> bytes:
    """Return the float32 bytes of logprobs."""
    return np.asarray(values, dtype="<f4").tobytes()


def unpack_floats(data: bytes) -> NDArray[np.float32]:
    """Return float32[n] values; inverse of ``pack_floats``."""
    return np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False)


def pack_halves(values: NDArray[np.float32]) -> bytes:
    """Return the float16 bytes of ``values``; numbers beyond ±65504 become ±65504."""
    limit = np.finfo(np.float16).max
    return np.clip(values, -limit, limit).astype("<f2").tobytes()


def unpack_halves(data: bytes) -> NDArray[np.float32]:
    """Return float32[n] values; inverse of ``pack_halves``."""
    return np.frombuffer(data, dtype="<f2").astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan(Document):
    """Generated tokens ``[start, end)`` of a model call, sampled under one policy version."""

    version: int
    start: int
    end: int


def append_span(spans: list[VersionSpan], version: int, start: int, end: int) -> None:
    """Append the span ``[start, end)``; join it with the last one if that has the same version."""
    if spans and spans[-1].version == version:
        start = spans.pop().start
    spans.append(VersionSpan(version=version, start=start, end=end))


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
    arguments: dict[str, Any] | str
    """See ``storable_arguments``."""
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
    """The assistant message: ``content``, ``tool_calls``; see ``storable_message``."""
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
    sampling_mask: bytes = b""
    """The ids that each output id was sampled from, if ``logprobs_of`` is ``truncated``: a SamplingMask."""
    routing: bytes = b""
    """Experts of its tokens (``documents.routing``): from the parent's last one, which this call computed, to
    the last one before its own last. Empty without a mixture, or if the engine did not return them all."""
    images: tuple[ImageSpan, ...] = ()
    """Tokens of ``context_ids`` that stand for images."""
    checksums: dict[str, str] = field(default_factory=dict, compare=False)
    """See ``store.mechanics.blobs``."""

    @property
    def message(self) -> dict[str, Any]:
        """Return the assistant's message as it was sampled."""
        return {"role": "assistant", **read_message(self.response)}

    @property
    def is_context_reset(self) -> bool:
        """Return whether the prompt is the first of a context that a context manager started."""
        begins = self.parent is None and self.index > 0
        return begins and not self.drops_thoughts and not self.opens_branch


def storable_arguments(arguments: Any) -> Any:
    """Return the arguments of a tool call; as JSON text if BSON would change them.

    It does that to an integer beyond 64 bits, to nesting beyond 40 levels, and to NUL in a key.
    """
    storable = sanitize_bson(arguments)
    try:
        text = json.dumps(arguments, ensure_ascii=False)
        return storable if json.dumps(storable, ensure_ascii=False) == text else text
    except (TypeError, ValueError, RecursionError):  # values of an agent's own that are not JSON
        return storable


def storable_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat message as a document holds it: with ``storable_arguments`` of its tool calls."""
    stored: dict[str, Any] = sanitize_bson(_with_arguments(message, storable_arguments))
    return stored


def read_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat message with the arguments of tool calls as objects; inverse of ``storable_message``."""
    return _with_arguments(message, _read_arguments)


def _read_arguments(given: Any) -> Any:
    try:
        return json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return given  # a message of an agent's own


def _with_arguments(message: Mapping[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls or not isinstance(calls, (list, tuple)):
        return dict(message)
    converted = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and "arguments" in function:
            call = {**call, "function": {**function, "arguments": convert(function["arguments"])}}
        converted.append(call)
    return {**message, "tool_calls": converted}


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
        else read_message(message)
        for message in call.messages
    )  # fmt: skip


def conversation(calls: Sequence[DispatchedSamplingTask]) -> list[dict[str, Any]]:
    """Return the messages of the calls of a trajectory as the model read them, each with its response."""
    by_id = {call.id: call for call in calls}
    return [
        message
        for call in calls
        for message in (
            *full_messages(call, None if call.parent is None else by_id[call.parent]),
            call.message,
        )
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialGeneration(Document):
    """The tokens so far of one generation, with the policy versions that sampled them."""

    prompt: str
    """Digest of the prompt's ids; only a call with the same prompt is resumed."""
    output_ids: bytes
    """int32 ids of the generated tokens."""
    logprobs: bytes
    """float32 logprob of each output id."""
    logprobs_of: LogprobsOf
    sampling_mask: bytes = b""
    versions: tuple[VersionSpan, ...]
    cached_tokens: int = 0


def prompt_digest(ids: Sequence[int]) -> str:
    """Return the digest of a prompt's ids."""
    return hashlib.blake2b(pack_ids(ids), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Branch:
    """A conversation from its first model call to its last. Branches may share their first calls."""

    calls: tuple[DispatchedSamplingTask, ...]

    @property
    def has_tools(self) -> bool:
        """Return whether tools were offered."""
        return any(call.tools for call in self.calls)

    @property
    def indexes(self) -> tuple[int, ...]:
        """Return the indexes of its calls."""
        return tuple(call.index for call in self.calls)


def branches_of(calls: Sequence[DispatchedSamplingTask]) -> list[Branch]:
    """Return a branch for each call that no other call continues, in the order of their last calls."""
    by_id = {call.id: call for call in calls}
    continued = {call.parent or call.follows for call in calls}
    return [Branch(_path(by_id, call)) for call in calls if call.id not in continued]


def main_branch(branches: Sequence[Branch]) -> Branch | None:
    """Return the branch with the most calls; of several, one with tools, then the one that grew longest."""
    return max(
        branches,
        key=lambda branch: (len(branch.calls), branch.has_tools, branch.calls[-1].prompt_tokens),
        default=None,
    )


def same_agent(branches: Sequence[Branch]) -> list[Branch]:
    """Return the branches with the system prompt and the tools of the main branch, which is one of them."""
    main = main_branch(branches)
    return [branch for branch in branches if main is not None and _setting(branch) == _setting(main)]


def _setting(branch: Branch) -> tuple[object, object]:
    """Return the system messages and the tools of a branch."""
    first = branch.calls[0]
    return [message for message in first.messages if message["role"] == "system"], first.tools


def of_main_role(calls: Sequence[DispatchedSamplingTask]) -> list[DispatchedSamplingTask]:
    """Return the calls of the trajectory's own conversation; if it has none, those of the first role."""
    name = calls[0].role if calls and all(call.role is not None for call in calls) else None
    return [call for call in calls if call.role == name]


def _path(
    by_id: Mapping[str, DispatchedSamplingTask], last: DispatchedSamplingTask
) -> tuple[DispatchedSamplingTask, ...]:
    path = [last]
    while (before := path[-1].parent or path[-1].follows) is not None:
        path.append(by_id[before])
    return tuple(reversed(path))
