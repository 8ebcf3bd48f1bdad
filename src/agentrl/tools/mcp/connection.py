"""Hold one connection to an MCP server: open it, list its tools, call them, notice when it is lost.

Not by ``mcp.client.stdio``: it bounds no line, ends at a byte that is not UTF-8, and hides the exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from agentrl.base.atomic_folder import scratch_folder
from agentrl.base.concurrency import background
from agentrl.base.untrusted_folder import discard
from agentrl.documents.document import shortened
from agentrl.tools.config import WORKDIR, Limits, McpSpec, StdioSpec, redact_secrets
from agentrl.tools.mcp.content import (
    LOST,
    MAX_MESSAGE_BYTES,
    NOT_SENT,
    NOT_VALID,
    OWN_ERROR,
    REFUSED,
    REJECTED,
    SESSION_LOST,
    TIMED_OUT,
    TOO_LARGE,
    NormalizedStream,
    images_in,
    read_message,
    reasons,
    render_item,
    render_resource,
)
from agentrl.tools.tool import Reply, Schema, function_schema, schema_name, timed_out

if TYPE_CHECKING:
    import httpx2
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp import Client, MCPError
    from mcp.shared.message import SessionMessage
    from mcp_types import CallToolResult

logger = logging.getLogger(__name__)

_EXIT_SECONDS = 2.0
"""How long a server may take to exit after its stdin closes, and again after SIGTERM."""
_CHUNK = 2**18
_ENDS = 4096
"""Bytes kept of both ends of a line that is too long: they hold the request's id."""
_MAX_GARBAGE_LINES = 1000
_STDERR_LINES = 20
_KEPT_BYTES = 4096
"""Bytes kept of a line that is no message; secrets are looked for in them before they are shown."""
_ID = re.compile(rb'"id"\s*:\s*(\d+)')
_BEGIN = re.compile(rb'\{\s*"(?:jsonrpc|id|method|params|result|error)"\s*:')
_MOST_BEGINNINGS = 8
"""Places in a line that are tried as the beginning of an answer."""
_ANSWER = re.compile(rb'"(?:result|error)"\s*:')


class StdioProcess:
    """One server process; ``transport`` is its MCP transport."""

    def __init__(self, spec: StdioSpec) -> None:
        self._spec = spec
        self._process: asyncio.subprocess.Process | None = None
        self._stderr: deque[str] = deque(maxlen=_STDERR_LINES)
        self._problem = ""
        self._printed = ""
        """The last line of stdout that is not a message."""

    @property
    def is_running(self) -> bool:
        """Return whether the process runs, as the kernel sees it now."""
        if self._process is None or self._process.returncode is not None:
            return False
        with contextlib.suppress(ChildProcessError):
            # Ask the kernel: asyncio learns of an exit later, and needs the status that WNOWAIT leaves.
            seen = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return seen is None
        return False

    @property
    def has_failed(self) -> bool:
        """Return whether the process has ended with an exit code of its own that is an error."""
        return self._process is not None and (self._process.returncode or 0) > 0

    def last_words(self) -> str:
        """Return why the process ended: its exit code and what it printed last, without secrets."""
        parts = [self._problem] if self._problem else []
        if self._process is not None and self._process.returncode is not None:
            parts.append(f"it exited with code {self._process.returncode}")
        if self._printed:
            printed = redact_secrets(self._printed, self._spec)[:200]
            parts.append(f"printed to stdout, where MCP messages go: {printed}")
        if self._stderr:
            parts.append("stderr: " + redact_secrets(" | ".join(self._stderr)[-500:], self._spec))
        return "; ".join(parts)

    @asynccontextmanager
    async def transport(self) -> AsyncIterator[tuple[Any, Any]]:
        """Start the process, yield its streams, and end the process group. Raises OSError."""
        with private_folder(self._spec) as spec:
            async with self._running(spec) as streams:
                yield streams

    @asynccontextmanager
    async def _running(self, spec: StdioSpec) -> AsyncIterator[tuple[Any, Any]]:
        import anyio
        from mcp.client.stdio import get_default_environment

        process = self._process = await asyncio.create_subprocess_exec(
            spec.command,
            *spec.args,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=get_default_environment() | dict(spec.env),
            cwd=spec.cwd,
            limit=_CHUNK,
            # Start a group of its own: `_end` reaches children by it, and Ctrl-C at a terminal does not.
            start_new_session=True,
        )
        received, read = anyio.create_memory_object_stream[Any](0)
        write, to_send = anyio.create_memory_object_stream[Any](0)
        pumps = (
            self._read(process, received), self._write(process, to_send, received),
            self._keep_stderr(process),
        )  # fmt: skip
        try:
            async with background(*pumps):
                try:
                    yield read, write
                finally:
                    for stream in (read, write):
                        stream.close()
                    await _end(process)
        finally:
            process._transport.close()  # type: ignore[attr-defined]  # closes pipes that hold unread bytes
            for stream in (received, to_send):
                stream.close()

    async def _read(
        self, process: asyncio.subprocess.Process, received: MemoryObjectSendStream[SessionMessage]
    ) -> None:
        """Send each message of stdout to the session; end the stream at EOF or after too much garbage."""
        import anyio

        garbage, lines = 0, LineReader(_stream(process.stdout))
        async with received:
            while garbage < _MAX_GARBAGE_LINES:
                line = await lines.next()
                if line is None:
                    return
                message = _parse(line)
                if message is None:
                    if text := line.strip()[:_KEPT_BYTES].decode("utf-8", "replace"):
                        garbage, self._printed = garbage + 1, text
                    continue
                garbage = 0
                try:
                    await received.send(message)
                except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                    return
            self._problem = f"it wrote {garbage} lines to stdout that are not MCP messages; print to stderr"

    async def _write(
        self,
        process: asyncio.subprocess.Process,
        to_send: MemoryObjectReceiveStream[SessionMessage],
        received: MemoryObjectSendStream[SessionMessage],
    ) -> None:
        """Write the session's messages to stdin; end the read stream when the server takes no more."""
        if process.stdin is None:
            raise RuntimeError("the process has no stdin")
        try:
            async with to_send:
                async for item in to_send:
                    text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
                    # Pass lone surrogates: an error here would end the writer, and the connection with it.
                    process.stdin.write(text.encode("utf-8", "surrogatepass") + b"\n")
                    await process.stdin.drain()
        except OSError:
            await received.aclose()

    async def _keep_stderr(self, process: asyncio.subprocess.Process) -> None:
        lines = LineReader(_stream(process.stderr))
        while (line := await lines.next()) is not None:
            text = line[:2000].decode("utf-8", "replace").rstrip()
            self._stderr.append(text)
            logger.debug("tool server: %s", text, extra={"server": self._spec.name})


@contextmanager
def private_folder(spec: StdioSpec) -> Iterator[StdioSpec]:
    """Yield ``spec`` with ``${workdir}`` replaced by a new folder, which is deleted at the end."""
    texts = [*spec.args, *spec.env.values(), spec.cwd or ""]
    if not any(WORKDIR in text for text in texts):
        yield spec
        return
    folder = str(scratch_folder(spec.name))
    try:
        yield replace(
            spec,
            args=tuple(arg.replace(WORKDIR, folder) for arg in spec.args),
            env={name: value.replace(WORKDIR, folder) for name, value in spec.env.items()},
            cwd=None if spec.cwd is None else spec.cwd.replace(WORKDIR, folder),
        )
    finally:
        discard(folder)


def _stream(stream: asyncio.StreamReader | None) -> asyncio.StreamReader:
    if stream is None:
        raise RuntimeError("the process has no pipe")
    return stream


class LineReader:
    """Reads lines of bounded length from a pipe. Each byte is searched once."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream = stream
        self._buffer = bytearray()

    async def next(self) -> bytes | None:
        """Return the next line; of one that is too long, its two ends around a NUL; None at the end."""
        searched = 0
        while True:
            end = self._buffer.find(b"\n", searched)
            if end >= 0:
                return self._take(end + 1)
            searched = len(self._buffer)
            if searched > MAX_MESSAGE_BYTES:
                return await self._skip()
            chunk = await self._stream.read(_CHUNK)
            if not chunk:
                return self._take(searched) or None
            self._buffer += chunk

    async def _skip(self) -> bytes:
        first, last = self._take(_ENDS), bytes(self._buffer[-_ENDS:])
        while chunk := await self._stream.read(_CHUNK):
            end = chunk.find(b"\n")
            if end >= 0:
                self._buffer = bytearray(chunk[end + 1 :])
                return first + b"\0" + (last + chunk[:end])[-_ENDS:]
            last = (last + chunk)[-_ENDS:]
        self._buffer.clear()
        return first + b"\0" + last

    def _take(self, size: int) -> bytes:
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken


def _parse(line: bytes) -> SessionMessage | None:
    """Return the message of one line; an error for an answer that is too long or not valid; None for
    garbage."""
    from mcp.shared.message import SessionMessage
    from mcp_types import ErrorData, JSONRPCError, jsonrpc_message_adapter

    if b"\0" in line:
        ids = [_ID.search(part) for part in line.split(b"\0")]
        number = next((int(match[1]) for match in ids if match), None)
        text, code = f"the answer is longer than {MAX_MESSAGE_BYTES // 2**20} MiB and was dropped", TOO_LARGE
    else:
        try:
            return SessionMessage(jsonrpc_message_adapter.validate_json(read_message(line), by_name=False))
        except ValueError as problem:
            if not line.lstrip().startswith(b"{"):
                return _answer_behind(line)
            number, text, code = _answered(line), str(problem), NOT_VALID
    if number is None:
        return None
    error = ErrorData(code=code, message=text)
    return SessionMessage(JSONRPCError(jsonrpc="2.0", id=number, error=error))


def _answer_behind(line: bytes) -> SessionMessage | None:
    """Return the answer at the end of a line, behind what a tool printed without a newline; None without."""
    from mcp.shared.message import SessionMessage
    from mcp_types import JSONRPCError, JSONRPCResponse, jsonrpc_message_adapter

    for begun in islice(_BEGIN.finditer(line), _MOST_BEGINNINGS):
        try:
            text = read_message(line[begun.start() :])
            message = jsonrpc_message_adapter.validate_json(text, by_name=False)
        except ValueError:
            continue
        return SessionMessage(message) if isinstance(message, JSONRPCResponse | JSONRPCError) else None
    return None


def _answered(line: bytes) -> int | None:
    """Return the id of the request that a line, which cannot be decoded, answers; None if it answers none."""
    if not line.lstrip().startswith(b"{") or not _ANSWER.search(line):
        return None
    try:
        number = json.loads(line.decode("utf-8", "replace")).get("id")
        return number if isinstance(number, int) else None
    except (ValueError, RecursionError):
        match = _ID.search(line)
        return int(match[1]) if match else None


async def _end(process: asyncio.subprocess.Process) -> None:
    """Close stdin, wait for the server to exit, then end its process group, also if cancelled."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        if not await _has_ended(process):
            _signal(process, signal.SIGTERM)
            await _has_ended(process)
    finally:
        _signal(process, signal.SIGKILL)  # also children that outlive the server
    await _has_ended(process)


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


async def _has_ended(process: asyncio.subprocess.Process) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_EXIT_SECONDS):
            await process.wait()
    return process.returncode is not None


_MAX_PAGES = 100
_RELIST_SECONDS = 10.0
_SETTLE_SECONDS = 2.0
_LIST_RESOURCES, _READ_RESOURCE = "list_resources", "read_resource"
_LIST_PROMPTS, _GET_PROMPT = "list_prompts", "get_prompt"
_RESOURCE_TOOLS = (
    function_schema(_LIST_RESOURCES, "List the resources that read_resource can read.", None),
    function_schema(
        _READ_RESOURCE,
        "Read the resource at a URI.",
        {"type": "object", "properties": {"uri": {"type": "string"}}, "required": ["uri"]},
    ),
)
"""Tools of ours, for models that can only call tools."""
_PROMPT_TOOLS = (
    function_schema(
        _GET_PROMPT,
        "Return a prompt with its arguments filled in.",
        {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "arguments": {"type": "object", "additionalProperties": {"type": "string"}},
            },
            "required": ["name"],
        },
    ),
    function_schema(_LIST_PROMPTS, "List the prompts and their arguments.", None),
)


@dataclass(frozen=True, slots=True)
class Listed:
    """The tools of one listing."""

    schemas: tuple[Schema, ...] = ()
    reads: frozenset[str] = frozenset()
    """Tools whose annotations say read-only."""
    repeatable: frozenset[str] = frozenset()
    """Tools whose annotations say read-only or idempotent."""
    extras: frozenset[str] = frozenset()
    """Tools of ours that read resources and prompts."""


class Listing:
    """The tools of one connection, kept up to date."""

    def __init__(self, client: Client, listed: Listed, spec: McpSpec) -> None:
        self._client = client
        self.listed = listed
        self._spec = spec
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()

    def on_message(self, message: Any) -> None:
        """Record a notification that the tools changed."""
        from mcp_types import ToolListChangedNotification

        if isinstance(message, ToolListChangedNotification):
            self._note()

    async def settled(self) -> None:
        """Wait, within a time limit, until the announced changes are listed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_SECONDS):
                await self._settled.wait()

    def watch(self) -> AbstractAsyncContextManager[None]:
        """List again after each change, until the block ends."""
        return background(self._relist(), self._subscribe())

    def _note(self) -> None:
        self._settled.clear()
        self._changed.set()

    async def _relist(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                async with asyncio.timeout(_RELIST_SECONDS):
                    self.listed = await list_tools(self._client, self._spec)
            except Exception as error:  # noqa: BLE001  any error of a foreign server
                logger.warning(
                    "the tools changed and cannot be listed; the earlier list stays",
                    extra={"server": self._spec.name, "why": type(error).__name__},
                )
            if not self._changed.is_set():
                self._settled.set()

    async def _subscribe(self) -> None:
        """Subscribe to changes where the protocol version needs it; older servers need no subscription."""
        from mcp.client.subscriptions import ListenNotSupportedError

        tools = self._client.server_capabilities.tools
        if tools is None or not tools.list_changed:
            return
        try:
            async with self._client.listen(tools_list_changed=True) as events:
                async for _ in events:
                    self._note()
        except ListenNotSupportedError:
            return
        except Exception as error:  # noqa: BLE001  any error of a foreign server
            logger.debug("the subscription to tool changes ended: %r", error)


async def list_tools(client: Client, spec: McpSpec) -> Listed:
    """List the tools that ``spec`` offers, sorted by name, page by page."""
    by_name: dict[str, Schema] = {}
    reads: set[str] = set()
    repeatable: set[str] = set()
    async for tool in _pages(client.list_tools, "tools"):
        by_name[tool.name] = function_schema(tool.name, tool.description, tool.input_schema)
        hints = tool.annotations
        if hints is not None and hints.read_only_hint:
            reads.add(tool.name)
        if hints is not None and (hints.read_only_hint or hints.idempotent_hint):
            repeatable.add(tool.name)
    can = client.server_capabilities
    own: tuple[Schema, ...] = ()
    if spec.options.resources and can.resources is not None:
        own = _RESOURCE_TOOLS
    if spec.options.prompts and can.prompts is not None:
        own = (*own, *_PROMPT_TOOLS)
    own = tuple(schema for schema in own if schema_name(schema) not in by_name)
    offered = spec.options.offer
    schemas = [
        schema for schema in (*by_name.values(), *own) if offered is None or schema_name(schema) in offered
    ]
    names = frozenset(map(schema_name, own))
    return Listed(tuple(sorted(schemas, key=schema_name)), names.union(reads), names.union(repeatable), names)


async def _pages(method: Callable[..., Awaitable[Any]], name: str) -> AsyncIterator[Any]:
    """Yield the items ``name`` of each page that a listing method returns."""
    cursor: str | None = None
    # Bound the pages: a server may return a next cursor for ever.
    for _ in range(_MAX_PAGES):
        page = await method(cursor=cursor)
        for item in getattr(page, name):
            yield item
        cursor = page.next_cursor
        if cursor is None:
            return


async def call_extra(client: Client, tool: str, arguments: Mapping[str, Any]) -> str:
    """Run one of the tools that read resources and prompts. Raises MCPError."""
    if tool == _LIST_RESOURCES:
        keys = ("name", "description", "mimeType")
        listed = [_shown(item, "uri", *keys) async for item in _pages(client.list_resources, "resources")]
        templates = await client.list_resource_templates()
        listed += [_shown(item, "uriTemplate", *keys) for item in templates.resource_templates]
        return json.dumps(listed, ensure_ascii=False)
    if tool == _READ_RESOURCE:
        read = await client.read_resource(str(arguments["uri"]))
        return "\n".join(render_resource(_raw(item)) for item in read.contents)
    if tool == _LIST_PROMPTS:
        keys = ("name", "description", "arguments")
        listed = [_shown(item, *keys) async for item in _pages(client.list_prompts, "prompts")]
        return json.dumps(listed, ensure_ascii=False)
    texts = {str(name): str(value) for name, value in (arguments.get("arguments") or {}).items()}
    prompt = await client.get_prompt(str(arguments["name"]), texts)
    return "\n".join(f"{message.role}: {render_item(_raw(message.content))}" for message in prompt.messages)


def _shown(item: Any, *keys: str) -> dict[str, Any]:
    raw = _raw(item)
    return {key: raw[key] for key in keys if raw.get(key)}


def _raw(item: Any) -> dict[str, Any]:
    raw: dict[str, Any] = item.model_dump(mode="json", by_alias=True, exclude_none=True)
    return raw


CONNECT_SECONDS = 30.0
PROBE_SECONDS = 5.0
TRAJECTORY_KEY = "agentrl/trajectory"
"""The key of the trajectory's id in the ``_meta`` of a call."""

OUTAGE_KEY = "agentrl/outage"
"""The key in the ``_meta`` of an error result by which a server says that what its tool reaches is down."""

_GRACE_SECONDS = 5.0
_TOTAL_FACTOR = 10.0
"""Longest call with progress, in timeouts, unless ``max_seconds`` is set."""
_EXCERPT = 500
_NO_SESSION = re.compile(r"session|initializ|invalid request parameters", re.IGNORECASE)
"""Words of servers that have lost the session of a request, in errors of any code."""
_SDK_LOGGERS = ("mcp.client.streamable_http", "mcp.client.sse", "client", "mcp.shared.jsonrpc_dispatcher")
"""Loggers of the SDK that are silenced: they log tracebacks of errors that the call already reports."""


class UnusableError(ConnectionError):
    """The entry of the server is wrong: no such command, a command that fails, a login that is refused."""


class LostError(Exception):
    """A call was lost. ``sent``: the server may have received it. ``whole``: so was the connection.

    ``session``: the server is up and does not know the session any more, with what it held.
    """

    def __init__(self, reason: str, *, sent: bool, whole: bool, session: bool = False) -> None:
        super().__init__(reason)
        self.sent = sent
        self.whole = whole
        self.session = session


class RefusedError(Exception):
    """The server refuses all calls now: it asks for a login, is overloaded, or does not speak MCP."""

    def __init__(self, reason: str, *, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class McpConnection:
    """One connection and its owner task: the SDK's connections belong to the task that opened them."""

    def __init__(self, spec: McpSpec, http: httpx2.AsyncClient | None) -> None:
        """``http`` is the client of a server behind HTTP."""
        self._spec = spec
        self._http = http
        self._process = StdioProcess(spec) if isinstance(spec, StdioSpec) else None
        self._stop = asyncio.Event()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner: asyncio.Task[None] | None = None
        self._client: Client | None = None
        self._listing: Listing | None = None
        self._has_ended = False
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def alive(self) -> bool:
        """Return whether calls can be made: the transport works and, for stdio, the process runs."""
        if self._owner is None or self._owner.done() or not self._ready.done():
            return False
        if self._stop.is_set() or self._has_ended:
            return False
        return self._process is None or self._process.is_running

    @property
    def listed(self) -> Listed:
        """Return the tools as last listed."""
        return self._listing.listed if self._listing is not None else Listed()

    async def open(self) -> None:
        """Connect and list the tools. Raises ConnectionError with the reason, without secrets.

        It is an UnusableError if another attempt cannot help.
        """
        self._owner = asyncio.create_task(self._own(), name=f"mcp-{self._spec.name}")
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                # Shield the future: a time-out would cancel it, and the owner's set_result would raise.
                await asyncio.shield(self._ready)
        except TimeoutError as error:
            await self.close()
            raise ConnectionError(self._words(f"no answer within {CONNECT_SECONDS:g} s")) from error
        except ConnectionError as error:
            await self.close()
            has_failed = self._process is not None and self._process.has_failed
            kind = UnusableError if has_failed else type(error)
            raise kind(self._words(str(error))) from error
        except asyncio.CancelledError:
            await self.close()
            raise

    async def close(self) -> None:
        """Close the connection in its owner task, within a time limit. Idempotent."""
        self._stop.set()
        if self._owner is not None and not self._owner.done():
            _, pending = await asyncio.wait([self._owner], timeout=_GRACE_SECONDS * 2)
            for task in pending:
                task.cancel()
        if self._ready.done() and not self._ready.cancelled():
            # Look at the error: asyncio would log one that nobody has retrieved.
            self._ready.exception()

    async def retire(self) -> None:
        """Close the connection when its running calls have ended: each learns by itself that it is lost."""
        await self._idle.wait()
        await self.close()

    async def settled(self) -> None:
        """Wait, within a time limit, until a change of the tools that the server announced is listed."""
        if self._listing is not None:
            await self._listing.settled()

    def repeatable(self, tool: str) -> bool:
        """Return whether the tool's annotations say that a second call changes nothing."""
        return tool in self.listed.repeatable

    async def call(
        self, tool: str, arguments: Mapping[str, Any], limits: Limits, meta: Mapping[str, Any]
    ) -> Reply:
        """Call one tool. Every progress message restarts its timeout.

        Raises LostError and RefusedError, and TimeoutError after ``limits.timeout_seconds`` of silence.
        """
        from mcp import MCPError
        from pydantic_core import to_json

        client = self._client
        if client is None or not self.alive:
            raise LostError(self._words("the connection is closed"), sent=False, whole=True)
        try:
            # Nest them as deeply as a request does: pydantic bounds the depth of the whole message.
            to_json([[[[[arguments]]]]])
        except ValueError as error:  # the SDK's writer ends with it, and the connection with the writer
            return Reply(text=f"{tool} was not called: its arguments cannot be sent: {error}", error=True)
        silence = limits.timeout_seconds or CONNECT_SECONDS
        self._running += 1
        self._idle.clear()
        try:
            if tool in self.listed.extras:
                async with asyncio.timeout(silence):
                    return Reply(text=await call_extra(client, tool, arguments))
            longest = limits.max_seconds or silence * _TOTAL_FACTOR
            result = await _call_tool(client, tool, arguments, meta, silence, longest)
        except MCPError as error:
            return await self._failed(error, tool, silence)
        except TimeoutError:
            raise
        except (OSError, ExceptionGroup) as error:
            raise LostError(self._words(reasons(error)), sent=True, whole=True) from error
        except (ValueError, RuntimeError) as error:
            return self._not_valid(tool, reasons(error))
        finally:
            self._running -= 1
            if self._running == 0:
                self._idle.set()
        return await self._reply(result, tool)

    async def _reply(self, result: CallToolResult, tool: str) -> Reply:
        """Return what the model reads of a result. Raises RefusedError if it says that the tool is down."""
        text = "\n".join(item.text for item in result.content if hasattr(item, "text"))
        if result.is_error and (result.meta or {}).get(OUTAGE_KEY):
            raise RefusedError(f"{tool}: {shortened(redact_secrets(text, self._spec), _EXCERPT)}")
        encoded = [item.data for item in result.content if item.type == "image"]
        images = await asyncio.to_thread(images_in, encoded) if encoded else ()
        if result.is_error and not text.strip():
            text = f"{tool} reported an error without a message"
        return Reply(text=text, error=bool(result.is_error), images=images)

    async def answers(self) -> bool:
        """Return whether the server still answers, after a call that did not."""
        if self._client is None or not self.alive:
            return False
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await self._client.session.list_tools()
        except Exception:  # noqa: BLE001  any error of a foreign server
            return False
        return True

    async def _failed(self, error: MCPError, tool: str, seconds: float) -> Reply:
        """Return the reply to a call that the server or the transport answered with an error.

        Servers choose their codes freely, so that codes count only in errors that are not the server's own.
        """
        text = redact_secrets(str(error), self._spec)
        data = error.error.data if isinstance(error.error.data, dict) else {}
        is_own = OWN_ERROR in data
        code = None if is_own else error.code
        is_doubtful = code == REJECTED or (is_own and _NO_SESSION.search(text) is not None)
        # The words may be about another session, such as a browser's; then the server still lists its tools.
        if code == SESSION_LOST or (is_doubtful and not await self.answers()):
            raise LostError(text, sent=False, whole=True, session=True) from error
        if is_own or is_doubtful:
            return Reply(text=text, error=True)
        if code == TIMED_OUT:
            return timed_out(tool, seconds)
        if code == NOT_VALID:
            return self._not_valid(tool, str(error))
        if code == REFUSED:
            raise RefusedError(text, retry_after=data.get("retry_after")) from error
        if code == NOT_SENT:
            raise LostError(text, sent=False, whole=False) from error
        if code == LOST:
            raise LostError(self._words(text), sent=True, whole=not self.alive) from error
        return Reply(text=text, error=True)

    def _not_valid(self, tool: str, why: str) -> Reply:
        text = shortened(redact_secrets(why, self._spec), _EXCERPT)
        return Reply(text=f"{tool} gave a result that is not valid: {text}", error=True)

    async def _own(self) -> None:
        """Open the connection, wait for ``close``, then close it. Errors go to ``open``, or to the log."""
        try:
            async with AsyncExitStack() as stack:
                self._client = await stack.enter_async_context(self._new_client())
                self._listing = Listing(self._client, await list_tools(self._client, self._spec), self._spec)
                await stack.enter_async_context(self._listing.watch())
                self._ready.set_result(None)
                await self._stop.wait()
        except Exception as error:  # noqa: BLE001  any error of a foreign server or transport
            if not self._ready.done():
                kind = UnusableError if _is_unusable(error) else ConnectionError
                self._ready.set_exception(kind(reasons(error)))
            elif not self._stop.is_set():
                logger.warning(
                    "tool server connection broke",
                    extra={"server": self._spec.name, "why": self._words(reasons(error))},
                )

    def _new_client(self) -> Client:
        from mcp import Client

        for name in _SDK_LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        return Client(
            self._transport(),
            read_timeout_seconds=CONNECT_SECONDS,
            message_handler=self._on_message,
            cache=None,
        )

    async def _on_message(self, message: Any) -> None:
        if self._listing is not None:
            self._listing.on_message(message)

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[tuple[Any, Any]]:
        from mcp.client.sse import sse_client
        from mcp.client.streamable_http import streamable_http_client

        opened: AbstractAsyncContextManager[tuple[Any, Any]]
        if isinstance(self._spec, StdioSpec):
            opened = self._process.transport()  # type: ignore[union-attr]
        elif self._spec.sse:
            from agentrl.tools.mcp.http import sse_http_client

            opened = sse_client(
                self._spec.url, dict(self._spec.headers), httpx_client_factory=sse_http_client
            )
        else:
            opened = streamable_http_client(
                self._spec.url, http_client=self._http, max_sse_event_size=MAX_MESSAGE_BYTES
            )
        async with opened as (read, write):
            yield NormalizedStream(read, self._end), write

    def _end(self) -> None:
        """Note that the server's stream has ended, as that of HTTP+SSE does with the server."""
        self._has_ended = True

    def _words(self, reason: str) -> str:
        """Return ``reason`` and the last words of the process, without secrets."""
        more = self._process.last_words() if self._process is not None else ""
        return redact_secrets("; ".join(part for part in (reason, more) if part), self._spec)


async def _call_tool(
    client: Client,
    tool: str,
    arguments: Mapping[str, Any],
    meta: Mapping[str, Any],
    silence: float,
    longest: float,
) -> CallToolResult:
    """Call a tool. Raises TimeoutError ``silence`` seconds after the last progress, or after ``longest``."""
    loop = asyncio.get_running_loop()
    latest = loop.time() + longest
    async with asyncio.timeout(silence) as timeout:

        async def extend(progress: float, total: float | None, message: str | None) -> None:
            # Spare a time-out that is over: rescheduling it raises RuntimeError.
            if not timeout.expired():
                timeout.reschedule(min(loop.time() + silence, latest))

        return await client.call_tool(
            tool,
            dict(arguments),
            # Let the SDK's time-out come last: ours is the one that progress restarts.
            read_timeout_seconds=longest + _GRACE_SECONDS,
            progress_callback=extend,
            meta=dict(meta),  # type: ignore[arg-type]  # any key is allowed
        )


def _is_unusable(error: BaseException) -> bool:
    """Return whether a connection failed for want of a program or of a login."""
    from mcp import MCPError

    if isinstance(error, BaseExceptionGroup):
        return any(map(_is_unusable, error.exceptions))
    if isinstance(error, MCPError):
        data = error.error.data
        return isinstance(data, dict) and OWN_ERROR not in data and bool(data.get("login"))
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status in (401, 403) or isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError)
