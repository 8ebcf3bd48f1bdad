"""Open spans on the tracer of this process: OpenTelemetry's, or none, whose spans record and cost nothing.

``observe.tracing`` makes the tracer that ``--trace`` names. This module needs OpenTelemetry's API alone, not
its SDK, so that every folder can import it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self

from opentelemetry import context as contexts
from opentelemetry import trace as api

from agentrl.errors import FailureError

Value = str | bool | int | float | Sequence[str] | Sequence[int]
Attributes = Mapping[str, Value | None]
"""Attributes of a span; those that are None are left out."""
Kind = Literal["internal", "client"]
Render = Callable[[Any], str]
"""Returns content as the text of an attribute, without secrets and cut."""

ROOT_BITS = 2**64 - 1
"""The id of a trace's root is the last half of the trace's id, so that the trace's id names its root."""


class Span:
    """A span. As a context manager it is the parent of spans that are opened inside, and ends with it."""

    def __init__(self, span: api.Span, tracer: Tracer) -> None:
        self._span = span
        self._tracer = tracer
        self._token: Any = None

    @property
    def is_recording(self) -> bool:
        """Whether it is recorded."""
        return self._tracer.is_recording

    @property
    def trace_id(self) -> str | None:
        """The id of its trace in 32 hexadecimal digits; None if it is not recorded."""
        context = self._span.get_span_context()
        return api.format_trace_id(context.trace_id) if context.trace_flags.sampled else None

    def __enter__(self) -> Self:
        if self.is_recording:
            self._token = contexts.attach(api.set_span_in_context(self._span))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the span, as failed if an exception leaves the block, or as ``agentrl.cancelled``."""
        if self._token is None:
            return
        contexts.detach(self._token)
        # Tell it from a failure: a sampler that stops cancels every call that runs.
        if isinstance(error, asyncio.CancelledError):
            self._span.set_attribute("agentrl.cancelled", True)
        elif isinstance(error, Exception):
            self.fail(error.kind if isinstance(error, FailureError) else type(error).__name__, str(error))
        self._span.end()

    def set(self, attributes: Attributes) -> None:
        """Set attributes."""
        self._span.set_attributes(_present(attributes))

    def event(self, name: str, attributes: Attributes) -> None:
        """Add an event with the current time."""
        self._span.add_event(name, _present(attributes))

    def content(self, name: str, value: Callable[[], Any]) -> None:
        """Set an attribute that holds text of a model, a tool or a user, if content is recorded."""
        if self._tracer.render is not None and (given := value()) is not None:
            self._span.set_attribute(name, self._tracer.render(given))

    def messages(self, name: str, messages: Sequence[Mapping[str, Any]]) -> None:
        """Set an attribute to messages in the parts of the GenAI conventions, if content is recorded."""
        if self._tracer.render_messages is not None:
            self._span.set_attribute(name, self._tracer.render_messages(messages))

    def phase(self, name: str, begin: float, end: float) -> Span:
        """Add a child that has ended; ``begin`` and ``end`` are seconds since the epoch. Return it."""
        child = self._tracer.span(name, parent=self, begin=begin)
        child._span.end(_nanoseconds(end))
        return child

    def fail(self, kind: str, message: str = "") -> None:
        """Mark the span as failed; ``kind`` is its ``error.type``. The message counts as content."""
        self._span.set_attribute("error.type", kind)
        shown = self._tracer.render(message) if self._tracer.render is not None and message else None
        self._span.set_status(api.Status(api.StatusCode.ERROR, shown))


class Tracer:
    """Opens spans. Without ``source``, a tracer of the SDK, every one is ``NO_SPAN``.

    ``policy`` names the policy's model. ``render`` and ``render_messages`` make texts of content; without
    them it is not recorded.
    """

    def __init__(
        self,
        source: api.Tracer | None = None,
        *,
        policy: str = "policy",
        render: Render | None = None,
        render_messages: Render | None = None,
    ) -> None:
        self.policy = policy
        self.render = render
        self.render_messages = render_messages
        self._source = source

    @property
    def is_recording(self) -> bool:
        """Whether its spans are recorded."""
        return self._source is not None

    def span(
        self,
        name: str,
        attributes: Attributes | None = None,
        *,
        kind: Kind = "internal",
        trace: str | None = None,
        root: bool = False,
        parent: Span | None = None,
        begin: float | None = None,
        links: Sequence[str] = (),
    ) -> Span:
        """Return a new span, a child of the current one.

        ``trace`` makes it a child of the root of another trace, which any process may have begun, ``parent``
        one of that span, and ``root`` the root of a new trace. ``begin`` is when it began, in seconds since
        the epoch. ``links`` are ids of traces whose roots it links to.
        """
        if self._source is None:
            return NO_SPAN
        # Give an empty context to a root: to the SDK None means the current span.
        context = contexts.Context() if root else None
        if parent is not None:
            context = api.set_span_in_context(parent._span)
        elif trace is not None and not root:
            context = api.set_span_in_context(api.NonRecordingSpan(_root_of(trace)), contexts.Context())
        started = self._source.start_span(
            name,
            context=context,
            kind=api.SpanKind[kind.upper()],
            attributes=_present(attributes or {}),
            start_time=None if begin is None else _nanoseconds(begin),
            links=[api.Link(_root_of(each)) for each in links],
        )
        return Span(started, self)


def _root_of(trace_id: str) -> api.SpanContext:
    number = int(trace_id, 16)
    # Mark it as sampled: by default the SDK drops the children of a parent that is not.
    return api.SpanContext(number, number & ROOT_BITS, is_remote=True, trace_flags=api.TraceFlags(1))


def _present(attributes: Attributes) -> dict[str, Value]:
    return {name: value for name, value in attributes.items() if value is not None}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


_tracer = Tracer()
NO_SPAN = Span(api.INVALID_SPAN, _tracer)


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
