"""Speak the protocol of OpenEnv servers: a session is one WebSocket, with JSON messages in turn.

A message ``{"type": "reset" | "step" | "state" | "close", "data": …}`` is answered by
``{"type": "observation" | "state" | "error", "data": …}``. The session, with its state, ends with the
connection. The client of the package ``openenv`` is not used: it needs other versions of ``mcp``.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from agentrl.documents.base import excerpt
from agentrl.environments.server_address import CONNECT_SECONDS
from agentrl.errors import (
    FailureError,
    OutageError,
    ServerFullError,
    SessionLostError,
    TaskEnvironmentError,
)
from agentrl.proxies import proxy_of

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
                answer = await self._exchange(json.dumps({"type": kind, "data": data}))
            except ConnectionClosed as error:
                why = f"OpenEnv server {self.url} closed the connection: {error}"
                self._over = SessionLostError(why) if self._has_state else OutageError(why)
                raise self._over from error
            self._over = None
        return self._data(answer)

    async def _exchange(self, message: str) -> Any:
        """Return the answer. A server without a free session says so before it reads anything."""
        from websockets.exceptions import ConnectionClosed

        with suppress(ConnectionClosed):  # what it said last can still be received
            await self._socket.send(message)
        return await self._socket.recv()

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
