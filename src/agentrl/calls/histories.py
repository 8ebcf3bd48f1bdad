"""Make model calls from whole message lists, and continue the sampled ids of the call that each one extends.

A framework sends the conversation with every call, and may edit it. A list that extends an earlier call's
goes on from its ids. Any other one is a branch of the trajectory's token tree, with a prompt of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.calls.prompts import Chain, Prompt, prefix_digests, prompt_of
from agentrl.calls.tool_calls import Tools, execute
from agentrl.calls.trajectory_calls import PendingCall, TrajectoryCalls, Turn
from agentrl.chat.chat_format import Message
from agentrl.chat.parsers.arguments import validate_call
from agentrl.chat.parsers.parser import ToolCall
from agentrl.documents.images import ImageSpan
from agentrl.errors import ContextFullError, TrajectoryError
from agentrl.inference.engine import Progress
from agentrl.tools.tool import Schema

MakeProgress = Callable[[list[int]], Progress]
"""Takes the ids of a prompt; returns what receives the tokens of its answer."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A call that later ones may extend."""

    pending: PendingCall
    prompt_ids: list[int]
    messages: list[Message]
    """The whole conversation, with the answer."""
    depth: int
    """Calls of its branch, itself included."""
    images: tuple[ImageSpan, ...] = ()
    """Of the prompt."""

    @property
    def chain(self) -> Chain:
        """Return the conversation as the prompt of the next call needs it."""
        output = list(self.pending.generation.output_ids)
        return Chain(self.pending.id, self.prompt_ids, output, self.messages, images=self.images)

    @property
    def rank(self) -> tuple[int, bool, int]:
        """Return what the main branch has most of."""
        tools = any("tool_calls" in message for message in self.messages)
        return self.depth, tools, len(self.prompt_ids)


class Histories:
    """The conversations of one role of a trajectory."""

    def __init__(self, calls: TrajectoryCalls, role: str | None) -> None:
        self._calls = calls
        self._role = role
        self._known: dict[str, _Known] = {}
        """By the digest of the conversation up to the answer."""
        self._by_tool_call: dict[str, PendingCall] = {}
        self._count = 0

    @property
    def main_messages(self) -> list[Message]:
        """Return the conversation of the branch with the most calls."""
        main = max(self._known.values(), key=lambda known: known.rank, default=None)
        return [] if main is None else main.messages

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[Schema],
        changes: dict[str, Any],
        progress: MakeProgress | None = None,
    ) -> tuple[PendingCall, Turn]:
        """Make the model call that answers ``messages``; ``changes`` are sampling parameters of this call.

        Raises TrajectoryError for messages that end with an answer, and ContextFullError for a prompt that
        does not fit.
        """
        if not messages or messages[-1]["role"] == "assistant":
            raise TrajectoryError(
                "the last message is the assistant's" if messages else "there are no messages",
                hint="end with a user or tool message",
            )
        known, length = self._extended(messages, tools)
        await self._calls.store_settled()
        # Store the parent even if its tools still run: until then it has no id that the child could name.
        if known is not None:
            await self._calls.store(known.pending)
        chain = None if known is None else known.chain
        prompt = prompt_of(self._calls.chat_format, chain, length, messages, tools)
        budget = self._calls.budget
        if len(prompt.ids) > budget.prompt_limit:
            raise ContextFullError(budget.name_limit(len(prompt.ids)), hint="shorten the graph's history")
        executions = known.pending.executions if known is not None and prompt.parent else ()
        self._count += 1
        pending, parsed = await self._calls.sample(
            prompt, changes, role=self._role, tools=tools, executions=executions,
            seed=() if self._role is None else (self._role, self._count),
            progress=None if progress is None else progress(prompt.ids),
        )  # fmt: skip
        text = self._calls.chat_format.decode(pending.generation.output_ids)
        if parsed.error is not None:
            pending.refuse(parsed.error)
            pending.settled = not parsed.tool_calls
        if not (parsed.content or parsed.tool_calls or parsed.reasoning):
            pending.response["content"] = text.strip()  # a malformed call stays readable
        self._keep(pending, prompt, known, tools)
        return pending, self._calls.turn(pending, parsed, text)

    def _extended(self, messages: Sequence[Message], tools: Sequence[Schema]) -> tuple[_Known | None, int]:
        """Return the call with the longest conversation that ``messages`` begin with, and its length."""
        digests = prefix_digests(messages, tools)
        for length in range(len(messages), 0, -1):
            if (known := self._known.get(digests[length])) is not None:
                return known, length
        return None, 0

    async def call_tool(
        self, call_id: str, name: str, arguments: Mapping[str, Any], tools: Tools, schemas: Sequence[Schema]
    ) -> tuple[str, bool]:
        """Run a tool that an answer called; return the text that the model reads, and whether it failed.

        It is recorded with the answer whose tool call has this id.
        """
        pending = self._by_tool_call.get(call_id)
        # Record runs with unstored calls only: frameworks may run a tool after its conversation went on.
        is_open = pending is not None and pending.index is None
        call = ToolCall(name, dict(arguments))
        problem = validate_call(call, schemas)
        if problem is not None:
            if pending is not None and is_open:
                pending.refuse(problem)
            return f"Error: {problem}", True
        execution = await execute(call, tools)
        if pending is not None and is_open:
            pending.executions.append(execution)
            pending.tool_seconds += execution.seconds
        return execution.text, execution.error

    def _keep(
        self, pending: PendingCall, prompt: Prompt, before: _Known | None, tools: Sequence[Schema]
    ) -> None:
        messages = [*prompt.messages, pending.response]
        depth = 1 if before is None else before.depth + 1
        known = _Known(pending, prompt.ids, messages, depth, prompt.images)
        self._known[prefix_digests(messages, tools)[-1]] = known
        for call in pending.response.get("tool_calls") or ():
            self._by_tool_call[call["id"]] = pending
