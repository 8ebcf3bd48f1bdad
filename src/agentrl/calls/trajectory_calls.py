"""Make the model calls of one trajectory, one at a time, and store them in order, in the background."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from agentrl.base.concurrency import end_tasks
from agentrl.calls.prompts import Budget, Chain, Prompt, answered_prefixes, prefix_digests, prompt_of
from agentrl.calls.trace import end_model_call, model_call_span
from agentrl.calls.turns import Tools, Turn, call_id_of, execute, images_of, message_of, parse
from agentrl.chat.chat_format import ChatFormat, Message
from agentrl.chat.parsers.arguments import validate_call
from agentrl.chat.parsers.parser import ToolCall
from agentrl.config.schema import AgentConfig
from agentrl.documents.model_call import DispatchedSamplingTask, ToolExecution
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.task import Claim
from agentrl.errors import ContextFullError, TrajectoryError
from agentrl.inference.engine import Engine, Progress
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
        write: Callable[[Turn], Awaitable[None]],
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
        self._unstored: list[Turn] = []
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
    ) -> Turn:
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
                response = message_of(parsed, call_id_of(self.turns))
                end_model_call(span, generation, prompt.new_messages, response)
                span.set({"agentrl.role": role, "agentrl.turn": self.turns + 1})
            turn = Turn(
                record=self.record, prompt=prompt, role=role, tools=tools, params=params,
                generation=generation, parsed=parsed, response=response, read=executions,
                text=self.chat_format.decode(generation.output_ids),
            )  # fmt: skip
            self.add(turn)
            return turn

    def add(self, turn: Turn) -> None:
        """Count a call that was made, and find its answer; ``store`` stores it."""
        if turn.error is None:
            if not turn.is_cut:
                turn.answer = extract_answer(turn.content, self._task.answer_schema)
            turn.settled = not turn.tool_calls
        self.turns += 1
        self._unstored.append(turn)

    def adopt(self, calls: Sequence[DispatchedSamplingTask], dropped: Collection[int]) -> None:
        """Take over the calls that a gateway made and stored; ``dropped`` ones are no turns."""
        self.turns = len(calls) - len(dropped)
        self.scored_calls = [ScoredCall.of_document(call, dropped) for call in calls]

    async def store(self, turn: Turn) -> None:
        """Store a call, unless it is stored. It cannot change any more."""
        async with self._storing:
            if turn.index is not None:
                return
            self._unstored.remove(turn)
            turn.index = len(self.scored_calls)
            self.scored_calls.append(ScoredCall.of(turn.response, turn.executions, turn.status, turn.role))
            await self._write(turn)

    async def store_settled(self) -> None:
        """Store the calls that have no tool call left to run."""
        for turn in [turn for turn in self._unstored if turn.settled]:
            await self.store(turn)

    async def store_all(self) -> None:
        """Store every call, in the order in which they were made."""
        for turn in list(self._unstored):
            await self.store(turn)


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
        await self._calls.store_settled()
        # Store the parent even if its tools still run: until then it has no id that the child could name.
        if before is not None and chain is not None:
            await self._calls.store(before)
            chain = replace(chain, call=before.id)
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

        It is recorded with the answer whose tool call has this id.
        """
        turn = self._by_tool_call.get(call_id)
        # Record runs with unstored calls only: frameworks may run a tool after its conversation went on.
        if turn is not None and turn.index is not None:
            turn = None
        call = ToolCall(name, dict(arguments))
        problem = validate_call(call, schemas)
        if problem is not None:
            if turn is not None:
                turn.refuse(problem)
            return f"Error: {problem}", True
        execution = await execute(call, tools)
        if turn is not None:
            turn.executions.append(execution)
            turn.tool_seconds += execution.seconds
        return execution.text, execution.error


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


class CallWriter:
    """Writes in order, while the process has nothing urgent to do, and nothing after an error.

    ``write`` and ``flush`` raise that error.

    An agent may suppress that error or raise another one; ``flush``, which comes before the score, raises the
    original. Use it as an async context manager.
    """

    def __init__(self, store: Store, claim: Claim) -> None:
        self._store = store
        self._claim = claim
        self._queue: deque[Turn] = deque()
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

    async def write(self, call: Turn) -> None:
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
                    self._queue.popleft().forget_stored()
                self._written.set()
        except Exception as error:  # noqa: BLE001  ``write`` and ``flush`` raise it
            self._error = error
            self._queue.clear()
        finally:
            self._writer = None
            self._written.set()
