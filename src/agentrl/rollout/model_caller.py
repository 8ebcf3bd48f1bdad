"""Make the model calls of one trajectory, one at a time, and store them in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.chat.chat_format import ChatFormat, Message
from agentrl.chat.parsers.base import ParsedMessage, ToolCall
from agentrl.config.schema import AgentConfig
from agentrl.documents.base import replace_surrogates
from agentrl.documents.images import ImageSpan
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.task import Claim
from agentrl.errors import TrajectoryError
from agentrl.inference.engine import Engine, Generation, Progress
from agentrl.rollout.budget import Budget
from agentrl.rollout.images import ImageStore, MemoryImages, images_of
from agentrl.rollout.model_call import PendingCall, Turn
from agentrl.rollout.trace import end_model_call, model_call_span
from agentrl.scoring.answers import extract_answer
from agentrl.scoring.scorers import ScoredCall
from agentrl.tools.base import Schema
from agentrl.user_code import contain_call

Write = Callable[[PendingCall], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A model call before it is made: its prompt, and its place in the token tree."""

    prompt_ids: list[int]
    context_ids: list[int]
    """The ids after the parent's output; the whole prompt without a parent."""
    messages: tuple[Message, ...]
    """The messages that the parent does not have, as they are stored."""
    tools: Sequence[Schema]
    read: tuple[Message, ...] = ()
    """The same messages with the results of tools, for traces."""
    parent: str | None = None
    follows: str | None = None
    drops_thoughts: bool = False
    opens_branch: bool = False
    images: tuple[ImageSpan, ...] = ()
    """Of the prompt."""
    context_images: tuple[ImageSpan, ...] = ()
    """Of ``context_ids``."""
    role: str | None = None
    seed: tuple[object, ...] = ()


class ModelCaller:
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
        write: Write,
        images: ImageStore | None = None,
    ) -> None:
        """``write`` takes one finished model call to store; ``images`` has those of the messages."""
        self.chat_format = chat_format
        self.images = images or MemoryImages()
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
        self, draft: Draft, changes: dict[str, Any], progress: Progress | None = None
    ) -> tuple[PendingCall, ParsedMessage]:
        """Sample one call; ``changes`` are sampling parameters for this call only.

        ``progress`` receives the tokens while they are generated. Concurrent calls of one trajectory are made
        one after the other.
        """
        async with self._turn:
            seed = draft.seed or (self.turns,)
            params = self._params.replace(**changes).seeded(*self._seed, *seed)
            params = self.budget.clamp(params, len(draft.prompt_ids))
            images = await images_of(self.images, draft.images)
            with model_call_span(self.record, params) as span:
                generation = await self._engine.generate(draft.prompt_ids, params, progress, images)
                parsed = self._parsed(draft, generation)
                response = self.message(parsed)
                end_model_call(span, generation, draft.read, response)
                span.set({"agentrl.role": draft.role, "agentrl.turn": self.turns + 1})
            pending = PendingCall(
                record=self.record,
                role=draft.role,
                parent=draft.parent,
                follows=draft.follows,
                drops_thoughts=draft.drops_thoughts,
                opens_branch=draft.opens_branch,
                messages=draft.messages,
                tools=None if draft.parent else tuple(draft.tools),
                context_ids=draft.context_ids,
                images=draft.context_images,
                params=params,
                generation=generation,
                response=response,
                settled=not parsed.tool_calls and parsed.error is None,
            )
            self.add(pending)
            return pending, parsed

    def _parsed(self, draft: Draft, generation: Generation) -> ParsedMessage:
        parsed = contain_call(
            lambda: cleaned(self.chat_format.parse(generation.output_ids, draft.tools, draft.prompt_ids)),
            "the tool-call parser",
            TrajectoryError,
        )
        if generation.finish_reason == "length":
            return replace(parsed, tool_calls=(), error=None)
        return parsed

    def add(self, pending: PendingCall) -> None:
        """Count a call that was made; ``store`` stores it."""
        self.turns += 1
        self._unstored.append(pending)

    def turn(self, pending: PendingCall, parsed: ParsedMessage, text: str, times_seen: int = 1) -> Turn:
        """Return the turn that the agent sees of a call."""
        pending.repeated = times_seen > 1
        reason = pending.generation.finish_reason
        return Turn(
            text=text,
            content=parsed.content,
            reasoning=parsed.reasoning,
            tool_calls=parsed.tool_calls,
            error=parsed.error,
            answer=None if reason == "length" else extract_answer(parsed.content, self._task.answer_schema),
            finish_reason=reason,
            times_seen=times_seen,
            prompt_tokens=pending.generation.prompt_tokens,
            output_tokens=len(pending.generation.output_ids),
        )

    def message(self, parsed: ParsedMessage) -> Message:
        """Return the assistant's message of the next call; its tool calls have ids of their own."""
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
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
