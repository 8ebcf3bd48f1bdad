"""Define environments: the base class ``Environment``, what its methods take and return, ``@environment``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from agentrl.base.registry import Registry
from agentrl.base.user_code import server_name
from agentrl.config.sampling import ContainerConfig
from agentrl.documents.record import HarnessRun
from agentrl.documents.task import Task
from agentrl.errors import ConfigError, ScorerError, TaskEnvironmentError
from agentrl.scoring.scorers import Result, ScorerContext, ScoreResult
from agentrl.tools.python import Toolset
from agentrl.tools.tool import ENVIRONMENT, ROLES, Schema

Reward = float | Mapping[str, float] | None
"""The reward of a trajectory, or those of its roles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRequest:
    """What ``Environment.tasks`` gets: the number of tasks to generate, their seed and split."""

    n: int
    seed: int
    split: str
    """``train``, or ``eval`` for every evaluation split. Tasks of two splits must differ."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Further parameters of the address, such as ``game`` in ``env:textarena?game=…``."""

    @property
    def random_seed(self) -> str:
        """Return a seed for ``random.Random`` that differs between splits."""
        return f"{self.seed}/{self.split}"


@dataclass(frozen=True, slots=True)
class Observation:
    """What the model reads after its message; ``done`` ends the trajectory, and the text is not shown."""

    text: str
    done: bool = False
    role: str | None = None
    """Who reads the text and moves next, in an environment with several roles."""


class Environment:
    """One trajectory's environment. Derive from it, and register the class by ``@environment("name")``.

    An instance is made for each trajectory; its attributes are the trajectory's state. Each method except
    ``tasks`` may be async; others run in a thread.
    """

    options: ClassVar[tuple[str, ...]] = ()
    """Names of the parameters that ``TaskRequest.options`` may have."""
    tools: ClassVar[tuple[str, ...]] = ()
    """Names of the methods that the model may call; each needs type hints and a docstring."""
    task_defaults: ClassVar[Mapping[str, Any]] = {}
    """Fields of a task that ``tasks`` leaves out, such as ``system_prompt`` and ``max_turns``."""
    limit: ClassVar[int | None] = None
    """How many trajectories a sampler runs at a time; of those with the same ``meta.server`` if it is set."""
    scored_by_tests: ClassVar[bool] = False
    """Whether ``reward`` runs tests that nothing replaces: no score of an agent, no reward of its client."""

    call_seconds: Mapping[str, float] = {}
    """How long a call of a method may take, by its name, instead of --tool_timeout_seconds."""
    agent_seconds: float | None = None
    """How long the agent may work; then the trajectory ends, and ``reward`` is asked for."""
    reward_details: Mapping[str, Any] = {}
    """What ``reward`` was made of, for the details of the score."""
    left: HarnessRun | None = None
    """What ``reward`` found in the trajectory's files, for the Record."""
    first_role: str | None = None
    """Who reads the query and moves first, in an environment with several roles; ``setup`` may set it."""
    is_done: bool = False
    """Set by a tool: the trajectory ends after the tool calls of this message."""

    def __init__(self, task: Task) -> None:
        self.task = task
        """The stored task; fields of other names that ``tasks`` yields are in ``task.meta``."""

    @classmethod
    def check(cls) -> None:
        """Raise ConfigError if this machine cannot run the environment. Must be fast: imports nothing."""

    @classmethod
    def tasks(cls, request: TaskRequest) -> Iterable[Mapping[str, Any]]:
        """Yield ``request.n`` tasks with the fields of a task file; ``id`` is optional.

        The same request must yield the same tasks, and a request with a larger ``n`` the same first tasks. An
        environment without this method gets its tasks from task files.
        """
        raise ConfigError(
            f"{cls.__name__} generates no tasks",
            hint="define the method 'tasks', or load a task file whose tasks name the environment",
        )

    @classmethod
    def names(cls, task: Task) -> Iterable[str]:
        """Return the code, servers and files outside the task that its ``meta`` names: ``permissions``.

        By default the address in ``meta.server``. What is not allowed ends the attempt before ``__init__``.
        """
        server = task.meta.get("server")
        return [server_name(server)] if isinstance(server, str) and "://" in server else []

    @classmethod
    def tool_schemas(cls, task: Task) -> Sequence[Schema]:
        """Return the function schemas of the tools of ``task``: by default the methods ``tools``."""
        return Toolset.of_methods(cls, cls.tools).schemas

    @classmethod
    def limit_of(cls, task: Task) -> int | None:
        """Return how many trajectories like that of ``task`` a sampler runs at a time; None: no limit."""
        return cls.limit

    def setup(self) -> Awaitable[None] | None:
        """Prepare the trajectory. An exception ends the attempt as ``environment``; it is retried."""
        return None

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str | Awaitable[str]:
        """Return the result of a tool of ``tool_schemas`` without a method; the model reads exceptions."""
        raise TaskEnvironmentError(
            f"{type(self).__name__} has no tool {name!r}", hint="define the method 'call_tool'"
        )

    def step(self, text: str) -> Observation | Awaitable[Observation]:
        """Return the answer to the model's message ``text``; only in environments that answer messages."""
        raise TaskEnvironmentError(
            f"{type(self).__name__} answers no messages", hint="define the method 'step'"
        )

    def reward(self) -> Reward | Awaitable[Reward]:
        """Return the reward of the final state, or None. It is stored in the Record before scoring.

        An environment with several roles may return {role: reward}: each role is trained by its own, and the
        first one's is the reward of the state.
        """
        return None

    @classmethod
    def score(cls, context: ScorerContext) -> Result | Awaitable[Result]:
        """Return the score of a finished trajectory: the stored ``reward`` unless it is overridden.

        Roles that made a model call get the rewards that are stored for them.

        It runs without an instance, because a score may be computed later, in another process, and again. A
        method that is not async runs in a worker process.
        """
        stored = context.tool_rewards.get(ENVIRONMENT, {})
        state = stored.get("state")
        if state is None:
            raise ScorerError(
                f"environment {context.environment} gave the trajectory no reward",
                hint="define the method 'reward' or 'score'",
            )
        called = {call.role for call in context.calls}
        roles = {role: value for role, value in stored.get(ROLES, {}).items() if role in called}
        return ScoreResult(float(state), dict(stored.get("details", {})), role_rewards=roles or None)

    def teardown(self) -> Awaitable[None] | None:
        """Release what ``setup`` has opened. Called once, also after a failed ``setup``; logs errors."""
        return None

    @classmethod
    def answers_messages(cls) -> bool:
        """Return whether the environment defines ``step``."""
        return cls.step is not Environment.step

    @classmethod
    def reads_reward(cls) -> bool:
        """Return whether the score is the stored reward."""
        own = cls.__mro__[: cls.__mro__.index(Environment)]
        return not any("score" in vars(kind) for kind in own)


E = TypeVar("E", bound=type[Environment])


def _environment_class(given: Any) -> type[Environment]:
    if not inspect.isclass(given) or not issubclass(given, Environment):
        raise TypeError("it is not a class derived from agentrl.Environment")
    Toolset.of_methods(given, given.tools)  # raises TypeError for a method without type hints
    return given


ENVIRONMENTS: Registry[type[Environment]] = Registry(
    "environment",
    group="agentrl.environments",
    built_in=[
        f"agentrl.worlds.{name}"
        for name in (
            "reasoning_gym",
            "textarena",
            "code",
            "verifiers",
            "harbor.environment",
            "openenv",
            "nemo_gym",
        )
    ],
    convert=_environment_class,
)


def environment(*names: str) -> Callable[[E], E]:
    """Register a class derived from ``Environment`` under ``names``."""

    def decorate(kind: E) -> E:
        ENVIRONMENTS.add(_environment_class(kind), *names)
        return kind

    return decorate


_container_flags = ContainerConfig()


def use_containers(flags: ContainerConfig) -> None:
    """Let this process run the containers of tasks as the flags say."""
    global _container_flags
    _container_flags = flags


def container_flags() -> ContainerConfig:
    """Return how this process runs the containers of tasks."""
    return _container_flags


def require_package(module: str, environment: str) -> None:
    """Raise ConfigError unless ``module`` is installed. Imports nothing."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"environment {environment} needs the package {module.replace('_', '-')}",
            hint="pip install 'agentrl[environments]'",
        )


def import_package(module: str, environment: str) -> Any:
    """Return the imported module. Raises ConfigError if it is not installed or cannot be imported."""
    require_package(module.partition(".")[0], environment)
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise ConfigError(
            f"environment {environment} cannot import {module}: {type(error).__name__}: {error}",
            hint="pip install --upgrade 'agentrl[environments]'",
        ) from error
