"""Run an MCP server as a child process and exchange JSON lines with it, each of bounded length.

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
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentrl.atomic_folder import scratch_folder
from agentrl.concurrency import background
from agentrl.tools.mcp.content import MAX_MESSAGE_BYTES, NOT_VALID, TOO_LARGE, read_message
from agentrl.tools.specs import WORKDIR, StdioSpec, redact_secrets
from agentrl.untrusted_folder import discard

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp.shared.message import SessionMessage

logger = logging.getLogger(__name__)

_EXIT_SECONDS = 2.0
"""How long a server may take to exit after its stdin closes, and again after SIGTERM."""
_CHUNK = 2**18
_ENDS = 4096
"""Bytes kept of both ends of a line that is too long: they hold the request's id."""
_MAX_GARBAGE_LINES = 1000
_STDERR_LINES = 20
_ID = re.compile(rb'"id"\s*:\s*(\d+)')
_ANSWER = re.compile(rb'"(?:result|error)"\s*:')


class StdioProcess:
    """One server process; ``transport`` is its MCP transport."""

    def __init__(self, spec: StdioSpec) -> None:
        self._spec = spec
        self._process: asyncio.subprocess.Process | None = None
        self._stderr: deque[str] = deque(maxlen=_STDERR_LINES)
        self._problem = ""

    @property
    def is_running(self) -> bool:
        """Return whether the process runs, as the kernel sees it now."""
        if self._process is None or self._process.returncode is not None:
            return False
        with contextlib.suppress(ChildProcessError):
            seen = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return seen is None
        return False

    @property
    def has_failed(self) -> bool:
        """Return whether the process has ended with an exit code of its own that is an error."""
        return self._process is not None and (self._process.returncode or 0) > 0

    def last_words(self) -> str:
        """Return why the process ended: its exit code and the end of its stderr, without secrets."""
        parts = [self._problem] if self._problem else []
        if self._process is not None and self._process.returncode is not None:
            parts.append(f"it exited with code {self._process.returncode}")
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
                    garbage += bool(line.strip())
                    continue
                garbage = 0
                try:
                    await received.send(message)
                except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                    return
            self._problem = f"it wrote {garbage} lines to stdout that are not MCP messages"

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
            number, text, code = _answered(line), str(problem), NOT_VALID
    if number is None:
        return None
    error = ErrorData(code=code, message=text)
    return SessionMessage(JSONRPCError(jsonrpc="2.0", id=number, error=error))


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
