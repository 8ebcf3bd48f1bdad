"""One model call, from the parsed generation over the runs of its tools to its document."""

from __future__ import annotations

import asyncio
import json
import string
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

from agentrl.base.user_code import contain_call, contain_errors
from agentrl.calls.prompts import Chain, Prompt
from agentrl.calls.trace import end_tool, tool_span
from agentrl.chat.chat_format import ChatFormat, Message
from agentrl.chat.parsers.arguments import validate_call
from agentrl.chat.parsers.parser import ParsedMessage, ToolCall
from agentrl.documents.document import now, replace_surrogates, sanitize_bson
from agentrl.documents.images import Image, ImageSpan, Part
from agentrl.documents.model_call import (
    DispatchedSamplingTask,
    Event,
    FixedModelCall,
    Spent,
    ToolExecution,
    pack_floats,
    pack_ids,
    storable_arguments,
    storable_message,
    strip_tool_results,
)
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import CallStatus, ToolState
from agentrl.errors import ToolServerError, TrajectoryError
from agentrl.inference.engine import Generation
from agentrl.tools.tool import Schema, ToolResult, schema_name, stored_text

if TYPE_CHECKING:
    from agentrl.store.model_calls import Images


# Compare by identity: two calls compared field by field would compare all their ids.
@dataclass(slots=True, kw_only=True, eq=False)
class Turn:
    """One model call: its tools may still run, and its document is written again when they have.

    A turn that was cut (``finish_reason`` ``length``) has neither an answer nor tool calls. One with a
    malformed call (``error``) has no answer: ``content`` holds the call, whose arguments do not count.
    """

    record: str
    index: int = 0
    """Its index among the calls of the trajectory, in the order in which they were made."""
    attempt: int | None = None
    """The claim that made it."""
    prompt: Prompt
    role: str | None
    tools: Sequence[Schema]
    params: SamplingParams
    generation: Generation
    parsed: ParsedMessage
    response: Message
    """The assistant's message, as later prompts have it."""
    text: str = ""
    """All that was generated, with special tokens."""
    answer: str | None = None
    """The answer that the task's schema finds in ``content``."""
    times_seen: int = 1
    """How often its text was generated in the current context, this call included."""
    problem: str | None = None
    """What the document has as its error: the first problem of its format, also one that its tools found."""
    read: Sequence[ToolExecution] = ()
    """The tool runs of its parent, whose results its prompt has."""
    executions: list[ToolExecution] = field(default_factory=list)
    tool_seconds: float = 0.0
    settled: bool = False
    """Whether no tool call is left to run."""
    closed: bool = False
    """Whether nothing can be added any more: the trajectory has gone on."""
    events: list[Event] = field(default_factory=list)
    snapshot: str | None = None
    fixed: FixedModelCall | None = None
    anchor: str | None = None
    """Digest of the state that it was made in."""
    changed_at: datetime = field(default_factory=now)
    """When it was made, or its last tool ended."""
    stored: DispatchedSamplingTask | None = None
    """Its document, if it is a call of an earlier owner."""
    journal: list[ToolExecution] = field(default_factory=list)
    """Runs of its tools under earlier owners that nobody has asked for again."""
    counted: bool = False
    """Whether the journal counts these runs as returned: one of its tools was asked for."""
    changes: int = 0
    """How often it has changed since it was made."""
    written: int | None = None
    """``changes`` when its document was written; None: it was not."""
    revision: int = 0
    """How often its document was written again."""
    written_executions: int = 0
    """The tool runs that its document has."""
    written_spent: Spent = field(default_factory=Spent)
    """What its document counts."""

    @property
    def content(self) -> str:
        """Return the text without thoughts and tool calls."""
        return self.parsed.content

    @property
    def reasoning(self) -> str:
        """Return the thoughts."""
        return self.parsed.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Return the tool calls."""
        return self.parsed.tool_calls

    @property
    def error(self) -> str | None:
        """Return why a tool call could not be read; None if all could."""
        return self.parsed.error

    @property
    def finish_reason(self) -> str:
        """Return why the generation ended."""
        return self.generation.finish_reason

    @property
    def is_cut(self) -> bool:
        """Return whether the length limit of the model call ended the turn."""
        return self.finish_reason == "length"

    @property
    def prompt_tokens(self) -> int:
        """Return the length of the prompt, as the engine counted it."""
        return self.generation.prompt_tokens

    @property
    def output_tokens(self) -> int:
        """Return the number of generated tokens."""
        return len(self.generation.output_ids)

    @property
    def id(self) -> str:
        """Return the id of its document."""
        return f"{self.record}/{self.index}"

    @property
    def is_written(self) -> bool:
        """Return whether its document has all that it has."""
        return self.written == self.changes

    def change(self) -> None:
        """Note that its document must be written again."""
        self.changes += 1
        self.changed_at = now()

    @property
    def status(self) -> CallStatus:
        """Return the status by the first error: of its format, of a repetition, of a tool."""
        if self.problem is not None:
            return CallStatus.FORMAT_ERROR
        if self.times_seen > 1:
            return CallStatus.REPEAT_ERROR
        if any(execution.error for execution in self.executions):
            return CallStatus.TOOL_FAILED
        return CallStatus.COMPLETED

    @property
    def chain(self) -> Chain:
        """Return the conversation that ends with this call, as the prompt of the next one needs it."""
        prompt, output = self.prompt, list(self.generation.output_ids)
        messages = [*prompt.messages, self.response]
        return Chain(self.id, prompt.ids, output, messages, prompt.encoded, prompt.images)

    def forget_stored(self) -> None:
        """Drop what only the document of a stored call needs: an agent may keep all its turns.

        Prompts grow, and the routing of a long answer has megabytes. Its ids stay: the next prompt has them.
        """
        self.stored = None
        self.prompt = Prompt(ids=[], context_ids=[], messages=(), new_messages=())
        self.generation = replace(self.generation, routing=b"", sampling_mask=b"", logprobs=())

    def resume(self, stored: DispatchedSamplingTask) -> None:
        """Go on with a call of an earlier owner, whose document has what came after it."""
        self.stored = stored
        self.journal = list(stored.tool_executions)
        self.problem = stored.error
        self.events = list(stored.events)
        self.snapshot = stored.snapshot
        self.tool_seconds = stored.tool_seconds
        self.changed_at = stored.created_at
        self.written, self.revision = self.changes, stored.revision
        self.written_executions, self.written_spent = len(stored.tool_executions), stored.spent

    def has_run(self, call: ToolCall) -> bool:
        """Return whether an earlier owner ran this call, which was valid then."""
        return any(stored.name == call.name and stored.arguments == storable_arguments(call.arguments)
                   for stored in self.journal)  # fmt: skip

    def wrote(self, document: DispatchedSamplingTask, changes: int) -> None:
        """Note that its document was written, as it was after ``changes``."""
        self.written, self.revision = changes, document.revision
        self.written_executions, self.written_spent = len(document.tool_executions), document.spent
        if self.closed and self.is_written:
            self.forget_stored()

    def refuse(self, problem: str) -> str:
        """Keep the first problem of the format; return the text that the model reads."""
        if self.problem is None:
            self.problem = problem
            self.changes += 1
        return f"Error: {problem}"

    def document(self) -> DispatchedSamplingTask:
        """Return the document of this call."""
        if self.stored is not None:
            # Change what came after it alone: its ids and what made them are an earlier owner's.
            return replace(
                self.stored, status=self.status, tool_executions=(*self.executions, *self.journal),
                events=tuple(self.events), snapshot=self.snapshot, error=self.problem,
                tool_seconds=self.tool_seconds, created_at=self.changed_at, revision=self.revision + 1,
            )  # fmt: skip
        generation, prompt = self.generation, self.prompt
        return DispatchedSamplingTask(
            id=self.id,
            record=self.record,
            index=self.index,
            role=self.role,
            parent=prompt.parent,
            follows=prompt.follows,
            anchor=self.anchor,
            drops_thoughts=prompt.drops_thoughts,
            opens_branch=prompt.opens_branch,
            fixed=self.fixed,
            status=self.status,
            messages=stored_messages(prompt.new_messages, self.read),
            response=storable_message(self.response),
            tool_executions=tuple(self.executions),
            events=tuple(self.events),
            snapshot=self.snapshot,
            revision=self.revision + 1 if self.written is not None else 0,
            # Store the schemas at a branch's beginning only: calls that continue it are offered the same.
            tools=None if prompt.parent else tuple(map(sanitize_bson, self.tools)),
            error=self.problem,
            finish_reason=generation.finish_reason,
            versions=generation.versions,
            prompt_tokens=generation.prompt_tokens,
            generated_tokens=len(generation.output_ids),
            cached_tokens=generation.cached_tokens,
            engine=generation.engine_url,
            attempt=self.attempt,
            sampling_params=sanitize_bson(self.fixed.params if self.fixed else self.params.to_request()),
            generate_seconds=generation.seconds,
            tool_seconds=self.tool_seconds,
            created_at=self.changed_at,
            context_ids=pack_ids(prompt.context_ids),
            output_ids=pack_ids(generation.output_ids),
            logprobs=pack_floats(generation.logprobs),
            logprobs_of=generation.logprobs_of,
            sampling_mask=generation.sampling_mask,
            routing=generation.routing,
            images=prompt.context_images,
        )


def stored_messages(messages: Sequence[Message], read: Sequence[ToolExecution]) -> tuple[dict[str, Any], ...]:
    """Return new messages as the document of a call has them; ``read`` are the tool runs of its parent."""
    return tuple(map(storable_message, strip_tool_results(messages, read)))


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
    """Return the assistant's message; ``call_id``, seven characters, begins the ids of its tool calls."""
    message: Message = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [
            {
                "id": f"{call_id}{_two_characters(index)}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(parsed.tool_calls)
        ]
    return message


def call_id_of(turn: int) -> str:
    """Return how the ids of the tool calls of a trajectory's model call begin; each call has its own."""
    # Keep the length: Mistral's templates refuse ids that are not of nine letters and digits.
    return f"call{turn:03d}" if turn < 1000 else f"c{turn:06d}"


def _two_characters(index: int) -> str:
    """Return 00 to 99, then a letter and a letter or digit: 3,324 tool calls of one answer differ."""
    if index < 100:
        return f"{index:02d}"
    letters, all_characters = string.ascii_letters, string.digits + string.ascii_letters
    first, second = divmod(index - 100, len(all_characters))
    return letters[first % len(letters)] + all_characters[second]


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


class Tools(Protocol):
    """The tools of one trajectory: ``ToolSession``."""

    async def list(self) -> Sequence[Schema]:
        """Return the function schemas of the tools offered now."""
        ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Run one tool."""
        ...

    def state_of(self, name: str, server: str | None = None) -> ToolState:
        """Return what a tool keeps between its calls; ``server`` is the one that a stored call names."""
        ...

    def recall(self, execution: ToolExecution) -> None:
        """Count the reward of a stored call that is not made again."""
        ...

    async def replay(self, executions: Sequence[ToolExecution]) -> int | None:
        """Make stored calls of tools with state again; return the index of the first that ends otherwise."""
        ...

    @property
    def keeps_files(self) -> bool:
        """Return whether ``snapshot`` may keep something."""
        ...

    async def snapshot(self) -> str | None:
        """Keep the files of tools as they are now; return the reference to them, None if none are kept."""
        ...

    async def restore(self, reference: str) -> bool:
        """Restore the files of a snapshot in new sessions; return False if it is not there."""
        ...

    async def rewards(self) -> dict[str, dict[str, Any]]:
        """Return the rewards that tools give, by tool; those for a state need its calls ``replay``ed."""
        ...


async def run_tool_calls(
    turn: Turn,
    schemas: Sequence[Schema],
    offered: Callable[[], Awaitable[Sequence[Schema]]],
    run: Callable[[ToolCall], Awaitable[ToolExecution]],
) -> list[Message]:
    """Run the tool calls of ``turn`` in parallel; return one message per call, in the order of the calls.

    ``run`` runs a valid one and records it in ``turn``, whose runs are then in the same order. A malformed
    tool call is not run: its message says what is wrong. An error that a tool reports is a result.
    ``offered`` returns what servers offer now: they may have added tools to ``schemas``, those of the prompt.
    Raises ToolServerError if a server is lost; the other calls of the turn are recorded.
    """
    ids = [call["id"] for call in turn.response.get("tool_calls", ())]
    known = set(map(schema_name, schemas))
    if any(not turn.has_run(call) for call in turn.tool_calls if call.name not in known):
        schemas = [*schemas, *await offered()]
    problems = [None if turn.has_run(call) else validate_call(call, schemas) for call in turn.tool_calls]
    valid = [call for call, problem in zip(turn.tool_calls, problems, strict=True) if problem is None]
    results: Sequence[ToolExecution | BaseException]
    if len(valid) == 1:  # a task would cost more than many a tool
        results = [await run(valid[0])]
    else:
        # Let all calls end: a task group would cancel the others, which may have taken effect unrecorded.
        results = await asyncio.gather(*map(run, valid), return_exceptions=True)
        order = {id(result): place for place, result in enumerate(results)}
        turn.executions.sort(key=lambda execution: order.get(id(execution), -1))
    texts = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        texts.append(result.content)
    shown = iter(texts)
    messages = []
    for call, call_id, problem in zip(turn.tool_calls, ids, problems, strict=True):
        content = next(shown) if problem is None else turn.refuse(problem)
        messages.append(_tool_message(content, call.name, call_id))
    if turn.error is not None:
        messages.append(_tool_message(turn.refuse(turn.error), None, None))
    return messages


async def execute(
    call: ToolCall, tools: Tools, images: Images | None = None, attempt: int | None = None
) -> ToolExecution:
    """Run one valid tool call; store the images of its result. Raises ToolServerError for a lost server.

    Images of results are stored in ``images``; without it the model reads text only, and the text says what
    is missing.
    """
    started_at = now()
    with tool_span(call) as span:
        result = await contain_errors(
            lambda: tools.call(call.name, call.arguments), f"tool {call.name}", ToolServerError
        )
        shown = () if images is None else result.images
        if shown and images is not None:
            await images.put(*shown)
        execution = ToolExecution(
            name=call.name,
            arguments=storable_arguments(call.arguments),
            result=stored_text(result.text, len(shown)),
            error=result.error,
            seconds=result.seconds,
            server=result.server,
            reward=result.reward,
            condensed=result.condensed,
            images=tuple(image.ref for image in shown),
            started_at=result.started_at or started_at,
            attempt=attempt,
        )
        end_tool(span, execution)
    return execution


def _tool_message(text: str | list[Part], name: str | None, call_id: str | None) -> Message:
    message: Message = {"role": "tool", "content": text}
    if name is not None:
        message["name"] = name
    if call_id is not None:
        message["tool_call_id"] = call_id
    return message
