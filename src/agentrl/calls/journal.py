"""The journal of a trajectory: what earlier owners did, which the next one need not do again.

It is the stored model calls, with the tool runs and events that followed each. The agent of a new owner
runs from its first line. What it asks for is looked up here first: an equal request gets the stored value,
without an engine or a tool, and the first that is missing or differs is made. Durable execution (as of
Temporal) needs a server that holds the history; here it is the trajectory itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from agentrl.calls.prompts import Prompt
from agentrl.chat.chat_format import Message
from agentrl.documents.document import sanitize_bson
from agentrl.documents.model_call import (
    STEP,
    TOOL,
    DispatchedSamplingTask,
    Event,
    ToolExecution,
    pack_ids,
    storable_arguments,
)

logger = logging.getLogger(__name__)

_APART_SECONDS = 0.25
"""Ends of parallel tool calls that are nearer tell nothing of what a server did first: answers travel."""

_STALLED_SECONDS = 2.0
"""Wait of a request for those that came before it: parallel roles may ask in another order."""


class Journal:
    """The stored model calls of one trajectory that its agent has not asked for again.

    They come back in the order in which they were made, so that what came back is always the beginning of the
    trajectory, and what may be dropped its rest.
    """

    def __init__(
        self,
        calls: Sequence[DispatchedSamplingTask],
        drop: Callable[[int], Awaitable[object]],
        note: Callable[[Journal], Awaitable[None]],
        events: Sequence[Event] = (),
    ) -> None:
        """``drop`` takes the calls from an index on out of the trajectory, ``note`` stores what was saved.

        ``events`` are those that no call has.
        """
        self._left = deque(calls)
        self._drop = drop
        self._note = note
        self._is_noted = not calls
        self.is_parallel = _is_parallel(calls)
        """Whether roles or branches ran at the same time: their agent may ask in another order."""
        self._dropping = asyncio.Lock()
        self._moved = asyncio.Event()
        self.early = tuple(events)
        """Events that no call has."""
        self._events: dict[tuple[str, str], list[Event]] = {}
        """Name and arguments of events → those that nobody has asked for again, in order."""
        for event in (*events, *(event for call in calls for event in call.events)):
            self._events.setdefault((event.name, as_text(event.arguments)), []).append(event)
        self.kept: list[Event] = []
        """Events of dropped calls that had come back: they belong to the call that is made instead."""
        self.seconds = sum(call.generate_seconds + call.tool_seconds for call in calls)
        """Seconds that the stored calls had taken: the trajectory's time goes on from there."""
        self.done: list[ToolExecution | Event] = []
        """The returned tool runs and steps, as they were looked up: repeated, they restore the state."""
        self.snapshot: str | None = None
        """The files of tools as they were after the first ``in_snapshot`` of ``done``; None without any."""
        self.in_snapshot: int | None = None
        """None: all of them; the call with the snapshot is the last one returned."""
        self.replayed = 0
        self.tokens = 0
        self.tool_seconds = 0.0

    def __bool__(self) -> bool:
        """Return whether model calls are left that may come back, or what came back is to be noted."""
        return bool(self._left) or not self._is_noted

    @property
    def left(self) -> int:
        """Return the number of model calls that may come back."""
        return len(self._left)

    async def call(
        self, role: str | None, prompt: Prompt, messages: Sequence[Message] | None = None
    ) -> DispatchedSamplingTask | None:
        """Return the stored model call with this prompt; None if it must be made.

        ``messages`` are the new ones, as a document has them, of a call to a model without ids. A request
        that is not the next one waits for those before it, for a moment: then the trajectory has gone another
        way, and the rest of the journal is dropped. Raises LeaseLostError.
        """
        if self._left:
            # Let heartbeats and other trajectories run: a long journal comes back without other waits.
            await asyncio.sleep(0)
        while self._left:
            if self._dropping.locked():
                async with self._dropping:  # what is being dropped must not come back meanwhile
                    continue
            if _repeats(self._left[0], role, prompt, messages):
                found = self._left.popleft()
                self._moved.set()
                self._moved = asyncio.Event()
                self.replayed += 1
                self.tokens += found.generated_tokens
                if self.in_snapshot is None:
                    self.in_snapshot = len(self.done)
                if found.snapshot is not None:
                    self.snapshot, self.in_snapshot = found.snapshot, None
                return found
            # Another conversation may begin beside those of the journal.
            is_beside = self.is_parallel or role != self._left[0].role or prompt.opens_branch
            try:
                async with asyncio.timeout(_STALLED_SECONDS if is_beside else 0.0):
                    await self._moved.wait()
            except TimeoutError:
                await self._diverge()
        await self._note_once()
        return None

    def execution(
        self, left: list[ToolExecution], name: str, arguments: Mapping[str, Any]
    ) -> ToolExecution | None:
        """Return the first of ``left`` that ran this tool with these arguments, and take it out."""
        wanted = as_text(storable_arguments(arguments)) if left else None
        for index, execution in enumerate(left):
            if execution.name == name and as_text(execution.arguments) == wanted:
                self.tool_seconds += execution.seconds
                return left.pop(index)
        return None

    def count(self, left: Sequence[ToolExecution]) -> None:
        """Count all tool runs of a call as returned, before the first of them is asked for.

        Calls that are made now came after them, wherever they stand in the answer. Parallel ones are made
        again in the order of the answer, but for those that ended long before others.
        """
        in_order: list[ToolExecution] = []
        for run in left:
            place = len(in_order)
            while place and _ended_before(run, in_order[place - 1]):
                place -= 1
            in_order.insert(place, run)
        self.done += in_order

    def event(self, name: str, arguments: Any = None, own: Sequence[Event] = ()) -> Event | None:
        """Return the first event of this name with these arguments, and take it out.

        Those of ``own`` come before others: parallel roles may step in another order.
        """
        waiting = self._events.get((name, as_text(arguments))) if self._events else None
        if not waiting:
            return None
        mine = {id(event) for event in own}
        found = waiting.pop(next((place for place, each in enumerate(waiting) if id(each) in mine), 0))
        if name == STEP:
            self.done.append(found)
        elif name == TOOL:
            self.done.append(ToolExecution.from_document(found.result))
            self.tool_seconds += found.seconds
        return found

    async def end(self) -> None:
        """Drop what the agent has not asked for again: it ended another way."""
        if self._left:
            await self._diverge()
        await self._note_once()

    def forget(self) -> None:
        """Leave the stored calls to a gateway, which looks them up itself and notes what it saved."""
        self._left.clear()
        self._is_noted = True

    async def _diverge(self) -> None:
        async with self._dropping:
            if not self._left:
                return
            first, count = self._left[0].index, len(self._left)
            logger.warning(
                "a trajectory went another way than its journal; the rest is dropped",
                extra={"record": self._left[0].record, "diverged_at": first, "dropped": count},
            )
            await self._drop(first)
            # Keep what the agent has got: another value for the next owner would be another way again.
            dropped = {id(event): event for call in self._left for event in call.events}
            unasked = {id(event) for waiting in self._events.values() for event in waiting}
            self.kept += [event for key, event in dropped.items() if key not in unasked]
            for waiting in self._events.values():
                waiting[:] = [event for event in waiting if id(event) not in dropped]
            self._left.clear()
            self._moved.set()

    async def _note_once(self) -> None:
        if not self._is_noted:
            self._is_noted = True
            await self._note(self)


def as_text(arguments: Any) -> str:
    """Return stored arguments as text: as values, NaN differs from itself, and 1 is True."""
    return json.dumps(sanitize_bson(arguments), sort_keys=True, default=str)


def _is_parallel(calls: Sequence[DispatchedSamplingTask]) -> bool:
    """Return whether several conversations made the calls: how they interleave depended on their tools."""
    return any(
        call.role != before.role or call.opens_branch or call.parent not in (None, before.id)
        for before, call in pairwise(calls)
    )


def began(stored: ToolExecution | Event) -> tuple[int, float]:
    """Return when a tool run or a step began: owners follow one another, whatever their clocks say."""
    return stored.attempt or 0, 0.0 if stored.started_at is None else stored.started_at.timestamp()


def _ended_before(run: ToolExecution, other: ToolExecution) -> bool:
    """Return whether a tool run ended long before another of its turn, or under an earlier owner."""
    if run.attempt != other.attempt:  # owners follow one another, whatever their clocks say
        return (run.attempt or 0) < (other.attempt or 0)
    if run.started_at is None or other.started_at is None:
        return False
    started = (run.started_at - other.started_at).total_seconds()
    return started + run.seconds + _APART_SECONDS < other.seconds


def _repeats(
    call: DispatchedSamplingTask, role: str | None, prompt: Prompt, messages: Sequence[Message] | None
) -> bool:
    """Return whether a request is the one that ``call`` answered."""
    if call.role != role or call.parent != prompt.parent:
        return False
    if messages is not None:
        return call.fixed is not None and list(call.messages) == list(messages)
    same_ids = call.fixed is None and call.context_ids == pack_ids(prompt.context_ids)
    return same_ids and call.images == tuple(prompt.context_images)
