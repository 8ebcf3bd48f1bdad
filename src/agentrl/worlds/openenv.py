"""Environment ``openenv``: the episodes of an OpenEnv server, one session a trajectory.

A message ``{"type": "reset" | "step" | "state" | "close", "data": …}`` is answered by
``{"type": "observation" | "state" | "error", "data": …}``. The session, with its state, ends with the
connection. The client of the package ``openenv`` is not used: it needs other versions of ``mcp``.

    agentrl tasks load 'env:openenv?url=http://127.0.0.1:8000&n=1000&seed=1' --run_name …

Task i resets the server with a seed of its own; what the server then shows is the task's query. The model
acts by its messages, by a tool ``step``, or by the tools that the server lists.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeVar

from agentrl.base.proxies import proxy_of
from agentrl.base.user_code import server_name
from agentrl.base.validation import SettingsModel
from agentrl.documents.document import excerpt
from agentrl.documents.task import Task
from agentrl.environments.environment import Environment, Observation, TaskRequest, environment
from agentrl.errors import (
    FailureError,
    OutageError,
    ServerFullError,
    SessionLostError,
    TaskEnvironmentError,
    TaskFileError,
)
from agentrl.tools.tool import Schema, ToolError, function_schema
from agentrl.worlds.address import CONNECT_SECONDS, FromOne, JsonObject, get_json, read_options, server_url

NAME = "openenv"
FIRST = "{observation}"
"""The place of the first observation in ``query``."""
_EXAMPLE = f"env:{NAME}?url=http://127.0.0.1:8000"
_SCALARS = ("string", "integer", "number", "boolean")
_CALL = {"tool_name", "arguments"}
"""The fields of the action that calls an MCP tool of the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(SettingsModel):
    """The parameters of an address."""

    url: str = ""
    action: Literal["text", "tool", "mcp"] | None = None
    action_field: str | None = None
    observation_field: str | None = None
    reward: Literal["sum", "last"] = "sum"
    query: str = FIRST
    reset: JsonObject = "{}"
    max_sessions: FromOne | None = None
    max_turns: FromOne | None = None
    system_prompt: str | None = None

    @classmethod
    def read(cls, given: Mapping[str, str]) -> Self:
        """Return the options of an address. Raises TaskFileError."""
        return read_options(cls, given, NAME, _EXAMPLE)


def refuse(problem: str, hint: str | None = None) -> TaskFileError:
    """Return the error of an address that cannot be loaded."""
    return TaskFileError(f"env:{NAME}: {problem}", hint=hint or _EXAMPLE)


def action_schema(url: str) -> Json:
    """Return the JSON schema of the server's actions. Raises TaskFileError."""
    schema = get_json(f"{url}/schema", "an OpenEnv server", headers()).get("action")
    if not isinstance(schema, dict):
        raise refuse(f"{url}/schema has no schema of actions", "this is not an OpenEnv server")
    return schema


def settings(schema: Json, options: Options) -> Json:
    """Return how the model acts, and what it sees, as ``Task.meta`` keeps it. Raises TaskFileError."""
    fields = {name: own for name, own in schema.get("properties", {}).items() if name != "metadata"}
    mode = options.action or _mode(schema, fields, options)
    given: Json = {
        "action": mode,
        "observation_field": options.observation_field,
        "reward": options.reward,
        "reset": json.dumps(json.loads(options.reset)),
        "max_sessions": options.max_sessions,
        "shows_first": FIRST in options.query,
    }
    if mode == "text":
        name = options.action_field or _single(schema, fields)
        kind = fields.get(name or "", {}).get("type")
        if kind not in _SCALARS:
            raise refuse(
                f"action_field={name} is not text, a number or a boolean; the action has {', '.join(fields)}",
                "name another action_field, or give action=tool",
            )
        given |= {"field": name, "type": kind}
    elif mode == "tool":
        given["tools"] = json.dumps([_step_tool(schema, fields)])
    return given


def listed_tools(observation: Json) -> list[Schema]:
    """Return the tools in the answer to ``list_tools``. Raises TaskFileError for none."""
    found = observation.get("tools")
    tools = [tool for tool in found if isinstance(tool, dict)] if isinstance(found, list) else []
    if not tools:
        raise refuse(
            f"the server lists no tools: {excerpt(observation, _EXCERPT)}", "give action=tool or text"
        )
    return [
        function_schema(tool["name"], tool.get("description"), tool.get("input_schema")) for tool in tools
    ]


def action_value(text: str, kind: str) -> Any:
    """Return the model's message as a value of the JSON type ``kind``. Raises ValueError."""
    if kind == "string":
        return text
    value = json.loads(text)
    if isinstance(value, bool) != (kind == "boolean") or not isinstance(value, (int, float)):
        raise ValueError(f"{text.strip()!r} is not of type {kind}")
    return value


def observation_text(observation: Json, field: str | None) -> str:
    """Return what the model reads: a field, the only text among the fields, or all of them as JSON.

    Of a tool's result, it is the result. Raises TaskEnvironmentError if the field is missing.
    """
    if field is not None:
        if field not in observation:
            raise TaskEnvironmentError(
                f"the observation has no field {field!r}; it has {', '.join(observation) or 'none'}",
                hint="correct observation_field= and load the tasks again",
            )
        return _plain(observation[field])
    if "tool_name" in observation and "result" in observation:
        return _tool_result(observation["result"])
    shown = {name: value for name, value in observation.items() if name != "metadata" and value is not None}
    texts = [value for value in shown.values() if isinstance(value, str)]
    return texts[0] if len(texts) == 1 else _plain(shown)


def _tool_result(result: Any) -> str:
    """Return the text of an MCP tool's result: its data, or the texts of its content."""
    if isinstance(result, dict) and result.get("data") is not None:
        return _plain(result["data"])
    content = result.get("content") if isinstance(result, dict) else None
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return _plain(result)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _mode(schema: Json, fields: Json, options: Options) -> str:
    if not fields or fields.keys() >= _CALL:
        return "mcp"
    return "text" if options.action_field is not None or _single(schema, fields) else "tool"


def _single(schema: Json, fields: Json) -> str | None:
    """Return the only field that an action must have if it is a text."""
    required = [name for name in schema.get("required", ()) if name in fields] or list(fields)
    is_text = len(required) == 1 and fields[required[0]].get("type") == "string"
    return required[0] if is_text else None


def _step_tool(schema: Json, fields: Json) -> Schema:
    parameters = {name: value for name, value in schema.items() if name not in ("title", "description")}
    parameters["properties"] = fields
    return function_schema("step", schema.get("description") or "Act in the environment.", parameters)


TOKEN = "OPENENV_TOKEN"
"""The environment variable with the servers' bearer token, such as Hugging Face's for its Spaces."""

_CLOSE_SECONDS = 2.0
_PING_SECONDS = 20.0
"""Interval of pings, and time for their answer: a server that hangs is an outage after both."""
_MAX_BYTES = 100 << 20
_EXCERPT = 300

Json = dict[str, Any]


class InvalidActionError(Exception):
    """The server refuses the action: it does not match its schema."""


class EpisodeError(TaskEnvironmentError):
    """The environment raised on the server; its session goes on."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a reset or a step returns."""

    observation: Json
    reward: float | None
    done: bool


def headers() -> dict[str, str]:
    """Return the headers of requests to OpenEnv servers."""
    token = os.environ.get(TOKEN)
    return {"Authorization": f"Bearer {token}"} if token else {}


class OpenEnvSession:
    """One session with a server. Calls that arrive at the same time are made one after another."""

    def __init__(self, url: str) -> None:
        """``url`` begins with ``http://`` or ``https://``, and has no slash at its end."""
        self.url = url
        self._socket: Any = None
        self._turn = asyncio.Lock()
        self._has_state = False
        self._over: FailureError | None = None
        """Why no more calls can be made."""

    async def open(self) -> None:
        """Connect. Raises OutageError."""
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        try:
            self._socket = await connect(
                f"ws{self.url.removeprefix('http')}/ws", open_timeout=CONNECT_SECONDS,
                close_timeout=_CLOSE_SECONDS, ping_interval=_PING_SECONDS, ping_timeout=_PING_SECONDS,
                max_size=_MAX_BYTES, additional_headers=headers(),
                proxy=proxy_of(self.url),
            )  # fmt: skip
        except (OSError, TimeoutError, WebSocketException) as error:
            raise OutageError(
                f"OpenEnv server {self.url} cannot be reached: {type(error).__name__}: {error}"
            ) from error

    async def reset(self, **parameters: Any) -> Step:
        """Begin an episode. Raises ServerFullError, OutageError and TaskEnvironmentError."""
        step = _step(await self._ask("reset", parameters))
        self._has_state = True
        return step

    async def step(self, action: Mapping[str, Any]) -> Step:
        """Do one action. Raises InvalidActionError, SessionLostError and TaskEnvironmentError."""
        return _step(await self._ask("step", dict(action)))

    async def close(self) -> None:
        """Disconnect, which ends the session on the server. Idempotent."""
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()

    async def _ask(self, kind: str, data: Json) -> Json:
        """Send one message and return the data of its answer. A call that was cut off ends the session."""
        from websockets.exceptions import ConnectionClosed

        async with self._turn:
            if self._socket is None:
                raise TaskEnvironmentError(f"the session with OpenEnv server {self.url} is not open")
            if self._over is not None:
                raise self._over
            self._over = TaskEnvironmentError(
                f"the session with OpenEnv server {self.url} is over: an earlier call was cut off",
                hint="raise --tool_timeout_seconds",
            )
            try:
                # A server without a free session says so before it reads: what it said can still be received.
                with suppress(ConnectionClosed):
                    await self._socket.send(json.dumps({"type": kind, "data": data}))
                answer = await self._socket.recv()
            except ConnectionClosed as error:
                why = f"OpenEnv server {self.url} closed the connection: {error}"
                self._over = SessionLostError(why) if self._has_state else OutageError(why)
                raise self._over from error
            self._over = None
        return self._data(answer)

    def _data(self, answer: str | bytes) -> Json:
        try:
            said = json.loads(answer)
            kind, data = said["type"], said["data"]
        except (ValueError, TypeError, KeyError):
            kind, data = "", None
        if not isinstance(data, dict) or kind not in ("observation", "state", "error"):
            raise TaskEnvironmentError(
                f"OpenEnv server {self.url} gave an answer that is not OpenEnv's: {excerpt(answer, _EXCERPT)}"
            )
        if kind != "error":
            return data
        code, message = data.get("code"), str(data.get("message", ""))
        if code == "CAPACITY_REACHED":
            most = data.get("max_sessions")
            raise ServerFullError(
                f"OpenEnv server {self.url} has no free session: {message}",
                sessions=most if isinstance(most, int) else None,
            )
        if code == "VALIDATION_ERROR":
            raise InvalidActionError(_invalid(data.get("errors")) or message)
        failure = EpisodeError if code == "EXECUTION_ERROR" else TaskEnvironmentError
        raise failure(f"OpenEnv server {self.url} answered {code}: {message[:_EXCERPT]}")


def _step(data: Json) -> Step:
    observation, reward = data.get("observation"), data.get("reward")
    return Step(
        observation if isinstance(observation, dict) else {},
        None if reward is None else float(reward),
        bool(data.get("done")),
    )


def _invalid(errors: Any) -> str:
    """Return what pydantic says of an action, as the model reads it."""
    if not isinstance(errors, list):
        return ""
    found = [error for error in errors if isinstance(error, dict)]
    return "; ".join(f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg')}" for error in found)


T = TypeVar("T")

_LOAD_SECONDS = 60.0
"""Longest time of a reset when tasks are loaded."""
_SEEDS = 2**31
_SEEDS_OF_ONE = 10_000_000
"""Seeds of one ``seed``: the largest number of tasks of an address."""


@environment(NAME)
class OpenEnv(Environment):
    """An episode of an OpenEnv server: an action is a message of the model, or the call of a tool."""

    options = tuple(item.name for item in dataclasses.fields(Options))
    _sessions: ClassVar[dict[str, int]] = {}
    """Server → its number of sessions, once it has refused one."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._given: Mapping[str, Any] = task.meta[NAME]
        self._session = OpenEnvSession(str(task.meta["server"]))
        self._rewards: list[float] = []

    @classmethod
    def tasks(cls, request: TaskRequest) -> Iterator[Mapping[str, Any]]:
        """Yield one task for each seed. Raises TaskFileError for a server that cannot be reached or used."""
        options = Options.read(request.options)
        url = server_url(options.url, NAME)
        given = settings(action_schema(url), options)
        own = {"max_turns": options.max_turns, "system_prompt": options.system_prompt}
        shared = {name: value for name, value in own.items() if value is not None}
        with asyncio.Runner() as runner:

            def ask(call: Awaitable[T]) -> T:
                return runner.run(asyncio.wait_for(call, _LOAD_SECONDS))

            session = OpenEnvSession(url)
            try:
                ask(session.open())
                if given["action"] == "mcp":
                    listed = ask(session.step({"type": "list_tools"}))
                    given["tools"] = json.dumps(listed_tools(listed.observation))
                for index in range(request.n):
                    seed = (request.seed * _SEEDS_OF_ONE + index) % _SEEDS
                    seed += 0 if request.split == "train" else _SEEDS
                    query = options.query
                    if given["shows_first"]:
                        first = _first_text(ask(_reset(session, given, seed)), given)
                        if index == 0 and _first_text(ask(_reset(session, given, seed)), given) != first:
                            raise _differs(url, seed)
                        query = query.replace(FIRST, first)
                    yield {"query": query, "meta": {"server": url, NAME: {**given, "seed": seed}}, **shared}
            except FailureError as error:
                raise refuse(error.message, error.hint) from error
            except InvalidActionError as error:
                raise refuse(f"{url} lists no tools: {error}", "give action=text or tool") from error
            except TimeoutError as error:
                raise refuse(f"{url} gave no answer in {_LOAD_SECONDS:g} s", "is it overloaded?") from error
            finally:
                runner.run(session.close())

    @classmethod
    def names(cls, task: Task) -> list[str]:
        """Return the server of the task."""
        return [server_name(str(task.meta.get("server")))]

    @classmethod
    def tool_schemas(cls, task: Task) -> Sequence[Schema]:
        """Return the tools that the server listed when the task was loaded."""
        tools: list[Schema] = json.loads(task.meta[NAME].get("tools", "[]"))
        return tools

    @classmethod
    def limit_of(cls, task: Task) -> int | None:
        """Return ``max_sessions`` of the address, or the number that the server has named."""
        known = (task.meta[NAME].get("max_sessions"), cls._sessions.get(str(task.meta["server"])))
        return min((limit for limit in known if limit is not None), default=None)

    async def setup(self) -> None:
        """Open the session and reset it with the task's seed. Raises TaskEnvironmentError if it differs."""
        await self._session.open()
        try:
            first = await _reset(self._session, self._given, self._given["seed"])
        except ServerFullError as error:
            if error.sessions is not None:
                self._sessions[self._session.url] = max(1, error.sessions)
            raise
        if self._given["shows_first"] and self._text(first) not in self.task.query:
            raise TaskEnvironmentError(
                f"{self._session.url} begins seed {self._given['seed']} otherwise than when it was loaded",
                hint="load the tasks again after the server's environment has changed",
            )
        self._note(first)

    async def step(self, text: str) -> Observation:
        """Do the action that the message is; with tools, a message without a call ends the episode."""
        if self._given["action"] != "text" or self.is_done:
            return Observation("", done=True)
        try:
            value = action_value(text, self._given["type"])
            step = await self._session.step({self._given["field"]: value})
        except (ValueError, InvalidActionError) as error:
            return Observation(f"This action is invalid: {error}")
        self._note(step)
        return Observation(self._text(step), done=step.done)

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Do the action that the call is; the model reads why it is refused."""
        if self.is_done:
            raise ToolError("the episode is over")
        action = dict(arguments)
        if self._given["action"] == "mcp":
            action = {"type": "call_tool", "tool_name": name, "arguments": action}
        try:
            step = await self._session.step(action)
        except (InvalidActionError, EpisodeError) as error:
            raise ToolError(str(error)) from error
        self._note(step)
        if (problem := step.observation.get("error")) and self._given["action"] == "mcp":
            raise ToolError(str(problem.get("message") if isinstance(problem, dict) else problem))
        return self._text(step)

    def reward(self) -> float:
        """Return the sum of the steps' rewards, or the last one; 0 for an episode without any."""
        return sum(self._rewards) if self._given["reward"] == "sum" else (self._rewards or [0.0])[-1]

    async def teardown(self) -> None:
        """End the session."""
        await self._session.close()

    def _note(self, step: Step) -> None:
        self.is_done = step.done
        if step.reward is not None:
            self._rewards.append(step.reward)

    def _text(self, step: Step) -> str:
        return observation_text(step.observation, self._given["observation_field"])


async def _reset(session: OpenEnvSession, given: Mapping[str, Any], seed: int) -> Step:
    return await session.reset(**json.loads(given["reset"]), seed=seed)


def _first_text(first: Step, given: Mapping[str, Any]) -> str:
    """Return the text of a first observation. Raises TaskFileError if there is none."""
    text = observation_text(first.observation, given["observation_field"])
    if text in ("", "{}"):
        raise refuse("the first observation has no text", "give query=TEXT or observation_field=NAME")
    return text


def _differs(url: str, seed: int) -> TaskFileError:
    return refuse(
        f"two resets of {url} with seed {seed} show different observations: a group would not share its task",
        "the environment must use the seed of reset; if only a part differs, name another as"
        " observation_field=, or give query=TEXT",
    )
