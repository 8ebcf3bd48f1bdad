"""Run the environment of one trajectory, whose faults end that attempt only, and ask it for the score."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from agentrl.base.concurrency import ENVIRONMENT_THREADS
from agentrl.base.process_pool import run_in_process
from agentrl.base.user_code import contain_call, describe, require_allowed
from agentrl.documents.document import is_score, replace_surrogates, sanitize_bson
from agentrl.documents.task import Task
from agentrl.documents.task_file import names_in_fields
from agentrl.environments.environment import ENVIRONMENTS, Environment, Observation
from agentrl.errors import (
    AgentRLError,
    ConfigError,
    Dependency,
    DependencyKind,
    OutageError,
    ScorerError,
    TaskEnvironmentError,
)
from agentrl.scoring.scorers import Result, ScorerContext, names_in_answer, scorer
from agentrl.tools.python import PythonSession, Toolset
from agentrl.tools.tool import Reply, Schema, contain_within, reply_within, run_function, schema_name

logger = logging.getLogger(__name__)


def open_environment(task: Task, *, call_timeout: float) -> EnvironmentSession | None:
    """Return the session of a task's environment; None if the task names none.

    Raises TaskEnvironmentError if the module of the environment cannot be imported, or if the task names what
    this process may not use, and ConfigError if this process does not find it or cannot run it.
    """
    name = task.environment
    if name is None:
        return None
    kind = contain_call(lambda: ENVIRONMENTS.get(name), f"environment {name}", TaskEnvironmentError)
    require_names(task)
    contain_call(kind.check, f"check of environment {name}", TaskEnvironmentError)
    return EnvironmentSession(name, kind, task, call_timeout=call_timeout)


def names_of(task: Task) -> frozenset[str]:
    """Return the code and files that a task names outside its ``meta``, as ``permissions`` writes them."""
    return names_in_fields(task) | names_in_answer(task)


def environment_names(task: Task) -> frozenset[str]:
    """Return the code, servers and files in a task's ``meta``; none if its environment is not here.

    Raises TaskEnvironmentError if ``Environment.names`` raises.
    """
    if task.environment is None:
        return frozenset()
    try:
        kind = ENVIRONMENTS.get(task.environment)
    except ConfigError:
        return frozenset()
    what = f"names of environment {task.environment}"
    return frozenset(contain_call(lambda: list(kind.names(task)), what, TaskEnvironmentError))


def require_names(task: Task) -> None:
    """Raise TaskEnvironmentError for what ``meta`` names and this process may not use."""
    for outside in sorted(environment_names(task)):
        try:
            require_allowed(outside, f"meta of environment {task.environment}")
        except ConfigError as error:
            raise TaskEnvironmentError(error.message, hint=error.hint) from error


def environment_of(task: Task) -> Dependency | None:
    """Return what is down if the task's environment is: the server in ``meta.server``, or all of its name."""
    if task.environment is None:
        return None
    server = task.meta.get("server")
    name = server if isinstance(server, str) else task.environment
    return Dependency(DependencyKind.ENVIRONMENT, name)


def full_environments(running: Iterable[Task]) -> frozenset[str]:
    """Return the environments and servers of which ``running`` are as many as a sampler may run."""
    counts: Counter[str] = Counter()
    limits: dict[str, int] = {}
    for task in running:
        needed = environment_of(task)
        if needed is None or task.environment is None:
            continue
        counts[needed.name] += 1
        try:
            kind = ENVIRONMENTS.get(task.environment)
            what = f"limit_of of environment {task.environment}"
            limit = contain_call(partial(kind.limit_of, task), what, TaskEnvironmentError)
        except AgentRLError:
            continue  # the trajectory itself fails, with this error
        if limit is not None:
            limits[needed.name] = min(limit, limits.get(needed.name, limit))
    return frozenset(name for name, limit in limits.items() if counts[name] >= limit)


class EnvironmentSession:
    """One trajectory's environment as a tool server's session: ``open`` sets up, ``close`` tears down."""

    def __init__(self, name: str, kind: type[Environment], task: Task, *, call_timeout: float) -> None:
        """``call_timeout`` bounds each call of a method, in seconds."""
        self.name = name
        self._kind = kind
        self._task = task
        self._call_timeout = call_timeout
        self._own_tools = Toolset.of_methods(kind, kind.tools)
        self._schemas = contain_call(
            lambda: sorted(kind.tool_schemas(task), key=schema_name),
            f"tool_schemas of environment {name}", TaskEnvironmentError,
        )  # fmt: skip
        self.dependency = environment_of(task) or Dependency(DependencyKind.ENVIRONMENT, name)
        """What is down in an OutageError of the environment."""
        self.reward_details: Mapping[str, Any] = {}
        """What ``reward`` was made of."""
        self._instance: Environment | None = None
        self._tools: PythonSession | None = None

    @property
    def schemas(self) -> Sequence[Schema]:
        """Return the function schemas of its tools, sorted by name."""
        return self._schemas

    @property
    def instance(self) -> Environment:
        """Return the environment. Raises TaskEnvironmentError unless it is open."""
        if self._instance is None:
            raise TaskEnvironmentError(f"environment {self.name} is not open")
        return self._instance

    async def open(self) -> None:
        """Make the instance and call ``setup``. Raises TaskEnvironmentError if one raises or is too slow."""
        self._instance = await self._method("__init__", self._kind, self._task)
        limits = [self._instance.call_seconds.get(name, self._call_timeout) for name in self._kind.tools]
        longest = max(limits, default=self._call_timeout)
        self._tools = PythonSession(
            self.name,
            self._own_tools,
            call_timeout=longest,
            instance=self._instance,
            threads=ENVIRONMENT_THREADS,
        )
        await self._method("setup", self.instance.setup)

    async def list(self) -> Sequence[Schema]:
        """Return the function schemas of its tools, sorted by name."""
        return self.schemas

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Reply:
        """Call a tool. An exception and a timeout are errors in the reply. Raises OutageError."""
        if self._tools is None:
            raise TaskEnvironmentError(f"environment {self.name} is not open")
        own = self._tools
        with self._naming_outages():
            if tool in self._kind.tools:
                return await own.call(tool, arguments)
            return await reply_within(self._call_timeout, lambda: self._call(tool, arguments), tool)

    async def _call(self, tool: str, arguments: Mapping[str, Any]) -> Reply:
        return Reply(
            text=str(await run_function(ENVIRONMENT_THREADS, self.instance.call_tool, tool, arguments))
        )

    async def step(self, text: str) -> Observation:
        """Return the answer to a message. Raises TaskEnvironmentError if ``step`` raises or is too slow."""
        observation = await self._method("step", self.instance.step, text)
        if not isinstance(observation, Observation) or not isinstance(observation.text, str):
            raise TaskEnvironmentError(
                f"step of environment {self.name} returned {describe(observation)}",
                hint="return Observation(text, done)",
            )
        return Observation(replace_surrogates(observation.text), bool(observation.done), observation.role)

    async def reward(self) -> float | dict[str, float] | None:
        """Return the reward of the state, or of each role; None without one. Raises TaskEnvironmentError."""
        reward = await self._method("reward", self.instance.reward)
        if reward is None:
            return None
        self.reward_details = sanitize_bson(dict(self.instance.reward_details))
        if isinstance(reward, Mapping) and reward and all(isinstance(role, str) for role in reward):
            return {role: self._number(value) for role, value in reward.items()}
        return self._number(reward)

    def _number(self, value: Any) -> float:
        if is_score(value):
            return float(value)
        raise TaskEnvironmentError(
            f"reward of environment {self.name} returned {describe(value)}",
            hint="return a finite number of at most 1e18, or {role: number}",
        )

    async def close(self) -> None:
        """Call ``teardown`` once; its errors are logged."""
        instance, self._instance, self._tools = self._instance, None, None
        if instance is None:
            return
        try:
            await self._method("teardown", instance.teardown)
        except AgentRLError as error:
            logger.warning(
                "an environment cannot be torn down", extra={"environment": self.name, "why": error.message}
            )

    async def _method(self, method: str, function: Callable[..., Any], *arguments: Any) -> Any:
        own = {} if self._instance is None else self._instance.call_seconds
        with self._naming_outages():
            return await contain_within(
                own.get(method, self._call_timeout),
                lambda: run_function(ENVIRONMENT_THREADS, function, *arguments),
                f"{method} of environment {self.name}", TaskEnvironmentError,
                hint="raise --tool_timeout_seconds",
            )  # fmt: skip

    @contextmanager
    def _naming_outages(self) -> Iterator[None]:
        try:
            yield
        except OutageError as error:
            error.outage = error.outage or self.dependency
            raise


@scorer("environment")
async def environment(context: ScorerContext) -> Result:
    """Return the score that the ``score`` method of the task's environment gives.

    A method that is not async runs in a worker process. Raises ScorerError for a task without an environment.
    """
    name = context.environment
    if name is None:
        raise ScorerError(
            "the task has the scorer 'environment' and names no environment",
            hint='give the task "environment": "NAME", or another scorer',
        )
    kind = ENVIRONMENTS.get(name)
    kind.check()
    if kind.reads_reward() or inspect.iscoroutinefunction(kind.score):
        scored = kind.score(context)
    else:
        scored = run_in_process(kind.score, context)
    result: Result = await scored if inspect.isawaitable(scored) else scored
    return result
