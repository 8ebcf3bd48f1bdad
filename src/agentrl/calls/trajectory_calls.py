"""Make the model calls of one trajectory, one at a time, and store them in order, in the background."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, cast

from agentrl.base.concurrency import end_tasks
from agentrl.calls.journal import Journal, as_text, began
from agentrl.calls.prompts import Budget, Chain, Prompt, prompt_of
from agentrl.calls.trace import end_model_call, model_call_span
from agentrl.calls.turns import Tools, Turn, call_id_of, execute, images_of, message_of, parse
from agentrl.chat.chat_format import ChatFormat, Message
from agentrl.chat.parsers.arguments import validate_call
from agentrl.chat.parsers.parser import ToolCall
from agentrl.config.schema import AgentConfig
from agentrl.documents.conversation import answered_prefixes, prefix_digests
from agentrl.documents.document import now, plain, sanitize_bson
from agentrl.documents.model_call import (
    STEP,
    TOOL,
    DispatchedSamplingTask,
    Event,
    ToolExecution,
    read_digest,
    state_digest,
    storable_arguments,
    unpack_floats,
    unpack_ids,
)
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import ToolState
from agentrl.documents.task import Claim
from agentrl.errors import ContextFullError, FailureError, ReplayError, StoreError, TrajectoryError
from agentrl.inference.engine import Engine, FinishReason, Generation, Progress
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


class Writes(Protocol):
    """Stores model calls in the background: ``CallWriter``."""

    def offer(self, call: Turn) -> None:
        """Queue a call that is new or has changed; it may change again."""

    async def write(self, call: Turn) -> None:
        """Queue a call that changes no more. Waits while too many are queued."""

    async def flush(self) -> None:
        """Wait until every queued call is stored. Raises the error of a write."""

    async def note_snapshot(self, call: Turn) -> None:
        """Store the snapshot of a call, which may be closed."""

    async def keep_events(self, events: Sequence[Event]) -> None:
        """Store all events of a trajectory whose calls are written elsewhere."""


class Steps(Protocol):
    """The environment of a trajectory: ``EnvironmentSession``."""

    @property
    def state(self) -> ToolState:
        """Return what it keeps between messages."""
        ...

    @property
    def names_states(self) -> bool:
        """Return whether it says in which state a model call is made."""
        ...

    async def anchor_state(self) -> str | bytes | None:
        """Return the state that it is in; None: the call's is what the model reads."""
        ...

    async def replay(self, steps: Sequence[tuple[str, Mapping[str, Any]]]) -> int | None:
        """Give stored messages to it again; return the index of the first that is answered otherwise."""
        ...


_LARGEST_EVENT = 2**20
"""Characters of what ``Rollout.once`` keeps: more does not belong into the document of a model call."""

_INTERRUPTED = (
    "the call was interrupted after it had begun: it may have taken effect, and it is not made again"
)


class TrajectoryCalls:
    """Makes the policy's calls of one trajectory, for all its roles, and keeps its journal.

    A call is stored when it is made, and again when its tools have run. It is closed when its role goes on.
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
        writer: Writes,
        journal: Journal,
        images: Images,
        hold: Hold,
        begin: Callable[[], None] = lambda: None,
        environment: Steps | None = None,
        tools: Tools | None = None,
    ) -> None:
        """``writer`` stores model calls; ``journal`` has those of earlier owners; ``images`` the messages'.

        Every model call has its own sampling seed, derived from ``seed``, the task, the trajectory, the
        attempt that began it and the turn. With a batch-invariant engine the same run samples the same tokens
        again; a trajectory that begins anew is another sample. ``hold`` repeats a call while the engines or a
        fixed model are down. ``begin`` is asked before a tool or an event that the journal does not have; it
        raises if no call may begin. ``tools`` are made again before ``environment`` is asked for its state.
        """
        self.chat_format = chat_format
        self.images = images
        self.hold = hold
        self.journal = journal
        self.attempt = claim.attempt
        self.made: list[Turn] = []
        """The model calls of all roles, by index."""
        self._open: list[Turn] = []
        self._adopted: list[ScoredCall] = []
        self._early: list[Event] = []
        """Events that came when no call could take them; the next one does."""
        self._noted = list(journal.early)
        """Events that are stored with the Record: no model call can take them in time."""
        self._has_gateway = False
        self._task = claim.task
        self.record = claim.record_id
        """The id of the Record."""
        self._seed = (seed, claim.task.id, claim.traj_id, claim.first_attempt)
        self._config = config
        self._engine = engine
        self._params = params
        self._writer = writer
        self._begin = begin
        self._environment = environment
        self._tools = tools
        self._lost: FailureError | None = None
        self._rebuilding = asyncio.Lock()
        self._is_rebuilt = False
        self._asked: dict[tuple[str, str], dict[object, Event | None]] = {}
        """Name and arguments of events → the questions that are not recorded, in order, and their answers."""
        self._files_of: Tools | None = None
        """The tools, once they are used, if they keep files."""
        self._keeping: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    @property
    def turns(self) -> int:
        """Return the number of model calls of all roles."""
        return sum(not call.dropped for call in self._adopted) if self._adopted else len(self.made)

    @property
    def scored_calls(self) -> list[ScoredCall]:
        """Return the finished model calls, by index, as a scorer gets them."""
        return self._adopted or [
            ScoredCall.of(turn.response, turn.executions, turn.status, turn.role)
            for turn in self.made
            if turn.closed
        ]

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
    ) -> Turn:
        """Return the call behind ``prompt``: the journal's, or a new one.

        ``changes`` are sampling parameters for this call only, ``executions`` the tool runs of its parent,
        ``seed`` names the call among those of its role. ``progress`` receives the tokens while they are
        generated. Concurrent calls of one trajectory are made one after the other.
        """
        self._require_state()
        if self.journal and (stored := await self.journal.call(role, prompt)) is not None:
            # Do not wait between look-up and ``add``: calls come back in the order of their indexes.
            generation = stored_generation(stored)
            if progress is not None:
                progress(0, generation.output_ids)
            return self._parsed(prompt, generation, role, tools, self._params, executions, stored)
        # Make one call at a time: the session resumes one partial generation, and seeds count the turns.
        async with self._turn:
            params = self._params.replace(**changes).seeded(*self._seed, *(seed or (self.turns,)))
            params = self.budget.clamp(params, len(prompt.ids))
            images = await images_of(self.images, prompt.images)
            anchor = await self._anchor(prompt)
            self._begin_keeping(role)
            with model_call_span(self.record, params) as span:
                generation = await self.hold(
                    lambda: self._engine.generate(
                        prompt.ids, params, progress, images, prompt.encoded, routed_from=prompt.routed_from
                    )
                )
                turn = self._parsed(prompt, generation, role, tools, params, executions, anchor=anchor)
                end_model_call(span, generation, prompt.new_messages, turn.response)
                span.set({"agentrl.role": role, "agentrl.turn": self.turns})
            return turn

    def _parsed(
        self,
        prompt: Prompt,
        generation: Generation,
        role: str | None,
        tools: Sequence[Schema],
        params: SamplingParams,
        executions: Sequence[ToolExecution],
        stored: DispatchedSamplingTask | None = None,
        anchor: str | None = None,
    ) -> Turn:
        parsed = parse(self.chat_format, prompt, generation, tools)
        turn = Turn(
            record=self.record, prompt=prompt, role=role, tools=tools, params=params,
            generation=generation, parsed=parsed, response=message_of(parsed, call_id_of(self.turns)),
            read=executions, text=self.chat_format.decode(generation.output_ids), anchor=anchor,
        )  # fmt: skip
        self.add(turn, stored)
        return turn

    async def _anchor(self, prompt: Prompt) -> str:
        """Return the digest of the state in which the model answers: the environment's, else what it reads.

        Raises TaskEnvironmentError, and what ``rebuild`` raises.
        """
        environment = self._environment
        if environment is not None and environment.names_states:
            if self._tools is not None:
                # An earlier owner's calls are behind this one: the new instance has to have made them too.
                await self.rebuild(self._tools)
            state = await self.hold(environment.anchor_state)
            if state is not None:
                return state_digest(state)
        return read_digest(prompt.messages)

    def add(self, turn: Turn, stored: DispatchedSamplingTask | None = None) -> None:
        """Count a call that was made or is ``stored``, and find its answer."""
        if turn.error is None:
            if not turn.is_cut:
                turn.answer = extract_answer(turn.content, self._task.answer_schema)
            turn.settled = not turn.tool_calls
        turn.index = len(self.made)
        turn.attempt = self.attempt
        self.made.append(turn)
        self._open.append(turn)
        if stored is not None:
            turn.resume(stored)
        if early := [*self.journal.kept, *self._early]:
            turn.events += early
            self.journal.kept, self._early = [], []
            turn.change()
        self._writer.offer(turn)

    async def leave_to_gateway(self) -> None:
        """Leave the model calls to a gateway. It takes no events: they are kept with the Record."""
        self.journal.forget()
        self._has_gateway = True
        if self._early:
            self._noted, self._early = [*self._noted, *self._early], []
            await self._writer.keep_events(self._noted)

    def adopt(self, calls: Sequence[DispatchedSamplingTask], dropped: Collection[int]) -> None:
        """Adopt the calls that a gateway stored; do not count the ``dropped`` indexes as turns."""
        self._adopted = [ScoredCall.of_document(call, dropped) for call in calls]

    async def run_tool(self, turn: Turn | None, call: ToolCall, tools: Tools) -> ToolExecution:
        """Run a valid tool call of ``turn`` and record it there; or return its run in the journal.

        Raises ToolServerError for a lost server.
        """
        if turn is None or turn.closed:
            return await self._run_apart(call, tools)
        if not turn.counted:
            turn.counted = True
            self.journal.count(turn.journal)
        found = self.journal.execution(turn.journal, call.name, call.arguments)
        if found is not None:
            if not found.finished:
                found = replace(found, result=_INTERRUPTED, error=True, attempt=self.attempt)
                turn.change()
            tools.recall(found)
            turn.executions.append(found)
            return found
        # Ask before the note of an outside tool: noted, it counts as one that may have taken effect.
        self._begin()
        begun: ToolExecution | None = None
        await self.rebuild(tools)
        if turn.closed:
            return await self._run_apart(call, tools)
        if tools.state_of(call.name) is ToolState.OUTSIDE:
            begun = self._begun(call)
            self._note(turn, begun)
            # Store it before it begins: whoever goes on must know that it may have taken effect.
            await self._writer.flush()
        execution = await execute(call, tools, self.images if self.reads_images else None, self.attempt)
        # Leave a call as it is stored if it was closed meanwhile: `forget_stored` may have emptied it.
        if not turn.closed:
            if begun is not None:
                turn.executions.remove(begun)
            self._note(turn, execution)
        return execution

    async def offered(self, tools: Tools) -> Sequence[Schema]:
        """Return the schemas of what is offered now, also of tools that calls of earlier owners have added.

        While stored model calls are left, these are not made again: nothing new is run before that.
        """
        if not self.journal.left:
            await self.rebuild(tools)
        return await tools.list()

    async def _run_apart(self, call: ToolCall, tools: Tools) -> ToolExecution:
        """Run a tool call of no open model call, and record it as an event; or return its run in the journal.

        Frameworks make such calls: for a conversation that has gone on, or by their own code.
        """
        told = {"name": call.name, "arguments": storable_arguments(call.arguments)}
        if tools.state_of(call.name) is ToolState.OUTSIDE:
            return await self._run_outside_apart(call, told, tools)
        is_new = False

        async def run() -> Any:
            nonlocal is_new
            is_new = True
            await self.rebuild(tools)
            return plain(await execute(call, tools, attempt=self.attempt))

        execution = ToolExecution.from_document(await self.event(TOOL, run, told))
        if not is_new:
            tools.recall(execution)
        return execution

    async def _run_outside_apart(
        self, call: ToolCall, told: Mapping[str, Any], tools: Tools
    ) -> ToolExecution:
        """Run a tool with effects outside; note with the Record that it begins, and how it ended."""
        found = self.journal.event(TOOL, told)
        if found is not None:
            execution = ToolExecution.from_document(found.result)
            if not execution.finished:
                execution = replace(execution, result=_INTERRUPTED, error=True, attempt=self.attempt)
            tools.recall(execution)
            return execution
        self._begin()
        await self.rebuild(tools)
        begun = Event(
            name=TOOL, arguments=told, result=plain(self._begun(call)), started_at=now(), seconds=0.0,
            attempt=self.attempt,
        )  # fmt: skip
        self._noted.append(begun)
        await self._writer.keep_events(self._noted)
        execution = await execute(call, tools, attempt=self.attempt)
        ended = replace(begun, result=plain(execution), seconds=execution.seconds)
        self._noted = [ended if event is begun else event for event in self._noted]
        await self._writer.keep_events(self._noted)
        return execution

    def _begun(self, call: ToolCall) -> ToolExecution:
        """Return the note of a tool run that begins, and may have taken effect if nothing follows it."""
        return ToolExecution(
            name=call.name, arguments=storable_arguments(call.arguments), result="", error=False,
            seconds=0.0, started_at=now(), attempt=self.attempt, finished=False,
        )  # fmt: skip

    async def rebuild(self, tools: Tools) -> None:
        """Make the state of tools and environment again, before the first call that needs it.

        Raises ReplayError if a call ends otherwise than it did. After that and any other error the state is
        unknown: whatever the agent does raises it again.
        """
        async with self._rebuilding:
            self._require_state()
            # Change no file before it is kept: the snapshot is that of the call before.
            if self._keeping is not None:
                await asyncio.wait([self._keeping])
            try:
                await self._rebuild(tools)
            except FailureError as error:
                self._lost = error
                raise
            except BaseException:
                # An agent may bound its tools by a time of its own, and go on: some calls are made again.
                self._lost = ReplayError("making the calls of earlier owners again was interrupted")
                raise

    async def _rebuild(self, tools: Tools) -> None:
        if not self._is_rebuilt:
            await self._restore_files(tools)
        if self.journal.is_parallel:
            # Sort here: what a snapshot has is counted in the order of the look-ups, and is left out now.
            self.journal.done.sort(key=began)
        while self.journal.done:
            stored = self.journal.done.pop(0)
            if isinstance(stored, ToolExecution):
                differs = await tools.replay([stored]) is not None
            else:
                differs = await self._step_differs(stored)
            if differs:
                what = stored.name if isinstance(stored, ToolExecution) else "the environment"
                raise ReplayError(
                    f"{what} answered a repeated call otherwise: its state is not what it was",
                    hint="declare its state: docs/durable.md",
                )

    async def _restore_files(self, tools: Tools) -> None:
        """Give new sessions the files that are kept; the calls that had changed them are not made again."""
        self._is_rebuilt = True
        self._files_of = tools if tools.keeps_files else None
        journal, count = self.journal, self.journal.in_snapshot
        if count is None:
            # Leave a snapshot that has the work of calls that the agent has not asked for again.
            count = 0 if self.made and self.made[-1].journal else len(journal.done)
        try:
            if journal.snapshot is None or count == 0 or not await tools.restore(journal.snapshot):
                return
        except FailureError as error:
            if error.outage is not None:
                raise
            raise ReplayError(f"the files of the tools cannot be restored: {error.message}") from error

        def is_kept(stored: ToolExecution | Event) -> bool:
            if isinstance(stored, ToolExecution):
                return tools.state_of(stored.name, stored.server) is ToolState.SNAPSHOT
            return self._environment is not None and self._environment.state is ToolState.SNAPSHOT

        others = [stored for stored in journal.done[:count] if not is_kept(stored)]
        journal.done = [*others, *journal.done[count:]]

    def _begin_keeping(self, role: str | None) -> None:
        """Keep the files of tools while the next model call of ``role`` is made."""
        if self._files_of is None or not (self._keeping is None or self._keeping.done()):
            return
        # Leave out what is not a sequence: tools of another role, or of an earlier call, may run meanwhile.
        if self.made and self.made[-1].settled and all(turn.role == role for turn in self.made):
            keeping = self._keep_files(self._files_of, self.made[-1])
            self._keeping = asyncio.create_task(keeping, name=f"files of {self.record}")

    async def _keep_files(self, tools: Tools, turn: Turn) -> None:
        reference = await tools.snapshot()
        if reference is None or reference == turn.snapshot:
            return
        turn.snapshot = reference
        with suppress(StoreError):  # the next write of the trajectory raises it
            await self._writer.note_snapshot(turn)

    async def stop_keeping(self) -> None:
        """End what is being kept: the trajectory is over."""
        if self._keeping is not None:
            await end_tasks(self._keeping)

    async def _step_differs(self, step: Event) -> bool:
        environment = self._environment
        assert environment is not None  # the journal has steps of the task's environment alone
        stored = [(step.arguments, step.result)]
        return await self.hold(lambda: environment.replay(stored)) is not None

    def _require_state(self) -> None:
        """Raise the error of ``rebuild`` again: an agent may have taken it for a tool's."""
        if self._lost is not None:
            raise self._lost

    def _note(self, turn: Turn, execution: ToolExecution) -> None:
        turn.executions.append(execution)
        turn.change()
        self._writer.offer(turn)

    async def event(
        self, name: str, call: Callable[[], Awaitable[Any]], arguments: Any = None, turn: Turn | None = None
    ) -> Any:
        """Return what ``call`` returns, as the journal has it or will have it.

        It is recorded with ``turn``, by default the latest call. Raises TrajectoryError for a value that
        cannot be stored.
        """
        found = self.journal.event(name, arguments, () if turn is None else turn.events)
        if found is not None:
            return sanitize_bson(found.result)
        self._begin()
        asked = self._asked.setdefault((name, as_text(arguments)), {})
        question = object()
        asked[question] = None
        try:
            started_at, started = now(), time.monotonic()
            result = sanitize_bson(await call())
            # The prompt limits what environment and tools answer: one that is too long ends the trajectory.
            if name not in (STEP, TOOL) and (size := len(json.dumps(result, default=str))) > _LARGEST_EVENT:
                raise TrajectoryError(
                    f"what {name!r} returned has {size:,} characters as JSON, more than {_LARGEST_EVENT:,}",
                    hint="return what the trajectory needs of it",
                )
            asked[question] = Event(
                name=name, arguments=arguments, result=result, started_at=started_at,
                seconds=time.monotonic() - started, attempt=self.attempt,
            )  # fmt: skip
        except BaseException:
            del asked[question]
            raise
        finally:
            # Record in the order of the questions: that is how the next owner's agent gets the answers.
            for first, event in list(asked.items()):
                if event is None:
                    break
                del asked[first]
                self._record(event, turn)
        if self._has_gateway:
            await self._writer.keep_events(self._noted)
        # Return a copy: the agent may change what it got before it is written.
        return sanitize_bson(result)

    def _record(self, event: Event, turn: Turn | None) -> None:
        taker = turn or (self.made[-1] if self.made else None)
        if self._has_gateway:
            self._noted.append(event)
        elif taker is None or taker.closed:
            self._early.append(event)
        else:
            taker.events.append(event)
            taker.change()
            self._writer.offer(taker)

    async def close(self, turn: Turn) -> None:
        """Store a call that cannot change any more, unless it is stored."""
        if not turn.closed:
            turn.closed = True
            self._open.remove(turn)
            if turn.stored is not None and turn.stored.tool_executions != (*turn.executions, *turn.journal):
                # Store them as they came back: the messages of the next call name results by their place.
                turn.changes += 1
            await self._writer.write(turn)

    async def close_settled(self) -> None:
        """Close the calls that have no tool call left to run."""
        for turn in [turn for turn in self._open if turn.settled]:
            await self.close(turn)

    async def close_all(self) -> None:
        """Close every call, in the order in which they were made."""
        self._require_state()
        for turn in list(self._open):
            await self.close(turn)


def stored_generation(call: DispatchedSamplingTask) -> Generation:
    """Return the generation of a stored model call."""
    return Generation(
        output_ids=tuple(unpack_ids(call.output_ids).tolist()),
        logprobs=tuple(unpack_floats(call.logprobs).tolist()),
        versions=call.versions,
        finish_reason=cast("FinishReason", call.finish_reason),
        prompt_tokens=call.prompt_tokens,
        cached_tokens=call.cached_tokens,
        seconds=call.generate_seconds,
        engine_url=call.engine,
        logprobs_of=call.logprobs_of,
        sampling_mask=call.sampling_mask,
        routing=call.routing,
    )


MakeProgress = Callable[[list[int]], Progress]
"""Takes the ids of a prompt; returns what receives the tokens of its answer."""


class Histories:
    """The calls of one role whose agent sends the whole conversation each time, as frameworks do.

    It may edit it. Messages that extend an earlier call's continue its sampled ids. Any others are a branch
    of the trajectory's token tree, with a prompt of its own.
    """

    def __init__(self, calls: TrajectoryCalls, role: str | None) -> None:
        self._calls = calls
        self._role = role
        self._known: dict[str, tuple[Turn, Chain, int]] = {}
        """Digest of a conversation → the call that ends it, its ids, and how many calls its branch has."""
        self._by_tool_call: dict[str, Turn] = {}
        self._count = 0

    @property
    def main_messages(self) -> list[Message]:
        """Return the conversation of the branch with the most calls; of such with tools, then the longest."""

        def rank(known: tuple[Turn, Chain, int]) -> tuple[int, bool, int]:
            _, chain, depth = known
            uses_tools = any("tool_calls" in message for message in chain.messages)
            return depth, uses_tools, len(chain.prompt_ids)

        return max(self._known.values(), key=rank)[1].messages if self._known else []

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[Schema],
        changes: dict[str, Any],
        progress: MakeProgress | None = None,
    ) -> Turn:
        """Make the model call that answers ``messages``; ``changes`` are sampling parameters of this call.

        Raises TrajectoryError for messages that end with an answer, and ContextFullError for a prompt that
        does not fit.
        """
        if not messages or messages[-1]["role"] == "assistant":
            raise TrajectoryError(
                "the last message is the assistant's" if messages else "there are no messages",
                hint="end with a user or tool message",
            )
        known, before, chain, depth = 0, None, None, 0
        for length, digest in answered_prefixes(messages, prefix_digests(messages, tools)):
            if digest in self._known:
                known, (before, chain, depth) = length, self._known[digest]
                break
        await self._calls.close_settled()
        if before is not None and chain is not None:
            await self._calls.close(before)
        prompt = prompt_of(self._calls.chat_format, chain, known, messages, tools)
        budget = self._calls.budget
        if len(prompt.ids) > budget.prompt_limit:
            raise ContextFullError(budget.name_limit(len(prompt.ids)), hint="shorten the graph's history")
        self._count += 1
        turn = await self._calls.sample(
            prompt, changes, role=self._role, tools=tools,
            executions=before.executions if before is not None and prompt.parent else (),
            seed=() if self._role is None else (self._role, self._count),
            progress=None if progress is None else progress(prompt.ids),
        )  # fmt: skip
        if turn.error is not None:
            turn.refuse(turn.error)
            turn.settled = not turn.tool_calls
        if not (turn.content or turn.tool_calls or turn.reasoning):
            turn.response["content"] = turn.text.strip()  # a malformed call stays readable
        chain = turn.chain
        self._known[prefix_digests(chain.messages, tools)[-1]] = turn, chain, depth + 1
        for call in turn.response.get("tool_calls") or ():
            self._by_tool_call[call["id"]] = turn
        return turn

    async def call_tool(
        self, call_id: str, name: str, arguments: Mapping[str, Any], tools: Tools, schemas: Sequence[Schema]
    ) -> tuple[str, bool]:
        """Run a tool that an answer called; return the text that the model reads, and whether it failed.

        It is recorded with the answer whose tool call has this id, or as an event.
        """
        turn = self._by_tool_call.get(call_id)
        # Leave a call that is closed: frameworks may run a tool after its conversation went on.
        if turn is not None and turn.closed:
            turn = None
        call = ToolCall(name, dict(arguments))
        problem = validate_call(call, schemas)
        if problem is not None:
            if turn is not None:
                turn.refuse(problem)
            return f"Error: {problem}", True
        before = 0 if turn is None else len(turn.journal)
        execution = await self._calls.run_tool(turn, call, tools)
        if turn is not None and not turn.closed and len(turn.journal) == before:
            turn.tool_seconds += execution.seconds
            turn.change()
        return execution.text, execution.error


_INTERVAL_SECONDS = 0.05
"""Interval of the times at which all trajectories of the process write: their calls share a transaction.

A call waits for one to two intervals."""

_OPEN_SECONDS = 0.4
"""Wait of a call whose tools may still run: most end before, and it is written once."""

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


class CallWriter:
    """Writes in order, while the process has nothing urgent to do, and nothing after an error.

    ``write`` and ``flush`` raise that error. An agent may suppress it or raise another one; ``flush``, which
    comes before the score, raises the original. Use it as an async context manager.
    """

    def __init__(self, store: Store, claim: Claim) -> None:
        self._store = store
        self._claim = claim
        self._queue: dict[Turn, float] = {}
        """Calls, and when they were queued (``time.monotonic``)."""
        self._must_flush = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._writer: asyncio.Task[None] | None = None
        self._written = asyncio.Event()
        self._error: Exception | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._queue:
            self._must_flush = True
            writer = self._start()
            await asyncio.wait([writer], timeout=_LAST_SECONDS)
            self._queue.clear()  # what the database did not take in time, the next owner makes again
            await end_tasks(writer)

    def offer(self, call: Turn) -> None:
        """Queue a model call that is new or has changed, and may change again.

        It is written after a moment, so that one whose tools are fast is written once.
        """
        if self._error is None and not call.is_written:
            self._queue.setdefault(call, time.monotonic())
            if self._writer is None and self._timer is None:
                self._wait(_OPEN_SECONDS, time.monotonic() + _LONGEST_SECONDS)

    async def write(self, call: Turn) -> None:
        """Queue a model call that changes no more.

        Waits while too many are queued; raises the error of an earlier write.
        """
        self._check()
        if call.is_written:
            call.forget_stored()
            return
        self._queue.setdefault(call, time.monotonic())
        if self._writer is None:
            self._wait(_INTERVAL_SECONDS, time.monotonic() + _LONGEST_SECONDS)
        if len(self._queue) >= _MANY_QUEUED:
            self._start()
        while len(self._queue) > _MAX_QUEUED:
            self._start()
            self._written.clear()
            await self._written.wait()
        self._check()

    async def flush(self) -> None:
        """Wait until every queued call is stored. Raises the error of a write."""
        while self._queue:
            self._must_flush = True
            # Shield the writer: a cancelled trajectory still stores what is queued, in ``__aexit__``.
            await asyncio.shield(self._start())
        self._check()

    async def keep_events(self, events: Sequence[Event]) -> None:
        """Store all events of a trajectory whose calls are written elsewhere. Raises StoreError."""
        await self._store.records.keep(self._claim, events=tuple(events))

    async def note_snapshot(self, call: Turn) -> None:
        """Store the snapshot of a call, which may be closed. Raises StoreError."""
        await self.flush()
        await self._store.model_calls.note_snapshot(call.id, call.attempt, call.snapshot)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _wait(self, seconds: float, latest: float) -> None:
        """Start writing at one of the process's times, when it is not busy or ``latest`` has passed."""
        at = ((time.monotonic() + seconds) // _INTERVAL_SECONDS + 1) * _INTERVAL_SECONDS
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = asyncio.get_running_loop().call_later(
            at - time.monotonic(), self._start_if_idle, at, latest
        )

    def _start_if_idle(self, planned: float, latest: float) -> None:
        self._timer = None
        now = time.monotonic()
        if now < planned + _BUSY_SECONDS or now >= latest:
            self._start()
        else:
            self._wait(_INTERVAL_SECONDS, latest)

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
            while turns := self._due():
                changes = [turn.changes for turn in turns]
                calls = [turn.document() for turn in turns]
                added = [
                    len(call.tool_executions) - turn.written_executions
                    for turn, call in zip(turns, calls, strict=True)
                ]
                spent = [
                    call.spent.since(turn.written_spent) for turn, call in zip(turns, calls, strict=True)
                ]
                await self._store.model_calls.add(self._claim, *calls, new_executions=added, new_spent=spent)
                # Take calls off the queue once they are stored: to ``flush``, an empty one means all are.
                for turn, call, seen in zip(turns, calls, changes, strict=True):
                    turn.wrote(call, seen)
                    if turn.is_written:
                        self._queue.pop(turn, None)
                self._written.set()
        except Exception as error:  # noqa: BLE001  ``write`` and ``flush`` raise it
            self._error = error
            self._queue.clear()
        finally:
            self._writer = None
            self._written.set()
            if self._queue:
                self._wait(_OPEN_SECONDS, time.monotonic() + _LONGEST_SECONDS)
            else:
                self._must_flush = False

    def _due(self) -> list[Turn]:
        """Return the calls to write now, in order: up to the first whose tools may end in a moment."""
        if self._must_flush or len(self._queue) >= _MANY_QUEUED:
            return list(self._queue)
        latest = time.monotonic() - _OPEN_SECONDS
        due = takewhile(lambda item: item[0].closed or item[1] <= latest, self._queue.items())
        return [turn for turn, _ in due]
