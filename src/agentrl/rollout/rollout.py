"""The Rollout that an agent receives: one trajectory's conversations, its model calls, tools and roles."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from agentrl.base.concurrency import AGENT_THREADS, Deadline
from agentrl.base.user_code import contain, describe
from agentrl.base.validation import Positive, PositiveWhole, SettingsModel, Text, read_config
from agentrl.calls.prompts import Conversation, Prompt
from agentrl.calls.trajectory_calls import Histories, MakeProgress, TrajectoryCalls, stored_generation
from agentrl.calls.turns import (
    Tools,
    Turn,
    call_id_of,
    cleaned,
    message_of,
    run_tool_calls,
    stored_messages,
    with_text_arguments,
)
from agentrl.chat.chat_format import Message, require_text_only, without_thought
from agentrl.chat.parsers.parser import ParsedMessage, ToolCall
from agentrl.config.schema import AgentConfig
from agentrl.documents.document import plain, sanitize_bson
from agentrl.documents.images import content_with, text_of
from agentrl.documents.model_call import (
    STEP,
    TOOL,
    DispatchedSamplingTask,
    FixedModelCall,
    ToolExecution,
    role_problem,
)
from agentrl.documents.record import HarnessRun
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.task import Claim, Task
from agentrl.environments.environment import Environment, EnvironmentSession, Observation
from agentrl.errors import (
    ConfigError,
    ContextFullError,
    ToolServerError,
    TrajectoryError,
    TurnsLimitError,
    judge,
)
from agentrl.inference.engine import Generation
from agentrl.llm.agent_config import AgentSection, ModelEndpoint
from agentrl.llm.chat import ChatAnswer, NoAnswerError, ask
from agentrl.observe.logging import failure_text
from agentrl.rollout.agent_io import (
    AgentCfg,
    Endpoint,
    Gateway,
    GatewayResult,
    agent_cfg_path,
    checked_messages,
    read_agent_cfg,
)
from agentrl.scoring.scorers import ScoredCall, ScoreResult
from agentrl.tools.tool import Schema, run_function, schema_name

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
    messages, ``restart`` and ``reset_context`` start a new prefix. Each model call and each tool run is
    stored; where an earlier owner of the trajectory has made it already, it comes from the journal.
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
        self._last: Turn | None = None
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
        return len(self._conversation.prompt.ids)

    @property
    def context_is_full(self) -> bool:
        """Return whether the next prompt uses some of ``prompt_reserve_tokens``."""
        return not self._fits(self.prompt_tokens)

    def would_fit(self, messages: Sequence[Message]) -> bool:
        """Return whether a new context that starts with ``messages`` is not full."""
        return self._fits(len(self._new_conversation(messages).prompt.ids))

    async def generate(self, **changes: Any) -> Turn:
        """Make one model call; ``changes`` are sampling parameters for this call only.

        A full context is reset before the call. Raises ContextFullError, which ends the trajectory at its
        length limit, if no prompt fits, and TurnsLimitError at the limit of a role.
        """
        self._require_turns()
        await self._conversation.render()
        if not await self._make_prompt_fit():
            raise ContextFullError(
                self._calls.budget.name_limit(self.prompt_tokens),
                hint="raise it, or choose a context manager by --new_context",
            )
        parent = await self._close_before()
        conversation = self._conversation
        extends = None if conversation.starts_branch else parent
        prompt = replace(
            conversation.prompt,
            parent=None if extends is None else extends.id,
            drops_thoughts=parent is not None and extends is None,
            opens_branch=self._opens_branch,
        )
        # Seed a role by its own turns: how the calls of roles interleave may differ from run to run.
        turn = await self._calls.sample(
            prompt, changes, role=self.name, tools=self.schemas,
            executions=() if extends is None else extends.executions,
            seed=() if self.name is None else (self.name, self._own_turns),
        )  # fmt: skip
        conversation.append_generation(turn.generation.output_ids, turn.response)
        self._texts[turn.text] += 1
        turn.times_seen = self._texts[turn.text]
        self._made(turn)
        return turn

    async def call_tools(self, turn: Turn) -> list[ToolExecution]:
        """Run the tool calls of the last ``turn`` in order and append their results.

        A malformed tool call is not run: its result says what is wrong, and the model call's status is
        ``formaterror``. An error that a tool reports is a result. Raises ToolServerError if a server is lost.
        """
        # Run nothing for a call that is closed: its document cannot take the results any more.
        if turn is not self._last or turn.closed:
            return []
        started, changes = time.monotonic(), turn.changes
        before = len(turn.executions)
        tools = self._shared.tools
        try:
            messages = await run_tool_calls(
                turn, self.schemas, lambda: self._calls.offered(tools),
                lambda call: self._calls.run_tool(turn, call, tools),
            )  # fmt: skip
        finally:
            # Settle also after a lost server: the failed attempt keeps the calls that have run.
            self._shared.tool_calls += len(turn.executions) - before
            if turn.changes > changes:
                turn.tool_seconds += time.monotonic() - started
                turn.change()
            turn.settled = True
        self.append_messages(messages)
        await self._conversation.render()
        return list(turn.executions)

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
        turn = await self._histories.complete(checked, tools, changes, progress)
        self._own_turns += 1
        return dict(turn.response), turn

    async def call_tool(self, call_id: str, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """Run a tool that an answer of ``complete`` called, by the id of the tool call.

        Return the text that the model reads, and whether it is an error.
        """
        if self._histories is None:
            raise TrajectoryError("no model call was made", hint="call complete() first")
        self._shared.tool_calls += 1
        return await self._histories.call_tool(call_id, name, arguments, self._shared.tools, self.schemas)

    async def finish(self) -> None:
        """Close the role's last model call, unless it is closed."""
        if self._last is not None:
            await self._calls.close(self._last)

    async def _begin(self, messages: Sequence[Message]) -> None:
        await self.finish()
        self._conversation = self._new_conversation(messages)
        self._last = None
        self._texts.clear()

    def _new_conversation(self, messages: Sequence[Message]) -> Conversation:
        return Conversation(self._calls.chat_format, messages, self.schemas)

    async def _close_before(self) -> Turn | None:
        """Close the calls before the next one; return the role's own in this context."""
        await self.finish()
        await self._calls.close_settled()
        return self._last

    def _made(self, turn: Turn) -> None:
        """Keep a call that was made as the latest one."""
        self._last = turn
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


Reply = ChatAnswer[str]

_NO_KEY = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedModel(SettingsModel):
    """A model behind an OpenAI-compatible API. Its key stays in the environment."""

    base_url: Text
    """With ``/v1``."""
    model: Text
    api_key_env: str | None = "OPENAI_API_KEY"
    """The environment variable that holds the key; None for a server that wants none."""
    params: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Parameters of every request, such as ``temperature``."""
    timeout: Positive = 120.0
    """Seconds for one request."""
    max_retries: PositiveWhole = 3
    max_concurrency: PositiveWhole = 32
    """Requests of this process under way at a time."""

    @classmethod
    def of(cls, given: Any, what: str) -> FixedModel:
        """Return the model that a mapping of a file describes. Raises ConfigError that names ``what``."""
        return read_config(cls, given, what, hint="docs/multi_agent.md describes a fixed model")

    @property
    def shown_url(self) -> str:
        """Return the base URL without user name, password, query and fragment."""
        parts = urlsplit(self.base_url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))

    def section(self) -> AgentSection:
        """Return the endpoint with its limits. Raises ConfigError if the key's variable is not set."""
        key = _NO_KEY if self.api_key_env is None else os.environ.get(self.api_key_env, "")
        if not key:
            raise ConfigError(
                f"the fixed model {self.model} takes its key from ${self.api_key_env}, which is not set",
                hint="set it for the sampler, or give api_key_env=None for a server without keys",
            )
        endpoint = ModelEndpoint(
            model=self.model, base_url=self.base_url, api_key=key, params={},
            max_concurrency=self.max_concurrency,
        )  # fmt: skip
        return AgentSection(
            name="fixed_model", models=(endpoint,), max_retries=self.max_retries, timeout=self.timeout
        )


class FixedRole(Role):
    """A role that a FixedModel plays, with the methods of every role.

    Its calls are recorded without ids. The policy does not see them, unless an agent gives their text to one
    of the policy's roles.
    """

    _fixed = True

    def __init__(
        self,
        shared: Shared,
        name: str,
        model: FixedModel,
        *,
        first_messages: Sequence[Message],
        schemas: Sequence[Schema],
        max_turns: int | None = None,
    ) -> None:
        self.model = model
        self._section = model.section()
        super().__init__(shared, name, first_messages=first_messages, schemas=schemas, max_turns=max_turns)

    @property
    def prompt_tokens(self) -> int:
        """Return 0: the model's tokens are not known here."""
        return 0

    def would_fit(self, messages: Sequence[Message]) -> bool:
        """Return True: the model's context length is not known here."""
        return True

    async def generate(self, **changes: Any) -> Turn:
        """Make one call of the model; ``changes`` are parameters of the request for this call only.

        Waits while the model is down. Raises TrajectoryError if it refuses the request, and TurnsLimitError
        at the limit of the role.
        """
        self._require_turns()
        parent = await self._close_before()
        new = self._conversation.unseen
        params = {**self.model.params, **changes}
        # Make a prompt without ids: the conversation's own is rendered for the policy, which never reads it.
        prompt = Prompt(
            ids=[], context_ids=[], messages=self._conversation.messages, new_messages=new,
            parent=None if parent is None else parent.id, opens_branch=parent is None,
        )  # fmt: skip
        read = () if parent is None else parent.executions
        stored = await self._calls.journal.call(self.name, prompt, stored_messages(new, read))
        if stored is None:
            reply = await self._calls.hold(lambda: self._ask(params))
            parsed, generation = _parsed(reply), _generation(reply, self.model)
            fixed: FixedModelCall | None = FixedModelCall(
                model=self.model.model,
                base_url=self.model.shown_url,
                params=sanitize_bson(params),
                prompt_tokens=reply.spent.prompt_tokens,
                completion_tokens=reply.spent.completion_tokens,
                cost=reply.spent.cost,
            )
        else:
            parsed, generation, fixed = _stored_message(stored), stored_generation(stored), stored.fixed
        turn = Turn(
            record=self._calls.record,
            prompt=prompt,
            role=self.name,
            tools=self.schemas,
            params=SamplingParams(),
            generation=generation,
            parsed=parsed,
            response=message_of(parsed, call_id_of(self._calls.turns)),
            text=parsed.content,
            read=read,
            fixed=fixed,
        )
        self._calls.add(turn, stored)
        self._conversation.append_message(turn.response)
        self._made(turn)
        return turn

    async def _ask(self, params: Mapping[str, Any]) -> Reply:
        require_text_only(self._conversation.messages, f"the fixed model of role {self.name}")
        messages = [with_text_arguments(without_thought(each)) for each in self._conversation.messages]
        tools = {"tools": self.schemas} if self.schemas else {}
        seconds = self.model.timeout * self.model.max_retries
        try:
            return await ask(
                self._section, messages, lambda text: text, Deadline(seconds), {**params, **tools}
            )
        except NoAnswerError as error:
            raise TrajectoryError(
                f"the model {self.model.model} of role {self.name} gave no answer:"
                f" {failure_text(str(error))}",
                outage=judge(self.model.model) if error.is_outage else None,
                retry_after=error.retry_after,
            ) from error


def _parsed(reply: Reply) -> ParsedMessage:
    """Return the message of a reply; a tool call that cannot be read is its error."""
    if reply.completion.is_cut:
        return cleaned(ParsedMessage(reply.value))
    calls, error = [], None
    for call in reply.completion.tool_calls:
        try:
            function = call["function"]
            arguments = json.loads(function.get("arguments") or "{}")
            if not isinstance(arguments, dict):
                raise TypeError("the arguments are not a JSON object")
            calls.append(ToolCall(str(function["name"]), arguments))
        # Catch RecursionError too: json.loads raises it for brackets that a model has nested too deeply.
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as problem:
            error = error or f"a tool call cannot be read: {failure_text(problem)}"
    return cleaned(ParsedMessage(reply.value, tuple(calls), error))


def _stored_message(call: DispatchedSamplingTask) -> ParsedMessage:
    """Return the message of a stored call of another model."""
    message = call.message
    calls = tuple(
        ToolCall(each["function"]["name"], each["function"]["arguments"])
        for each in message.get("tool_calls") or ()
    )
    # Take the error of a call without tool calls alone: that of one with some is of a tool's arguments.
    return ParsedMessage(message["content"], calls, None if calls else call.error)


def _generation(reply: Reply, model: FixedModel) -> Generation:
    """Return a generation without tokens of the policy."""
    return Generation(
        output_ids=(), logprobs=(), versions=(),
        finish_reason="length" if reply.completion.is_cut else "stop",
        prompt_tokens=0, cached_tokens=0, seconds=reply.spent.seconds, engine_url=model.shown_url,
    )  # fmt: skip


_IN_ONCE: ContextVar[bool] = ContextVar("agentrl_in_once", default=False)
"""Whether the function of a ``Rollout.once`` runs."""

TimeLimit = Callable[[float | None], AbstractAsyncContextManager[Any]]
"""Raises TimeoutError after so many seconds; None means no limit."""


class Rollout(Role):
    """One trajectory as its agent sees it.

    It is the conversation of a single agent itself; ``role`` adds conversations of other roles. ``turns``,
    ``tool_calls`` and ``context_resets`` count those of all roles.
    """

    def __init__(
        self,
        claim: Claim,
        config: AgentConfig,
        *,
        calls: TrajectoryCalls,
        tools: Tools,
        schemas: Sequence[Schema],
        manage_context: ContextManager,
        environment: EnvironmentSession | None = None,
        gateway: Gateway | None = None,
        time_limit: TimeLimit = asyncio.timeout,
    ) -> None:
        """``calls`` makes and stores the model calls; ``schemas`` are the tools offered."""
        shared = Shared(
            task=claim.task, config=config, calls=calls, tools=tools, schemas=list(schemas),
            manage_context=manage_context, max_turns=claim.task.max_turns or config.max_turns,
        )  # fmt: skip
        self.task, self.config = claim.task, config
        super().__init__(shared, None, first_messages=self._question_messages(), schemas=schemas)
        self.agent_cfg_path = agent_cfg_path(claim.task.agent_cfg_path, config.agent_cfg_path)
        """The agent's YAML file; None without one."""
        self.tool_rewards: dict[str, dict[str, Any]] = {}
        self.agent_score: dict[str, Any] | None = None
        """The agent's own score as the Record stores it; None without one."""
        self.reported_reward: ScoreResult | None = None
        """The reward that the agent reported through its gateway."""
        self.harness_run: HarnessRun | None = None
        """What the command line of the trajectory did, for its Record."""
        self.chat_format = calls.chat_format
        """How messages become ids, and ids messages."""
        self._claim = claim
        self._gateway = gateway
        self._uses_gateway = False
        self._environment = environment
        self.time_limit = time_limit
        """Bounds a block of the trajectory; the clock stands still while the trajectory is held."""
        self.loop = asyncio.get_running_loop()
        """The event loop that the trajectory runs in."""

    @property
    def turns(self) -> int:
        """Return the number of model calls of the trajectory."""
        return self._calls.turns

    @property
    def max_turns(self) -> int:
        """Return the number of model calls that the trajectory may make."""
        return self._shared.max_turns

    @property
    def tool_calls(self) -> int:
        """Return the number of tool calls of the trajectory."""
        return self._shared.tool_calls

    @property
    def context_resets(self) -> int:
        """Return the number of contexts that a context manager started."""
        return self._shared.context_resets

    @property
    def scored_calls(self) -> list[ScoredCall]:
        """Return the finished model calls, as a scorer gets them."""
        return self._calls.scored_calls

    @property
    def question(self) -> str:
        """Return the user message that asks the question."""
        template = self.task.query_prompt or self.config.query_prompt or "{query}"
        # Replace, do not format: a prompt with other braces, as of JSON or \boxed{}, would raise KeyError.
        return template.replace("{query}", self.task.query)

    @property
    def record_id(self) -> str:
        """Return the id of the trajectory's Record."""
        return self._claim.record_id

    @property
    def train_rule(self) -> str | None:
        """Return the rule that chose the branches to train: all, if whole conversations were answered."""
        roles = (self, *self._shared.roles.values())
        return "all" if any(role._histories is not None for role in roles) else None

    @cached_property
    def cfg(self) -> AgentCfg:
        """Return the agent's YAML file, as ``cfg.name`` or ``cfg["name"]``; empty without one."""
        return read_agent_cfg(self.agent_cfg_path)

    @property
    def result_messages(self) -> list[Message]:
        """Return the messages that a scorer gets: this conversation, or the one of the first role."""
        calls = self.scored_calls
        if not calls or calls[0].role is None or any(call.role is None for call in calls):
            return self.messages
        role = self._shared.roles.get(calls[0].role)
        return self.messages if role is None else role.messages

    @property
    def fixed_roles(self) -> tuple[str, ...]:
        """Return the roles that other models play."""
        return tuple(name for name, role in self._shared.roles.items() if isinstance(role, FixedRole))

    def role(
        self,
        name: str,
        *,
        model: FixedModel | None = None,
        system_prompt: str | None = None,
        messages: Sequence[Message] | None = None,
        tools: Sequence[str] | None = None,
        max_turns: int | None = None,
    ) -> Role:
        """Return the role ``name``, with a conversation of its own; make it at the first call.

        The policy plays it, or ``model``, whose calls are recorded and never trained. Its conversation starts
        with ``system_prompt`` (by default the trajectory's) and ``messages`` (by default the few-shot
        messages and the question). ``tools`` names the tools that it is offered (by default all),
        ``max_turns`` bounds its model calls. Raises TrajectoryError for a role that has other settings.
        """
        given = (model, system_prompt, messages, tools, max_turns)
        known = self._shared.roles.get(name)
        if known is not None:
            if any(value is not None for value in given):
                raise TrajectoryError(
                    f"the role {name!r} exists already", hint="give its settings at the first call only"
                )
            return known
        if (problem := role_problem(name)) is not None:
            raise TrajectoryError(problem)
        first = self._question_messages(system_prompt, messages)
        known_tools = {schema_name(schema): schema for schema in self._shared.schemas}
        if unknown := [tool for tool in tools or () if tool not in known_tools]:
            raise TrajectoryError(
                f"role {name!r} wants the tool {unknown[0]!r}",
                hint=f"this trajectory has: {', '.join(sorted(known_tools)) or 'none'}",
            )
        schemas = self._shared.schemas if tools is None else [known_tools[tool] for tool in tools]
        if model is None:
            role = Role(self._shared, name, first_messages=first, schemas=schemas, max_turns=max_turns)
        else:
            role = FixedRole(
                self._shared, name, model, first_messages=first, schemas=schemas, max_turns=max_turns
            )
        self._shared.roles[name] = role
        return role

    def player(self, name: str | None) -> Role:
        """Return the role ``name`` of the environment; None is the trajectory's own conversation.

        The policy plays it, or the fixed model that the agent's file has under ``roles: {name: …}``. The
        environment's ``first_role`` starts with the question, any other role with nothing. Raises ConfigError
        for a model that cannot be used, and TrajectoryError for a name that no role can have.
        """
        if name is None or name in self._shared.roles:
            return self if name is None else self._shared.roles[name]
        asks = self._environment is not None and self._environment.instance.first_role == name
        models = self.cfg.get("roles") or {}
        if not isinstance(models, Mapping):
            raise ConfigError(
                f"{self.agent_cfg_path}: roles is {describe(models)}",
                hint="write roles: {NAME: {base_url: …, model: …}}",
            )
        given = models.get(name)
        model = None if given is None else FixedModel.of(given, f"{self.agent_cfg_path}: role {name}")
        return self.role(name, model=model, messages=None if asks else [])

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
        return await super().generate(**changes)

    async def finish(self) -> None:
        """Close the last model call of this conversation and of every role."""
        await self._calls.close_all()

    async def once(self, name: str, function: Callable[[], Any]) -> Any:
        """Return what ``function``, sync or async, returned when this trajectory asked for ``name`` first.

        Another process that goes on with the trajectory gets the same value without a call: ask this way for
        the time, for randomness and for anything outside that is no tool. The n-th question of a name gets
        the n-th value. A sync function runs in a thread. Values are stored as BSON, and what ``function``
        raises is not stored. Raises TrajectoryError for a value of more than 1 MiB.
        """
        if not isinstance(name, str) or name in ("", STEP, TOOL):
            raise TrajectoryError(f"once() was given the name {name!r}", hint="give it a text of its own")

        async def call() -> Any:
            token = _IN_ONCE.set(True)
            try:
                # In the event loop a slow function would hold all trajectories, and the renewal of leases.
                return await run_function(AGENT_THREADS, function)
            finally:
                _IN_ONCE.reset(token)

        # Store no question inside of another: where the outer value comes back, nobody asks it again, and
        # the next question of its name would get its value.
        return sanitize_bson(await call()) if _IN_ONCE.get() else await self._calls.event(name, call)

    async def end_journal(self) -> None:
        """Drop what earlier owners did and the agent has not done again: it has ended."""
        await self._calls.journal.end()

    @asynccontextmanager
    async def gateway(self, train: str = "main", volatile: Sequence[str] = ()) -> AsyncIterator[Endpoint]:
        """Open a base URL at which any client of a model API continues this trajectory.

        Every request there is a model call of the trajectory. ``train`` chooses the branches that are
        trained: ``main``, ``agent``, ``all``, or ``module:function``. When the block ends, the URL is dead,
        and ``turns``, ``messages`` and ``scored_calls`` are those of the calls. An exception that leaves the
        block after a request was refused for a limit ends the trajectory at that limit.

        If the trajectory had owners before, start the client from its beginning: requests that equal theirs
        get the stored answers. Text that the regular expressions ``volatile`` match does not count there.

        Raises TrajectoryError without a gateway, and if the trajectory has made model calls already.
        """
        if self._gateway is None or self.turns or self._uses_gateway:
            why = "has no gateway" if self._gateway is None else "has made model calls already"
            raise TrajectoryError(f"this trajectory {why}", hint="open it once, before any model call")
        self._uses_gateway = True
        await self._calls.leave_to_gateway()
        result = GatewayResult()
        try:
            takes_reward = self.environment is None or not self.environment.scored_by_tests
            async with self._gateway.open(
                self._claim, train=train, max_calls=self.max_turns, takes_reward=takes_reward,
                volatile=volatile,
            ) as endpoint:  # fmt: skip
                result = endpoint.result
                yield endpoint
        except Exception as error:
            if (limit := result.limit(self.max_turns)) is not None:
                raise limit from error
            raise
        finally:
            # Adopt the calls also after an error: the gateway has stored them, whatever became of the client.
            self._calls.adopt(result.calls, result.dropped)
            self.reported_reward = result.reward
            if result.messages:
                self._conversation = self._new_conversation(result.messages)

    async def collect_tool_rewards(self) -> None:
        """Set ``tool_rewards`` to the rewards that the tools give. Raises ToolServerError."""
        await self._calls.rebuild(self._shared.tools)
        try:
            self.tool_rewards = await contain(
                self._shared.tools.rewards, "the rewards of the tools", ToolServerError
            )
        finally:
            # Note what the agent left also if its reward fails: the Record of the failed attempt shows it.
            left = None if self._environment is None else self._environment.instance.left
            if left is not None:
                run = left.run if self.harness_run is None else self.harness_run.run
                self.harness_run = replace(left, run=run)

    @property
    def environment(self) -> Environment | None:
        """Return the environment of the task, with the state of this trajectory; None without one."""
        return None if self._environment is None else self._environment.instance

    async def step(self, turn: Turn, role: Role | None = None) -> Observation:
        """Give the message of ``turn``, without its reasoning, to the environment.

        Appends the answer as a user message to this conversation, to ``role``'s, or to that of the role which
        the environment names, unless it ends the trajectory. Raises TaskEnvironmentError if the environment
        raises, and TrajectoryError if the task has none that answers messages. While what the environment
        reaches is down, the call waits and is repeated.
        """
        session = self._environment
        if session is None or not session.instance.answers_messages():
            raise TrajectoryError(
                "no environment answers messages", hint="use an agent for tools, such as --agent_name react"
            )

        async def step() -> Any:
            await self._calls.rebuild(self._shared.tools)
            return plain(await self._calls.hold(lambda: session.step(turn.content)))

        observation = Observation(**await self._calls.event(STEP, step, turn.content, turn))
        if not observation.done:
            reader = role or self if observation.role is None else self.player(observation.role)
            reader.append_messages([{"role": "user", "content": observation.text}])
        return observation

    def _question_messages(
        self, system_prompt: str | None = None, messages: Sequence[Message] | None = None
    ) -> list[Message]:
        """Return the messages of a first prompt: system prompt, few-shot messages, question."""
        own = self.task.system_prompt if system_prompt is None else system_prompt
        system = self.config.system_prompt if own is None else own
        first: list[Message] = [{"role": "system", "content": system}] if system else []
        if messages is None:
            question = content_with(self.question, self.task.images)
            messages = [*self.task.messages, {"role": "user", "content": question}]
        return [*first, *(dict(message) for message in messages)]


CURRENT: ContextVar[Rollout | None] = ContextVar("agentrl_rollout", default=None)


def current_rollout() -> Rollout:
    """Return the rollout whose agent calls this, also in tasks and threads that the agent started.

    Raises TrajectoryError outside an agent.
    """
    rollout = CURRENT.get()
    if rollout is None:
        raise TrajectoryError(
            "no agent of AgentRL runs here, so there is no rollout",
            hint="call it in an agent, or give the rollout explicitly",
        )
    return rollout
