"""Environment ``openenv``: the episodes of an OpenEnv server, one session a trajectory.

    agentrl tasks load 'env:openenv?url=http://127.0.0.1:8000&n=1000&seed=1' --run_name …

Task i resets the server with a seed of its own; what the server then shows is the task's query. The model
acts by its messages, by a tool ``step``, or by the tools that the server lists.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from agentrl.documents.task import Task
from agentrl.environments.base import Environment, Observation, TaskRequest, environment
from agentrl.environments.openenv_session import EpisodeError, InvalidActionError, OpenEnvSession, Step
from agentrl.environments.openenv_tasks import (
    FIRST,
    NAME,
    OPTIONS,
    action_schema,
    action_value,
    listed_tools,
    observation_text,
    refuse,
    settings,
    task_fields,
)
from agentrl.environments.server_address import server_url
from agentrl.errors import FailureError, ServerFullError, TaskEnvironmentError, TaskFileError
from agentrl.permissions import server_name
from agentrl.tools.base import Schema, ToolError

T = TypeVar("T")

_LOAD_SECONDS = 60.0
"""Longest time of a reset when tasks are loaded."""
_SEEDS = 2**31
_SEEDS_OF_ONE = 10_000_000
"""Seeds of one ``seed``: the largest number of tasks of an address."""


@environment(NAME)
class OpenEnv(Environment):
    """An episode of an OpenEnv server: an action is a message of the model, or the call of a tool."""

    options = OPTIONS
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
        options = request.options
        url = server_url(options.get("url", ""), NAME)
        given, shared = settings(action_schema(url), options), task_fields(options)
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
                    query = options.get("query", FIRST)
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
