"""DispatchedSamplingTask: one model call, with packed tokens, routed experts, sampling masks and branches.

A piece of routing is a header and the experts of consecutive tokens. Its bytes never change once an engine's
answer is packed: model calls and training data hold the same ones, so that they compare equal on every
machine.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import takewhile
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from agentrl.documents.document import Document, Root, now, sanitize_bson
from agentrl.documents.images import ImageRef, ImageSpan, Part
from agentrl.documents.sampling import LogprobsOf
from agentrl.documents.status import CallStatus
from agentrl.errors import StoreError

Routing = NDArray[np.signedinteger]
"""int8 or int16 [tokens, layers, top_k], ascending along the last axis; −1: the token routes freely."""

_HEADER: Final = struct.Struct("<IIHHBI")
"""Tokens, how many of the first are left out, layers, top_k, bytes of an expert, bytes that follow."""
_FAST = 1
"""zlib's level: higher ones save 2 % and take three times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Size of a model's routing. ``layers`` counts all decoder layers: engines return dense ones as zeros."""

    layers: int
    top_k: int
    experts: int

    @property
    def per_token(self) -> int:
        """Return the experts of one token."""
        return self.layers * self.top_k


def pack_routing(routing: NDArray[np.integer]) -> bytes:
    """Return a piece for the experts [tokens, layers, top_k] of consecutive tokens.

    The order of a token's experts has no meaning, because their weights are computed again: they are stored
    as differences of ascending indices, which compress to about 0.7 of a byte per expert of 128.
    """
    ascending = np.sort(routing, axis=-1)
    # Go by the ids at hand: an engine's answer does not say how many experts the model has.
    itemsize = 1 if ascending.max(initial=0) < 256 else 2
    gaps = np.diff(ascending, axis=-1, prepend=0).astype(f"<u{itemsize}")
    data = zlib.compress(gaps.tobytes(), _FAST)
    return _HEADER.pack(len(gaps), 0, *gaps.shape[1:], itemsize, len(data)) + data


def free_routing(tokens: int) -> bytes:
    """Return a piece for tokens that route freely."""
    return _HEADER.pack(tokens, 0, 0, 0, 1, 0) if tokens else b""


def routed_tokens(packed: bytes) -> int:
    """Return the number of tokens in all pieces. Raises ValueError for bytes that are not pieces."""
    return sum(tokens - skipped for tokens, skipped, *_ in _pieces(packed))


def without_first(packed: bytes) -> bytes:
    """Return the pieces without their first token."""
    tokens, skipped, *rest = _HEADER.unpack_from(packed)
    # Count it in the header: without it the compressed gaps would have to be unpacked and packed again.
    return _HEADER.pack(tokens, skipped + 1, *rest) + packed[_HEADER.size :]


class TreeRouting:
    """Joins the routing of model calls along a token tree, in the order in which their tokens are added."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._tokens = 0
        self._is_empty = True

    def add(self, routing: bytes, start: int, tokens: int, has_parent: bool, is_next: bool) -> None:
        """Add a call whose own tokens are ``[start, start + tokens)``; leave out a routing of another length.

        A call with a parent has computed the parent's last token too. ``is_next``: that one is token
        ``start`` − 1. Otherwise an earlier branch follows the parent, and has its routing.
        """
        if not routing or routed_tokens(routing) != tokens - 1 + has_parent:
            return
        follows = has_parent and is_next
        self._fill(start - follows)
        self._pieces.append(without_first(routing) if has_parent and not is_next else routing)
        # Stop before the last token: it was sampled, and only a call that continues this one computes it.
        self._tokens = start + tokens - 1
        self._is_empty = False

    def finish(self, tokens: int) -> bytes:
        """Return the routing of all ``tokens`` tokens; empty if no call has one."""
        self._fill(tokens)
        return b"" if self._is_empty else b"".join(self._pieces)

    def _fill(self, end: int) -> None:
        self._pieces.append(free_routing(end - self._tokens))
        self._tokens = end


def unpack_routing(packed: bytes, shape: ExpertShape) -> Routing:
    """Return the experts of each token, −1 for a token that routes freely.

    So does a token for which a layer of the mixture has not k different experts: the engine has not captured
    it. A layer without any token that has is dense. Raises ValueError for bytes that are not pieces, and for
    a routing of another shape.
    """
    # End int8 at 128 experts, not at 256: −1 needs the sign.
    kind = np.int8 if shape.experts <= 128 else np.int16
    found = [np.empty((0, shape.layers, shape.top_k), kind)]
    for tokens, skipped, layers, top_k, itemsize, data in _pieces(packed):
        if not data:
            found.append(np.full((tokens - skipped, shape.layers, shape.top_k), -1, kind))
            continue
        if (layers, top_k) != (shape.layers, shape.top_k):
            raise ValueError(
                f"a routing of {layers} layers with {top_k} experts a token, not {shape.layers} with"
                f" {shape.top_k}"
            )
        try:
            gaps = np.frombuffer(zlib.decompress(data), f"<u{itemsize}").reshape(tokens, layers, top_k)
        except zlib.error as error:
            raise ValueError(f"a routing that cannot be decompressed: {error}") from error
        gaps = gaps[skipped:]
        experts = np.cumsum(gaps, axis=-1, dtype=np.int32)
        if experts.max(initial=0) >= shape.experts:
            raise ValueError(f"expert {experts.max()} of {shape.experts}")
        differ = np.all(gaps[..., 1:] > 0, axis=2)
        is_sparse = np.any(differ, axis=0)
        captured = np.all(differ[:, is_sparse], axis=1) & np.any(differ, axis=1)
        found.append(np.where(captured[:, None, None], experts, -1).astype(kind))
    return np.concatenate(found)


def _pieces(packed: bytes) -> Iterator[tuple[int, int, int, int, int, bytes]]:
    """Yield (tokens, skipped, layers, top_k, bytes of an expert, data) of each piece."""
    at = 0
    while at < len(packed):
        if len(packed) - at < _HEADER.size:
            raise ValueError(f"a routing of {len(packed)} bytes ends in a header")
        tokens, skipped, layers, top_k, itemsize, length = _HEADER.unpack_from(packed, at)
        at += _HEADER.size
        if skipped > tokens or itemsize not in (1, 2) or length > len(packed) - at:
            raise ValueError(f"a routing of {len(packed)} bytes has a malformed header")
        yield tokens, skipped, layers, top_k, itemsize, packed[at : at + length]
        at += length


LARGEST: Final = 4000
"""Most ids that a token's mask may keep: a request for masks has this as its largest ``top_k``."""

_BITS, _MORE = 7, 0x80
"""Bits of a number in each byte, and the bit that says that another byte follows."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMask:
    """The kept ids of n tokens; a token that keeps 0 ids was sampled from the whole vocabulary."""

    counts: NDArray[np.int64]
    """int64[n], how many ids each token keeps."""
    ids: NDArray[np.int64]
    """int64[sum of counts], token after token, ascending within a token."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Self:
        """Build it from the ids of each token, in any order."""
        counts = np.fromiter(map(len, rows), np.int64, len(rows))
        # Begin with an empty array: numpy refuses to concatenate none, and a call may have no tokens.
        ids = np.concatenate([np.zeros(0, np.int64), *(np.asarray(row, np.int64) for row in rows)])
        return cls(counts, ids[np.lexsort((ids, np.repeat(np.arange(len(rows)), counts)))])

    @classmethod
    def join(cls, masks: Sequence[SamplingMask]) -> Self:
        """Concatenate at least one mask."""
        return cls(np.concatenate([m.counts for m in masks]), np.concatenate([m.ids for m in masks]))

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.counts)

    def select(self, chosen: NDArray[np.bool_] | NDArray[np.int64] | slice) -> SamplingMask:
        """Return the mask of the chosen tokens."""
        return SamplingMask(self.counts[chosen], self.ids[self.places(chosen)])

    def places(self, chosen: NDArray[np.bool_] | NDArray[np.int64] | slice) -> NDArray[np.int64]:
        """Return the indexes in ``ids`` of the ids that the chosen tokens keep."""
        counts = self.counts[chosen]
        shift = (np.cumsum(self.counts) - self.counts)[chosen] - (np.cumsum(counts) - counts)
        return np.repeat(shift, counts) + np.arange(counts.sum())

    def keeps(self, tokens: NDArray[np.integer]) -> bool:
        """Return whether every token, int[n], is among the ids that it was sampled from."""
        if len(tokens) != len(self):
            return False
        row = np.repeat(np.arange(len(self)), self.counts)
        found = np.bincount(row[self.ids == tokens[row]], minlength=len(self))
        return bool(np.all((found == 1) | (self.counts == 0)))

    def pack(self) -> bytes:
        """Return the counts, then each token's ids as gaps, as variable-length numbers of 7 bits a byte.

        Empty if no token keeps fewer ids than the vocabulary. Equal masks have equal bytes.
        """
        if not self.ids.size:
            return b""
        gaps = np.diff(self.ids, prepend=0)
        first = (np.cumsum(self.counts) - self.counts)[self.counts > 0]
        # Start each token at 0: over the border of two tokens a gap may be negative, which has no encoding.
        gaps[first] = self.ids[first]
        return _encode(np.concatenate([self.counts, gaps]))

    @classmethod
    def unpack(cls, data: bytes, tokens: int) -> Self:
        """Return the mask of ``tokens`` tokens; inverse of ``pack``. Raises StoreError for other bytes."""
        if not data:
            return cls(np.zeros(tokens, np.int64), np.zeros(0, np.int64))
        numbers = _decode(data)
        counts, gaps = numbers[:tokens], numbers[tokens:]
        if len(counts) < tokens or counts.sum() != len(gaps):
            raise StoreError(f"a sampling mask of {len(data)} bytes is not one of {tokens} tokens")
        first = (np.cumsum(counts) - counts)[counts > 0]
        total = np.cumsum(gaps)
        return cls(counts, total - np.repeat(total[first] - gaps[first], counts[counts > 0]))


def _encode(numbers: NDArray[np.int64]) -> bytes:
    length = np.ones_like(numbers)
    for bits in range(_BITS, 32, _BITS):
        length += numbers >= 1 << bits
    start = np.cumsum(length) - length
    data = np.zeros(int(length.sum()), np.uint8)
    for place in range(int(length.max(initial=0))):
        has = length > place
        more = np.where(length[has] > place + 1, _MORE, 0)
        data[start[has] + place] = (numbers[has] >> _BITS * place) & (_MORE - 1) | more
    return data.tobytes()


def _decode(data: bytes) -> NDArray[np.int64]:
    values = np.frombuffer(data, np.uint8).astype(np.int64)
    last = np.flatnonzero(values < _MORE)
    if not last.size or last[-1] != len(values) - 1:
        raise StoreError(f"a sampling mask of {len(data)} bytes ends within a number")
    start = np.concatenate([[0], last[:-1] + 1])
    place = np.arange(len(values)) - np.repeat(start, np.diff(last, prepend=-1))
    # Ask before the shift: numpy shifts by more than 63 bits to 0 without an error.
    if place.max() > 4:
        raise StoreError(f"a sampling mask of {len(data)} bytes has a number of more than 32 bits")
    return np.add.reduceat((values & (_MORE - 1)) << _BITS * place, start)


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
    started_at: datetime | None = None
    attempt: int | None = None
    """The claim that ran it, or that found it unfinished: one of ``Record.owners``."""
    finished: bool = True
    """False: its owner died or lost it before it ended, so that it may have taken effect."""

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


STEP: Final = "step"
"""The name of the events that are answers of an environment."""
TOOL: Final = "tool"
"""The name of the events that are tool runs of no open model call: their results are a ToolExecution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event(Document):
    """What a trajectory learned other than by a model or a tool: an environment's answer, or an agent's own.

    ``name`` is ``step``, ``tool``, or the name that the agent gave to ``Rollout.once``.
    """

    name: str
    arguments: Any = None
    """What the environment was told, or the tool."""
    result: Any
    """The answer, as ``sanitize_bson`` returned it."""
    started_at: datetime
    seconds: float
    attempt: int
    """The claim that it happened under: one of ``Record.owners``."""


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


class Spent(NamedTuple):
    """What a model call took beside its own generation, so far."""

    tool_seconds: float = 0.0
    api_tokens: int = 0
    api_cost: float = 0.0

    def since(self, earlier: Spent) -> dict[str, float]:
        """Return what was added to ``earlier``, by field of the Record."""
        return {name: now - then for name, now, then in zip(self._fields, self, earlier, strict=True)}


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
    anchor: str | None = None
    """Digest of the state that it was made in (``state_digest``, ``read_digest``): ``--step_advantage``
    compares the calls of a group that have the same. None: another model's call, or an old document."""
    status: CallStatus
    messages: tuple[dict[str, Any], ...]
    """The messages that were added after the parent's response.

    A tool result is stored once, in the parent's ``tool_executions``: its message has ``execution``, an index
    into them, instead of ``content``. ``full_messages`` restores the content.
    """
    response: dict[str, Any]
    """The assistant message: ``content``, ``tool_calls``; see ``storable_message``."""
    tool_executions: tuple[ToolExecution, ...] = ()
    events: tuple[Event, ...] = ()
    """What happened after it, until the next model call; of the first call also what happened before it."""
    snapshot: str | None = None
    """Where the files of its tools are kept as they were after it; None: they are not."""
    revision: int = 0
    """How often it was written again, because its tools had ended or something had happened."""
    tools: tuple[dict[str, Any], ...] | None = None
    """The tool schemas offered; stored only in calls without a parent."""
    error: str | None = None
    finish_reason: str
    versions: tuple[VersionSpan, ...]
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int = 0
    engine: str
    attempt: int | None = None
    """The claim that made it: one of ``Record.owners``."""
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
    # Leave them out of ==: the store adds them, so that a call read back would differ from the one written.
    checksums: dict[str, str] = field(default_factory=dict, compare=False)
    """See ``store.mechanics.blobs``."""

    @property
    def message(self) -> dict[str, Any]:
        """Return the assistant's message as it was sampled."""
        return {"role": "assistant", **read_message(self.response)}

    @property
    def spent(self) -> Spent:
        """Return what the call, its tools and the events after it took."""
        models: list[BrowseCall | FixedModelCall] = [] if self.fixed is None else [self.fixed]
        for run in self.tool_executions:
            models += () if run.condensed is None else run.condensed.calls
        events = [event.seconds for event in self.events if event.name in (STEP, TOOL)]
        return Spent(
            tool_seconds=sum(run.seconds for run in self.tool_executions) + sum(events),
            api_tokens=sum(model.prompt_tokens + model.completion_tokens for model in models),
            api_cost=sum(model.cost for model in models),
        )

    @property
    def is_context_reset(self) -> bool:
        """Return whether the prompt is the first of a context that a context manager started."""
        begins = self.parent is None and self.index > 0
        return begins and not self.drops_thoughts and not self.opens_branch


def storable_arguments(arguments: Any) -> Any:
    """Return the arguments of a tool call; as JSON text if BSON would change them.

    It does that to an integer beyond 64 bits, to nesting beyond 40 levels, to NUL in a key, and to objects
    with ``$ref`` and ``$id``, which the driver reads as references.
    """
    storable = sanitize_bson(arguments)
    try:
        # Compare as JSON: 1, 1.0 and True are equal to Python, and three values to a tool.
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
    return _with_arguments(message, read_arguments)


def read_arguments(given: Any) -> Any:
    """Return the arguments of a tool call as they were given; inverse of ``storable_arguments``."""
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
        # Replace only an equal content: an agent may have cut a result before it sent it to the model.
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


def state_digest(state: str | bytes) -> str:
    """Return the digest of the state that an environment gives."""
    data = state if isinstance(state, bytes) else state.encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def read_digest(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the digest of what the model answers: the contents of the messages since the last answer.

    The ids of tool calls do not count: they differ between positions at which a tool returns the same.
    """
    read = [[message.get("role"), message.get("content")] for message in unanswered(messages)]
    return state_digest(json.dumps(read, sort_keys=True, default=str))


def unanswered(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages since the last answer, in order; all without one."""
    new = takewhile(lambda message: message.get("role") != "assistant", reversed(messages))
    return list(new)[::-1]


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
