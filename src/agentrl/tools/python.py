"""Python functions and classes as tools: ``@tool``, chosen by ``--tools``."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from agentrl.errors import AgentRLError, ToolServerError
from agentrl.registry import Registry
from agentrl.threads import TOOL_THREADS, Threads
from agentrl.tools.base import (
    Reply,
    Schema,
    ServerSession,
    ToolError,
    ToolServer,
    Trajectory,
    contain_within,
    function_schema,
    reply_within,
    run_function,
    schema_name,
    text_of,
    unreachable_is_outage,
)
from agentrl.tools.stateful import StatefulTools, is_stateful
from agentrl.user_code import contain

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
    built_in=["agentrl.tools.sandbox.tool"],
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

    def decorate(target: F) -> F:
        TOOLS.add(Toolset.of(target), *names)
        return target

    return decorate


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

    def session(self, trajectory: Trajectory) -> PythonSession:
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
