"""Define a request, its answer, its errors and a dialect; nothing here knows an API of a provider."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, ParamSpec, Protocol, TypeVar

from agentrl.chat.chat_format import Delta, Message
from agentrl.documents.record import GatewaySession
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.task import Claim
from agentrl.errors import (
    AgentRLError,
    ContextFullError,
    FailureError,
    StoreUnavailableError,
    TrajectoryError,
)
from agentrl.inference.engine import EngineRefusedError
from agentrl.tools.tool import Schema

logger = logging.getLogger(__name__)

Kind = Literal[
    "invalid", "too_large", "authentication", "not_found", "limit", "timeout", "unavailable", "internal"
]

STATUS: dict[Kind, int] = {
    "invalid": 400, "authentication": 401, "limit": 403, "not_found": 404, "timeout": 408, "too_large": 413,
    "internal": 500, "unavailable": 503,
}  # fmt: skip
_SOONEST_RETRY, _LATEST_RETRY = 1.0, 8.0
"""Seconds after which a client repeats a request that the gateway could not answer."""


class GatewayError(AgentRLError):
    """A request that gets no answer. ``code`` names the reason for programs, ``param`` the field."""

    def __init__(
        self, kind: Kind, message: str, *, code: str, param: str | None = None, hint: str | None = None,
        retry_after: float | None = None,
    ) -> None:  # fmt: skip
        """``retry_after`` is the time in seconds for which an engine asked."""
        super().__init__(message, hint=hint)
        self.kind: Kind = kind
        self.code = code
        self.param = param
        self._retry_after = retry_after

    @property
    def status(self) -> int:
        """Return the HTTP status."""
        return STATUS[self.kind]

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of the answer: when to send an unavailable request again, in whole seconds.

        The times differ, so that those who were refused together do not return together.
        """
        if self.kind != "unavailable":
            return {}
        seconds = self._retry_after or random.uniform(_SOONEST_RETRY, _LATEST_RETRY)
        return {"retry-after": str(max(1, math.ceil(seconds)))}

    @property
    def text(self) -> str:
        """Return message and hint on one line."""
        return f"{self.message} ({self.hint})" if self.hint else self.message


def invalid(message: str, param: str | None = None, *, code: str = "invalid_value") -> GatewayError:
    """Return the error for a request that no retry makes valid."""
    return GatewayError("invalid", message, code=code, param=param)


def dead_url() -> GatewayError:
    """Return the error for a URL whose trajectory has ended, and for one that never was."""
    return GatewayError(
        "authentication",
        "this URL belongs to no running trajectory: it has ended, its lease was lost, or the token is wrong",
        code="dead_token",
    )


def as_gateway_error(error: BaseException) -> BaseException:
    """Return the error to answer for a failure; cancellations stay as they are."""
    if isinstance(error, GatewayError) or not isinstance(error, Exception):
        return error
    if isinstance(error, ContextFullError):
        return GatewayError("invalid", error.message, code="context_length_exceeded", param="messages")
    if isinstance(error, EngineRefusedError):
        return invalid(f"the engine refused the request: {error.message}", code="engine_refused")
    if isinstance(error, TrajectoryError):
        return GatewayError("invalid", error.message, code="cannot_render", param="messages", hint=error.hint)
    if isinstance(error, (FailureError, StoreUnavailableError)):
        return GatewayError(
            "unavailable", error.message, code="unavailable", hint="send the request again",
            retry_after=error.retry_after if isinstance(error, FailureError) else None,
        )  # fmt: skip
    logger.error("a request failed", exc_info=error)
    return GatewayError(
        "internal", f"the gateway failed: {type(error).__name__}", code="internal", hint="see its log"
    )


P = ParamSpec("P")
T = TypeVar("T")

LARGE_JSON = 256 << 10
"""Bytes that take longer to read than a thread takes to start."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The trajectory that a request belongs to."""

    session: GatewaySession
    claim: Claim


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayRequest:
    """One model call as a client asks for it. ``changes`` are sampling parameters."""

    model: str
    messages: list[Message]
    tools: list[Schema]
    changes: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    one_call: bool = False
    """Whether an answer may have one tool call only."""
    must_call: tuple[str, ...] = ()
    """The tools of which the answer must call one; empty: the model decides."""
    no_calls: bool = False
    """Whether an answer may have no tool call."""
    schema: Mapping[str, Any] | None = None
    """The JSON schema of an answer without tool calls; None: free text."""
    role: str | None = None
    """The role of the trajectory that makes the call."""
    previous: str | None = None
    """The id of an earlier answer whose conversation comes before ``messages``."""
    size: int = 0
    """Bytes of the body."""
    left_out: tuple[str, ...] = ()
    """The tools of the request that the model is not shown, because only OpenAI's own server runs them."""
    volatile: tuple[str, ...] = ()
    """``GatewaySession.volatile``."""

    def params(self, base: SamplingParams) -> SamplingParams:
        """Return the sampling parameters of the call: those of the run with the client's changes."""
        limit = base.max_new_tokens
        changes = {**self.changes, "max_new_tokens": min(limit, self.max_tokens or limit)}
        seed = changes.pop("seed", None)
        extra = {**base.extra, **({"stop": list(self.stop)} if self.stop else {})}
        if seed is not None:
            extra["sampling_seed"] = seed
        return base.replace(**changes, extra=extra)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredToolCall:
    """A tool call of an answer; ``arguments`` is JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the model answered. ``finish_reason`` is stop, stop_sequence, length or tool_calls."""

    id: str
    created: int
    model: str
    content: str
    reasoning: str
    tool_calls: tuple[AnsweredToolCall, ...]
    finish_reason: str
    stop_sequence: str | None
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    logprobs: tuple[tuple[str, float], ...] | None = None
    """(text, logprob) of each generated token, if the request asks for them."""
    left_out: tuple[str, ...] = ()
    """As in GatewayRequest."""


async def aside(is_large: bool, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Do work on a request: in a thread if it ``is_large``, so that the event loop goes on."""
    if not is_large:
        return work(*arguments, **named)
    return await asyncio.to_thread(work, *arguments, **named)


class EventStream(Protocol):
    """The server-sent events of one answer."""

    def begin(self, answer_id: str, created: int, prompt_tokens: int) -> Iterator[bytes]:
        """Return the events before the first token."""
        ...

    def delta(self, delta: Delta) -> Iterator[bytes]:
        """Return the events of a piece of text."""
        ...

    def end(self, answer: Answer) -> Iterator[bytes]:
        """Return the events that end the answer; all its text has been sent."""
        ...


class Dialect(Protocol):
    """One API of a model provider."""

    name: str

    def parse(self, body: Mapping[str, Any]) -> GatewayRequest:
        """Return the request in ``body``. Raises GatewayError."""
        ...

    def answer(self, answer: Answer) -> dict[str, Any]:
        """Return the answer as JSON."""
        ...

    def stream(self, request: GatewayRequest) -> EventStream:
        """Return the events of an answer."""
        ...

    def error(self, error: GatewayError) -> dict[str, Any]:
        """Return an error as JSON."""
        ...

    def error_event(self, error: GatewayError) -> bytes:
        """Return the event of an error after the answer has begun."""
        ...
