"""The Rollout that an agent receives: one trajectory's conversation, its model calls and its tools."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from agentrl.chat.chat_format import ChatFormat, Message
from agentrl.chat.conversation import Conversation
from agentrl.chat.parsers import ParsedMessage, ToolCall
from agentrl.config.schema import AgentConfig
from agentrl.documents.model_call import ToolExecution, strip_tool_results
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.sanitize_bson import replace_surrogates
from agentrl.documents.task import Claim
from agentrl.environments.base import Environment, Observation
from agentrl.environments.session import EnvironmentSession
from agentrl.errors import ContextFullError, ToolServerError, TrajectoryError, TurnsLimitError
from agentrl.rollout.agent_cfg import agent_cfg_path
from agentrl.rollout.budget import Budget
from agentrl.rollout.endpoint import Endpoint, Gateway, GatewayResult
from agentrl.rollout.model_call import Engine, PendingCall, Turn
from agentrl.rollout.outcome import checked_messages
from agentrl.rollout.tool_calls import Tools, run_tool_calls
from agentrl.scoring.answers import extract_answer
from agentrl.scoring.scorers import ScoredCall, ScoreResult
from agentrl.tools.base import Schema
from agentrl.user_code import contain, contain_call

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
        chat_format: ChatFormat,
        engine: Engine,
        tools: Tools,
        schemas: Sequence[Schema],
        params: SamplingParams,
        seed: int,
        manage_context: ContextManager,
        write: Callable[[PendingCall], Awaitable[None]],
        environment: EnvironmentSession | None = None,
        gateway: Gateway | None = None,
    ) -> None:
        """``write`` takes one finished model call to store; ``schemas`` are the tools offered.

        Every model call has its own sampling seed, derived from ``seed``, the task, the trajectory, the
        attempt and the turn. With a batch-invariant engine the same run samples the same tokens again;
        another attempt is another sample.
        """
        self.task = claim.task
        self.config = config
        self.schemas = list(schemas)
        self.agent_cfg_path = agent_cfg_path(claim.task.agent_cfg_path, config.agent_cfg_path)
        """The agent's YAML file; None without one."""
        self.max_turns = claim.task.max_turns or config.max_turns
        self.turns = 0
        self.tool_calls = 0
        self.context_resets = 0
        self.tool_rewards: dict[str, dict[str, Any]] = {}
        self.agent_score: dict[str, Any] | None = None
        """The agent's own score as the Record stores it; None without one."""
        self.scored_calls: list[ScoredCall] = []
        """The finished model calls, as a scorer gets them."""
        self.reported_reward: ScoreResult | None = None
        """The reward that the agent reported through its gateway."""
        self._claim = claim
        self._gateway = gateway
        self._uses_gateway = False
        self._record_id = claim.record_id
        self._chat_format = chat_format
        self._engine = engine
        self._tools = tools
        self._params = params
        self._seed = (seed, claim.task.id, claim.traj_id, claim.attempt)
        self._manage_context = manage_context
        self._write = write
        self._environment = environment
        self._texts: Counter[str] = Counter()
        self._parent: str | None = None
        self._pending: PendingCall | None = None
        self._is_managing = False
        self._conversation = Conversation(chat_format, self.first_messages, self.schemas)

    @property
    def messages(self) -> list[Message]:
        """Return a copy of the messages of the current context."""
        return [dict(message) for message in self._conversation.messages]

    @property
    def first_messages(self) -> list[Message]:
        """Return the messages of the first prompt: system prompt, few-shot messages, question."""
        own = self.task.system_prompt
        system = self.config.system_prompt if own is None else own
        first: list[Message] = [{"role": "system", "content": system}] if system else []
        shots = (dict(message) for message in self.task.messages)
        return [*first, *shots, {"role": "user", "content": self.question}]

    @property
    def question(self) -> str:
        """Return the user message that asks the question."""
        template = self.task.query_prompt or self.config.query_prompt or "{query}"
        return template.replace("{query}", self.task.query)

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
        return self._fits(len(Conversation(self._chat_format, messages, self.schemas).prompt_ids()))

    async def generate(self, **changes: Any) -> Turn:
        """Make one model call; ``changes`` are sampling parameters for this call only.

        A full context is reset before the call. Raises ContextFullError, which ends the trajectory at its
        length limit, if no prompt fits.
        """
        if self._uses_gateway:
            raise TrajectoryError(
                "this trajectory makes its model calls through its gateway",
                hint="use either rollout.generate() or rollout.gateway()",
            )
        if not await self._make_prompt_fit():
            raise ContextFullError(
                self._budget.name_limit(self.prompt_tokens),
                hint="raise it, or choose a context manager by --new_context",
            )
        answered = self._pending.executions if self._pending else []
        await self.finish()
        conversation = self._conversation
        context_ids = conversation.context_ids()
        before = self._parent
        parent = None if conversation.starts_branch else before
        if parent is None:
            answered = []
        new_messages = strip_tool_results(conversation.new_messages, answered)
        prompt_ids = conversation.prompt_ids()
        params = self._params.replace(**changes).seeded(*self._seed, self.turns)
        params = self._budget.clamp(params, len(prompt_ids))
        generation = await self._engine.generate(prompt_ids, params)
        text = self._chat_format.decode(generation.output_ids)
        parsed = contain_call(
            lambda: _cleaned(conversation.parse(generation.output_ids)),
            "the tool-call parser",
            TrajectoryError,
        )
        is_cut = generation.finish_reason == "length"
        if is_cut:
            parsed = replace(parsed, tool_calls=(), error=None)
        message = self._message(parsed)
        conversation.append_generation(generation.output_ids, message)
        self._texts[text] += 1
        self._pending = PendingCall(
            record=self._record_id,
            index=self.turns,
            parent=parent,
            drops_thoughts=parent is None and before is not None,
            messages=new_messages,
            tools=None if parent else tuple(self.schemas),
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
            reasoning=parsed.reasoning,
            tool_calls=parsed.tool_calls,
            error=parsed.error,
            answer=None if is_cut else extract_answer(parsed.content, self.task.answer_schema),
            finish_reason=generation.finish_reason,
            times_seen=self._texts[text],
        )

    @asynccontextmanager
    async def gateway(self, train: str = "main") -> AsyncIterator[Endpoint]:
        """Open a base URL at which any client of a model API continues this trajectory.

        Every request there is a model call of the trajectory. ``train`` chooses the branches that are
        trained: ``main``, ``all``, or ``module:function``. When the block ends, the URL is dead, and
        ``turns``, ``messages`` and ``scored_calls`` are those of the calls. An exception that leaves the
        block after a request was refused for a limit ends the trajectory at that limit.

        Raises TrajectoryError without a gateway, and if the trajectory has made model calls already.
        """
        if self._gateway is None or self.turns or self._uses_gateway:
            why = "has no gateway" if self._gateway is None else "has made model calls already"
            raise TrajectoryError(f"this trajectory {why}", hint="open it once, before any model call")
        self._uses_gateway = True
        result = GatewayResult()
        try:
            async with self._gateway.open(self._claim, train=train, max_calls=self.max_turns) as endpoint:
                result = endpoint.result
                yield endpoint
        except Exception as error:
            if result.stopped_by == "turns":
                raise TurnsLimitError(f"the trajectory made its {self.max_turns} model calls") from error
            if result.stopped_by == "length":
                raise ContextFullError("a request did not fit into the context") from error
            raise
        finally:
            self._adopt(result)

    def _adopt(self, result: GatewayResult) -> None:
        """Take over the calls that a gateway made."""
        self.turns = len(result.calls)
        if result.reward is not None:
            reward = result.reward
            by_call = {int(call): value for call, value in reward.turn_rewards.items()}
            self.reported_reward = ScoreResult(reward.score, reward.details, by_call or None)
        self.scored_calls = [
            ScoredCall.of(call.response, call.tool_executions, call.status) for call in result.calls
        ]
        if result.messages:
            self._conversation = Conversation(self._chat_format, result.messages, self.schemas)

    async def collect_tool_rewards(self) -> None:
        """Set ``tool_rewards`` to the rewards that the tools give. Raises ToolServerError."""
        self.tool_rewards = await contain(self._tools.rewards, "the rewards of the tools", ToolServerError)

    async def call_tools(self, turn: Turn) -> list[ToolExecution]:
        """Run the tool calls of the last ``turn`` in order and append their results.

        A malformed tool call is not run: its result says what is wrong, and the model call's status is
        ``formaterror``. An error that a tool reports is a result. Raises ToolServerError if a server is lost.
        """
        pending = self._pending
        if pending is None:
            return []
        started = time.monotonic()
        before = len(pending.executions)
        try:
            messages = await run_tool_calls(turn, pending, self._tools, self.schemas)
        finally:
            self.tool_calls += len(pending.executions) - before
            pending.tool_seconds = time.monotonic() - started
        self.append_messages(messages)
        return list(pending.executions)

    @property
    def environment(self) -> Environment | None:
        """Return the environment of the task, with the state of this trajectory; None without one."""
        return None if self._environment is None else self._environment.instance

    async def step(self, turn: Turn) -> Observation:
        """Give the message of ``turn``, without its reasoning, to the environment.

        Appends the answer as a user message unless it ends the trajectory. Raises TaskEnvironmentError if the
        environment raises, and TrajectoryError if the task has none that answers messages.
        """
        session = self._environment
        if session is None or not session.instance.answers_messages():
            raise TrajectoryError(
                "no environment answers messages", hint="use an agent for tools, such as --agent_name react"
            )
        observation = await session.step(turn.content)
        if not observation.done:
            self.append_messages([{"role": "user", "content": observation.text}])
        return observation

    def append_messages(self, messages: Sequence[Message]) -> None:
        """Append messages to the last turn. Raises TrajectoryError for an invalid message."""
        self._conversation.append_messages(checked_messages(messages))

    async def reset_context(self) -> bool:
        """Start a new prefix according to ``--new_context``; return False if the trajectory must end.

        Model calls are counted as repetitions within one context only.
        """
        what = f"context manager {self.config.new_context}"
        if self._is_managing:
            raise TrajectoryError(f"{what} resets the context itself", hint="return the new messages instead")
        self._is_managing = True
        try:
            messages = await contain(lambda: self._manage_context(self), what, TrajectoryError)
        except ContextFullError:
            return False
        finally:
            self._is_managing = False
        if messages is None:
            return False
        first = checked_messages(messages)
        await self.finish()
        self._conversation = Conversation(self._chat_format, first, self.schemas)
        self._parent = None
        self._texts.clear()
        self.context_resets += 1
        return not self.context_is_full

    async def finish(self) -> None:
        """Store the last model call, unless it is stored."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._parent = pending.id
            self.scored_calls.append(ScoredCall.of(pending.response, pending.executions, pending.status))
            await self._write(pending)

    @property
    def _budget(self) -> Budget:
        return Budget(self.config, self._engine.context_length)

    def _fits(self, tokens: int) -> bool:
        return tokens <= self._budget.full_at

    async def _make_prompt_fit(self) -> bool:
        """Manage a full context. A context manager's own calls may use the reserve, but not exceed it."""
        if not self._is_managing:
            return not self.context_is_full or await self.reset_context()
        limit = self._budget.prompt_limit
        if self.prompt_tokens > limit:
            self._conversation.change_new_messages(_without_result)
        return self.prompt_tokens <= limit

    def _message(self, parsed: ParsedMessage) -> Message:
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


def _cleaned(parsed: ParsedMessage) -> ParsedMessage:
    calls = tuple(
        ToolCall(replace_surrogates(call.name), replace_surrogates(call.arguments))
        for call in parsed.tool_calls
    )
    return replace(parsed, tool_calls=calls, error=replace_surrogates(parsed.error))


def _without_result(message: Message) -> Message:
    if message.get("role") != "tool":
        return message
    length = len(message["content"])
    return {**message, "content": f"[not shown: a result of {length:,} characters does not fit]"}
