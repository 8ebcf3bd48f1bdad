"""The Rollout that an agent receives: one trajectory's conversation, its model calls and its tools."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentrl.chat.conversation import Conversation
from agentrl.chat.parsers import ParsedMessage, ToolCall, ToolCallParser, typed_call, validate_call
from agentrl.chat.renderer import ChatRenderer, Message
from agentrl.config.schema import AgentConfig
from agentrl.documents.model_call import DispatchedSamplingTask, ToolExecution, strip_tool_results
from agentrl.documents.packing import pack_floats, pack_ids
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.sanitize_bson import replace_surrogates, sanitize_bson
from agentrl.documents.status import CallStatus
from agentrl.documents.task import Claim
from agentrl.errors import ToolServerError, TrajectoryError
from agentrl.inference.client import Generation
from agentrl.rollout.outcome import Outcome as Outcome
from agentrl.rollout.outcome import checked_messages
from agentrl.scoring.answers import extract_answer
from agentrl.tools.base import Schema, ToolResult
from agentrl.user_code import contain, contain_call


class Engine(Protocol):
    """Access to an inference engine: ``EngineRouter.session``."""

    async def generate(self, input_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Sample a continuation of ``input_ids``."""
        ...


class Tools(Protocol):
    """The tools of one trajectory: ``TrajectoryTools``."""

    async def schemas(self, servers: Sequence[str] | None = None) -> list[Schema]:
        """Return OpenAI function schemas."""
        ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Run one tool."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One parsed model call. ``times_seen`` counts its text in the trajectory, this call included."""

    text: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    error: str | None
    answer: str | None
    finish_reason: str
    times_seen: int


@dataclass(slots=True, kw_only=True)
class _Pending:
    """A model call that is not stored yet: its tools may still run."""

    parent: str | None
    messages: tuple[Message, ...]
    tools: tuple[Schema, ...] | None
    context_ids: list[int]
    params: SamplingParams
    generation: Generation
    response: dict[str, Any]
    error: str | None = None
    repeated: bool = False
    executions: list[ToolExecution] = field(default_factory=list)
    tool_seconds: float = 0.0

    @property
    def status(self) -> CallStatus:
        if self.error is not None:
            return CallStatus.FORMAT_ERROR
        if self.repeated:
            return CallStatus.REPEAT_ERROR
        if any(execution.error for execution in self.executions):
            return CallStatus.TOOL_FAILED
        return CallStatus.COMPLETED


ContextManager = Callable[["Rollout"], Awaitable[list[Message] | None]]
"""Returns the messages that a new context starts with, or None to end the trajectory."""


class Rollout:
    """One trajectory as its agent sees it.

    ``generate`` makes a model call, ``call_tools`` runs the tool calls in it, ``append_messages`` adds other
    messages, ``reset_context`` starts a new prefix. A model call is stored when the next one starts, or by
    ``finish``.
    """

    def __init__(
        self,
        claim: Claim,
        config: AgentConfig,
        *,
        renderer: ChatRenderer,
        engine: Engine,
        tools: Tools,
        schemas: Sequence[Schema],
        parser: ToolCallParser,
        params: SamplingParams,
        seed: int,
        manage_context: ContextManager,
        write: Callable[[DispatchedSamplingTask], Awaitable[None]],
    ) -> None:
        """``write`` stores one model call; ``schemas`` are the tools offered.

        Every model call has its own sampling seed, derived from ``seed``, the task, the trajectory, the
        attempt and the turn. With a batch-invariant engine the same run samples the same tokens again;
        another attempt is another sample.
        """
        self.task = claim.task
        self.config = config
        self.schemas = list(schemas)
        self.max_turns = claim.task.max_turns or config.max_turns
        self.turns = 0
        self.tool_calls = 0
        self.context_resets = 0
        self._record_id = claim.record_id
        self._renderer = renderer
        self._engine = engine
        self._tools = tools
        self._parser = parser
        self._params = params
        self._seed = (seed, claim.task.id, claim.traj_id, claim.attempt)
        self._manage_context = manage_context
        self._write = write
        self._texts: Counter[str] = Counter()
        self._parent: str | None = None
        self._pending: _Pending | None = None
        self._conversation = Conversation(renderer, _first_messages(self), self.schemas)

    @property
    def messages(self) -> list[Message]:
        """Return a copy of the messages of the current context."""
        return [dict(message) for message in self._conversation.messages]

    @property
    def question(self) -> str:
        """Return the first user message of the trajectory."""
        template = self.task.query_prompt or self.config.query_prompt or "{query}"
        return template.replace("{query}", self.task.query)

    @property
    def prompt_tokens(self) -> int:
        """Return the length of the next model call's prompt, in tokens."""
        return len(self._conversation.prompt_ids())

    @property
    def context_is_full(self) -> bool:
        """Return whether the next prompt uses some of ``prompt_reserve_tokens``."""
        return self.prompt_tokens > self.config.max_prompt_tokens - self.config.prompt_reserve_tokens

    async def generate(self, **changes: Any) -> Turn:
        """Make one model call; ``changes`` are sampling parameters for this call only."""
        answered = self._pending.executions if self._pending else []
        await self.finish()
        conversation = self._conversation
        context_ids = conversation.context_ids()
        new_messages = strip_tool_results(conversation.new_messages, answered)
        params = self._params.replace(**changes).seeded(*self._seed, self.turns)
        generation = await self._engine.generate(conversation.prompt_ids(), params)
        text = self._renderer.decode(generation.output_ids)
        parsed = contain_call(
            lambda: _cleaned(self._parser.parse(text)), "the tool-call parser", TrajectoryError
        )
        message = self._message(text, parsed)
        conversation.append_generation(generation.output_ids, message)
        self._texts[text] += 1
        self._pending = _Pending(
            parent=self._parent,
            messages=new_messages,
            tools=None if self._parent else tuple(self.schemas),
            context_ids=context_ids,
            params=params,
            generation=generation,
            response=message,
            repeated=self._texts[text] > 1,
        )
        self.turns += 1
        return Turn(
            text=text,
            content=parsed.content,
            tool_calls=parsed.tool_calls,
            error=parsed.error,
            answer=extract_answer(text, self.task.answer_schema),
            finish_reason=generation.finish_reason,
            times_seen=self._texts[text],
        )

    async def call_tools(self, turn: Turn) -> list[ToolExecution]:
        """Run the tool calls of the last ``turn`` in order and append their results.

        A malformed tool call is not run: its result says what is wrong, and the model call's status is
        ``formaterror``. An error that a tool reports is a result. Raises ToolServerError if a server is lost.
        """
        pending = self._pending
        if pending is None:
            return []
        started = time.monotonic()
        ids = [call["id"] for call in pending.response.get("tool_calls", ())]
        for call, call_id in zip(turn.tool_calls, ids, strict=True):
            typed = typed_call(call, self.schemas)
            problem = validate_call(typed, self.schemas)
            if problem is None:
                text = await self._run(typed, pending)
            else:
                text = self._refuse(problem, pending)
            self.append_messages([_tool_message(text, call.name, call_id)])
        if turn.error is not None:
            self.append_messages([_tool_message(self._refuse(turn.error, pending), None, None)])
        pending.tool_seconds = time.monotonic() - started
        return list(pending.executions)

    def append_messages(self, messages: Sequence[Message]) -> None:
        """Append messages to the last turn. Raises TrajectoryError for an invalid message."""
        self._conversation.append_messages(checked_messages(messages))

    async def reset_context(self) -> bool:
        """Start a new prefix according to ``--new_context``; return False if the trajectory must end."""
        what = f"context manager {self.config.new_context}"
        messages = await contain(lambda: self._manage_context(self), what, TrajectoryError)
        if messages is None:
            return False
        first = checked_messages(messages)
        await self.finish()
        self._conversation = Conversation(self._renderer, first, self.schemas)
        self._parent = None
        self.context_resets += 1
        return not self.context_is_full

    async def finish(self) -> None:
        """Store the last model call, unless it is stored."""
        pending, self._pending = self._pending, None
        if pending is not None:
            call = self._document(pending)
            await self._write(call)
            self._parent = call.id

    async def _run(self, call: ToolCall, pending: _Pending) -> str:
        self.tool_calls += 1
        result = await contain(
            lambda: self._tools.call(call.name, call.arguments), f"tool {call.name}", ToolServerError
        )
        text = str(replace_surrogates(result.text))
        pending.executions.append(
            ToolExecution(
                name=call.name,
                arguments=sanitize_bson(call.arguments),
                result=text,
                error=result.error,
                seconds=result.seconds,
                server=result.server,
            )
        )
        return pending.executions[-1].text

    def _refuse(self, problem: str, pending: _Pending) -> str:
        pending.error = pending.error or problem
        return f"Error: {problem}"

    def _message(self, text: str, parsed: ParsedMessage) -> Message:
        message: Message = {"role": "assistant", "content": text if parsed.error else parsed.content}
        if parsed.tool_calls:
            message["tool_calls"] = [
                {
                    "id": f"call{self.turns % 1000:03d}{place % 100:02d}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for place, call in enumerate(parsed.tool_calls)
            ]
        return message

    def _document(self, pending: _Pending) -> DispatchedSamplingTask:
        generation = pending.generation
        return DispatchedSamplingTask(
            id=f"{self._record_id}/{self.turns - 1}",
            record=self._record_id,
            index=self.turns - 1,
            parent=pending.parent,
            status=pending.status,
            messages=tuple(sanitize_bson(message) for message in pending.messages),
            response=sanitize_bson(pending.response),
            tool_executions=tuple(pending.executions),
            tools=None if pending.tools is None else tuple(map(sanitize_bson, pending.tools)),
            error=pending.error,
            finish_reason=generation.finish_reason,
            versions=generation.versions,
            prompt_tokens=generation.prompt_tokens,
            generated_tokens=len(generation.output_ids),
            cached_tokens=generation.cached_tokens,
            engine=generation.engine_url,
            sampling_params=sanitize_bson(pending.params.to_request()),
            generate_seconds=generation.seconds,
            tool_seconds=pending.tool_seconds,
            context_ids=pack_ids(pending.context_ids),
            output_ids=pack_ids(generation.output_ids),
            logprobs=pack_floats(generation.logprobs),
            logprobs_of=generation.logprobs_of,
        )


def _cleaned(parsed: ParsedMessage) -> ParsedMessage:
    calls = tuple(
        ToolCall(replace_surrogates(call.name), replace_surrogates(call.arguments), call.typed)
        for call in parsed.tool_calls
    )
    return ParsedMessage(parsed.content, calls, replace_surrogates(parsed.error))


def _first_messages(rollout: Rollout) -> list[Message]:
    system = (
        rollout.config.system_prompt if rollout.task.system_prompt is None else rollout.task.system_prompt
    )
    first: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": rollout.question}]


def _tool_message(text: str, name: str | None, call_id: str | None) -> Message:
    message: Message = {"role": "tool", "content": text}
    if name is not None:
        message["name"] = name
    if call_id is not None:
        message["tool_call_id"] = call_id
    return message
