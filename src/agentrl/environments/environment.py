"""Define environments, and run the one of a trajectory: its faults end that attempt only."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from agentrl.base.atomic_folder import scratch_folder
from agentrl.base.concurrency import ENVIRONMENT_THREADS
from agentrl.base.installation import how_to_install
from agentrl.base.process_pool import run_in_process
from agentrl.base.registry import Registry, refuse_bare
from agentrl.base.untrusted_folder import discard
from agentrl.base.user_code import contain_call, describe, require_allowed, server_name
from agentrl.config.sampling import ContainerConfig
from agentrl.documents.document import is_score, plain, replace_surrogates, sanitize_bson
from agentrl.documents.record import HarnessRun
from agentrl.documents.status import ToolState
from agentrl.documents.task import Task
from agentrl.documents.task_file import names_in_fields
from agentrl.errors import (
    AgentRLError,
    ConfigError,
    Dependency,
    DependencyKind,
    OutageError,
    ScorerError,
    TaskEnvironmentError,
)
from agentrl.scoring.scorers import Result, ScorerContext, ScoreResult, names_in_answer, scorer
from agentrl.tools.python import PythonSession, Toolset, declared_state
from agentrl.tools.tool import (
    ENVIRONMENT,
    ROLES,
    Reply,
    Schema,
    contain_within,
    reply_within,
    run_function,
    schema_name,
)

if TYPE_CHECKING:
    from agentrl.environments.snapshots import TrajectorySnapshots

logger = logging.getLogger(__name__)

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
    state: ClassVar[ToolState | str] = ToolState.REPLAY
    """What an instance keeps, and so how a trajectory goes on in another process: with a new instance.

    ``replay``: the same messages and tool calls give it the same state; their answers are compared.
    ``stateless``: nothing that counts. ``snapshot``: files, which ``snapshot`` and ``restore`` keep.
    ``outside``: effects that cannot be taken back. ``tool_state`` declares that of one tool."""
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
    keeps_files: bool = False
    """Whether ``snapshot`` will be called; set before ``setup``."""

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

    def anchor_state(self) -> str | bytes | Awaitable[str | bytes | None] | None:
        """Return the state in which the model answers next, as text or bytes; None: what the model reads.

        ``--step_advantage`` compares the model calls of a group that are made in the same state. Leave out
        what does not change what is best to do next, such as a count of the moves.
        """
        return None

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

    def snapshot(self, archive: Path, limit: int) -> Awaitable[None] | None:
        """Write the files that tools and messages have changed into ``archive``, of at most ``limit`` bytes.

        For environments with ``state = "snapshot"``. Raise an exception if they cannot be kept: then another
        process makes the calls again.
        """
        raise TaskEnvironmentError(
            f"{type(self).__name__} keeps no files", hint="define the methods 'snapshot' and 'restore'"
        )

    def restore(self, archive: Path) -> Awaitable[None] | None:
        """Change the files of a new instance, after ``setup``, as ``archive`` has them."""
        raise TaskEnvironmentError(
            f"{type(self).__name__} restores no files", hint="define the methods 'snapshot' and 'restore'"
        )

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
    if not isinstance(given.state, str) or given.state not in set(ToolState):
        raise TypeError(
            f"its class attribute 'state' is {describe(given.state)}: it declares how the state is restored"
            f" ({', '.join(ToolState)}); name your own otherwise"
        )
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
    refuse_bare(names, "environment")

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
            hint=how_to_install("environments"),
        )


def import_package(module: str, environment: str) -> Any:
    """Return the imported module. Raises ConfigError if it is not installed or cannot be imported."""
    require_package(module.partition(".")[0], environment)
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise ConfigError(
            f"environment {environment} cannot import {module}: {type(error).__name__}: {error}",
            hint=how_to_install("environments").replace("install", "install --upgrade", 1),
        ) from error


def open_environment(
    task: Task, *, call_timeout: float, files: TrajectorySnapshots | None = None
) -> EnvironmentSession | None:
    """Return the session of a task's environment; None if the task names none. ``files`` keeps its snapshots.

    Raises TaskEnvironmentError if the module of the environment cannot be imported, or if the task names what
    this process may not use, and ConfigError if this process does not find it or cannot run it.
    """
    name = task.environment
    if name is None:
        return None
    kind = contain_call(lambda: ENVIRONMENTS.get(name), f"environment {name}", TaskEnvironmentError)
    require_names(task)
    contain_call(kind.check, f"check of environment {name}", TaskEnvironmentError)
    return EnvironmentSession(name, kind, task, call_timeout=call_timeout, files=files)


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


def keeps_files(task: Task) -> bool:
    """Return whether the environment of a task has files that can be kept; False if it is not here."""
    if task.environment is None:
        return False
    try:
        return ENVIRONMENTS.get(task.environment).state == ToolState.SNAPSHOT
    except ConfigError:
        return False


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

    def __init__(
        self, name: str, kind: type[Environment], task: Task, *, call_timeout: float,
        files: TrajectorySnapshots | None = None,
    ) -> None:  # fmt: skip
        """``call_timeout`` bounds each call of a method, in seconds. Without ``files`` none are kept."""
        self.name = name
        self._files = files
        self._snapshot: str | None = None
        self._has_changed = False
        """Whether a call or a message came since the snapshot."""
        self._running = 0
        self._keeping = asyncio.Lock()
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

    @property
    def state(self) -> ToolState:
        """Return what it keeps between messages."""
        return ToolState(self._kind.state)

    def state_of(self, tool: str) -> ToolState:
        """Return what is declared of a method; else what the environment keeps."""
        return declared_state(getattr(self._kind, tool, None)) or self.state

    async def open(self) -> None:
        """Make the instance and call ``setup``. Raises TaskEnvironmentError if one raises or is too slow."""
        self._instance = await self._method("__init__", self._kind, self._task)
        self._instance.keeps_files = self.keeps_files
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
        async with self._acting():
            if tool in self._kind.tools:
                return await own.call(tool, arguments)
            return await reply_within(self._call_timeout, lambda: self._call(tool, arguments), tool)

    async def _call(self, tool: str, arguments: Mapping[str, Any]) -> Reply:
        return Reply(
            text=str(await run_function(ENVIRONMENT_THREADS, self.instance.call_tool, tool, arguments))
        )

    async def step(self, text: str) -> Observation:
        """Return the answer to a message. Raises TaskEnvironmentError if ``step`` raises or is too slow."""
        async with self._acting():
            observation = await self._method("step", self.instance.step, text)
        if not isinstance(observation, Observation) or not isinstance(observation.text, str):
            raise TaskEnvironmentError(
                f"step of environment {self.name} returned {describe(observation)}",
                hint="return Observation(text, done)",
            )
        return Observation(replace_surrogates(observation.text), bool(observation.done), observation.role)

    @property
    def names_states(self) -> bool:
        """Return whether the environment defines ``anchor_state``."""
        return self._kind.anchor_state is not Environment.anchor_state

    async def anchor_state(self) -> str | bytes | None:
        """Return the state that it is in. Raises TaskEnvironmentError if it raises or is no text or bytes."""
        state = await self._method("anchor_state", self.instance.anchor_state)
        if state is None or isinstance(state, (str, bytes)):
            return state
        raise TaskEnvironmentError(
            f"anchor_state of environment {self.name} returned {describe(state)}",
            hint="return text or bytes that are the same for the same state, such as str(self.board)",
        )

    async def replay(self, steps: Sequence[tuple[str, Mapping[str, Any]]]) -> int | None:
        """Give stored messages to ``step`` again, in order; ``steps`` are (message, fields of the answer).

        Return the index of the first whose answer is not the stored one; None if all are. Raises
        TaskEnvironmentError, and OutageError: give one step at a time where outages are waited for.
        """
        for index, (text, stored) in enumerate(steps):
            if plain(await self.step(text)) != stored:
                return index
        return None

    @property
    def keeps_files(self) -> bool:
        """Return whether ``snapshot`` may keep something."""
        return self._files is not None and self._files.limit > 0 and self.state is ToolState.SNAPSHOT

    async def snapshot(self) -> str | None:
        """Keep the files as they are now; return the reference to them, None if they are not kept.

        Calls wait meanwhile. A failure to keep files is logged once per environment and is not an error.
        """
        files = self._files
        if files is None or not self.keeps_files or self._running:
            return None
        if not self._has_changed:
            return self._snapshot
        async with self._keeping, _temporary_folder() as folder:
            archive = folder / "snapshot.tar"
            self._snapshot, self._has_changed = None, False
            try:
                await self._method("snapshot", self.instance.snapshot, archive, files.limit)
                self._snapshot = await files.put(archive)
            except (AgentRLError, OSError) as error:
                _warn_not_kept(self.name, describe(error))
        return self._snapshot

    async def restore(self, reference: str) -> bool:
        """Give a new instance the files of a snapshot; return False if it is not there.

        Raises TaskEnvironmentError and OutageError.
        """
        files = self._files
        if files is None or self.state is not ToolState.SNAPSHOT:
            return False
        async with _temporary_folder() as folder:
            archive = folder / "snapshot.tar"
            if not await files.get(reference, archive):
                return False
            await self._method("restore", self.instance.restore, archive)
        self._snapshot, self._has_changed = reference, False
        return True

    @asynccontextmanager
    async def _acting(self) -> AsyncIterator[None]:
        """Call the environment in the block, after a snapshot that is being made."""
        async with self._keeping:
            self._running += 1
        self._has_changed = True
        try:
            with self._naming_outages():
                yield
        finally:
            self._running -= 1

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


@asynccontextmanager
async def _temporary_folder() -> AsyncIterator[Path]:
    """Yield a new folder, which is deleted at the end."""
    folder = await asyncio.to_thread(scratch_folder, "snapshot")
    try:
        yield folder
    finally:
        await asyncio.to_thread(discard, folder)


_not_kept: set[str] = set()
"""Environments of which it was said that files are not kept."""


def _warn_not_kept(environment: str, why: str) -> None:
    level = logging.DEBUG if environment in _not_kept else logging.WARNING
    _not_kept.add(environment)
    logger.log(
        level, "files of a trajectory are not kept; its next owner repeats the calls",
        extra={"environment": environment, "why": why},
    )  # fmt: skip


@scorer("environment")
async def score_by_environment(context: ScorerContext) -> Result:
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
