"""Make the model calls of one trajectory, one at a time, and store them in order, in the background."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from agentrl.chat.chat_format import ChatFormat
from agentrl.chat.parsers.base import ParsedMessage
from agentrl.concurrency import end_tasks
from agentrl.config.schema import AgentConfig
from agentrl.documents.model_call import DispatchedSamplingTask, ToolExecution
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.task import Claim
from agentrl.inference.engine import Engine, Progress
from agentrl.rollout.model_call import Hold, PendingCall, Turn, images_of, message_of, parse
from agentrl.rollout.prompts import Budget, Prompt
from agentrl.rollout.trace import end_model_call, model_call_span
from agentrl.scoring.answers import extract_answer
from agentrl.scoring.scorers import ScoredCall
from agentrl.tools.base import Schema

if TYPE_CHECKING:
    from agentrl.store.client import Store
    from agentrl.store.images import Images

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
                for _ in calls:
                    self._queue.popleft()
                self._written.set()
        except Exception as error:  # noqa: BLE001  ``write`` and ``flush`` raise it
            self._error = error
            self._queue.clear()
        finally:
            self._writer = None
            self._written.set()
