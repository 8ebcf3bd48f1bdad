"""Make the model calls of one trajectory, one at a time, and store them in order, in the background."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from agentrl.base.concurrency import end_tasks
from agentrl.base.user_code import contain_call
from agentrl.calls.prompts import Budget, Prompt
from agentrl.calls.trace import end_model_call, model_call_span
from agentrl.chat.chat_format import ChatFormat, Message
from agentrl.chat.parsers.parser import ParsedMessage, ToolCall
from agentrl.config.schema import AgentConfig
from agentrl.documents.document import replace_surrogates, sanitize_bson
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
from agentrl.documents.task import Claim
from agentrl.errors import TrajectoryError
from agentrl.inference.engine import Engine, Generation, Progress
from agentrl.scoring.answers import extract_answer
from agentrl.scoring.scorers import ScoredCall
from agentrl.tools.tool import Schema

if TYPE_CHECKING:
    from agentrl.store.client import Store
    from agentrl.store.model_calls import Images

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
            # Store the schemas at a branch's beginning only: calls that continue it are offered the same.
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
                # Keep ids at nine letters and digits: Mistral's templates refuse any other length.
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


_INTERVAL_SECONDS = 0.05
"""Interval of the times at which all trajectories of the process write: their calls share a transaction.

A call waits for one to two intervals."""

_BUSY_SECONDS = 0.01
"""Delay of a timer from which on the process is busy: what the next model calls wait for comes first."""

_LONGEST_SECONDS = 1.0
"""Time after which calls are written also if the process is busy."""

_MANY_QUEUED = 12
"""Queued calls from which on they are written also if the process is busy."""

_MAX_QUEUED = 16
"""Calls that wait to be written; another one waits until they are fewer."""

_LAST_SECONDS = 1.0
"""Time to write what is queued after the trajectory was cancelled."""


class TrajectoryCalls:
    """Makes the policy's calls of one trajectory, for all its roles.

    A call is stored when it is finished: when its tools have run, or when its role goes on. Its index is its
    place in the order of storing, so that indexes have no gap and a parent comes before its children.
    """

    def __init__(
        self,
        claim: Claim,
        config: AgentConfig,
        *,
        chat_format: ChatFormat,
        engine: Engine,
        params: SamplingParams,
        seed: int,
        write: Callable[[PendingCall], Awaitable[None]],
        images: Images,
        hold: Hold,
    ) -> None:
        """``write`` takes one finished model call to store; ``images`` has those of the messages.

        Every model call has its own sampling seed, derived from ``seed``, the task, the trajectory, the
        attempt and the turn. With a batch-invariant engine the same run samples the same tokens again;
        another attempt is another sample. ``hold`` repeats a call while the engines or a fixed model are
        down.
        """
        self.chat_format = chat_format
        self.images = images
        self.hold = hold
        self.turns = 0
        """Model calls of all roles."""
        self.scored_calls: list[ScoredCall] = []
        """The stored model calls, by index, as a scorer gets them."""
        self._task = claim.task
        self.record = claim.record_id
        """The id of the Record."""
        self._seed = (seed, claim.task.id, claim.traj_id, claim.attempt)
        self._config = config
        self._engine = engine
        self._params = params
        self._write = write
        self._unstored: list[PendingCall] = []
        self._turn = asyncio.Lock()
        self._storing = asyncio.Lock()

    @property
    def reads_images(self) -> bool:
        """Return whether the chat format shows images."""
        return self.chat_format.vision is not None

    @property
    def budget(self) -> Budget:
        """Return the limits of prompts and generations."""
        return Budget(self._config, self._engine.context_length)

    async def sample(
        self,
        prompt: Prompt,
        changes: dict[str, Any],
        *,
        role: str | None,
        tools: Sequence[Schema],
        executions: Sequence[ToolExecution] = (),
        seed: tuple[object, ...] = (),
        progress: Progress | None = None,
    ) -> tuple[PendingCall, ParsedMessage]:
        """Sample the call behind ``prompt``; ``changes`` are sampling parameters for this call only.

        ``executions`` are the tool runs of its parent, ``seed`` names the call among those of its role.
        ``progress`` receives the tokens while they are generated. Concurrent calls of one trajectory are made
        one after the other.
        """
        # Make one call at a time: the session resumes one partial generation, and seeds count the turns.
        async with self._turn:
            params = self._params.replace(**changes).seeded(*self._seed, *(seed or (self.turns,)))
            params = self.budget.clamp(params, len(prompt.ids))
            images = await images_of(self.images, prompt.images)
            with model_call_span(self.record, params) as span:
                generation = await self.hold(
                    lambda: self._engine.generate(
                        prompt.ids, params, progress, images, prompt.encoded, routed_from=prompt.routed_from
                    )
                )
                parsed = parse(self.chat_format, prompt, generation, tools)
                response = message_of(parsed, f"call{self.turns % 1000:03d}")
                end_model_call(span, generation, prompt.new_messages, response)
                span.set({"agentrl.role": role, "agentrl.turn": self.turns + 1})
            pending = PendingCall(
                record=self.record, prompt=prompt, role=role, tools=tools, params=params,
                generation=generation, response=response, read=executions,
                settled=not parsed.tool_calls and parsed.error is None,
            )  # fmt: skip
            self.add(pending)
            return pending, parsed

    def add(self, pending: PendingCall) -> None:
        """Count a call that was made; ``store`` stores it."""
        self.turns += 1
        self._unstored.append(pending)

    def turn(self, pending: PendingCall, parsed: ParsedMessage, text: str, times_seen: int = 1) -> Turn:
        """Return the turn that the agent sees of a call."""
        pending.repeated = times_seen > 1
        reason = pending.generation.finish_reason
        is_whole = reason != "length" and parsed.error is None
        return Turn(
            text=text,
            content=parsed.content,
            reasoning=parsed.reasoning,
            tool_calls=parsed.tool_calls,
            error=parsed.error,
            answer=extract_answer(parsed.content, self._task.answer_schema) if is_whole else None,
            finish_reason=reason,
            times_seen=times_seen,
            prompt_tokens=pending.generation.prompt_tokens,
            output_tokens=len(pending.generation.output_ids),
        )

    def adopt(self, calls: Sequence[DispatchedSamplingTask]) -> None:
        """Take over the calls that a gateway made and stored."""
        self.turns = len(calls)
        self.scored_calls = [
            ScoredCall.of(call.response, call.tool_executions, call.status, call.role) for call in calls
        ]

    async def store(self, pending: PendingCall) -> None:
        """Store a call, unless it is stored. It cannot change any more."""
        async with self._storing:
            if pending.index is not None:
                return
            # Compare by identity: list.remove would compare two calls field by field, with all their ids.
            self._unstored = [other for other in self._unstored if other is not pending]
            pending.index = len(self.scored_calls)
            self.scored_calls.append(
                ScoredCall.of(pending.response, pending.executions, pending.status, pending.role)
            )
            await self._write(pending)

    async def store_settled(self) -> None:
        """Store the calls that have no tool call left to run."""
        for pending in [pending for pending in self._unstored if pending.settled]:
            await self.store(pending)

    async def store_all(self) -> None:
        """Store every call, in the order in which they were made."""
        for pending in list(self._unstored):
            await self.store(pending)


class CallWriter:
    """Writes in order, while the process has nothing urgent to do, and nothing after an error.

    ``write`` and ``flush`` raise that error.

    An agent may suppress that error or raise another one; ``flush``, which comes before the score, raises the
    original. Use it as an async context manager.
    """

    def __init__(self, store: Store, claim: Claim) -> None:
        self._store = store
        self._claim = claim
        self._queue: deque[PendingCall] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._writer: asyncio.Task[None] | None = None
        self._written = asyncio.Event()
        self._error: Exception | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._queue:
            return
        writer = self._start()
        await asyncio.wait([writer], timeout=_LAST_SECONDS)
        await end_tasks(writer)

    async def write(self, call: PendingCall) -> None:
        """Queue one model call. Waits while too many are queued; raises the error of an earlier write."""
        self._check()
        self._queue.append(call)
        if self._writer is None and self._timer is None:
            self._wait_until_idle(time.monotonic() + _LONGEST_SECONDS)
        if len(self._queue) >= _MANY_QUEUED:
            self._start()
        while len(self._queue) > _MAX_QUEUED:
            self._start()
            self._written.clear()
            await self._written.wait()
        self._check()

    async def flush(self) -> None:
        """Wait until every queued call is stored. Raises the error of a write."""
        if self._queue:
            # Shield the writer: a cancelled trajectory still stores what is queued, in ``__aexit__``.
            await asyncio.shield(self._start())
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _wait_until_idle(self, latest: float) -> None:
        """Start writing at one of the process's times, when it is not busy or ``latest`` has passed."""
        at = (time.monotonic() // _INTERVAL_SECONDS + 2) * _INTERVAL_SECONDS
        self._timer = asyncio.get_running_loop().call_later(
            at - time.monotonic(), self._start_if_idle, at, latest
        )

    def _start_if_idle(self, planned: float, latest: float) -> None:
        now = time.monotonic()
        if now < planned + _BUSY_SECONDS or now >= latest:
            self._start()
        else:
            self._wait_until_idle(latest)

    def _start(self) -> asyncio.Task[None]:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writer is None:
            self._writer = asyncio.create_task(
                self._write_queued(), name=f"writer of {self._claim.record_id}"
            )
        return self._writer

    async def _write_queued(self) -> None:
        try:
            while self._queue:
                calls = [call.document() for call in self._queue]
                await self._store.model_calls.add(self._claim, *calls)
                # Take calls off the queue once they are stored: to ``flush``, an empty one means all are.
                for _ in calls:
                    self._queue.popleft()
                self._written.set()
        except Exception as error:  # noqa: BLE001  ``write`` and ``flush`` raise it
            self._error = error
            self._queue.clear()
        finally:
            self._writer = None
            self._written.set()
