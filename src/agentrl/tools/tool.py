"""Define tools independently of any protocol: servers, their sessions with a trajectory, names, outages."""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

from agentrl.base.concurrency import Threads, task_group, time_limit
from agentrl.base.user_code import contain
from agentrl.chat.parsers.arguments import unknown_tool
from agentrl.documents.document import now, replace_surrogates
from agentrl.documents.images import Image
from agentrl.documents.model_call import Condensed, ToolExecution, read_arguments
from agentrl.documents.status import ToolState
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
_NOT_SHOWN = re.compile(r"(\[image, [^\]\n]{1,200}); not shown\]")
"""The description of an image that the model sees behind the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryInfo:
    """What tools may know of a trajectory. ``id`` is its Record's id."""

    id: str
    attempt: int | None = None
    """The claim that goes on with a trajectory of an earlier one; None for the one that began it."""
    servers: tuple[str, ...] | None = None
    """The servers whose tools are offered: the task's ``tools``. None: all."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """The task's ``meta``."""
    question: str = ""
    """The task's query."""

    @classmethod
    def of(cls, claim: Claim) -> TrajectoryInfo:
        """Return the trajectory of a claim."""
        task, attempt = claim.task, claim.attempt
        return cls(
            id=claim.record_id, attempt=None if attempt == claim.first_attempt else attempt,
            servers=task.tools, meta=task.meta, question=task.query,
        )  # fmt: skip

    def key(self, *, replayed: bool) -> str:
        """Return the id by which a server keeps state of the trajectory.

        State that is ``replayed`` begins anew, under an id of the owner: the last one may have left some, and
        it may still act if it only seemed dead. Any other state goes on under the Record's id.
        """
        return f"{self.id}@{self.attempt}" if replayed and self.attempt is not None else self.id


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
    started_at: datetime | None = None
    """When it began to run, after its wait for other calls of the turn."""


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

    def state_of(self, tool: str) -> ToolState:
        """Return what a tool keeps between its calls."""
        return ToolState.REPLAY

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


@runtime_checkable
class KeepsFiles(Protocol):
    """A session whose files can be kept, so that a new session goes on with them."""

    @property
    def keeps_files(self) -> bool:
        """Return whether ``snapshot`` may keep something."""
        ...

    async def snapshot(self) -> str | None:
        """Keep the files as they are now; return the reference to them, None if they are not kept."""
        ...

    async def restore(self, reference: str) -> bool:
        """Give a new session the files of a snapshot; return False if it is not there."""
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


Condense = Callable[[str, Mapping[str, Any], str], Awaitable[Condensed | None]]
"""Returns a tool's text condensed, by the tool's name, arguments and text; None leaves it as it is."""


_SAFE = re.compile(r"[^\W\d][\w.-]{0,63}")
"""Names that every chat format can call; OpenAI's and Anthropic's APIs take 64 characters too."""
_UNSAFE = re.compile(r"[^\w.-]")
_LONGEST = 64


class ToolNames:
    """The names under which the tools of several servers are offered: safe, and each for one tool.

    A name depends on the names of the tools alone, since it stands in prompts that are trained.
    """

    def __init__(self, tools: Mapping[str, Iterable[Schema]]) -> None:
        """``tools`` holds each server's schemas, by the server's name."""
        own = {(server, schema_name(schema)) for server, schemas in tools.items() for schema in schemas}
        servers_with = Counter(tool for _, tool in own)
        self._shared = {tool for tool, count in servers_with.items() if count > 1}
        self._offered: dict[tuple[str, str], str] = {}
        self.targets: dict[str, tuple[str, str]] = {}
        """Name that the model sees → the server and its own name for the tool."""
        # Name safe ones first, so that no renamed tool takes their names; sort for the same names everywhere.
        for server, tool in sorted(own, key=lambda of: (not _SAFE.fullmatch(self._plain(*of)), of)):
            self.offered(server, tool)

    def offered(self, server: str, tool: str) -> str:
        """Return the name that the model sees, also for a tool that a server has added since."""
        key = (server, tool)
        if key not in self._offered:
            name = plain = self._plain(server, tool)
            if not _SAFE.fullmatch(plain):
                name = _UNSAFE.sub("_", plain)
                name = name if _SAFE.match(name) else f"_{name}"
            if len(name) > _LONGEST or name in self.targets:
                digest = sha256("\0".join(key).encode("utf-8", "replace")).hexdigest()[:8]
                name = f"{name[: _LONGEST - 9]}_{digest}"
            self._offered[key] = name
            self.targets[name] = key
        return self._offered[key]

    def _plain(self, server: str, tool: str) -> str:
        return f"{server}.{tool}" if tool in self._shared else tool

    def renamed(self, server: str, schema: Schema) -> Schema:
        """Return ``schema`` under the name that the model sees."""
        function = schema["function"]
        name = self.offered(server, function["name"])
        return function_schema(name, function["description"], function["parameters"])


class ToolSession:
    """One trajectory's sessions with its servers, as one: ``async with pool.session(trajectory)``."""

    def __init__(
        self,
        sessions: Mapping[str, ServerSession],
        names: ToolNames,
        *,
        max_chars: int,
        max_parallel: int,
        condense: Condense | None = None,
    ) -> None:
        """``sessions`` are the trajectory's, by server. A result longer than ``max_chars`` is cut, and
        ``max_parallel`` calls run at a time. ``condense`` may shorten a result before it is cut."""
        self._sessions = sessions
        self._names = names
        self._max_chars = max_chars
        self._condense = condense
        self._slots = asyncio.Semaphore(max_parallel)
        self._call_rewards: dict[str, list[float]] = {}
        self._listed: set[str] = set()
        """The names that were ever offered."""
        own = sessions.get(ENVIRONMENT)
        self._files = own if isinstance(own, KeepsFiles) and own.keeps_files else None

    async def __aenter__(self) -> Self:
        try:
            async with task_group() as opening:
                for name, session in self._sessions.items():
                    opening.create_task(_open(name, session))
        # Close what has opened: ``__aexit__`` is not called if ``__aenter__`` raises.
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def list(self) -> Sequence[Schema]:
        """Return the function schemas of the tools offered now, sorted by name."""
        offered = [
            self._names.renamed(server, schema)
            for server, session in self._sessions.items()
            for schema in await session.list()
        ]
        self._listed.update(map(schema_name, offered))
        return sorted(offered, key=schema_name)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call one tool by the name that ``list`` gives it.

        The tool's error and its timeout are results. Raises ToolServerError for a lost server.
        """
        target = await self._target(name)
        if target is None:
            text = (
                f"there is no tool {name} any more: its server no longer lists it"
                if name in self._listed
                else unknown_tool(name, await self.list())
            )
            return ToolResult(text=text, error=True, seconds=0.0, server="")
        server, tool = target
        reply, seconds = await self._reply(server, tool, arguments)
        started_at = now() - timedelta(milliseconds=round(1000 * seconds))
        if reply.reward is not None:
            self._call_rewards.setdefault(name, []).append(reply.reward)
        text, condensed = reply.text, None
        # Condense outside of the slot: it waits for a model while other tools could run.
        if self._condense is not None and not reply.error:
            condensed = await self._condense(name, arguments, text)
            if condensed is not None and condensed.result is not None:
                text = condensed.result
        return ToolResult(
            text=_cut(text, reply.max_chars or self._max_chars),
            error=reply.error,
            seconds=seconds,
            server=server,
            reward=reply.reward,
            condensed=condensed,
            images=reply.images,
            started_at=started_at,
        )

    def state_of(self, name: str, server: str | None = None) -> ToolState:
        """Return what the tool ``name`` keeps between its calls; ``outside`` if no server has such a tool.

        ``server`` is the one that a stored call names: it may list the tool only after earlier calls.
        """
        known, tool = self._names.targets.get(name, (server, name))
        session = None if known is None else self._sessions.get(known)
        return ToolState.OUTSIDE if session is None else session.state_of(tool)

    def recall(self, execution: ToolExecution) -> None:
        """Count the reward of a stored call that is not made again."""
        if execution.reward is not None:
            self._call_rewards.setdefault(execution.name, []).append(execution.reward)

    async def replay(self, executions: Sequence[ToolExecution]) -> int | None:
        """Make stored calls again, in order, so that new sessions have the state of those that are gone.

        Calls of tools that are ``stateless`` or ``outside`` are left out. Return the index of the first call
        that ends otherwise than it is stored, in text, error or images; None if none does. Rewards are not
        counted again: see ``recall``. Raises ToolServerError for a lost server.
        """
        for index, execution in enumerate(executions):
            state = self.state_of(execution.name, execution.server)
            if state in (ToolState.REPLAY, ToolState.SNAPSHOT) and not await self._repeats(execution):
                return index
        return None

    @property
    def keeps_files(self) -> bool:
        """Return whether files of a tool can be kept: those of an environment."""
        return self._files is not None

    async def snapshot(self) -> str | None:
        """Keep the files of ``snapshot`` tools as they are now, between two calls; return the reference."""
        return None if self._files is None else await self._files.snapshot()

    async def restore(self, reference: str) -> bool:
        """Restore files before the first call; return False if they are not there. Raises ToolServerError."""
        return self._files is not None and await self._files.restore(reference)

    async def rewards(self) -> dict[str, dict[str, Any]]:
        """Return ``{tool: {"calls": rewards of its calls, "state": reward of its state}}`` of tools that give
        rewards; call it before ``close``. Rewards of roles are ``roles``, and the first is that of the state.
        What an environment's reward was made of is ``details``.
        Raises ToolServerError."""
        rewards: dict[str, dict[str, Any]] = {
            name: {"calls": list(calls)} for name, calls in self._call_rewards.items()
        }
        for server, session in self._sessions.items():
            with outages_of(server):
                state = await session.reward() if isinstance(session, Rewarding) else None
            if isinstance(state, Mapping):
                first = next(iter(state.values()))
                rewards.setdefault(server, {"calls": []}).update({"state": first, ROLES: dict(state)})
            elif state is not None:
                rewards.setdefault(server, {"calls": []})["state"] = state
            if details := getattr(session, "reward_details", None):
                rewards[server]["details"] = details
        return rewards

    async def close(self) -> None:
        """Close every session: their teardown hooks. Idempotent."""
        await asyncio.gather(*(session.close() for session in self._sessions.values()))

    async def _reply(self, server: str, tool: str, arguments: Mapping[str, Any]) -> tuple[Reply, float]:
        """Return a server's answer to one call, and the seconds that it took."""
        async with self._slots:
            # Start the clock in the slot: the tool's seconds do not hold the wait for other tools.
            start = time.monotonic()
            with outages_of(server):
                reply = await self._sessions[server].call(tool, arguments)
            return reply, time.monotonic() - start

    async def _repeats(self, execution: ToolExecution) -> bool:
        """Make a stored call again; return whether it ends as it is stored."""
        target, arguments = await self._target(execution.name), read_arguments(execution.arguments)
        if target is None or not isinstance(arguments, Mapping):
            return False
        reply, _ = await self._reply(*target, arguments)
        if reply.error != execution.error:
            return False
        if execution.condensed is not None:
            # Compare the tool's own text: a model that condenses it again may write another one.
            own, stored = str(replace_surrogates(reply.text)), execution.condensed
            return len(own) == stored.chars and own.startswith(stored.original)
        images = tuple(image.ref for image in reply.images) if execution.images else ()
        text = _cut(reply.text, reply.max_chars or self._max_chars)
        return images == execution.images and stored_text(text, len(images)) == execution.result

    async def _target(self, name: str) -> tuple[str, str] | None:
        for server, session in self._sessions.items():
            for schema in await session.list():
                tool = schema_name(schema)
                if self._names.offered(server, tool) == name:
                    return server, tool
        return None


def stored_text(text: str, images: int) -> str:
    """Return a tool's text as it is stored, and the model reads it before the first ``images`` images."""
    return str(replace_surrogates(_NOT_SHOWN.sub(r"\1]", text, count=images) if images else text))


async def _open(server: str, session: ServerSession) -> None:
    with outages_of(server):
        try:
            await session.open()
        except asyncio.CancelledError:  # a task group would take it for an opened session
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise ToolServerError(f"the opening of tool server {server} was cancelled") from None


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[cut: {len(text) - limit} more characters]"
