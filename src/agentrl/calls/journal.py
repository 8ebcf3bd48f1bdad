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
    ) -> None:
        """``drop`` takes the calls from an index on out of the trajectory, ``note`` stores what was saved."""
        self._left = deque(calls)
        self._drop = drop
        self._note = note
        self._is_noted = not calls
        self.is_parallel = _is_parallel(calls)
        """Whether roles or branches ran at the same time: their agent may ask in another order."""
        self._dropping = asyncio.Lock()
        self._moved = asyncio.Event()
        self._events = [event for call in calls for event in call.events]
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

    async def call(
        self, role: str | None, prompt: Prompt, messages: Sequence[Message] | None = None
    ) -> DispatchedSamplingTask | None:
        """Return the stored model call with this prompt; None if it must be made.

        ``messages`` are the new ones, as a document has them, of a call to a model without ids. A request
        that is not the next one waits for those before it, for a moment: then the trajectory has gone another
        way, and the rest of the journal is dropped. Raises LeaseLostError.
        """
        while self._left:
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
            try:
                async with asyncio.timeout(_STALLED_SECONDS if self.is_parallel else 0.0):
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
                self.done.append(execution)
                return left.pop(index)
        return None

    def event(self, name: str, arguments: Any = None, own: Sequence[Event] = ()) -> Event | None:
        """Return the first event of this name with these arguments, and take it out.

        Those of ``own`` come before others: parallel roles may step in another order.
        """
        if not self._events:
            return None
        mine = {id(event) for event in own}
        wanted = as_text(arguments)
        like = (each for each in self._events if each.name == name and as_text(each.arguments) == wanted)
        found = min(like, key=lambda event: id(event) not in mine, default=None)
        if found is not None:
            self._events = [event for event in self._events if event is not found]
            if name == STEP:
                self.done.append(found)
            elif name == TOOL:
                execution = ToolExecution.from_document(found.result)
                self.tool_seconds += execution.seconds
                self.done.append(execution)
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
            gone = {id(event) for call in self._left for event in call.events}
            self._events = [event for event in self._events if id(event) not in gone]
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
