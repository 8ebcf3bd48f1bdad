"""A role of a trajectory: a conversation of the policy, with its model calls and its tools."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.chat.chat_format import Message
from agentrl.chat.conversation import Conversation
from agentrl.config.schema import AgentConfig
from agentrl.documents.images import text_of
from agentrl.documents.model_call import ToolExecution
from agentrl.documents.task import Task
from agentrl.errors import ContextFullError, TrajectoryError, TurnsLimitError
from agentrl.rollout.agent_io import checked_messages
from agentrl.rollout.histories import Histories, MakeProgress
from agentrl.rollout.model_call import PendingCall, Turn
from agentrl.rollout.prompts import Prompt
from agentrl.rollout.tool_calls import Tools, run_tool_calls
from agentrl.rollout.trajectory_calls import TrajectoryCalls
from agentrl.tools.base import Schema
from agentrl.user_code import contain

ContextManager = Callable[[Any], Awaitable[list[Message] | None]]
"""Takes the Rollout, or the Role of a trajectory with several.

Returns the messages that a new context starts with, or None to end the trajectory.
"""


@dataclass(slots=True, kw_only=True)
class Shared:
    """What all roles of a trajectory have in common."""

    task: Task
    config: AgentConfig
    calls: TrajectoryCalls
    tools: Tools
    schemas: list[Schema]
    manage_context: ContextManager
    max_turns: int
    """Model calls of all roles together."""
    tool_calls: int = 0
    context_resets: int = 0
    roles: dict[str, Role] = field(default_factory=dict)


class Role:
    """One conversation of a trajectory.

    ``complete`` is for frameworks, which send whole conversations: use it instead of the other methods.

    ``generate`` makes a model call, ``call_tools`` runs the tool calls in it, ``append_messages`` adds other
    messages, ``restart`` and ``reset_context`` start a new prefix. A model call is stored when the
    trajectory goes on.
    """

    _fixed = False

    def __init__(
        self,
        shared: Shared,
        name: str | None,
        *,
        first_messages: Sequence[Message],
        schemas: Sequence[Schema],
        max_turns: int | None = None,
    ) -> None:
        self.name = name
        """The name of the role; None for the trajectory's own conversation."""
        self.task = shared.task
        self.config = shared.config
        self.schemas = list(schemas)
        self._shared = shared
        self._calls = shared.calls
        self._first = [dict(message) for message in first_messages]
        self._own_turns = 0
        self._own_limit = max_turns
        self._texts: Counter[str] = Counter()
        self._last: PendingCall | None = None
        """The latest call of the current context."""
        self._is_managing = False
        self._restarted = False
        self._histories: Histories | None = None
        self._conversation = self._new_conversation(self._first)

    @property
    def turns(self) -> int:
        """Return the number of model calls that this role has made."""
        return self._own_turns

    @property
    def max_turns(self) -> int:
        """Return the number of model calls that this role may make: its limit, or what others leave."""
        left = self._own_turns + self._shared.max_turns - self._calls.turns
        return left if self._own_limit is None else min(left, self._own_limit)

    @property
    def messages(self) -> list[Message]:
        """Return a copy of the messages of the current context; those of the main branch after branches."""
        if self._histories is not None:
            return [dict(message) for message in self._histories.main_messages]
        return [dict(message) for message in self._conversation.messages]

    @property
    def first_messages(self) -> list[Message]:
        """Return the messages of the first prompt."""
        return [dict(message) for message in self._first]

    @property
    def prompt_tokens(self) -> int:
        """Return the length of the next model call's prompt, in tokens."""
        return len(self._conversation.prompt_ids())

    @property
    def context_is_full(self) -> bool:
        """Return whether the next prompt uses some of ``prompt_reserve_tokens``."""
        return not self._fits(self.prompt_tokens)

    def would_fit(self, messages: Sequence[Message]) -> bool:
        """Return whether a new context that starts with ``messages`` is not full."""
        return self._fits(len(self._new_conversation(messages).prompt_ids()))

    async def generate(self, **changes: Any) -> Turn:
        """Make one model call; ``changes`` are sampling parameters for this call only.

        A full context is reset before the call. Raises ContextFullError, which ends the trajectory at its
        length limit, if no prompt fits, and TurnsLimitError at the limit of a role.
        """
        self._require_turns()
        if not await self._make_prompt_fit():
            raise ContextFullError(
                self._calls.budget.name_limit(self.prompt_tokens),
                hint="raise it, or choose a context manager by --new_context",
            )
        parent = await self._store_before()
        conversation = self._conversation
        starts = conversation.starts_branch
        prompt = Prompt(
            ids=conversation.prompt_ids(),
            context_ids=conversation.context_ids(),
            messages=conversation.messages,
            new_messages=conversation.new_messages,
            parent=None if starts or parent is None else parent.id,
            drops_thoughts=starts and parent is not None,
            opens_branch=self._opens_branch,
            images=conversation.prompt_images(),
            context_images=conversation.context_images(),
        )
        executions = () if starts or parent is None else parent.executions
        seed = () if self.name is None else (self.name, self._own_turns)
        pending, parsed = await self._calls.sample(
            prompt, changes, role=self.name, tools=self.schemas, executions=executions, seed=seed
        )
        conversation.append_generation(pending.generation.output_ids, pending.response)
        text = self._calls.chat_format.decode(pending.generation.output_ids)
        self._texts[text] += 1
        self._made(pending)
        return self._calls.turn(pending, parsed, text, self._texts[text])

    async def call_tools(self, turn: Turn) -> list[ToolExecution]:
        """Run the tool calls of the last ``turn`` in order and append their results.

        A malformed tool call is not run: its result says what is wrong, and the model call's status is
        ``formaterror``. An error that a tool reports is a result. Raises ToolServerError if a server is lost.
        """
        pending = self._last
        if pending is None or pending.index is not None:
            return []
        started = time.monotonic()
        before = len(pending.executions)
        try:
            images = self._calls.images if self._calls.reads_images else None
            messages = await run_tool_calls(turn, pending, self._shared.tools, self.schemas, images)
        finally:
            self._shared.tool_calls += len(pending.executions) - before
            pending.tool_seconds = time.monotonic() - started
            pending.settled = True
        self.append_messages(messages)
        return list(pending.executions)

    def append_messages(self, messages: Sequence[Message]) -> None:
        """Append messages to the last turn. Raises TrajectoryError for an invalid message."""
        self._conversation.append_messages(checked_messages(messages))

    async def restart(self, messages: Sequence[Message]) -> None:
        """Begin a new conversation with ``messages``: a branch of the trajectory's token tree."""
        await self._begin(checked_messages(messages))
        self._restarted = True

    async def reset_context(self) -> bool:
        """Start a new prefix according to ``--new_context``; return False if the trajectory must end.

        Model calls are counted as repetitions within one context only.
        """
        what = f"context manager {self.config.new_context}"
        if self._is_managing:
            raise TrajectoryError(f"{what} resets the context itself", hint="return the new messages instead")
        self._is_managing = True
        try:
            messages = await contain(lambda: self._shared.manage_context(self), what, TrajectoryError)
        except ContextFullError:
            return False
        finally:
            self._is_managing = False
        if messages is None:
            return False
        await self._begin(checked_messages(messages))
        self._shared.context_resets += 1
        return not self.context_is_full

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[Schema] = (),
        *,
        progress: MakeProgress | None = None,
        **changes: Any,
    ) -> tuple[Message, Turn]:
        """Make the model call that answers a whole conversation, as a framework sends it; return its message.

        Messages that extend an earlier call's go on from its ids; any others are a branch. ``tools`` are the
        function schemas offered. ``progress`` makes what receives the tokens meanwhile. Raises
        TurnsLimitError at the limit of turns, and ContextFullError.
        """
        if self._last is not None or self._fixed:
            raise TrajectoryError(
                f"role {self.name} has a conversation of its own",
                hint="use either generate() or complete() for a role that the policy plays",
            )
        if self.turns >= self.max_turns:
            raise TurnsLimitError(f"the trajectory has made its {self.turns} model calls")
        if self._histories is None:
            self._histories = Histories(self._calls, self.name)
        checked = checked_messages(messages)
        pending, turn = await self._histories.complete(checked, tools, changes, progress)
        self._own_turns += 1
        return dict(pending.response), turn

    async def call_tool(self, call_id: str, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """Run a tool that an answer of ``complete`` called, by the id of the tool call.

        Return the text that the model reads, and whether it is an error.
        """
        if self._histories is None:
            raise TrajectoryError("no model call was made", hint="call complete() first")
        self._shared.tool_calls += 1
        return await self._histories.call_tool(call_id, name, arguments, self._shared.tools, self.schemas)

    async def finish(self) -> None:
        """Store the role's last model call, unless it is stored."""
        if self._last is not None:
            await self._calls.store(self._last)

    async def _begin(self, messages: Sequence[Message]) -> None:
        await self.finish()
        self._conversation = self._new_conversation(messages)
        self._last = None
        self._texts.clear()

    def _new_conversation(self, messages: Sequence[Message]) -> Conversation:
        return Conversation(self._calls.chat_format, messages, self.schemas)

    async def _store_before(self) -> PendingCall | None:
        """Store the calls before the next one; return the role's own in this context."""
        await self.finish()
        await self._calls.store_settled()
        return self._last

    def _made(self, pending: PendingCall) -> None:
        """Keep a call that was made as the latest one."""
        self._last = pending
        self._own_turns += 1
        self._restarted = False

    def _require_turns(self) -> None:
        if self._histories is not None:
            raise TrajectoryError(
                "this conversation is made of complete() calls", hint="use either generate() or complete()"
            )
        if self.name is not None and self._own_turns >= self.max_turns:
            raise TurnsLimitError(f"role {self.name} has made its {self._own_turns} model calls")

    @property
    def _opens_branch(self) -> bool:
        """Whether the next call begins a conversation beside the others."""
        if self._last is not None:
            return False
        return self._restarted or (self._own_turns == 0 and bool(self._shared.roles))

    def _fits(self, tokens: int) -> bool:
        return tokens <= self._calls.budget.full_at

    async def _make_prompt_fit(self) -> bool:
        """Manage a full context. A context manager's own calls may use the reserve, but not exceed it."""
        if not self._is_managing:
            return not self.context_is_full or await self.reset_context()
        limit = self._calls.budget.prompt_limit
        if self.prompt_tokens > limit:
            self._conversation.change_new_messages(_without_result)
        return self.prompt_tokens <= limit


def _without_result(message: Message) -> Message:
    if message.get("role") != "tool":
        return message
    length = len(text_of(message["content"]))
    return {**message, "content": f"[not shown: a result of {length:,} characters does not fit]"}
