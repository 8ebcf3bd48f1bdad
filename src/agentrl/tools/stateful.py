"""Run tools with state by trajectory: classes with ``create``, ``execute``, ``calc_reward`` and ``release``.

The methods are verl's, so that its tool classes work unchanged. One object serves all trajectories; each
trajectory has an instance id of its own.
"""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from agentrl.documents.base import is_score
from agentrl.errors import AgentRLError, ConfigError, ToolServerError
from agentrl.threads import TOOL_THREADS
from agentrl.tools.base import (
    Reply,
    Schema,
    ServerSession,
    ToolServer,
    Trajectory,
    contain_within,
    function_schema,
    reply_within,
    run_function,
    text_of,
    unreachable_is_outage,
)
from agentrl.user_code import contain_call

logger = logging.getLogger(__name__)


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

    def __init__(self, target: Any, *, call_timeout: float) -> None:
        """``call_timeout`` bounds each method, in seconds. Raises ConfigError for a malformed schema."""
        self._target = target
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
    ) -> StatefulTools:
        """Make the tool object of a class. Raises ConfigError if the class refuses its configuration."""
        if not callable(getattr(kind, "execute", None)):
            raise ConfigError(f"{where} has no method 'execute'", hint="see docs/tools.md")
        try:
            view = None if schema is None else ToolSchema.model_validate(schema)
        except ValidationError as error:
            problem = error.errors()[0]
            raise ConfigError(
                f"{where}: tool_schema.{'.'.join(map(str, problem['loc']))}: {problem['msg']}",
                hint="write type: function, and function with name, description and parameters",
            ) from error
        try:
            target = contain_call(lambda: kind(dict(config), view), where, ToolServerError)
        except ToolServerError as error:
            raise ConfigError(error.message, hint="correct its 'config' in the tool configuration") from error
        return cls(target, call_timeout=call_timeout)

    @property
    def schemas(self) -> Sequence[Schema]:
        return (self._schema,)

    def session(self, trajectory: Trajectory) -> StatefulSession:
        return StatefulSession(
            self._target, self._schema, trajectory, name=self.name, call_timeout=self._call_timeout
        )


class StatefulSession(ServerSession):
    """One tool with the state of one trajectory: ``create`` at its start, ``release`` at its end."""

    def __init__(
        self, target: Any, schema: Schema, trajectory: Trajectory, *, name: str, call_timeout: float
    ) -> None:
        self._target = target
        self._schema = schema
        self._name = name
        self._call_timeout = call_timeout
        self._instance = trajectory.id
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
    try:
        function = ToolSchema.model_validate(schema).function
    except ValidationError as error:
        raise ConfigError(
            f"the tool {type(target).__name__} has no function schema: {error.errors()[0]['msg']}",
            hint="give tool_schema in the tool configuration, or return it from get_openai_tool_schema",
        ) from error
    return function_schema(function.name, function.description, function.parameters or None)
