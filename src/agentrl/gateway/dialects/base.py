"""Define what a dialect translates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from agentrl.chat.text_stream import Delta
from agentrl.gateway.errors import GatewayError
from agentrl.gateway.request import Answer, GatewayRequest


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
