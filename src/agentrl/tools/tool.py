"""Define tools independently of any protocol: servers, their sessions with trajectories, and outages."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from agentrl.base.concurrency import Threads, time_limit
from agentrl.base.user_code import contain
from agentrl.documents.images import Image
from agentrl.documents.model_call import Condensed
from agentrl.documents.task import Claim
from agentrl.errors import FailureError, OutageError, ToolServerError, tool_server

Schema = dict[str, Any]
"""An OpenAI function schema: ``{"type": "function", "function": {name, description, parameters}}``."""

ENVIRONMENT = "environment"
"""The name under which the tools of a task's environment and its reward are recorded."""

ROLES = "roles"
"""The name under which the rewards of roles are recorded beside ``state``."""
T = TypeVar("T")
_MAX_CAUSES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryInfo:
    """What tools may know of a trajectory. ``id`` is its Record's id; MCP servers receive it in ``_meta``."""

    id: str
    servers: tuple[str, ...] | None = None
    """The servers whose tools are offered: the task's ``tools``. None: all."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """The task's ``meta``."""
    question: str = ""
    """The task's query."""

    @classmethod
    def of(cls, claim: Claim) -> TrajectoryInfo:
        """Return the trajectory of a claim."""
        task = claim.task
        return cls(id=claim.record_id, servers=task.tools, meta=task.meta, question=task.query)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A server's answer to one call. ``error``: the call failed, and the model reads the text."""

    text: str
    error: bool = False
    reward: float | None = None
    """The reward that the tool itself gives to the call, if it gives one."""
    max_chars: int | None = None
    """Where the text is cut; None leaves --max_tool_result_chars."""
    lost: bool = False
    """The server gave no answer: the call took too long, or the connection broke."""
    images: tuple[Image, ...] = ()
    """Images that the tool returned; ``text`` describes them for models that read text only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The result of a tool call, as the trajectory records it."""

    text: str
    error: bool
    seconds: float
    server: str
    reward: float | None = None
    condensed: Condensed | None = None
    """Set if the browse agent tried to condense the tool's own text."""
    images: tuple[Image, ...] = ()


class ServerSession(Protocol):
    """One server's session with one trajectory. Each method raises ToolServerError if the server is lost.

    ``open`` and ``close`` do nothing unless a subclass has something to prepare.
    """

    async def open(self) -> None:
        """Prepare the trajectory's state: the setup hook. Called once, before any other method."""
        return

    async def list(self) -> Sequence[Schema]:
        """Return the schemas of its tools, sorted by name."""
        ...

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Reply:
        """Call one tool. Calls of one session may run in parallel."""
        ...

    async def close(self) -> None:
        """Release the trajectory's state: the teardown hook. Idempotent; its errors are logged."""
        return


class OwnSession(ServerSession, Protocol):
    """Tools that belong to one trajectory only: those of its environment."""

    @property
    def schemas(self) -> Sequence[Schema]:
        """Return the schemas of its tools, sorted by name."""
        ...


@runtime_checkable
class Rewarding(Protocol):
    """A session whose tool gives a reward for the trajectory's state at its end."""

    async def reward(self) -> float | Mapping[str, float] | None:
        """Return the reward, or {role: reward}; None if there is none. Raises ToolServerError."""
        ...


class ToolServer(Protocol):
    """One configured tool server of this process. One that runs in it has nothing to open and to close."""

    name: str

    async def open(self) -> None:
        """Connect. Raises ToolServerError if the server cannot be reached."""
        return

    @property
    def schemas(self) -> Sequence[Schema]:
        """Return the schemas of its tools as it last listed them, sorted by name."""
        ...

    def session(self, trajectory: TrajectoryInfo) -> ServerSession:
        """Return a session for one trajectory; its caller opens and closes it."""
        ...

    async def close(self) -> None:
        """Disconnect; abandon running calls. Idempotent."""
        return


def function_schema(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> Schema:
    """Return the schema of a tool, as chat templates and the OpenAI API expect it."""
    function = {
        "name": name,
        "description": description or "",
        "parameters": dict(parameters or {"type": "object", "properties": {}}),
    }
    return {"type": "function", "function": function}


def schema_name(schema: Mapping[str, Any]) -> str:
    """Return the tool's name in a function schema."""
    return str(schema["function"]["name"])


def timed_out(tool: str, seconds: float | None, *, lost: bool = False) -> Reply:
    """Return the reply to a call without an answer in time."""
    text = f"{tool} was stopped: it did not answer within {seconds or 0.0:g} s"
    return Reply(text=text, error=True, lost=lost)


def text_of(value: Any) -> str:
    """Return what a Python tool returned as text: text as it is, nothing for None, other values as JSON."""
    from pydantic_core import to_json

    if isinstance(value, str):
        return value
    # Use pydantic's writer: tools return models, dates and dataclasses, which json.dumps refuses.
    return "" if value is None else to_json(value, fallback=str, inf_nan_mode="null").decode()


class ToolError(FailureError):
    """A tool raised; the model reads the message."""

    kind = "tool"


async def run_function(
    threads: Threads, function: Callable[..., Any], /, *arguments: Any, **named: Any
) -> Any:
    """Await an async function; run any other in one of ``threads``, and await what it returns if need be."""
    with threads.asyncios():
        # Look behind decorators: a plain wrapper of an async function would take a thread for nothing.
        if inspect.iscoroutinefunction(inspect.unwrap(function)):
            return await function(*arguments, **named)
        result = await threads.run(function, *arguments, **named)
        return await result if inspect.isawaitable(result) else result


async def contain_within(
    seconds: float,
    work: Callable[[], Awaitable[T]],
    what: str,
    failure: type[FailureError],
    *,
    hint: str | None = None,
) -> T:
    """Return the result of ``work()``. Raises ``failure`` if it raises or takes longer than ``seconds``.

    Waiting for a thread does not count.
    """
    try:
        async with time_limit(seconds):
            return await contain(work, what, failure)
    except TimeoutError as error:
        raise failure(f"{what} took longer than {seconds:g} s", hint=hint) from error


async def reply_within(seconds: float, work: Callable[[], Awaitable[Reply]], tool: str) -> Reply:
    """Return the reply of a tool of this process; an exception and a timeout are errors in it.

    Waiting for a thread does not count. A thread goes on after its time. Raises any FailureError of the tool.
    """
    try:
        async with time_limit(seconds):
            return await contain(work, f"tool {tool}", ToolError)
    except TimeoutError:
        return timed_out(tool, seconds)
    except ToolError as error:
        return Reply(text=error.message, error=True)


@contextmanager
def outages_of(server: str) -> Iterator[None]:
    """Name ``server`` as what is down in each OutageError of the block."""
    try:
        yield
    except OutageError as error:
        error.outage = error.outage or tool_server(server)
        raise


@contextmanager
def unreachable_is_outage(server: str) -> Iterator[None]:
    """Make each ToolServerError of the block an outage of ``server`` if a connection or a time-out caused it.

    Its cause is a ConnectionError or a TimeoutError, or an error that one of these led to.
    """
    try:
        yield
    except ToolServerError as error:
        if error.outage is None and _is_unreachable(error):
            error.outage = tool_server(server)
        raise


def _is_unreachable(error: BaseException) -> bool:
    cause: BaseException | None = error
    # Bound the walk: code of users may chain causes in a circle, which Python allows.
    for _ in range(_MAX_CAUSES):
        if cause is None or isinstance(cause, ConnectionError | TimeoutError):
            return cause is not None
        # Follow what a traceback would show: after `raise … from None` the context says nothing.
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False
