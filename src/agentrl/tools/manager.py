"""Use tool servers behind an MCP manager: plain HTTP at a URL that ends in ``/mcpapi``."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from agentrl.base.proxies import ProxiedTransport
from agentrl.config.schema import ToolConfig
from agentrl.documents.status import ToolState
from agentrl.errors import ToolServerConfigError, ToolServerError, tool_server
from agentrl.llm.chat import retry_after
from agentrl.tools.config import CallGate, Limits, ManagerSpec, Options, redact_address, redact_secrets
from agentrl.tools.mcp.content import (
    MAX_MESSAGE_BYTES,
    image_items,
    images_in,
    is_content,
    json_text,
    render_content,
)
from agentrl.tools.tool import (
    Reply,
    Schema,
    ServerSession,
    ToolServer,
    TrajectoryInfo,
    function_schema,
    schema_name,
    timed_out,
)

logger = logging.getLogger(__name__)

_CONTROL_SECONDS = 30.0
_END_SECONDS = 5.0
_SPARE_CONNECTIONS = 8
_EXCERPT = 300
_LOGIN, _BUSY = (401, 403), (429, 503)
TRAJECTORY_HEADER = "X-AgentRL-Trajectory"
"""The header with the id of the trajectory that a request belongs to."""
_NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol)
_LOGIN_HINT = "check --mcp_manager_url and the token in the variable that --mcp_auth_token_env names"


class ManagedServer(ToolServer):
    """One server of a manager. All servers use the manager's HTTP client."""

    def __init__(self, name: str, manager: ManagerClient, gate: CallGate, *, has_nodes: bool) -> None:
        """``gate`` bounds the calls. ``has_nodes``: the manager keeps the state of each trajectory."""
        self.name = name
        self._schemas: list[Schema] = []
        self._states: dict[str, ToolState] = {}
        self.manager = manager
        self.gate = gate
        self.has_nodes = has_nodes

    @property
    def schemas(self) -> Sequence[Schema]:
        return self._schemas

    async def open(self) -> None:
        """List the tools: ``GET /server/NAME/tools``. Raises ToolServerError."""
        answer = await self.manager.get(f"/server/{self.name}/tools", self.name)
        schemas: list[Schema] = []
        states: dict[str, ToolState] = {}
        for item in answer.get("tools") or ():
            function = item.get("function", item) if isinstance(item, Mapping) else None
            if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
                schemas.append(function_schema(name, function.get("description"), function.get("parameters")))
                if item.get("state") in tuple(ToolState):
                    states[name] = ToolState(item["state"])
        self._schemas, self._states = sorted(schemas, key=schema_name), states

    def state_of(self, tool: str) -> ToolState:
        """Return what the manager says of a tool; of other managers' tools that no call is made twice."""
        return self._states.get(tool, ToolState.REPLAY if self.has_nodes else ToolState.OUTSIDE)

    def session(self, trajectory: TrajectoryInfo) -> ManagedSession:
        is_replayed = any(self.state_of(schema_name(schema)) is ToolState.REPLAY for schema in self._schemas)
        return ManagedSession(self, trajectory.key(replayed=is_replayed))

    async def close(self) -> None:
        await self.manager.close()


class ManagedSession(ServerSession):
    """The calls of one trajectory to a managed server. The manager begins its state with the first call."""

    def __init__(self, server: ManagedServer, trajectory: str) -> None:
        self._server = server
        self._trajectory = trajectory
        self._has_called = False

    async def list(self) -> Sequence[Schema]:
        return self._server.schemas

    def state_of(self, tool: str) -> ToolState:
        return self._server.state_of(tool)

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Reply:
        """Call ``POST /tool/NAME.TOOL``; an error in the answer is the tool's. Raises ToolServerError."""
        self._has_called = True
        server = self._server
        async with server.gate.enter(tool) as limits:
            seconds = limits.timeout_seconds or 0.0
            try:
                answer = await server.manager.call(server.name, tool, arguments, seconds, self._trajectory)
            except TimeoutError:
                return timed_out(tool, seconds)
        content = _content(answer)
        encoded = [item["data"] for item in image_items(content)]
        images = await asyncio.to_thread(images_in, encoded) if encoded else ()
        return Reply(text=_text(content), error=_is_error(answer), images=images)

    async def close(self) -> None:
        """End the state that the manager keeps of the trajectory, if there is one. Idempotent."""
        has_called, self._has_called = self._has_called, False
        if has_called and self._server.has_nodes:
            await self._server.manager.end(self._server.name, self._trajectory)


async def managed_servers(spec: ManagerSpec, config: ToolConfig) -> list[ManagedServer]:
    """Return all servers of the manager, or the one that the flags select. Raises ToolServerError."""
    manager = ManagerClient(spec, connections=config.max_tool_connections)
    try:
        answer = await manager.get("/servers", spec.server)
        listed = answer.get("servers")
        if not isinstance(listed, list):
            problem = f"answered no list of servers to /servers: {str(answer)[:200]}"
            raise manager.error(problem, server=spec.server)
        names = [str(name) for name in listed]
        if spec.server != "all" and spec.server not in names:
            raise manager.error(
                f"has no server {spec.server!r}",
                hint=f"--mcp_server_name is one of: all, {', '.join(names)}",
                kind=ToolServerConfigError,
            )
    except BaseException:
        await manager.close()
        raise
    base = Limits(timeout_seconds=config.tool_timeout_seconds)
    return [
        ManagedServer(
            name,
            manager,
            CallGate(Options(), base, connections=config.max_tool_connections),
            has_nodes=answer.get("nodes") is True,
        )
        for name in (names if spec.server == "all" else [spec.server])
    ]


def _content(answer: ManagerAnswer) -> Any:
    """Return the answer's content, or its ``detail``; one content item as a list."""
    content = answer.body
    if isinstance(content, Mapping) and {"content", "detail"} & set(content):
        content = content.get("content", content.get("detail"))
    return [content] if is_content(content) else content


def _text(content: Any) -> str:
    """Return content as text: item by item if one of them is a content item, else as JSON."""
    if isinstance(content, list) and any(map(is_content, content)):
        parts = [item if isinstance(item, str) or is_content(item) else json_text(item) for item in content]
        return render_content(parts)
    return content if isinstance(content, str) else json_text(content)


def _is_error(answer: ManagerAnswer) -> bool:
    code = answer.body.get("status_code") if isinstance(answer.body, Mapping) else None
    status = answer.body.get("status") if isinstance(answer.body, Mapping) else None
    return answer.status >= 400 or (isinstance(code, int) and code >= 400) or status == "error"


@dataclass(frozen=True, slots=True)
class ManagerAnswer:
    """The manager's answer to a call: the HTTP status, and the JSON or text of its body."""

    status: int
    body: Any


class ManagerClient:
    """HTTP client of one manager. Its errors contain no token of its URL or its headers."""

    def __init__(self, spec: ManagerSpec, *, connections: int) -> None:
        """``connections`` calls may be in flight at a time."""
        self._spec = spec
        limits = httpx2.Limits(
            max_connections=connections + _SPARE_CONNECTIONS, max_keepalive_connections=connections
        )
        self._slots = asyncio.Semaphore(connections)
        self._http = httpx2.AsyncClient(
            base_url=spec.url,
            headers=dict(spec.headers),
            timeout=_CONTROL_SECONDS,
            transport=ProxiedTransport(limits=limits),
        )
        self._suspect = False
        self._checking = asyncio.Lock()

    async def get(self, path: str, server: str = "all") -> dict[str, Any]:
        """Return the JSON object at ``path``, which ``server`` needs. Raises ToolServerError."""
        try:
            answer = await self._send("GET", path, server, None, _CONTROL_SECONDS, {})
        except TimeoutError as error:
            late = f"did not answer {path} within {_CONTROL_SECONDS:g} s"
            raise self.error(late, server=server) from error
        except httpx2.HTTPError as error:
            raise self._unreachable(error, server) from error
        if answer.status != 200 or not isinstance(answer.body, dict):
            shown = str(answer.body)[:_EXCERPT]
            problem = f"answered {answer.status} to {path}: {shown}"
            raise self.error(problem, hint=_LOGIN_HINT, server=server)
        return answer.body

    async def call(
        self, server: str, tool: str, arguments: Mapping[str, Any], seconds: float, trajectory: str
    ) -> ManagerAnswer:
        """Call a tool. An answer that breaks off is an error of the call: it is not repeated.

        Raises TimeoutError after ``seconds``, and ToolServerError if the manager refuses all calls now.
        """
        await self._check(server)
        path, headers = f"/tool/{server}.{tool}", {TRAJECTORY_HEADER: trajectory}
        async with self._slots:
            try:
                answer = await self._send("POST", path, server, dict(arguments), seconds, headers)
            except _NOT_SENT as error:
                raise self._unreachable(error, server) from error
            except httpx2.HTTPError as error:
                self._suspect = True
                lost = f"{tool} failed: the connection to its server broke ({type(error).__name__})"
                return ManagerAnswer(500, f"{lost}; it may have taken effect")
        said = isinstance(answer.body, Mapping) and {"detail", "content"} & set(answer.body)
        if answer.status >= 500 and not said:
            self._suspect = True
            return ManagerAnswer(answer.status, f"{tool} failed: its server answered HTTP {answer.status}")
        return answer

    async def end(self, server: str, trajectory: str) -> None:
        """End the trajectory's node of a server. The manager ends idle nodes itself, so errors are logged."""
        path = f"/server/{server}/node"
        try:
            await self._send("DELETE", path, server, None, _END_SECONDS, {TRAJECTORY_HEADER: trajectory})
        except (httpx2.HTTPError, TimeoutError, ToolServerError) as error:
            logger.warning(
                "a node of the MCP manager is not ended", extra={"server": server, "why": str(error)}
            )

    def error(
        self,
        problem: str,
        *,
        hint: str | None = None,
        server: str = "all",
        retry_after: float | None = None,
        kind: type[ToolServerError] = ToolServerError,
    ) -> ToolServerError:
        """Return an outage of this manager, without secrets; ``server`` is the server that a call needs."""
        message = f"MCP manager {redact_address(self._spec)} {redact_secrets(problem, self._spec)}"
        return kind(message, hint=hint, outage=tool_server(server), retry_after=retry_after)

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._http.aclose()

    async def _check(self, server: str) -> None:
        """Test the manager after a lost call, before the next one; one request serves all callers."""
        if not self._suspect:
            return
        async with self._checking:
            if self._suspect:
                await self.get("/servers", server)
                self._suspect = False

    async def _send(
        self, method: str, path: str, server: str, body: Any, seconds: float, headers: Mapping[str, str]
    ) -> ManagerAnswer:
        """Return the answer. Raises httpx2.HTTPError, TimeoutError and ToolServerError."""
        limits = httpx2.Timeout(_CONTROL_SECONDS, read=seconds)
        async with (
            asyncio.timeout(seconds),
            self._http.stream(method, path, json=body, timeout=limits, headers=dict(headers)) as response,
        ):
            content = bytearray()
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) > MAX_MESSAGE_BYTES:
                    text = f"the answer is longer than {MAX_MESSAGE_BYTES // 2**20} MiB and was dropped"
                    return ManagerAnswer(500, {"detail": text})
        return self._answer(response, bytes(content), path, server)

    def _answer(self, response: httpx2.Response, content: bytes, path: str, server: str) -> ManagerAnswer:
        """Read the body. Raises ToolServerError for a login, an overload, and a page instead of JSON."""
        text = content.decode("utf-8", "replace")
        status = response.status_code
        shown = " ".join(text[:_EXCERPT].split())
        if status in _LOGIN:
            problem = f"answered {status} to {path}: {shown}"
            raise self.error(problem, hint=_LOGIN_HINT, server=server, kind=ToolServerConfigError)
        if status in _BUSY:
            problem = f"is overloaded: it answered {status}: {shown}"
            raise self.error(problem, server=server, retry_after=retry_after(response.headers))
        try:
            return ManagerAnswer(status, json.loads(text))
        except (ValueError, RecursionError) as error:
            if content.lstrip().startswith((b"{", b"[")):
                return ManagerAnswer(500, {"detail": f"the result is not valid: {error}"})
            if status < 500:
                raise self.error(f"answered no JSON: {shown}", hint=_LOGIN_HINT, server=server) from error
            return ManagerAnswer(status, text)

    def _unreachable(self, error: httpx2.HTTPError, server: str = "all") -> ToolServerError:
        return self.error(
            f"cannot be reached: {type(error).__name__}: {error}",
            hint="start it, or correct --mcp_manager_url",
            server=server,
        )
