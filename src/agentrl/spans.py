"""Open spans on the tracer of this process. Without one, a span records nothing and costs nothing.

``observe.tracing`` installs the tracer that ``--trace`` names. This module knows no tracing library, so that
every folder can import it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self

Value = str | bool | int | float | Sequence[str] | Sequence[int]
Attributes = Mapping[str, Value | None]
"""Attributes of a span; those that are None are left out."""

Kind = Literal["internal", "client"]


class Span:
    """A span while tracing is off. As a context manager it is the parent of spans that are opened inside."""

    is_recording = False
    trace_id: str | None = None
    """The id of its trace in 32 hexadecimal digits; None if it is not recorded."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the span, as failed if an exception leaves the block."""

    def set(self, attributes: Attributes) -> None:
        """Set attributes."""

    def event(self, name: str, attributes: Attributes) -> None:
        """Add an event with the current time."""

    def content(self, name: str, value: Callable[[], Any]) -> None:
        """Set an attribute that holds text of a model, a tool or a user, if content is recorded."""

    def messages(self, name: str, messages: Sequence[Mapping[str, Any]]) -> None:
        """Set an attribute to messages in the parts of the GenAI conventions, if content is recorded."""

    def phase(self, name: str, begin: float, end: float, attributes: Attributes | None = None) -> Span:
        """Add a child that has ended; ``begin`` and ``end`` are seconds since the epoch. Return it."""
        return self

    def fail(self, kind: str, message: str = "") -> None:
        """Mark the span as failed; ``kind`` is its ``error.type``. The message counts as content."""


NO_SPAN = Span()


class Tracer:
    """The tracer of a process without ``--trace``."""

    is_recording = False
    policy = "policy"
    """The name of the policy's model."""

    def span(
        self,
        name: str,
        attributes: Attributes | None = None,
        *,
        kind: Kind = "internal",
        trace: str | None = None,
        root: bool = False,
        begin: float | None = None,
        links: Sequence[str] = (),
    ) -> Span:
        """Return a new span, a child of the current one.

        ``trace`` makes it a child of the root of another trace, which any process may have begun; ``root``
        makes it the root of a new trace. ``begin`` is when it began, in seconds since the epoch. ``links``
        are ids of traces whose roots it links to.
        """
        return NO_SPAN


_OFF = Tracer()
_tracer = _OFF


def tracer() -> Tracer:
    """Return the tracer of this process."""
    return _tracer


@contextmanager
def use_tracer(chosen: Tracer) -> Iterator[None]:
    """Make ``chosen`` the tracer of this process within the block."""
    global _tracer
    before, _tracer = _tracer, chosen
    try:
        yield
    finally:
        _tracer = before
