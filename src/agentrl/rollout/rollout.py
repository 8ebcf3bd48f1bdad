"""The Rollout that an agent receives: one trajectory's conversation, its model calls, tools and roles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property
from typing import Any

from agentrl.chat.chat_format import Message
from agentrl.config.schema import AgentConfig
from agentrl.documents.images import content_with
from agentrl.documents.model_call import role_problem
from agentrl.documents.record import HarnessRun
from agentrl.documents.task import Claim
from agentrl.environments.base import Environment, Observation
from agentrl.environments.session import EnvironmentSession
from agentrl.errors import ConfigError, ToolServerError, TrajectoryError
from agentrl.rollout.agent_io import (
    AgentCfg,
    Endpoint,
    Gateway,
    GatewayResult,
    agent_cfg_path,
    read_agent_cfg,
)
from agentrl.rollout.fixed_model import FixedModel, FixedRole
from agentrl.rollout.model_call import Turn
from agentrl.rollout.role import ContextManager, Role, Shared
from agentrl.rollout.tool_calls import Tools
from agentrl.rollout.trajectory_calls import TrajectoryCalls
from agentrl.scoring.scorers import ScoredCall, ScoreResult
from agentrl.tools.base import Schema, schema_name
from agentrl.user_code import contain, describe

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
        """Store the last model call of this conversation and of every role, unless it is stored."""
        await self._calls.store_all()

    @asynccontextmanager
    async def gateway(self, train: str = "main") -> AsyncIterator[Endpoint]:
        """Open a base URL at which any client of a model API continues this trajectory.

        Every request there is a model call of the trajectory. ``train`` chooses the branches that are
        trained: ``main``, ``agent``, ``all``, or ``module:function``. When the block ends, the URL is dead,
        and ``turns``, ``messages`` and ``scored_calls`` are those of the calls. An exception that leaves the
        block after a request was refused for a limit ends the trajectory at that limit.

        Raises TrajectoryError without a gateway, and if the trajectory has made model calls already.
        """
        if self._gateway is None or self.turns or self._uses_gateway:
            why = "has no gateway" if self._gateway is None else "has made model calls already"
            raise TrajectoryError(f"this trajectory {why}", hint="open it once, before any model call")
        self._uses_gateway = True
        result = GatewayResult()
        try:
            takes_reward = self.environment is None or not self.environment.scored_by_tests
            async with self._gateway.open(
                self._claim, train=train, max_calls=self.max_turns, takes_reward=takes_reward
            ) as endpoint:
                result = endpoint.result
                yield endpoint
        except Exception as error:
            if (limit := result.limit(self.max_turns)) is not None:
                raise limit from error
            raise
        finally:
            self._calls.adopt(result.calls)
            self.reported_reward = result.reward
            if result.messages:
                self._conversation = self._new_conversation(result.messages)

    async def collect_tool_rewards(self) -> None:
        """Set ``tool_rewards`` to the rewards that the tools give. Raises ToolServerError."""
        try:
            self.tool_rewards = await contain(
                self._shared.tools.rewards, "the rewards of the tools", ToolServerError
            )
        finally:
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
        observation = await self._calls.hold(lambda: session.step(turn.content))
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
