"""Python functions and classes as tools: ``@tool``, and tools whose state is a trajectory's own.

The methods are verl's, so that its tool classes work unchanged. One object serves all trajectories; each
trajectory has an instance id of its own.
"""

from __future__ import annotations

import functools
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from agentrl.base.concurrency import TOOL_THREADS, Threads
from agentrl.base.registry import Registry, refuse_bare
from agentrl.base.user_code import contain, contain_call
from agentrl.base.validation import check
from agentrl.documents.document import is_score
from agentrl.documents.status import ToolState
from agentrl.errors import AgentRLError, ConfigError, ToolServerError
from agentrl.tools.tool import (
    Reply,
    Schema,
    ServerSession,
    ToolError,
    ToolServer,
    TrajectoryInfo,
    contain_within,
    function_schema,
    reply_within,
    run_function,
    schema_name,
    text_of,
    unreachable_is_outage,
)

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Toolset:
    """A function as one tool, a class whose public methods are tools that share an instance, or a class with
    ``create`` and ``execute``, which is one tool."""

    target: Callable[..., Any]
    schemas: tuple[Schema, ...]
    """One for each tool, sorted by name; none for a class with ``create`` and ``execute``."""

    @classmethod
    def of(cls, target: Any) -> Toolset:
        """Return the tools of a function or class. Raises TypeError without type hints or docstrings."""
        if is_stateful(target):
            return cls(target, ())
        if inspect.isclass(target):
            schemas = [
                _schema(name, method, bound=True)
                for name, method in inspect.getmembers(target, inspect.isfunction)
                if not name.startswith("_") and name != "close"
            ]
            if not schemas:
                raise TypeError(f"the class {target.__name__} has no public method")
            return cls(target, tuple(sorted(schemas, key=schema_name)))
        if not inspect.isfunction(target):
            raise TypeError(f"it is of type {type(target).__name__}, not a function or class")
        return cls(target, (_schema(target.__name__, target, bound=False),))

    @classmethod
    def of_methods(cls, target: type, names: Sequence[str]) -> Toolset:
        """Return the methods ``names`` of a class. Raises TypeError without type hints or docstrings."""
        missing = [name for name in names if not inspect.isfunction(getattr(target, name, None))]
        if missing:
            raise TypeError(f"the class {target.__name__} has no method {missing[0]!r}")
        schemas = [_schema(name, getattr(target, name), bound=True) for name in sorted(names)]
        return cls(target, tuple(schemas))


TOOLS: Registry[Toolset] = Registry(
    "tool",
    group="agentrl.tools",
    flag="--tools",
    built_in=["agentrl.worlds.sandbox.tool"],
    convert=lambda found: found if isinstance(found, Toolset) else Toolset.of(found),
)


def tool(*names: str) -> Callable[[F], F]:
    """Register a function or class as tools under ``names``.

    The model sees the name, the docstring and the parameters of the function, async or not; every parameter
    needs a type hint. Of a class it sees the public methods. A new instance is made for each trajectory, so
    attributes are the trajectory's state, and its method ``close`` is called at the end. A tool returns text
    or anything that JSON can hold. An exception is a result that the model reads, except an ``OutageError``:
    what the tool reaches is down, and the call is repeated when it is up.

    A class with ``create`` and ``execute`` is one tool with verl's methods: see ``StatefulTool``.
    """
    refuse_bare(names, "tool")

    def decorate(target: F) -> F:
        TOOLS.add(Toolset.of(target), *names)
        return target

    return decorate


_STATE = "__agentrl_state__"


def tool_state(state: ToolState | str) -> Callable[[F], F]:
    """Declare what a tool keeps between its calls: ``stateless``, ``replay`` or ``outside``.

    It decorates a function, a class, or a method of a class of tools or an environment. Without it a function
    is ``stateless``, and a class ``replay``: each trajectory has an instance. Raises ValueError.
    """
    declared = ToolState(state)
    if declared is ToolState.SNAPSHOT:
        raise ValueError("only the files of environments are kept: write 'replay', or 'outside'")

    def decorate(target: F) -> F:
        setattr(target, _STATE, declared)
        return target

    return decorate


def declared_state(target: object) -> ToolState | None:
    """Return what ``tool_state`` declares of a function, class or instance; None without it."""
    state: ToolState | None = getattr(target, _STATE, None)
    return state


class PythonTools(ToolServer):
    """A Toolset as a tool server. Each session of a class has an instance of its own."""

    def __init__(self, name: str, toolset: Toolset, *, call_timeout: float) -> None:
        """``call_timeout`` bounds one tool call, in seconds."""
        self.name = name
        self._toolset = toolset
        self._call_timeout = call_timeout

    @property
    def schemas(self) -> Sequence[Schema]:
        return self._toolset.schemas

    def session(self, trajectory: TrajectoryInfo) -> PythonSession:
        return PythonSession(self.name, self._toolset, call_timeout=self._call_timeout)


class PythonSession(ServerSession):
    """The tools of a Toolset for one trajectory. The instance of a class is made at the first call."""

    def __init__(
        self,
        name: str,
        toolset: Toolset,
        *,
        call_timeout: float,
        instance: object | None = None,
        threads: Threads = TOOL_THREADS,
    ) -> None:
        """``call_timeout`` bounds one tool call, in seconds. ``instance`` is used instead of a new one.

        Functions that are not async run in ``threads``.
        """
        self._threads = threads
        self._name = name
        self._toolset = toolset
        self._call_timeout = call_timeout
        self._instance: Any = instance

    async def list(self) -> Sequence[Schema]:
        return self._toolset.schemas

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Reply:
        """Call a tool. An exception and a timeout are errors in the reply; a thread then goes on.

        Raises ToolServerError if the class cannot be instantiated, and any FailureError of the tool.
        """

        async def work() -> Reply:
            return Reply(text=await _run(self._threads, await self._function(tool), arguments))

        return await reply_within(self._call_timeout, work, tool)

    def state_of(self, tool: str) -> ToolState:
        """Return what is declared of the method, or of the class; a function is ``stateless`` without it."""
        target = self._toolset.target
        declared = declared_state(getattr(target, tool, None)) or declared_state(target)
        return declared or (ToolState.REPLAY if inspect.isclass(target) else ToolState.STATELESS)

    async def close(self) -> None:
        """Call ``close`` of the instance, if there is one; its errors are logged."""
        instance, self._instance = self._instance, None
        close = getattr(instance, "close", None)
        if close is None:
            return
        what = f"close of tool {self._name}"
        try:
            await contain_within(
                self._call_timeout, lambda: run_function(self._threads, close), what, ToolError
            )
        except AgentRLError as error:
            logger.warning("a tool cannot be closed", extra={"tool": self._name, "why": error.message})

    async def _function(self, tool: str) -> Callable[..., Any]:
        target = self._toolset.target
        if not inspect.isclass(target):
            return target
        if self._instance is None:
            what = f"the class of tool {self._name}"
            with unreachable_is_outage(self._name):
                self._instance = await contain(lambda: self._threads.run(target), what, ToolServerError)
        function: Callable[..., Any] = getattr(self._instance, tool)
        return function


def python_servers(names: str, *, call_timeout: float) -> list[PythonTools | StatefulTools]:
    """Return a server for each of the comma-separated ``names``, called as the name or as the path's end.

    A class with ``create`` and ``execute`` is called as its tool. Raises ConfigError for a tool that does not
    exist or that this process may not import.
    """
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    return [_server(name, TOOLS.get(name), call_timeout) for name in chosen]


def _server(name: str, toolset: Toolset, call_timeout: float) -> PythonTools | StatefulTools:
    if is_stateful(toolset.target):
        where = f"--tools {name}"
        return StatefulTools.load(toolset.target, {}, None, where=where, call_timeout=call_timeout)
    return PythonTools(name.rpartition(":")[2], toolset, call_timeout=call_timeout)


def _schema(name: str, function: Callable[..., Any], *, bound: bool) -> Schema:
    """Return the function schema of ``function``; ``bound``: its first parameter is the instance."""
    from pydantic import TypeAdapter
    from pydantic.json_schema import GenerateJsonSchema

    class Untitled(GenerateJsonSchema):
        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

    description = inspect.getdoc(function)
    if not description:
        raise TypeError(f"{name} has no docstring, which tells the model what it does")
    for parameter in list(inspect.signature(function).parameters.values())[bound:]:
        if parameter.annotation is parameter.empty:
            raise TypeError(f"the parameter {parameter.name!r} of {name} has no type hint")
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"the parameter {parameter.name!r} of {name} cannot be given by name")
    call: Any = function.__get__(object()) if bound else function
    return function_schema(name, description, TypeAdapter(call).json_schema(schema_generator=Untitled))


async def _run(threads: Threads, function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Call ``function`` with validated ``arguments`` and return its result as text."""
    instance = getattr(function, "__self__", None)
    if instance is None:
        validated = _validator(function)
    else:
        validated = functools.partial(_validator(function.__func__), instance)  # type: ignore[attr-defined]
    return text_of(await run_function(threads, validated, **arguments))


@functools.lru_cache(maxsize=1024)
def _validator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the validating function; it is made once, because that takes a millisecond."""
    from pydantic import validate_call

    return validate_call(function)


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class FunctionSchema(_Open):
    """``function`` of an OpenAI function schema."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class ToolSchema(_Open):
    """An OpenAI function schema as an object, which verl's tool classes expect."""

    type: str = "function"
    function: FunctionSchema


_SCHEMA_HINT = "write type: function, and function with name, description and parameters"


def _read_schema(schema: Any, where: str, *place: str, hint: str) -> ToolSchema:
    """Return a function schema as an object. Raises ConfigError, which begins with ``where``."""
    return check(ToolSchema, schema, lambda found: ConfigError(f"{where}: {found.text}", hint=hint), *place)


class StatefulTool(ABC):
    """Base class of a tool with state by trajectory. Override ``execute``, and what else the tool needs.

    The reward of a call and that of the state are stored in the Record and reach the scorer.
    """

    def __init__(self, config: Mapping[str, Any], tool_schema: Any = None) -> None:
        """``config`` and ``tool_schema`` come from the tool configuration file, if there is one."""
        self.config = dict(config)
        self.tool_schema = tool_schema or self.get_openai_tool_schema()

    def get_openai_tool_schema(self) -> Any:
        """Return the function schema for a configuration that gives none."""
        raise ConfigError(
            f"{type(self).__name__} has no function schema", hint="give tool_schema in the tool configuration"
        )

    async def create(self, instance_id: str, **kwargs: Any) -> str:
        """Prepare the state of one trajectory; return its instance id.

        It is called again after an outage: it raised a ConnectionError, a TimeoutError or an OutageError, or
        took too long. ``release`` is called in between.
        """
        return instance_id

    @abstractmethod
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Run one call; return its text, or ``(text, reward, metrics)``."""

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """Return the reward of the trajectory's state at its end; None if the tool gives none."""
        return None

    async def release(self, instance_id: str, **kwargs: Any) -> None:  # noqa: B027 - a hook that may stay empty
        """Release the state of one trajectory."""


class StatefulTools(ToolServer):
    """One tool object as a tool server, named like its tool."""

    def __init__(self, target: Any, *, call_timeout: float, state: ToolState | None = None) -> None:
        """``call_timeout`` bounds each method, in seconds; ``state`` None is what the class declares.

        Raises ConfigError for a malformed schema.
        """
        self._target = target
        self.state = state or declared_state(target) or ToolState.REPLAY
        """What the tool keeps between the calls of a trajectory."""
        self._schema = _plain_schema(target)
        self._call_timeout = call_timeout
        self.name = str(self._schema["function"]["name"])

    @classmethod
    def load(
        cls,
        kind: Callable[..., Any],
        config: Mapping[str, Any],
        schema: Any,
        *,
        where: str,
        call_timeout: float,
        state: ToolState | None = None,
    ) -> StatefulTools:
        """Make the tool object of a class. Raises ConfigError if the class refuses its configuration."""
        if not callable(getattr(kind, "execute", None)):
            raise ConfigError(f"{where} has no method 'execute'", hint="see docs/tools.md")
        view = None if schema is None else _read_schema(schema, where, "tool_schema", hint=_SCHEMA_HINT)
        try:
            target = contain_call(lambda: kind(dict(config), view), where, ToolServerError)
        except ToolServerError as error:
            raise ConfigError(error.message, hint="correct its 'config' in the tool configuration") from error
        return cls(target, call_timeout=call_timeout, state=state)

    @property
    def schemas(self) -> Sequence[Schema]:
        return (self._schema,)

    def session(self, trajectory: TrajectoryInfo) -> StatefulSession:
        return StatefulSession(
            self._target, self._schema, trajectory, name=self.name, call_timeout=self._call_timeout,
            state=self.state,
        )  # fmt: skip


class StatefulSession(ServerSession):
    """One tool with the state of one trajectory: ``create`` at its start, ``release`` at its end."""

    def __init__(
        self, target: Any, schema: Schema, trajectory: TrajectoryInfo, *, name: str, call_timeout: float,
        state: ToolState = ToolState.REPLAY,
    ) -> None:  # fmt: skip
        self._target = target
        self._state = state
        self._schema = schema
        self._name = name
        self._call_timeout = call_timeout
        self._instance = trajectory.key(replayed=state is ToolState.REPLAY)
        self._created = False
        self._kwargs = _tool_kwargs(trajectory.meta, name)

    async def open(self) -> None:
        """Call ``create``. Raises ToolServerError if it raises or takes too long; a time-out and an error of
        a connection are outages."""
        given = self._kwargs.get("create_kwargs", {})
        create = getattr(self._target, "create", None)
        self._created = True
        if create is not None:
            parameters = inspect.signature(create).parameters.values()
            takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
            whole = {"create_kwargs": given} if takes_any else {}
            created = await self._method("create", create, self._instance, **{**whole, **given})
            instance = created[0] if isinstance(created, tuple) and created else created
            self._instance = self._instance if instance is None else str(instance)

    async def list(self) -> Sequence[Schema]:
        return (self._schema,)

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Reply:
        """Call ``execute``. An exception and a timeout are errors in the reply. Raises ToolServerError if the
        tool raises one."""
        given = self._kwargs.get("execute_kwargs", {})

        async def work() -> Reply:
            result = await run_function(
                TOOL_THREADS, self._target.execute, self._instance, dict(arguments), **given
            )
            text, reward = _result(result)
            return Reply(text=text, reward=reward)

        return await reply_within(self._call_timeout, work, tool)

    def state_of(self, tool: str) -> ToolState:
        return self._state

    async def reward(self) -> float | None:
        """Return the reward of the state, by ``calc_reward`` or ``reward``; None if the tool gives none.

        Raises ToolServerError if the method raises.
        """
        for method in ("calc_reward", "reward"):
            function = getattr(self._target, method, None)
            if callable(function):
                given = self._kwargs.get("calc_reward_kwargs", {})
                return _number(await self._method(method, function, self._instance, **given))
        return None

    async def close(self) -> None:
        """Call ``release`` once; its errors are logged."""
        created, self._created = self._created, False
        release = getattr(self._target, "release", None)
        if not created or release is None:
            return
        try:
            await self._method("release", release, self._instance, **self._kwargs.get("release_kwargs", {}))
        except AgentRLError as error:
            logger.warning("a tool cannot be released", extra={"tool": self._name, "why": error.message})

    async def _method(self, method: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        what = f"{method} of tool {self._name}"
        with unreachable_is_outage(self._name):
            return await contain_within(
                self._call_timeout,
                lambda: run_function(TOOL_THREADS, function, *args, **kwargs),
                what,
                ToolServerError,
            )


def is_stateful(target: Any) -> bool:
    """Return whether ``target`` is a class with verl's methods rather than one tool per method."""
    return inspect.isclass(target) and all(
        callable(getattr(target, name, None)) for name in ("create", "execute")
    )


def _tool_kwargs(meta: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """Return what the task gives to the tool: ``meta.tools_kwargs`` or verl's ``extra_info.tools_kwargs``."""
    extra = meta.get("extra_info")
    for holder in (meta, extra if isinstance(extra, Mapping) else {}):
        by_tool = holder.get("tools_kwargs")
        given = by_tool.get(name) if isinstance(by_tool, Mapping) else None
        if isinstance(given, Mapping):
            return {key: dict(value) for key, value in given.items() if isinstance(value, Mapping)}
    return {}


def _result(result: Any) -> tuple[str, float | None]:
    """Return the text and the reward of ``text``, ``(text, reward)`` or ``(text, reward, metrics)``."""
    response, reward = result, None
    if isinstance(result, tuple) and result:
        response, reward = result[0], _number(result[1]) if len(result) > 1 else None
    return _text(response), reward


def _text(response: Any) -> str:
    """Return the text of a response; images and videos are replaced by a notice."""
    parts = response if isinstance(response, Mapping) else getattr(response, "__dict__", None)
    if parts is None or not {"text", "image", "video"} & parts.keys():
        return text_of(response)
    shown = [str(parts["text"])] if parts.get("text") else []
    shown += [f"[{kind} that cannot be shown]" for kind in ("image", "video") if parts.get(kind)]
    return "\n".join(shown)


def _number(value: Any) -> float | None:
    """Return a finite number; None for any other value."""
    return float(value) if is_score(value) else None


def _plain_schema(target: Any) -> Schema:
    """Return the function schema of a tool object. Raises ConfigError."""
    schema = getattr(target, "tool_schema", None)
    if schema is None:
        schema = contain_call(target.get_openai_tool_schema, "get_openai_tool_schema", ToolServerError)
    if hasattr(schema, "model_dump"):
        schema = schema.model_dump(exclude_none=True)
    function = _read_schema(
        schema, f"the tool {type(target).__name__} has no function schema",
        hint="give tool_schema in the tool configuration, or return it from get_openai_tool_schema",
    ).function  # fmt: skip
    return function_schema(function.name, function.description, function.parameters or None)
